"""Memory that ranks share on imagined nodes: topologies to try, what ranks hold, and how much memory that takes."""

from pathlib import Path

import torch

from hpcfsdp.launch.topology import Topology


def machines(size):
    """Different machines of so many ranks."""
    made = [
        Topology.regular(1, size),
        Topology.regular(size, 1),
        *(Topology.uneven([size - k, k]) for k in range(1, size)),
        *(Topology.uneven([k, size - k]) for k in range(1, size)),
        Topology.from_labels([rank % 2 for rank in range(size)]),
        Topology.from_labels([rank % 3 for rank in range(size)]),
    ]
    return list(dict.fromkeys(made))


def held(rank, numel, turn=0, dtype=torch.float32):
    """What a rank holds in a turn: whole numbers, so that sums are exact whatever their order."""
    return (torch.arange(numel) % 7 + 10 * rank + 100 * turn).to(dtype)


def memory_held(world):
    """MiB that all ranks together hold, each page counted once: shared memory, or with one rank plain memory."""
    kind = "Pss_Shmem" if world.size > 1 else "Pss_Anon"
    world.comm.Barrier()
    text = Path("/proc/self/smaps_rollup").read_text()
    mine = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{kind}:"))
    world.comm.Barrier()
    return world.comm.allreduce(mine) / 1024
