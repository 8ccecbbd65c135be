"""Clipping on the simulated accelerator: as on the CPU, without a wait of the host, and by few kernels."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.units.clip import _norm_and_sum, clip_grad_norm
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1)

SIM = torch.device("sim", 0)
NORMS = [0.0, 1.0, 2.0, 3.5, math.inf]


class Operators(TorchDispatchMode):
    """Counts the operators that a GPU has a kernel for. (This device runs a list of tensors one by one.)"""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def params(number, device, dtypes=(torch.float32, torch.bfloat16, torch.float32)):
    torch.manual_seed(0)
    made = [torch.zeros(index % 4, 3, dtype=dtypes[index % len(dtypes)]) for index in range(number)]
    grads = [torch.randn(each.shape).to(each.dtype) for each in made]
    made = [nn.Parameter(each.to(device)) for each in made]
    for param, grad in zip(made, grads, strict=True):
        param.grad = grad.to(device)
    return made


def clip(made, comm, norm_type):
    half = len(made) // 2
    shares = [(copies, [param.grad for param in part]) for copies, part in ((1, made[:half]), (2, made[half:]))]
    return clip_grad_norm(made, shares, [comm], 0.5, norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
def test_values_are_those_of_the_cpu(world, group, norm_type):
    expected, found = params(12, "cpu"), params(12, SIM)
    norm = clip(expected, world.host, norm_type)
    comm = TorchGroupCommunicator(group, SIM)
    simulated.reset_counts()
    there = clip(found, comm, norm_type)
    assert simulated.waits() == {}
    assert torch.equal(there.cpu(), norm)
    for param, other in zip(found, expected, strict=True):
        assert torch.equal(param.grad.cpu(), other.grad)


@pytest.mark.parametrize("norm_type", NORMS)
def test_the_number_of_kernels_does_not_grow_with_the_parameters(world, group, norm_type):
    counts, comm = [], TorchGroupCommunicator(group, SIM)
    for number in (12, 60):
        made = params(number, SIM)
        with Operators() as operators:
            clip(made, comm, norm_type)
        counts.append(operators.count)
    assert counts[0] == counts[1] < 40


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_a_model_is_clipped_without_a_wait(world, group, original):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(3))).to(SIM)
    policy = ModuleWrapPolicy({nn.Sequential})
    model = FullyShardedDataParallel(net, process_group=group, auto_wrap_policy=policy, use_orig_params=original)
    model(torch.ones(4, 9, device=SIM)).square().sum().backward()
    simulated.reset_counts()
    norm = model.clip_grad_norm_(1e-3)
    assert simulated.waits() == {}
    assert model.clip_grad_norm_(1.0).item() == pytest.approx(1e-3, rel=1e-3)
    assert norm.item() > 1e-3


def test_the_check_for_local_clipping_waits_once(world):
    made = params(12, SIM, [torch.float32])
    simulated.reset_counts()
    found = _norm_and_sum([param.grad for param in made])
    assert simulated.waits() == {"copy to host": 1}
    assert found == pytest.approx(_norm_and_sum([param.grad.cpu() for param in made]))
