"""A bounded ring of host memory that passes bytes from the training thread to the writing thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcfsdp import _compat, accelerator
from hpcfsdp.params.layout import round_up

log = logging.getLogger("hpcfsdp.checkpoint")


@dataclass(frozen=True, eq=False)
class StagedBlock:
    """Bytes in a ring that wait to be written.

    Attributes:
        key: the caller's key.
        memory: the bytes, uint8, 1-D.
        event: of the device's copy; None if they are there already.
        end: their end, counted from the first byte that ever went through the ring.
    """

    key: Any
    memory: torch.Tensor
    event: torch.Event | None
    end: int

    def arrived(self) -> memoryview:
        """Waits until the bytes are there; the bytes. Not collective."""
        if self.event is not None:
            self.event.synchronize()
        return memoryview(self.memory.numpy())


class Ring:
    """First in, first out, between one thread that puts bytes in and one that takes them out.

    A round of use is ``put`` as often as needed and ``end`` on one side, ``take`` and ``release`` until ``take``
    returns nothing on the other; ``stop`` there discards all further bytes.

    Attributes:
        nbytes: of the memory.
        align: pieces begin at multiples of so many bytes.
        pinned: whether it asked for pinned memory, into which accelerators copy asynchronously.
    """

    @_compat.outside_of_modes
    def __init__(self, nbytes: int, *, align: int = 1, pinned: bool = False) -> None:
        """Allocates the memory, of at least the bytes of the largest piece, up to a multiple of `align`."""
        nbytes = round_up(nbytes, align)
        self.nbytes, self.align, self.pinned = nbytes, align, pinned
        self._memory = _pinned_memory(nbytes) if pinned else torch.empty(nbytes, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._copied: torch.Event | None = None
        self.start()

    def close(self) -> None:
        """Waits for pending copies of accelerators. The ring must not be used afterwards."""
        if self._copied is not None:
            self._copied.synchronize()

    def start(self) -> None:
        """Begins a round with an empty ring."""
        with self._changed:
            self._head = self._tail = 0
            self._waiting: deque[StagedBlock] = deque()
            self._ended = self._stopped = False

    def put(self, pieces: Sequence[tuple[Any, torch.Tensor]], *, wait: bool = True) -> bool:
        """Copies bytes into the ring; whether it did. Then the source may change, on a device by the current stream.

        After ``stop`` the bytes are discarded. Raises ValueError for more bytes than the ring has.

        Args:
            pieces: the key and the bytes of each, uint8, 1-D.
            wait: until all of them fit. Otherwise nothing is copied when they do not fit.
        """
        nbytes = sum(round_up(source.numel(), self.align) for _, source in pieces)
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit into a staging ring of {self.nbytes}")
        with self._changed:
            while not self._stopped and (begin := self._room(nbytes)) is None:
                if not wait:
                    return False
                self._changed.wait()
            if self._stopped:
                return True
        # All before the first copy: data that flows through the caches drives everything else out.
        copies, end = [], begin
        for key, source in pieces:
            memory = self._memory.narrow(0, end % self.nbytes if self.nbytes else 0, source.numel())
            end += round_up(source.numel(), self.align)
            copies.append((key, source, memory, end, accelerator.is_accelerator(source.device)))
        events: dict[int, torch.Event] = {}  # by the number of the copy
        for number, (_, source, memory, _, on_device) in enumerate(copies):
            memory.copy_(source, non_blocking=on_device)
            if on_device:  # the copy's stream, not that of the current device
                events[number] = self._copied = accelerator.record(accelerator.current_stream(source.device))
        blocks = [StagedBlock(key, memory, events.get(i), end) for i, (key, _, memory, end, _) in enumerate(copies)]
        with self._changed:
            self._head = begin + nbytes
            self._waiting.extend(blocks)
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """Ends the input of this round."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, nbytes: int) -> list[StagedBlock]:
        """Waits for bytes and returns blocks of up to `nbytes`, at least one block; empty after the last."""
        with self._changed:
            while not self._waiting and not self._ended and not self._stopped:
                self._changed.wait()
            blocks: list[StagedBlock] = []
            while self._waiting and not self._stopped and (not blocks or nbytes >= self._waiting[0].memory.numel()):
                blocks.append(self._waiting.popleft())
                nbytes -= blocks[-1].memory.numel()
            return blocks

    def release(self, blocks: list[StagedBlock]) -> None:
        """Frees the room of blocks that have been written."""
        with self._changed:
            self._tail = blocks[-1].end
            self._changed.notify_all()

    def stop(self) -> None:
        """Discards the ring's bytes, and all further input."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def _room(self, nbytes: int) -> int | None:
        """The place of the next `nbytes` contiguous bytes, counted from the first byte ever; None without room."""
        if self._head == self._tail:
            # Nothing is in the ring: begin at its start, where there is room for the largest piece.
            self._head = self._tail = -(-self._head // self.nbytes) * self.nbytes if self.nbytes else 0
        begin = self._head
        left = self.nbytes - begin % self.nbytes if self.nbytes else 0
        if nbytes > left:
            begin += left
        return begin if begin + nbytes - self._tail <= self.nbytes else None


def _pinned_memory(nbytes: int) -> torch.Tensor:
    """Pinned memory, or plain memory where the system gives none: then copies are only slower."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning(
            "%d bytes of memory for copies of a checkpoint are not pinned (%s): saves hold the training for longer; "
            "allow more with ulimit -l, or give a smaller staging_bytes",
            nbytes,
            str(error).partition("\n")[0],
        )
        return torch.empty(nbytes, dtype=torch.uint8)
