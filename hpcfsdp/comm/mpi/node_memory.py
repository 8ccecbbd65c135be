"""Memory that the ranks of one node share, with the flags by which they take turns on it.

docs/developers/node-memory.md describes the protocol, with the reason of each wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcfsdp import _compat
from hpcfsdp.errors import CommunicationError, DifferentCallsError

if TYPE_CHECKING:
    from mpi4py import MPI

ARRIVED, DONE, CLEARED = 0, 1, 2
"""Counters of a rank: operations that it has entered (its contribution is written), and left (it reads no more), and
the last one after which it has freed its part of the memory, or will not."""

_LINE = 256  # bytes of flags for each rank, a multiple of the cache line: three counters, then two labels
_COUNTERS = 32
_LABEL_BYTES = (_LINE - _COUNTERS) // 2
_ALIGNMENT = 4096

# x86 keeps loads and stores of one core in the order that the protocol needs. Elsewhere two rounds through a lock do:
# a release followed by an acquire is a barrier for everything before against everything after.
_NEEDS_FENCE = platform.machine().lower() not in ("x86_64", "amd64")
_lock = threading.Lock()


def _fence() -> None:
    if _NEEDS_FENCE:
        with _lock:
            pass
        with _lock:
            pass


@_compat.outside_of_modes
@torch.inference_mode(False)
def share(node: MPI.Intracomm, nbytes: int) -> Tensor:
    """Map `nbytes` zero bytes on all of them, as uint8. Collective over `node`, ranks that share memory.

    The memory has no name (``memfd_create``, opened by the others through ``/proc``), so nothing stays in /dev/shm,
    however processes end, and the size of /dev/shm (64 MiB in many containers) is no limit. Where processes do not see
    each other in ``/proc``, this uses a file in /dev/shm, and removes its name as soon as all ranks have opened it. All
    ranks raise if one cannot map the memory.
    """
    if node.size == 1:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory, first = _map_together(node, nbytes, open_unnamed)
    if memory is None:
        memory, second = _map_together(node, nbytes, _open_named)
    if memory is None:
        raise CommunicationError(
            f"{nbytes} bytes of memory could not be shared on this node: {first}; with a file in /dev/shm: {second}"
        )
    return memory


def _map_together(node: Any, nbytes: int, opener: Any) -> tuple[Tensor | None, str | None]:
    """Map the file of `opener` on every rank of `node`. Returns the mapping, or the error of the lowest such rank."""
    fd, memory, problem, opened = -1, None, None, None
    try:
        fd, name, opened = opener(None, nbytes) if node.rank == 0 else (-1, None, None)
    except Exception as error:  # of any kind: the others must learn of it
        name, problem = None, f"local rank 0: {error}"
    made = node.bcast((name, *identity(fd)) if fd >= 0 else None)
    if made is not None:
        try:
            if node.rank != 0:
                fd, _, _ = opener(made[0], nbytes)
                if identity(fd) != made[1:]:
                    raise OSError(
                        f"{made[0]} is another file here: are the ranks in containers with separate process ids?"
                    )
            memory = map_fd(fd, nbytes)
        except Exception as error:
            problem = f"local rank {node.rank}: {error}"
    problems = [p for p in node.allgather(problem) if p]
    if fd >= 0:
        os.close(fd)
    if opened is not None:
        os.unlink(opened)
    return (None, problems[0]) if problems else (memory, None)


def identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_ino, found.st_dev


@torch.inference_mode(False)  # it outlives the call
def map_fd(fd: int, nbytes: int) -> Tensor:
    """Return the bytes of an open file as memory, which stays when the file is closed."""
    # Unlike mmap.mmap this keeps no file descriptor open: processes may have few.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def open_unnamed(path: str | None, nbytes: int) -> tuple[int, str, None]:
    """Open a file of shared memory that another process has made, or make one. Returns it, and where others open it."""
    if path is not None:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), path, None
    fd = os.memfd_create("hpcfsdp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except Exception:
        os.close(fd)
        raise
    return fd, f"/proc/{os.getpid()}/fd/{fd}", None


def _open_named(path: str | None, nbytes: int) -> tuple[int, str, str | None]:
    if path is not None:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), path, None
    fd, path = tempfile.mkstemp(prefix="hpcfsdp-", dir="/dev/shm")
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full /dev/shm is an error here, and would be a SIGBUS at the first write
    except Exception:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, path, path


_alive: weakref.WeakValueDictionary[int, NodeMemory] = weakref.WeakValueDictionary()


def memory_at(tensor: Tensor) -> NodeMemory | None:
    """Return the ``NodeMemory`` of this process, of any communicator, that holds `tensor`; None for other memory."""
    return _alive.get(tensor.untyped_storage().data_ptr()) if _alive and tensor.numel() else None


def memory_bytes(ranks: int, nbytes: int, *, gathered: bool) -> int:
    """Return the bytes of a ``NodeMemory`` for so many ranks, with regions of `nbytes` bytes."""
    return _aligned(ranks * _LINE) + _aligned(max(1, nbytes)) * (1 if gathered else ranks)


@functools.cache
def memory_limit() -> int:
    """Return the bytes of memory that processes here may use: the machine's, or the limit of a control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            place, name = ("", "memory.max") if number == "0" else ("memory", "memory.limit_in_bytes")
            if number == "0" or "memory" in controllers.split(","):
                group = Path("/sys/fs/cgroup", place, path.lstrip("/"))
                for each in (group, *group.parents):  # in a container the path may be that outside
                    with contextlib.suppress(OSError, ValueError):  # "max" is none
                        limits.append(int((each / name).read_text()))
    return min(limits)


class NodeMemory:
    """Shared memory for collectives: flags, and one region for each rank of the node, or if `gathered` one for all."""

    def __init__(
        self, shared: Tensor, place: int, ranks: Sequence[int], numel: int, dtype: torch.dtype, *, gathered: bool
    ) -> None:
        """`ranks`, of which this is number `place`, share ``memory_bytes`` zero bytes. Messages name them so."""
        self.gathered = gathered
        self.is_released = False  # whether this rank has yet to free its part
        self.epoch = 0  # operations begun on this memory, the same number on all ranks
        self.is_busy = False  # one of them is in progress
        self.ranks, self._mine = tuple(ranks), place  # the ranks in messages
        self._peers = tuple(other for other in range(len(ranks)) if other != place)
        flag_bytes, region_bytes = _aligned(len(ranks) * _LINE), _aligned(max(1, numel * dtype.itemsize))
        self._flags = memoryview(shared[:flag_bytes].numpy())
        self._counters = self._flags.cast("q")
        begins = [flag_bytes + (0 if gathered else region_bytes * other) for other in range(len(ranks))]
        # For each rank of the node, in order, its memory as a 1-D tensor.
        self.regions = tuple(shared[begin : begin + numel * dtype.itemsize].view(dtype) for begin in begins)
        self._pages = _whole_pages(shared.data_ptr() + flag_bytes, region_bytes, len(ranks), place)
        self.mine = self.regions[place]
        self.address = self.mine.untyped_storage().data_ptr()  # that of every tensor on the memory
        if numel:
            _alive[self.address] = self

    def arrive(self, label: str | None) -> None:
        """Signal to the peers that this rank has written its part of the operation. They compare labels, if given."""
        if label is not None:
            begin = self._label_begin(self._mine)
            self._flags[begin : begin + _LABEL_BYTES] = fit_label(label, _LABEL_BYTES)
        self._set(ARRIVED)

    def done(self) -> None:
        """Signal to the peers that this rank reads nothing of the operation any more."""
        self._set(DONE)

    def release(self) -> None:
        """Signal to the peers that this rank reads the memory no more until it is gathered again."""
        self.done()
        self.is_released = True

    def clear(self) -> bool:
        """Free this rank's part of memory that all peers have released. Return whether that is done."""
        if self.is_released:
            if not all(self._reached(peer, DONE, self.epoch) for peer in self._peers):
                return False
            _free_pages(*self._pages, is_shared=bool(self._peers))
            self.fill()
        return True

    def fill(self) -> None:
        """Promise the peers to free nothing from now on: the memory is gathered again."""
        self.is_released = False
        self._set(CLEARED)

    def all_cleared(self) -> PeersReached:
        return PeersReached(self, CLEARED, self.epoch, compare=False)

    def all_arrived(self, *, compare: bool = True) -> PeersReached:
        return PeersReached(self, ARRIVED, self.epoch, compare=compare)

    def all_done(self) -> PeersReached:
        return PeersReached(self, DONE, self.epoch, compare=False)

    def label_of(self, place: int) -> bytes:
        begin = self._label_begin(place)
        return bytes(self._flags[begin : begin + _LABEL_BYTES])

    def _label_begin(self, place: int) -> int:
        # Two labels in turn: a peer may be one operation ahead before this rank has read its last label.
        return place * _LINE + _COUNTERS + _LABEL_BYTES * (self.epoch % 2)

    def _set(self, counter: int) -> None:
        _fence()
        self._counters[self._mine * (_LINE // 8) + counter] = self.epoch
        _fence()

    def _reached(self, place: int, counter: int, epoch: int) -> bool:
        if self._counters[place * (_LINE // 8) + counter] < epoch:
            return False
        _fence()
        return True


class PeersReached:
    """Holds when a counter of every peer has reached an operation. A ``Condition`` of progress.py."""

    def __init__(self, memory: NodeMemory, counter: int, epoch: int, *, compare: bool) -> None:
        self._memory, self._counter, self._epoch, self._compare = memory, counter, epoch, compare
        self._awaited = list(memory._peers)

    def holds(self) -> bool:
        memory = self._memory
        while self._awaited:
            place = self._awaited[-1]
            if not memory._reached(place, self._counter, self._epoch):
                return False
            if self._compare:
                mine, theirs = memory.label_of(memory._mine), memory.label_of(place)
                if mine != theirs:
                    raise DifferentCallsError(
                        f"rank {memory.ranks[memory._mine]} calls {decode_label(mine)}, but rank "
                        f"{memory.ranks[place]} calls {decode_label(theirs)} on the same memory: all ranks must call "
                        "the same"
                    )
            self._awaited.pop()
        return True

    def missing(self) -> list[int]:
        memory = self._memory
        return [memory.ranks[p] for p in self._awaited if not memory._reached(p, self._counter, self._epoch)]


def _whole_pages(address: int, nbytes: int, parts: int, place: int) -> tuple[int, int]:
    """Return where part `place` of memory begins, and its bytes, in whole pages."""
    page = mmap.PAGESIZE
    first, end = -(-address // page), (address + nbytes) // page
    begin, end = (first + max(0, end - first) * number // parts for number in (place, place + 1))
    return begin * page, (end - begin) * page


def _free_pages(address: int, nbytes: int, *, is_shared: bool) -> None:
    """Give pages back to the system: they are zero when they are used next."""
    # The pages of a shared file stay unless they are removed from it.
    advice = mmap.MADV_REMOVE if is_shared else mmap.MADV_DONTNEED
    if nbytes and _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
        raise OSError(ctypes.get_errno(), f"madvise of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


_libc = ctypes.CDLL(None, use_errno=True)


def fit_label(label: str, nbytes: int) -> bytes:
    """Return a label in `nbytes` bytes. One that is too long is cut, and ends with a digest of the whole."""
    text = label.encode()
    if len(text) > nbytes:
        mark = b"..." + hashlib.blake2b(text, digest_size=6).hexdigest().encode()
        text = text[: nbytes - len(mark)] + mark
    return text.ljust(nbytes)


def decode_label(label: bytes) -> str:
    return label.decode(errors="replace").rstrip()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
