"""What ranks do on the simulated device, as traces for ``tests/deadlock.py``, and what holds for every test there."""

import pickle
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from tests.accelerator import simulated
from tests.accelerator.programs import SIM
from tests.deadlock import HOST, Group, Step, difference_of_order, problem
from tests.under_mpi import COMM, SUCCEEDED, TEMPORARY

LATE_S = 240.0
"""After so long in a test, a minute before pytest ends the job, it prints where the calls of ranks differ."""


@pytest.fixture(autouse=True)
def one_order(request):
    """All ranks call collectives in one order, over all groups and MPI, and in no circle: else the test fails."""
    calls, count = simulated.every_call, MpiCommunicator._count

    def noted(comm, label):
        calls.append((Group("MPI", comm.world_ranks), label))
        count(comm, label)

    calls.clear()
    late = threading.Timer(LATE_S, _print_difference, [request.node.nodeid])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MpiCommunicator, "_count", noted)
        late.start()
        yield
        late.cancel()
    exempt = request.node.get_closest_marker("other_orders")
    assert exempt is None or exempt.args, "other_orders needs a reason"
    is_compared = exempt is None and request.node.stash.get(SUCCEEDED, False)
    if COMM.size > 1 and is_compared:  # all ranks know alike
        traces = COMM.gather(_steps())
        found = COMM.bcast(problem(traces) if COMM.rank == 0 else None)
        if found is not None:
            pytest.fail(found)


def _steps():
    return [Step("collective", HOST, *call) for call in simulated.every_call]


def _print_difference(name):
    """Ranks that wait in a circle do not come to the end of a test: by files, what each of them has called so far."""
    path = Path(TEMPORARY, "calls")
    path.with_suffix(f".{COMM.rank}").write_bytes(pickle.dumps(_steps()))
    time.sleep(5)
    if COMM.rank == 0:
        traces = [pickle.loads(path.with_suffix(f".{rank}").read_bytes()) for rank in range(COMM.size)]
        sys.stderr.write(f"{name} has not ended: {difference_of_order(traces)}\n")


def trace_of(entries, names):
    """The steps among the entries of ``simulated.log``.

    Args:
        names: the ``Group`` of each folder.
    """
    steps, recorded = [], set()
    for kind, stream, key, label, _ in entries:
        where = HOST if stream < 0 else stream
        if kind == "collective":
            steps.append(Step(kind, where, names[key], label))
        elif kind == "record":
            recorded.add(key)
            steps.append(Step(kind, where, key))
        elif kind == "wait" and key in recorded:  # others were recorded when the device was idle
            steps.append(Step(kind, where, key))
        elif kind in ("kernel", "drain"):
            steps.append(Step(kind, where, None, label))
    return steps


def traces_of(world, entries, groups):
    """Collective over all ranks. The traces of all ranks, which have used these groups and no others."""
    names = {}
    for number, group in enumerate(groups):
        known = Group(f"group {number}", tuple(dist.get_process_group_ranks(group)))
        names |= dict.fromkeys(group._get_backend(SIM).folders, known)
    return world.comm.allgather(trace_of(entries, names))
