"""Tests that run under mpirun: what the conftest.py of a folder with such tests imports.

Every rank runs every test. After each phase of a test the ranks tell each other how it went: a test that fails on one
rank fails on all of them, and all go on to the next one together. A rank that fails while others are still inside of
the test (waiting for it in a collective) ends the job. Rank 0 alone reports.
"""

import array
import os
import shutil
import sys
import tempfile
import time

import pytest
import torch

import hpcfsdp
from hpcfsdp.launch.job import load_mpi
from tests.selection import chosen

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_report_header",
    "pytest_runtest_makereport",
    "pytest_unconfigure",
    "shared_path",
    "thorough",
    "world",
]

MPI = load_mpi()
COMM = MPI.COMM_WORLD.Dup()
PATIENCE_S = 20.0
SUCCEEDED = pytest.StashKey[bool]()
"""Of a test: whether its last phase has failed on no rank, as all of them know."""

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


def pytest_addoption(parser):
    parser.addoption("--more-ranks", action="store_true", help="each test under all numbers of ranks that it is for")
    parser.addoption("--any-ranks", action="store_true", help="all tests, whatever numbers of ranks they are for")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what this number of ranks does not show; all ranks come to the same selection."""
    for item in items:
        item.add_marker(pytest.mark.mpi)
    if config.getoption("any_ranks"):
        return
    kept = chosen(items, COMM.size, config.getoption("more_ranks"))
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if COMM.size == 1:
        return
    text = f"--- rank {COMM.rank} ---\n{report.longreprtext}" if report.failed else ""
    failures = _failures(report.failed)
    if failures is None:
        sys.stderr.write(f"{item.nodeid} ({report.when}) failed while other ranks are inside of it\n{text}\n")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    item.stash[SUCCEEDED] = not failures
    if failures:
        report.outcome = "failed"
        report.longrepr = "\n".join(other for other in COMM.allgather(text) if other)


def _failures(failed):
    """On how many ranks the phase has failed; waits without end for all of them, unless this one has failed: None."""
    mine, total, began = array.array("i", [failed]), array.array("i", [0]), time.monotonic()
    arrival = COMM.Iallreduce([mine, MPI.INT], [total, MPI.INT])
    while not arrival.Test():  # sleeping: ranks may be more than cores
        if failed and time.monotonic() - began > PATIENCE_S:
            return None
        time.sleep(0.0005)
    return total[0]


@pytest.fixture(scope="session")
def world():
    torch.set_num_threads(1)
    made = hpcfsdp.init("cpu")
    yield made
    hpcfsdp.finalize()


@pytest.fixture(scope="session")
def thorough(request):
    """Whether a test that goes through many cases by itself is to take all of them, as in make test-slow."""
    return request.config.getoption("more_ranks")


@pytest.fixture
def shared_path(tmp_path):
    """One empty folder that all ranks see."""
    path = COMM.bcast(tmp_path)
    yield path
    COMM.Barrier()
