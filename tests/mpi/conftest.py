"""Tests that run under mpirun: ``mpirun -n N python -m pytest tests/mpi --with-mpi``.

Every rank runs every test. After each phase of a test the ranks tell each other how it went: a test that fails on one
rank fails on all of them, and all go on to the next one together. A rank that fails while others are still inside of
the test (waiting for it in a collective) ends the job. Rank 0 alone reports.
"""

import os
import shutil
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

import hpcfsdp
from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.mpi import MpiCommunicator
from hpcfsdp.comm.topology import Topology
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.launch.bootstrap import load_mpi
from tests.mpi import parity

MPI = load_mpi()
COMM = MPI.COMM_WORLD.Dup()
PATIENCE_S = 20.0

# A folder for each rank: several pytest processes would clean up one folder at the same time.
TEMPORARY = COMM.bcast(tempfile.mkdtemp(prefix="hpcfsdp-tests-") if COMM.rank == 0 else None)
os.mkdir(f"{TEMPORARY}/{COMM.rank}")
os.environ["PYTEST_DEBUG_TEMPROOT"] = f"{TEMPORARY}/{COMM.rank}"


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if COMM.rank != 0:
        config.pluginmanager.get_plugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115


def pytest_unconfigure():
    COMM.Barrier()
    if COMM.rank == 0:
        shutil.rmtree(TEMPORARY, ignore_errors=True)


def pytest_report_header():
    library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
    return f"MPI: {library}, rank {COMM.rank} of {COMM.size}, torch {torch.__version__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.mpi)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if COMM.size == 1:
        return
    text = f"--- rank {COMM.rank} ---\n{report.longreprtext}" if report.failed else ""
    if not _others_arrive(report.failed):
        sys.stderr.write(f"{item.nodeid} ({report.when}) failed while other ranks are inside of it\n{text}\n")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    texts = [other for other in COMM.allgather(text) if other]
    if texts:
        report.outcome = "failed"
        report.longrepr = "\n".join(texts)


def _others_arrive(failed):
    """Whether all ranks come to the end of the phase; waits without end unless this rank has failed."""
    arrival, began = COMM.Ibarrier(), time.monotonic()
    while not arrival.Test():
        if failed and time.monotonic() - began > PATIENCE_S:
            return False
        time.sleep(0.0005)
    return True


@pytest.fixture(scope="session")
def world():
    torch.set_num_threads(1)
    made = hpcfsdp.init("cpu")
    yield made
    hpcfsdp.finalize()


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


@pytest.fixture
def shared_path(tmp_path, world):
    """One empty folder that all ranks see."""
    path = world.comm.bcast(tmp_path)
    yield path
    world.comm.Barrier()
