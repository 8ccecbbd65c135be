import math

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.units.clip import clip_grad_norm

GRADS = [[3.0, -4.0, 0.0], [12.0], [0.5, 0.25]]
ALL = [3.0, -4.0, 0.0, 12.0, 0.5, 0.25]


def clip(shares, comms, max_norm, norm_type=2.0):
    """Clip parameters; each share has the number of ranks that hold it."""
    clipped = [param for _, params in shares for param in params]
    grads = [(copies, [param.grad for param in params if param.grad is not None]) for copies, params in shares]
    return clip_grad_norm(clipped, grads, comms, max_norm, norm_type)


def params(dtype=torch.float32, grads=GRADS):
    made = [nn.Parameter(torch.zeros(len(grad), dtype=dtype)) for grad in grads]
    for param, grad in zip(made, grads, strict=True):
        param.grad = torch.tensor(grad, dtype=dtype)
    return made


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 5, 1000.0, math.inf])
def test_norm_and_gradients_are_those_of_torch(norm_type, max_norm):
    mine, torchs = params(), params()
    total = clip([(1, mine)], [FakeCommunicator()], max_norm, norm_type)
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(torchs, max_norm, norm_type))
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_each_element_counts_once_over_all_ranks(run_ranks, norm_type):
    everything = params(grads=[ALL])
    expected = clip([(1, everything)], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        mine = params(grads=GRADS[comm.rank : comm.rank + 1])
        return clip([(1, mine)], [comm], 1.0, norm_type), mine[0].grad

    results = run_ranks(3, body)
    for total, _ in results:
        torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), everything[0].grad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_a_rank_without_gradients_counts_as_zero(run_ranks, norm_type):
    def body(comm):
        mine = params() if comm.rank else [nn.Parameter(torch.zeros(2))]
        return clip([(1, mine)], [comm], 1.0, norm_type).item()

    results = run_ranks(2, body)
    assert results[0] == results[1] == pytest.approx(torch.tensor(ALL).norm(norm_type).item())


def test_the_norm_is_float32_for_half_precision_and_float64_for_float64():
    assert clip([(1, params(torch.bfloat16))], [FakeCommunicator()], 1.0).dtype == torch.float32
    assert clip([(1, params(torch.float64))], [FakeCommunicator()], 1.0).dtype == torch.float64


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(("dtype", "real"), [(torch.complex64, torch.float32), (torch.complex128, torch.float64)])
def test_complex_gradients_next_to_real_ones(dtype, real, norm_type):
    def mixed():
        return [*params(dtype, [[3 + 4j, -1j], [0.5]]), *params(torch.float32, [[2.0]]), *params(dtype, [[]])]

    mine, torchs = mixed(), mixed()
    total = clip([(1, mine)], [FakeCommunicator()], 1.0, norm_type)
    norms = [param.grad.to(torch.complex128).abs() for param in torchs]
    torch.testing.assert_close(total, torch.cat(norms).norm(norm_type).to(real))
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(a.grad, (b.grad / (total.to(real) + 1e-6)).to(b.dtype))


def test_gradients_without_elements_are_left_out():
    total = clip([(1, params(grads=[*GRADS, []]))], [FakeCommunicator()], 1.0, math.inf)
    assert total.item() == 12


def test_without_parameters_the_norm_is_0():
    assert clip([(1, [])], [FakeCommunicator()], 1.0).item() == 0


def test_norm_0_counts_what_is_not_0():
    made = params()
    assert clip([(1, made)], [FakeCommunicator()], 2.5, 0).item() == 5
    torch.testing.assert_close(made[1].grad, torch.tensor([6.0]))


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
def test_parameters_of_other_groups_count_once_each(run_ranks, norm_type):
    expected = clip([(1, params(grads=[ALL]))], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        mine = params(grads=[[3.0], [-4.0, 0.0]][comm.rank : comm.rank + 1])
        sharded = params(grads=[[12.0], [0.5]][comm.rank : comm.rank + 1])
        everywhere = params(grads=[[0.25]])
        total = clip([(1, mine), (1, sharded), (comm.size, everywhere)], [comm], 1.0, norm_type)
        return total, everywhere[0].grad.item()

    for total, clipped in run_ranks(2, body):
        torch.testing.assert_close(total, expected)
        assert clipped == pytest.approx(0.25 / expected.item(), rel=1e-5)


def test_other_dtypes_are_scaled_in_their_own():
    made = [*params(torch.bfloat16, [[3.0]]), *params(torch.float64, [[4.0]])]
    total = clip([(1, made)], [FakeCommunicator()], 1.0)
    assert (total.item(), total.dtype) == (5, torch.float64)
    assert [param.grad.dtype for param in made] == [torch.bfloat16, torch.float64]
    assert made[1].grad.item() == pytest.approx(0.8)


@pytest.mark.parametrize("norm_type", [-1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type):
    with pytest.raises(ValueError, match=f"^norm_type must be 0, positive or inf, not {float(norm_type)}$"):
        clip([(1, params())], [FakeCommunicator()], 1.0, norm_type)


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, 3.0, math.inf])
def test_parts_that_several_ranks_have_count_once(run_ranks, norm_type):
    """Four ranks as two times two: a part is on all, on the two of a row, on the two of a column, or on one."""
    everything = params(torch.float64, [ALL])
    expected = clip([(1, everything)], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        row, column = comm.rank // 2, comm.rank % 2
        everywhere, own = (
            params(torch.float64, [[3.0]]),
            params(torch.float64, [[[-4.0], [0.0], [12.0], []][comm.rank]]),
        )
        in_row, in_column = params(torch.float64, [[[0.5], []][row]]), params(torch.float64, [[[], [0.25]][column]])
        shares = [(4, everywhere), (1, own), (2, in_row), (2, in_column)]
        return clip(shares, [comm], 1.0, norm_type), everywhere[0].grad, own[0].grad, in_row[0].grad, in_column[0].grad

    results = run_ranks(4, body)
    for total, *_ in results:
        torch.testing.assert_close(total, expected)
    _, everywhere, own, in_row, in_column = zip(*results, strict=True)
    found = torch.cat([everywhere[0], *own, in_row[0], in_column[1]])
    torch.testing.assert_close(found, everything[0].grad)
    assert everywhere[0].item() == everywhere[3].item()


@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, math.inf])
def test_the_norm_goes_over_one_group_after_the_other(run_ranks, norm_type):
    """Each rank of the first group stands for a line of the second one, with the same parts on all of its ranks."""
    expected = clip([(1, params(grads=[ALL]))], [FakeCommunicator()], 1.0, norm_type)

    def body(comm):
        mine = params(grads=[[ALL[:2], ALL[2:]][comm.rank]])
        return clip([(3, mine)], [comm, FakeCommunicator(size=3)], 1.0, norm_type)

    for total in run_ranks(2, body):
        torch.testing.assert_close(total, expected)


def test_a_parameter_in_two_parts_is_scaled_once():
    """Some elements of a gradient are on one rank, others on two: its parts count differently."""
    whole = params(torch.float64, [ALL])
    grad = whole[0].grad
    total = clip_grad_norm(whole, [(1, [grad[:2]]), (2, [grad[2:]])], [FakeCommunicator()], 1.0)
    assert total.item() == pytest.approx(math.sqrt(25 + (144 + 0.25 + 0.0625) / 2))
    torch.testing.assert_close(whole[0].grad, torch.tensor(ALL, dtype=torch.float64) / (total + 1e-6))
