"""A bounded stretch of host memory through which bytes go from the thread that trains to the one that writes."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger("hpcfsdp.checkpoint")


@dataclass(frozen=True, eq=False)
class StagedBlock:
    """Bytes that wait in a ring to be written.

    Attributes:
        key: whatever they were put in with.
        memory: the bytes, uint8, 1-D.
        event: of the GPU that copies them; None where they are there already.
        end: where they end, counted from the first byte that ever went through the ring.
    """

    key: Any
    memory: torch.Tensor
    event: torch.cuda.Event | None
    end: int

    def arrived(self) -> memoryview:
        """Not collective. Wait until the bytes are there; the bytes."""
        if self.event is not None:
            self.event.synchronize()
        return memoryview(self.memory.numpy())


class Ring:
    """First in, first out, between one thread that puts bytes in and one that takes them.

    A round of use is ``put`` as often as needed and ``end`` on the one side, ``take`` and ``release`` until ``take``
    has nothing more on the other, where ``stop`` says that the bytes are not wanted any more.

    Attributes:
        nbytes: of the memory; never more than was asked for.
        for_gpu: whether it was asked to be page-locked.
    """

    def __init__(self, nbytes: int, *, for_gpu: bool = False) -> None:
        """Take the memory.

        Args:
            nbytes: at least as many as the largest piece that is put in.
            for_gpu: have it page-locked, so that GPUs copy into it while the thread that puts bytes in goes on.
        """
        self.nbytes, self.for_gpu = nbytes, for_gpu
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._copied: torch.cuda.Event | None = None
        self._unlock: weakref.finalize | None = None
        if for_gpu and nbytes and _lock_pages(self._memory):
            self._unlock = weakref.finalize(self, _unlock_pages, self._memory)
            self._unlock.atexit = False
        self.start()

    def close(self) -> None:
        """Give the memory back, when what GPUs copy into it has arrived. The ring is not used any more."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._unlock is not None:
            self._unlock()

    def start(self) -> None:
        """Begin a round: the ring is empty, whatever was in it."""
        with self._changed:
            self._head = self._tail = 0
            self._waiting: deque[StagedBlock] = deque()
            self._ended = self._stopped = False

    def put(self, pieces: Sequence[tuple[Any, torch.Tensor]], *, wait: bool = True) -> bool:
        """Copy bytes into the ring; they may be changed afterwards, by work enqueued on the current stream if on a GPU.

        Args:
            pieces: the key and the bytes of each, uint8, 1-D, together no more than the ring holds.
            wait: for room for all, until what was put in before has been written.

        Returns:
            Whether they were taken. After ``stop`` they are, and are forgotten; without `wait` they are not where there
            is no room for them.

        Raises:
            ValueError: they do not fit into the ring at all.
        """
        nbytes = sum(source.numel() for _, source in pieces)
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit into a staging ring of {self.nbytes}")
        with self._changed:
            while not self._stopped and (begin := self._room(nbytes)) is None:
                if not wait:
                    return False
                self._changed.wait()
            if self._stopped:
                return True
        blocks, end = [], begin
        for key, source in pieces:
            memory = self._memory.narrow(0, end % self.nbytes if self.nbytes else 0, source.numel())
            memory.copy_(source, non_blocking=source.is_cuda)
            event = None
            if source.is_cuda:
                event = self._copied = torch.cuda.Event()
                event.record(torch.cuda.current_stream(source.device))  # on which the copy is, whatever GPU is current
            end += source.numel()
            blocks.append(StagedBlock(key, memory, event, end))
        with self._changed:
            self._head = begin + nbytes
            self._waiting.extend(blocks)
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """Say that nothing more is put in."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, nbytes: int) -> list[StagedBlock]:
        """Wait for bytes; those that are there, up to `nbytes` of them but one piece at least; empty after the last."""
        with self._changed:
            while not self._waiting and not self._ended and not self._stopped:
                self._changed.wait()
            taken: list[StagedBlock] = []
            while self._waiting and not self._stopped and (not taken or nbytes >= self._waiting[0].memory.numel()):
                taken.append(self._waiting.popleft())
                nbytes -= taken[-1].memory.numel()
            return taken

    def release(self, taken: list[StagedBlock]) -> None:
        """Give back the room of bytes that have been written."""
        with self._changed:
            self._tail = taken[-1].end
            self._changed.notify_all()

    def stop(self) -> None:
        """Forget what is in the ring, and what is put in from now on."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _room(self, nbytes: int) -> int | None:
        """Where as many bytes can go without a break, counted from the first byte ever; None for nowhere yet."""
        if self._head == self._tail:
            # Nothing is in the ring: begin at its start, where there is room for the largest piece.
            self._head = self._tail = -(-self._head // self.nbytes) * self.nbytes if self.nbytes else 0
        begin = self._head
        left = self.nbytes - begin % self.nbytes if self.nbytes else 0
        if nbytes > left:
            begin += left
        return begin if begin + nbytes - self._tail <= self.nbytes else None


# torch's own page-locked memory comes in powers of two, and is kept for the whole run.


def _lock_pages(memory: torch.Tensor) -> bool:
    """Whether CUDA has locked the pages of this memory. Where it has not, copies are only slower."""
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if code:
        log.warning(
            "%d bytes of memory for copies of a checkpoint are not page-locked (CUDA error %d): saves hold the "
            "training for longer; allow more with ulimit -l, or give a smaller staging_bytes",
            memory.numel(),
            code,
        )
    return not code


def _unlock_pages(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
