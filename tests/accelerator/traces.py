"""What the simulated device has noted, as a trace for ``tests/deadlock.py``."""

import torch.distributed as dist

from tests.accelerator.programs import SIM
from tests.deadlock import HOST, Group, Step


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
