import math

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.runtime.clip import clip_grad_norm

GRADS = [[3.0, -4.0, 0.0], [12.0], [0.5, 0.25]]
ALL = [3.0, -4.0, 0.0, 12.0, 0.5, 0.25]


def params(dtype=torch.float32, grads=GRADS):
    made = [nn.Parameter(torch.zeros(len(grad), dtype=dtype)) for grad in grads]
    for param, grad in zip(made, grads, strict=True):
        param.grad = torch.tensor(grad, dtype=dtype)
    return made


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 5, 1000.0, math.inf])
def test_norm_and_gradients_are_those_of_torch(norm_type, max_norm):
    mine, torchs = params(), params()
    total = clip_grad_norm([(1, mine)], [FakeCommunicator()], max_norm, norm_type)
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(torchs, max_norm, norm_type))
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_each_element_counts_once_over_all_ranks(run_ranks, norm_type):
    everything = params(grads=[ALL])
    expected = clip_grad_norm([(1, everything)], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        mine = params(grads=GRADS[comm.rank : comm.rank + 1])
        return clip_grad_norm([(1, mine)], [comm], 1.0, norm_type), mine[0].grad

    results = run_ranks(3, body)
    for total, _ in results:
        torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), everything[0].grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_rank_without_gradients_counts_as_zero(run_ranks, norm_type):
    def body(comm):
        mine = params() if comm.rank else [nn.Parameter(torch.zeros(2))]
        return clip_grad_norm([(1, mine)], [comm], 1.0, norm_type).item()

    results = run_ranks(2, body)
    assert results[0] == results[1] == pytest.approx(torch.tensor(ALL).norm(norm_type).item())


def test_the_norm_is_float32_for_half_precision_and_float64_for_float64():
    assert clip_grad_norm([(1, params(torch.bfloat16))], [FakeCommunicator()], 1.0).dtype == torch.float32
    assert clip_grad_norm([(1, params(torch.float64))], [FakeCommunicator()], 1.0).dtype == torch.float64


def test_gradients_without_elements_are_left_out():
    total = clip_grad_norm([(1, params(grads=[*GRADS, []]))], [FakeCommunicator()], 1.0, math.inf)
    assert total.item() == 12


def test_without_parameters_the_norm_is_0():
    assert clip_grad_norm([(1, [])], [FakeCommunicator()], 1.0).item() == 0


def test_norm_0_counts_what_is_not_0():
    made = params()
    assert clip_grad_norm([(1, made)], [FakeCommunicator()], 2.5, 0).item() == 5
    torch.testing.assert_close(made[1].grad, torch.tensor([6.0]))


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
def test_parameters_of_other_groups_count_once_each(run_ranks, norm_type):
    expected = clip_grad_norm([(1, params(grads=[ALL]))], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        mine = params(grads=[[3.0], [-4.0, 0.0]][comm.rank : comm.rank + 1])
        sharded = params(grads=[[12.0], [0.5]][comm.rank : comm.rank + 1])
        everywhere = params(grads=[[0.25]])
        total = clip_grad_norm([(1, mine), (1, sharded), (comm.size, everywhere)], [comm], 1.0, norm_type)
        return total, everywhere[0].grad.item()

    for total, clipped in run_ranks(2, body):
        torch.testing.assert_close(total, expected)
        assert clipped == pytest.approx(0.25 / expected.item(), rel=1e-5)


def test_other_dtypes_are_scaled_in_their_own():
    made = [*params(torch.bfloat16, [[3.0]]), *params(torch.float64, [[4.0]])]
    total = clip_grad_norm([(1, made)], [FakeCommunicator()], 1.0)
    assert (total.item(), total.dtype) == (5, torch.float64)
    assert [param.grad.dtype for param in made] == [torch.bfloat16, torch.float64]
    assert made[1].grad.item() == pytest.approx(0.8)


@pytest.mark.parametrize("norm_type", [-1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type):
    with pytest.raises(ValueError, match=f"^norm_type must be 0, positive or inf, not {float(norm_type)}$"):
        clip_grad_norm([(1, params())], [FakeCommunicator()], 1.0, norm_type)
