"""The device and the number of threads of a rank."""

from __future__ import annotations

import os
from typing import Any

import torch

from hpcfsdp import env
from hpcfsdp.errors import LaunchError


def choose(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """The device of the rank with this local rank: the GPU with index ``local_rank % visible`` unless one is named.

    Under ``--gpus-per-task=1`` every rank sees one device, with index 0.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(wanted if wanted is not None else ("cuda" if visible else "cpu"))
    except (RuntimeError, TypeError):
        raise LaunchError(f"device {wanted!r} is not supported: use 'cpu' or 'cuda'") from None
    if device.type not in ("cpu", "cuda"):
        raise LaunchError(f"device {str(device)!r} is not supported: use 'cpu' or 'cuda'")
    if device.type == "cpu":
        return device
    if visible == 0:
        raise LaunchError(
            f"device {str(device)!r} was asked for, but this process sees no GPU; ask the launcher for one"
        )
    index = device.index if device.index is not None else local_rank % visible
    if index >= visible:
        raise LaunchError(f"device {str(device)!r} was asked for, but this process sees {visible} GPU(s)")
    return torch.device("cuda", index)


def fair_threads(mine: set[int], everyone: list[set[int]]) -> int:
    """Threads for a process that may run on the cores `mine`. Processes share a core equally."""
    share = sum(1 / max(1, sum(core in cores for cores in everyone)) for core in mine)
    return max(1, int(share + 1e-9))


def bind(wanted: str | torch.device | None, node: Any, *, exclusive: bool = True) -> torch.device:
    """Collective over `node` (the ranks of one node). Choose this rank's device and make it current.

    Args:
        exclusive: refuse ranks that share a GPU, as NCCL does. hpcmpi, which stages through the host, allows it.
    """
    device = choose(wanted, node.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        uuids = node.allgather(str(torch.cuda.get_device_properties(device).uuid))
        twins = [rank for rank, uuid in enumerate(uuids) if uuid == uuids[node.rank]]
        if exclusive and len(twins) > 1:
            raise LaunchError(
                f"local ranks {twins} of this node share one GPU ({device}, {uuids[node.rank]}), which NCCL refuses: "
                f"start at most one process per GPU, or let each see another one (srun --gpus-per-task=1)"
            )
    elif not env.threads_chosen():
        cores = os.sched_getaffinity(0)
        torch.set_num_threads(fair_threads(cores, node.allgather(cores)))
    return device
