"""The size of a checkpoint, and the time that saving takes on a file system."""

from __future__ import annotations

from dataclasses import dataclass

from hpcfsdp.plan.layouts import OPTIMIZERS, Setup
from hpcfsdp.plan.workload import Workload


@dataclass(frozen=True)
class Disk:
    """A parallel file system.

    Attributes:
        node_bytes_per_s: that one node writes.
        bytes_per_s: that all nodes write together at most.
    """

    node_bytes_per_s: float = 2e9
    bytes_per_s: float = 100e9


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a training.

    Attributes:
        nbytes: of a file: parameters, buffers and the optimizer's state, each once. The format adds about 1 KiB for
            each tensor, and checksums.
        seconds: in which it is written.
        rank_bytes: that each of the writing ranks writes.
        interval_s: between two of them.
        share: of the time that training waits for them, unless they are written in the background.
        per_day: files in a day.
        bytes_per_day: that these take without retention.
    """

    nbytes: int
    seconds: float
    rank_bytes: float
    interval_s: float
    share: float
    per_day: float
    bytes_per_day: float


def saving(workload: Workload, setup: Setup, *, nodes: int, disk: Disk, interval_s: float) -> Saving:
    """Checkpoints every `interval_s` seconds from so many nodes. Pure."""
    values = OPTIMIZERS[setup.optimizer].values
    nbytes = workload.buffer_bytes
    for unit in workload.units:
        for param in unit.params:
            nbytes += param.numel * param.dtype.itemsize * (1 + values * param.trained)
    seconds = nbytes / min(nodes * disk.node_bytes_per_s, disk.bytes_per_s)
    every = interval_s + seconds
    return Saving(
        nbytes,
        seconds,
        nbytes / setup.ranks,
        interval_s,
        seconds / every,
        86400 / every,
        nbytes * 86400 / every,
    )
