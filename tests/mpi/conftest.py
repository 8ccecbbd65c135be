"""Tests that run under mpirun: ``mpirun -n N python -m pytest tests/mpi --with-mpi``."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.launch.topology import Topology
from tests.mpi import parity
from tests.under_mpi import *  # noqa: F403

# torch keeps a list of the functions that torch.device("meta") sees, made at the first use; transformers has patched
# torch.linspace while it builds a model, which then is missing in the list for the rest of the process.
with torch.device("meta"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def seed():
    """All ranks begin with one seed: what they build has the same values."""
    torch.manual_seed(0)


@pytest.fixture
def comm(world):
    """The communicator over all ranks."""
    return communicator_for(None, required=True)


@pytest.fixture
def several(world):
    """The communicator over all ranks, where there is somebody to wait for or to disagree with."""
    if world.size == 1:
        pytest.skip("one rank has nobody to wait for, and cannot disagree")
    return communicator_for(None, required=True)


@pytest.fixture
def make_comm(world):
    """``make_comm(topology, **options)``: an ``MpiCommunicator`` over all ranks that may be broken by the test."""
    made = []

    def make_communicator(topology=None, **options):
        made.append(MpiCommunicator(world.comm.Dup(), topology, **options))
        return made[-1]

    yield make_communicator
    for communicator in made:
        communicator.abandon()


@pytest.fixture
def make(world, make_comm):
    """As ``make_comm``, with all ranks on one node by default."""
    return lambda topology=None, **options: make_comm(topology or Topology.regular(1, world.size), **options)


@pytest.fixture(scope="session")
def gloo(world):
    """A communicator over all ranks as gloo connects them."""
    return TorchGroupCommunicator(dist.new_group(backend="gloo"))


@pytest.fixture(scope="module")
def groups(world):
    """To shard over: ranks that share memory, that send each other messages although they could, and as gloo has it."""
    messages = MpiCommunicator(world.comm.Dup(), Topology.regular(world.size, 1))
    yield {"shared memory": None, "messages": messages, "gloo": world.process_group}
    messages.close()


@pytest.fixture(scope="module")
def engines(world):
    with parity.engines(world) as made:
        yield made


@pytest.fixture
def engine(engines):
    """The engine that a test trains with, see ``parity``."""
    return parity.under_test(engines)


@pytest.fixture(scope="session")
def row_meshes(world, gloo):
    """Of torch's ``fully_shard``, and of ours by the way in which ranks exchange values."""
    everyone = init_device_mesh("cpu", (world.size,))
    return {"torch": everyone, "shared memory": everyone, "gloo": DeviceMesh.from_group(gloo.group, "cpu")}


@pytest.fixture(params=["shared memory", "gloo"])
def ours_on(request, row_meshes):
    return row_meshes[request.param]
