"""The device and the number of threads of a rank."""

import os
from typing import Any

import torch

from hpcfsdp import accelerator, env
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi


def choose(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device of the rank with this local rank, number ``local_rank % visible`` unless one is named.

    Under ``--gpus-per-task=1`` every rank sees one device, with index 0.
    """
    kind, visible = accelerator.device_type(), accelerator.device_count()
    try:
        device = torch.device(wanted if wanted is not None else kind or "cpu")
    except (RuntimeError, TypeError):
        raise LaunchError(f"device {wanted!r} is not supported: use 'cpu' or {kind or 'cuda'!r}") from None
    if device.type == "meta":
        raise LaunchError(f"device {str(device)!r} is not supported: use 'cpu' or {kind or 'cuda'!r}")
    if device.type == "cpu":
        return device
    where = f"device {str(device)!r} was asked for, but"
    if visible == 0:
        raise LaunchError(f"{where} this process sees no accelerator; ask the launcher for one")
    if device.type != kind:
        raise LaunchError(f"{where} the accelerator of this process is {kind!r}")
    index = device.index if device.index is not None else local_rank % visible
    if index >= visible:
        raise LaunchError(f"{where} this process sees {visible} device(s)")
    return torch.device(kind, index)


def check_thread_level(device: torch.device, *, progress_thread: bool) -> None:
    """Raise unless MPI may be called as a device, or a progress thread, needs it."""
    mpi = load_mpi()
    level = mpi.Query_thread()
    names = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized"}
    if progress_thread and level < mpi.THREAD_MULTIPLE:
        where = "with HPCFSDP_PROGRESS_THREAD=1 it must be 'multiple': the main thread and the other call it at once"
    elif level < mpi.THREAD_SERIALIZED and accelerator.is_accelerator(device):
        where = (
            f"on {device.type!r} it must be 'serialized' at least: torch may run a backward, whose hooks call MPI, "
            "on a thread for the device"
        )
    else:
        return
    raise LaunchError(
        f"MPI was started with the thread level {names[level]!r}, but {where}. Unset MPI4PY_RC_THREAD_LEVEL and "
        "MPI4PY_RC_THREADS, or use an MPI that is built with support for threads"
    )


def fair_threads(mine: set[int], everyone: list[set[int]]) -> int:
    """Return the number of threads for a process that may run on the cores `mine`. Processes share a core equally."""
    share = sum(1 / max(1, sum(core in cores for cores in everyone)) for core in mine)
    return max(1, int(share + 1e-9))


def activate(device: torch.device) -> str | None:
    """Make the device of this rank current. The name of its hardware; None on the CPU, or where the driver names none.

    On an accelerator the calling thread runs its backwards itself from now on. torch has a thread for each device
    otherwise, and this one would hear no signal as long as a hook waits there for other ranks.
    """
    if not accelerator.is_accelerator(device):
        return None
    accelerator.make_current(device)
    torch.autograd.set_multithreading_enabled(False)
    return accelerator.describe(device).uuid


def share_node(device: torch.device, uuid: str | None, node: Any, *, exclusive: bool) -> None:
    """Compare accelerators, or divide the cores among the ranks. Collective over `node` (the ranks of one node).

    `uuid` is that of ``activate``. If `exclusive` this refuses ranks that share a device, as NCCL does. hpcmpi, which
    stages through the host, allows it.
    """
    if accelerator.is_accelerator(device):
        uuids = node.allgather(uuid)
        twins = [rank for rank, other in enumerate(uuids) if other == uuid]
        if exclusive and uuid is not None and len(twins) > 1:
            raise LaunchError(
                f"{node.size} rank(s) on this node use {len(set(uuids))} device(s): local ranks {twins} share one "
                f"({device}, {uuid}), which NCCL and its like refuse: start at most one rank for each device (srun "
                "--ntasks-per-node=N, mpirun --map-by ppr:N:node), or let each see another one (srun "
                "--gpus-per-task=1)"
            )
    else:
        cores = os.sched_getaffinity(0)
        everyone = node.allgather(cores)  # also where this rank has fixed its threads: others may not have
        if not env.threads_chosen():
            torch.set_num_threads(fair_threads(cores, everyone))
