"""Tests on a simulated accelerator: ``make test-accelerator``, or mpirun and pytest by hand."""

import contextlib
import zlib

import pytest
import torch
import torch.distributed as dist

from hpcfsdp.engine import root
from hpcfsdp.engine.streams import DeviceStreams
from tests.accelerator import simulated
from tests.accelerator.programs import SIM
from tests.accelerator.traces import one_order  # noqa: F401
from tests.under_mpi import *  # noqa: F403
from tests.under_mpi import COMM, TEMPORARY

simulated.scratch = TEMPORARY


@pytest.fixture(autouse=True)
def fresh():
    """Each test begins with an idle device, counters at 0, and no stream starved."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    simulated.starve()
    simulated.reset_counts()
    torch.manual_seed(0)
    yield
    simulated.starve()
    with contextlib.suppress(RuntimeError):  # of a kernel that the test has had fail
        torch.accelerator.synchronize()


@pytest.fixture(params=["own queues", "one queue", "blocking"])
def hardware(request):
    """What the device has: a queue for each stream, one for all, or a driver that waits for it now and then."""
    seed = zlib.crc32(request.node.nodeid.encode()) + COMM.rank
    hardware = {"one queue": simulated.hardware_queues(1), "blocking": simulated.blocking(seed)}
    with hardware.get(request.param, contextlib.nullcontext()):
        yield
        with contextlib.suppress(RuntimeError):
            torch.accelerator.synchronize()


@pytest.fixture(scope="session")
def group(world):
    """A process group of all ranks for tensors on the device."""
    return dist.new_group(backend=simulated.BACKEND)  # one: torch's caches know meshes by their ranks alone


@pytest.fixture
def own_group(world):
    """A process group that the test may break."""
    made = dist.new_group(backend=simulated.BACKEND)
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def streams(monkeypatch):
    """The queues of all models on the device that the test makes."""
    made, streams_for = DeviceStreams(SIM), root.streams_for
    monkeypatch.setattr(root, "streams_for", lambda device: made if device == SIM else streams_for(device))
    return made
