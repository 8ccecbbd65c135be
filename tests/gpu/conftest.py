"""Tests on accelerators of any vendor: ``make test-gpu``, or mpirun and pytest by hand.

One process computes as one of several imagined ranks. Several ranks have a device each and communicate over the
vendor's backend, or share one and communicate over MPI, with copies through host memory. What the machine has too few
devices for is skipped. With ``HPCFSDP_SIMULATED=1`` the device is that of tests/accelerator, one in each process.
"""

import os

import pytest
import torch

import hpcfsdp
from hpcfsdp import accelerator
from hpcfsdp.launch import device as devices
from tests.under_mpi import *  # noqa: F403
from tests.under_mpi import COMM, MPI, TEMPORARY

if os.environ.get("HPCFSDP_SIMULATED"):
    from tests.accelerator import simulated
    from tests.accelerator.traces import one_order  # noqa: F401

    simulated.scratch = TEMPORARY
else:
    simulated = None


def why_not(sharing):
    """The reason why ranks cannot have devices of their own, or share one; None if they can."""
    kind = accelerator.device_type()
    kinds = set(COMM.allgather(kind))
    if kinds != {kind} or kind is None:
        return "no accelerator is visible on every rank"
    if sharing:
        return "one rank alone shares its device with none" if COMM.size == 1 else None
    node = COMM.Split_type(MPI.COMM_TYPE_SHARED)
    mine = devices.choose(None, node.rank)
    identity = accelerator.describe(mine).uuid or str(mine)
    count = len(set(node.allgather(identity)))
    few = f"{node.size} ranks of this node see {count} device(s), and the vendor's backend takes one for each"
    return next(filter(None, COMM.allgather(few if count < node.size else None)), None)


@pytest.fixture(scope="session", params=["own devices", "one device"])
def world(request):
    sharing = request.param == "one device"
    reason = why_not(sharing)
    if reason:
        pytest.skip(reason)
    torch.set_num_threads(1)
    made = hpcfsdp.init(f"{accelerator.device_type()}:0", backend="hpcmpi") if sharing else hpcfsdp.init()
    yield made
    hpcfsdp.finalize()


@pytest.fixture
def device(world):
    return world.device


@pytest.fixture(scope="session")
def alone():
    """The current device, for tests of one process."""
    if accelerator.device_type() is None:
        pytest.skip("no accelerator is visible")
    return accelerator.current_device()


@pytest.fixture(autouse=True)
def idle():
    """Each test begins and ends with an idle device."""
    yield
    if accelerator.device_type() is not None:
        if simulated is not None:
            simulated.starve()
        torch.accelerator.synchronize()
