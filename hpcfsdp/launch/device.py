"""The device and the number of threads of a rank."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcfsdp import accelerator, env
from hpcfsdp.accelerator import Hardware
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi
from hpcfsdp.text.terminal import members

_PCI = Path("/sys/bus/pci/devices")


def choose(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device of the rank with this local rank, number ``local_rank % visible`` unless one is named.

    Under ``--gpus-per-task=1`` every rank sees one device, with index 0. ``assign`` may find a nearer one.
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


@dataclass(frozen=True)
class Place:
    """The cores and devices of a rank, as the other ranks of its node need to know them."""

    cores: frozenset[int]  # on which this rank may run
    index: int | None = None  # the number of the device that was named; None where any will do
    devices: tuple[Hardware, ...] = ()  # that this rank sees, by number; none on the CPU
    near: tuple[frozenset[int], ...] = ()  # for each of them the cores next to it; empty where that is unknown


def look(device: torch.device, *, named: bool) -> Place:
    """Return the place of this rank, with all devices that it sees if `device` is an accelerator."""
    cores = frozenset(os.sched_getaffinity(0))
    if not accelerator.is_accelerator(device):
        return Place(cores)
    found = [accelerator.describe(torch.device(device.type, n)) for n in range(accelerator.device_count())]
    return Place(cores, device.index if named else None, tuple(found), tuple(near_cores(each.pci) for each in found))


def near_cores(pci: str | None) -> frozenset[int]:
    """Return the cores that Linux knows to be next to a device; none where it does not say."""
    try:
        return frozenset(members((_PCI / (pci or "?") / "local_cpulist").read_text().strip()))
    except (OSError, ValueError):
        return frozenset()


def assign(places: Sequence[Place]) -> list[int]:
    """Return the number of the device that each rank of a node uses, by its place there. Pure.

    Ranks that see the same devices, at least one for each, get different ones: a rank that is bound to cores one that
    is next to all of them, wherever that can be, and otherwise the one with the number of its local rank. Where devices
    were named, or ranks see different ones, it is that or ``local rank % visible``.
    """
    first, count = places[0], len(places)
    if count > len(first.devices) or any(each.index is not None or each.devices != first.devices for each in places):
        numbers = (rank % max(1, len(each.devices)) for rank, each in enumerate(places))
        return [n if each.index is None else each.index for n, each in zip(numbers, places, strict=True)]
    holders: dict[int, int] = {}  # of devices, by number

    def seat(rank: int, tried: set[int]) -> bool:
        near = [n for n, cores in enumerate(first.near) if places[rank].cores <= cores]
        for n in sorted(near, key=lambda n: (n in holders, n != rank, n)):
            if n not in tried:
                tried.add(n)
                if n not in holders or seat(holders[n], tried):
                    holders[n] = rank
                    return True
        return False

    without = [rank for rank in range(count) if not seat(rank, set())]
    holders |= {rank: rank for rank in without if rank not in holders}
    free = iter([n for n in range(len(first.devices)) if n not in holders])
    holders |= {next(free): rank for rank in without if rank not in holders.values()}
    return sorted(holders, key=lambda n: holders[n])


def owners(places: Sequence[Place], numbers: Sequence[int]) -> list[int]:
    """Return for each rank of a node the lowest one that uses the same device, as far as the driver tells. Pure.

    The instances of a partitioned device may have one UUID, or one PCI address. So devices are the same if all that is
    known about both is equal. A process sees no device twice.
    """

    def same(one: int, other: int) -> bool:
        if places[one].devices == places[other].devices and numbers[one] != numbers[other]:
            return False
        mine, theirs = (places[rank].devices[numbers[rank]] for rank in (one, other))
        pairs = [pair for pair in ((mine.uuid, theirs.uuid), (mine.pci, theirs.pci)) if None not in pair]
        return bool(pairs) and all(a == b for a, b in pairs)

    ranks = range(len(places))
    return [next(one for one in ranks if one == rank or same(one, rank)) for rank in ranks]


def local_rank(numbers: Sequence[int], place: int) -> int:
    """Return ``LOCAL_RANK`` for others: the number of the rank's device, if the ranks of the node have 0, 1, 2, ...

    Programs call ``set_device(LOCAL_RANK)``, and let the rank of a node with 0 download and print. Where each rank
    sees one device both cannot be: it is the rank's place on the node, so that one rank of a node has 0.
    """
    return numbers[place] if sorted(numbers) == list(range(len(numbers))) else place


def activate(kind: str, number: int) -> torch.device:
    """Return the device of this rank, and make it current. Nothing changes on the CPU.

    On an accelerator the calling thread runs its backwards itself from now on. torch has a thread for each device
    otherwise, and this one would hear no signal as long as a hook waits there for other ranks.
    """
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, number)
    accelerator.make_current(device)
    torch.autograd.set_multithreading_enabled(False)
    return device


def share_node(places: Sequence[Place], numbers: Sequence[int], rank: int, *, exclusive: bool) -> None:
    """Refuse ranks that share a device, and divide the cores of a node among its ranks. `rank` is this one there.

    Only if `exclusive` are shared devices refused, as NCCL does. hpcmpi, which stages through the host, allows them. On
    an accelerator a core is left to the threads of the backend: NCCL's proxy starves beside MPI's polling otherwise.
    """
    mine = places[rank]
    if mine.devices and exclusive:
        lowest = owners(places, numbers)
        twins = [each for each, owner in enumerate(lowest) if owner == lowest[rank]]
        if len(twins) > 1:
            found = mine.devices[numbers[rank]]
            names = ", ".join(name for name in (f"number {numbers[rank]}", found.uuid, found.pci) if name)
            raise LaunchError(
                f"{len(places)} rank(s) on this node use {len(set(lowest))} device(s): local ranks {twins} share one "
                f"({names}), which NCCL and its like refuse: start at most one rank for each device (srun "
                "--ntasks-per-node=N, mpirun --map-by ppr:N:node), or let each see another one (srun "
                "--gpus-per-task=1)"
            )
    if not env.threads_chosen():
        share = fair_threads(set(mine.cores), [set(each.cores) for each in places])
        torch.set_num_threads(max(1, share - 1) if mine.devices else share)
