"""The engine where the calling thread runs the backward, as after ``hpcfsdp.init`` on an accelerator."""

import threading

import pytest
import torch

from hpcfsdp.fsdp import CPUOffload
from tests.accelerator.programs import POLICIES, SIM
from tests.accelerator.test_engine import TOLERANCE, differences

pytestmark = pytest.mark.ranks(2, 1)


@pytest.fixture(autouse=True)
def one_thread():
    with torch.autograd.set_multithreading_enabled(False):
        yield


def test_hooks_run_on_the_calling_thread_and_on_the_streams_of_the_forward():
    seen, side = [], torch.Stream(SIM)
    x = torch.ones(3, device=SIM, requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
        y.register_hook(lambda grad: seen.append((threading.get_ident(), torch.accelerator.current_stream().stream_id)))
    torch.accelerator.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen == [(threading.get_ident(), side.stream_id)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_training_is_that_of_one_process(world, group, streams, original, policy):
    assert differences(world, group, streams, policy, use_orig_params=original) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_in_host_memory(world, group, streams, policy):
    offload = CPUOffload(offload_params=True)
    assert differences(world, group, streams, policy, cpu_offload=offload) < TOLERANCE
