"""Memory that is registered with a process group: which calls a training makes for it, in order, on fake objects."""

import contextlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcfsdp.comm import torch_group
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2)

SIM = torch.device("sim", 0)


@pytest.fixture
def calls(own_group, monkeypatch):
    """Calls of a backend and a device that have pools, oldest first; allocations only within ``use_mem_pool``."""
    made = []

    @contextlib.contextmanager
    def use(pool, device):
        before = simulated.allocations()
        made.append(("use", pool.allocator, device))
        yield
        made.append(("allocations", simulated.allocations() - before))

    module = torch.get_device_module(SIM)
    monkeypatch.setattr(module, "MemPool", lambda allocator: SimpleNamespace(allocator=allocator), raising=False)
    monkeypatch.setattr(module, "use_mem_pool", use, raising=False)
    own_group.mem_allocator = "allocator"
    own_group.register_mem_pool = lambda pool: made.append(("register", pool.allocator))
    gather = TorchGroupCommunicator._all_gather_into_tensor

    def gathered(comm, label, *rest):
        made.append(("gather",))
        return gather(comm, label, *rest)

    monkeypatch.setattr(TorchGroupCommunicator, "_all_gather_into_tensor", gathered)
    return made


def train(group):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(2))).to(SIM)
    model = FullyShardedDataParallel(net, process_group=group, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    loss = model(torch.ones(4, 9, device=SIM)).square().sum()
    loss.backward()
    return loss.item()


def test_gathered_values_are_allocated_from_one_pool_that_is_registered_first(own_group, calls, monkeypatch):
    plain = train(own_group)
    assert {call[0] for call in calls} == {"gather"}  # nothing else without the option
    calls.clear()
    monkeypatch.setenv("HPCFSDP_REGISTERED_MEMORY", "1")
    assert train(own_group) == plain
    assert next(call for call in calls if call[0] != "gather") == ("register", "allocator")
    assert [call[0] for call in calls].count("register") == 1
    units = [index for index, call in enumerate(calls) if call[0] == "use"]
    assert len(units) >= 4  # two units, forward and backward
    for index in units:
        assert calls[index : index + 3] == [("use", "allocator", SIM), ("allocations", 1), ("gather",)]


def test_a_backend_without_such_memory_is_named_once(group, monkeypatch, caplog):
    monkeypatch.setenv("HPCFSDP_REGISTERED_MEMORY", "1")
    monkeypatch.setattr(torch_group, "_pools", {})
    with caplog.at_level(logging.WARNING, "hpcfsdp.comm"):
        for _ in range(2):
            with TorchGroupCommunicator(group, SIM).gathering_memory():
                torch.empty(3, device=SIM)
    assert [record.getMessage() for record in caplog.records] == [
        "simccl has no registered memory: HPCFSDP_REGISTERED_MEMORY=1 has no effect"
    ]
