"""Write a checkpoint in threads while training goes on, and commit it at a later step.

The training thread copies bytes and makes all communication between ranks; other threads lay the file out, compute
checksums and write. None forks the process.

Writing needs no communication because every rank lays the file out by itself: the places of tensors depend only on
values that are equal on all ranks. The small values, which only rank 0 knows, follow the tensors.
"""

import atexit
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from hpcfsdp import _compat, accelerator
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.metadata import MetadataImage
from hpcfsdp.checkpoint.saving.content import Collected, Content
from hpcfsdp.checkpoint.saving.kept_plan import in_groups
from hpcfsdp.checkpoint.saving.same_call import all_agree
from hpcfsdp.checkpoint.saving.state_reads import StateReads
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile, TemporaryFileGoneError, naming_write_errors
from hpcfsdp.checkpoint.saving.writer import gather_sums
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError, HpcfsdpError
from hpcfsdp.params.layout import round_up
from hpcfsdp.state.tensors import buffers_of
from hpcfsdp.world import before_finalize

log = logging.getLogger("hpcfsdp.checkpoint")

POLL_S = 0.05
"""While a rank waits for its own disk it looks after the others as often as this: none may be left in a collective."""

EXIT_GRACE_S = 5.0
"""How long the end of the program waits for a write under way."""

VISIBLE_WITHIN_S = 90.0
"""After so long every rank sees a file that rank 0 has made. Clients of NFS look anew after a minute at most."""

LOOK_S = 0.1
"""A rank looks as often as this for the file, while rank 0 is making it."""

T = TypeVar("T")


@dataclass(eq=False)
class StagedBlock:
    """Bytes in a ring, uint8, 1-D, that wait to be written."""

    key: Any
    memory: torch.Tensor
    end: int  # counted from the first byte that ever went through the ring
    event: torch.Event | None = None

    def arrived(self) -> memoryview:
        """Wait until the bytes are there, and return them."""
        if self.event is not None:
            accelerator.wait_for(self.event)
        return memoryview(self.memory.numpy())


class StagingRing:
    """First in, first out, between one thread that puts bytes in and one that takes them out.

    A round of use is ``put`` as often as needed and ``end`` on one side, ``take`` and ``release`` until ``take``
    returns nothing on the other; ``stop`` there discards all further bytes. Pieces begin at multiples of `align` bytes.
    Accelerators copy asynchronously into `pinned` memory, if the system gives it.
    """

    @_compat.outside_of_modes
    def __init__(self, nbytes: int, *, align: int = 1, pinned: bool = False) -> None:
        """Allocate the memory, of at least the bytes of the largest piece, up to a multiple of `align`."""
        nbytes = round_up(nbytes, align)
        self.nbytes, self.align, self.pinned = nbytes, align, pinned
        try:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            if not pinned:
                raise
            log.warning(
                "%d bytes of memory for copies of a checkpoint are not pinned (%s): saves hold the training for "
                "longer; allow more with ulimit -l, or give a smaller staging_bytes",
                nbytes,
                str(error).partition("\n")[0],
            )
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._changed = threading.Condition()
        self._copied: dict[bool, torch.Event] = {}  # the last copies, by whether they are in the background
        self.start()

    def close(self) -> None:
        """Wait for pending copies of accelerators. The ring must not be used afterwards."""
        for event in self._copied.values():
            accelerator.wait_for(event)

    def start(self, reads: StateReads | None = None) -> None:
        """Begin a round with an empty ring; copies of `reads` go on in the background."""
        self._reads = reads
        if (event := self._copied.pop(True, None)) is not None:  # of a save that was given up: they write here
            accelerator.current_stream(event.device).wait_event(event)
        with self._changed:
            self._head = self._tail = 0
            self._waiting: deque[StagedBlock] = deque()
            self._ended = self.stopped = False

    def put(self, pieces: Sequence[tuple[Any, torch.Tensor]], *, wait: bool = True) -> bool:
        """Copy `pieces`, keys with bytes, uint8, 1-D; return whether it did: not without room for all, if not `wait`.

        Then the source may change, on a device in stream order, and of ``StateReads`` after ``await_reads``. After
        ``stop`` the bytes are discarded.
        """
        nbytes = sum(round_up(source.numel(), self.align) for _, source in pieces)
        if nbytes > self.nbytes:
            raise ValueError(f"{nbytes} bytes do not fit into a staging ring of {self.nbytes}")
        with self._changed:
            while not self.stopped and (begin := self._room(nbytes)) is None:
                if not wait:
                    return False
                self._changed.wait()
            if self.stopped:
                return True
        # All before the first copy: data that flows through the caches drives everything else out.
        copies, end = [], begin
        for key, source in pieces:
            memory = self._memory.narrow(0, end % self.nbytes if self.nbytes else 0, source.numel())
            end += round_up(source.numel(), self.align)
            copies.append((StagedBlock(key, memory, end), source, accelerator.is_accelerator(source.device)))
        background = []
        for block, source, on_device in copies:
            if on_device and self._reads is not None and self._reads.has(source):
                background.append((block, source))
                continue
            block.memory.copy_(source, non_blocking=on_device)
            if on_device:  # the copy's stream, not that of the current device
                block.event = self._copied[False] = accelerator.record(accelerator.current_stream(source.device))
        if background:  # they come last: a device may copy in the order in which copies were given to it
            events = self._reads.copy((block.memory, source) for block, source in background)
            for (block, _), event in zip(background, events, strict=True):
                block.event = self._copied[True] = event
        with self._changed:
            self._head = begin + nbytes
            self._waiting.extend(block for block, _, _ in copies)
            self._changed.notify_all()
        return True

    def end(self) -> None:
        """End the input of this round."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, nbytes: int) -> list[StagedBlock]:
        """Wait for bytes and return blocks of up to `nbytes`, at least one block; empty after the last."""
        with self._changed:
            while not self._waiting and not self._ended and not self.stopped:
                self._changed.wait()
            blocks: list[StagedBlock] = []
            while self._waiting and not self.stopped and (not blocks or nbytes >= self._waiting[0].memory.numel()):
                blocks.append(self._waiting.popleft())
                nbytes -= blocks[-1].memory.numel()
            return blocks

    def release(self, blocks: list[StagedBlock]) -> None:
        """Free the room of blocks that have been written."""
        with self._changed:
            self._tail = blocks[-1].end
            self._changed.notify_all()

    def stop(self) -> None:
        """Discard the ring's bytes, and all further input."""
        with self._changed:
            self.stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def _room(self, nbytes: int) -> int | None:
        """Return the place of the next `nbytes` contiguous bytes, counted from the first ever; None without room."""
        if self._head == self._tail:
            # Nothing is in the ring: begin at its start, where there is room for the largest piece.
            self._head = self._tail = -(-self._head // self.nbytes) * self.nbytes if self.nbytes else 0
        left = self.nbytes - self._head % self.nbytes if self.nbytes else 0
        begin = self._head + (left if nbytes > left else 0)
        return begin if begin + nbytes - self._tail <= self.nbytes else None


class Task(Future[T]):
    """Work on a checkpoint in a daemon thread, which the end of the program does not wait for."""

    def __init__(self, path: Path, work: Callable[[], T]) -> None:
        super().__init__()
        self._path = path
        context = contextvars.copy_context()  # tests replace the disk there
        threading.Thread(target=context.run, args=(self._run, work), name="hpcfsdp-checkpoint", daemon=True).start()

    @property
    def has_failed(self) -> bool:
        return self.done() and self.exception() is not None

    def result(self, timeout: float | None = None) -> T:
        """As ``Future.result``, but errors of other kinds become a CheckpointError that names the file."""
        error = self.exception(timeout)
        if error is not None and not isinstance(error, HpcfsdpError):
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{self._path}: cannot write the checkpoint: {reason}") from error
        return super().result()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:
            self.set_exception(error)


class PendingSave:
    """A save in progress; `ended` when it has been committed, or given up. Collective, but for methods that say so."""

    def __init__(
        self,
        comm: Communicator,
        temporary: TemporaryFile,
        content: Content,
        ring: StagingRing,
        committed: Callable[[Path], None],
    ) -> None:
        """Not collective; touch no disk.

        The ranks of the plan have `comm` for this save alone, as its messages interleave with those of training. The
        `ring` holds the largest block. `committed` is called in a thread of rank 0 after the commit.
        """
        self.path, self.ended = temporary.path, False
        self._comm, self._temporary, self._content = comm, temporary, content
        self._ring, self._committed = ring, committed
        self._own = content.plan.blocks_of(comm.rank)
        self._laying: Task[MetadataImage] | None = None
        self._task: Task[np.ndarray] | None = None
        self._commit_task: Task[None] | None = None
        self._all_written = False
        self._made_s: float | None = None
        self._may_begin = threading.Event()

    def stage(self, collected: Collected, reads: StateReads) -> None:
        """Copy the tensors, those of `reads` in the background, and begin to write. Afterwards they may be changed.

        Return without waiting if all ranks' bytes fit into their rings. Further bytes wait until earlier ones are
        written. Gather buffers are filled, copied and freed one after the other. Raise CheckpointError if it waited
        and the file cannot be made; the file is then removed.
        """
        self._reads = reads
        comm, ring, recalled = self._comm, self._ring, collected.recalled
        pieces_of = collected.pieces(self._own, None if recalled is None else recalled.known.sources)
        most = at_once = min(BlockWriter.AT_ONCE, ring.nbytes // 4)  # a small ring is filled while it is emptied
        if recalled is not None:  # only scalars are copied: all pieces may be there at a time
            fit = sum(round_up(size, ring.align) for size in collected.sizes(comm.rank)) <= ring.nbytes
            at_once = ring.nbytes if fit else most
        first = in_groups(pieces_of(None), at_once)
        ring.start(reads)
        _uncommitted[self] = None
        # They begin later, as they would take half of the time from the copies; but to start a thread takes long once
        # another one is busy.
        self._laying = Task(self.path, self._lay_out)
        self._task = Task(self.path, self._write)
        reads.begin()  # the second task ends it
        try:
            with raise_together(comm):
                left = self._put(first, wait=False)
            if buffers_of(collected.tensors) or not all(all_agree(comm, left is None)):
                self._may_begin.set()
                # There is more than the ring holds. Who waits for room must not wait for a file that never comes.
                with raise_together(comm):
                    if comm.rank == 0:
                        self._laying.result()
                self._made_s = time.monotonic()
                with raise_together(comm):
                    if left is not None:
                        ring.put(left)
                    del left  # which may be a copy
                    self._put(first)
            collected.gather(comm, lambda buffer: self._put(in_groups(pieces_of(buffer), most)))
        except BaseException:
            self.give_up()
            raise
        ring.end()
        self._may_begin.set()

    def advance(self) -> bool:
        """Compare the progress of all ranks and take the next step if possible; return whether the file is committed.

        Raise CheckpointError on all ranks if one of them could not write; the file is then given up.
        """
        if self.ended:
            return True
        task = self._commit_task or (None if self._all_written else self._task)
        fine = task is None or not task.has_failed
        made = self._comm.rank != 0 or (self._laying.done() and not self._laying.has_failed)
        all_done, all_fine, is_made = all_agree(self._comm, task is None or task.done(), fine, made)
        if is_made:
            self._made_s = self._made_s or time.monotonic()
        try:
            if not all_fine:
                with raise_together(self._comm):
                    if not fine:
                        task.result()
            elif all_done:
                self._go_on()
        except BaseException:
            self.give_up()
            raise
        return self.ended

    def wait(self) -> None:
        """Wait until it is committed; raise as ``advance``."""
        while not self.advance():
            self.wait_for_threads(POLL_S)

    def wait_for_threads(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's threads are idle, at most for that long. Not collective."""
        tasks = (self._laying, self._task, self._commit_task)
        concurrent.futures.wait([task for task in tasks if task is not None], timeout_s)

    def give_up(self) -> None:
        """Stop this rank's threads; rank 0 removes the file. Not collective: other ranks may still write to it."""
        self.ended = True
        _uncommitted.pop(self, None)
        if self._commit_task is not None and self._commit_task.exception() is None:
            return  # rank 0 has come to the end of it alone
        self._ring.stop()
        self._may_begin.set()
        if self._comm.rank == 0:
            if self._laying is not None:
                self._laying.exception()  # when it has ended: it would make the file afterwards
            self._temporary.discard()

    def leave(self) -> None:
        """At the program's end: log a lost file and remove the temporary file. Not collective."""
        if self._commit_task is not None and self._commit_task.exception() is None:
            return  # rank 0 has come to the end of it alone
        if self._all_written and self._comm.rank != 0:
            return  # rank 0 knows how it ends
        if self._comm.rank == 0:
            log.error(
                "%s: was not committed, and is lost: the program has ended before wait(), close() or "
                "hpcfsdp.finalize()",
                self.path,
            )
        self._ring.stop()
        self.wait_for_threads(EXIT_GRACE_S)
        self.give_up()

    def _go_on(self) -> None:
        """Take the next step when every rank has finished its current task. Collective."""
        if self._all_written:
            self.ended = True
            _uncommitted.pop(self, None)
            return
        offsets = np.asarray(self._laying.result().offsets, np.int64)
        digests = self._comm.all_gather_object(schema.checksum(offsets.view(np.uint8)))
        for rank, digest in enumerate(digests):
            if digest != digests[0]:  # say, other versions of HDF5
                raise CheckpointError(
                    f"{self.path}: rank {rank} has laid the file out otherwise than rank 0: have all ranks run the "
                    'same versions of hpcfsdp, h5py and HDF5, or save without "asynchronous"'
                ).on_all_ranks()
        everyone = gather_sums(self._comm, self._content.plan, self._task.result())

        def commit() -> None:
            with naming_write_errors(self.path):
                image = self._laying.result()
                self._temporary.commit(image, self._content.plan.extent_rows(image.offsets, everyone))
            self._committed(self.path)

        if self._comm.rank == 0:
            self._commit_task = Task(self.path, commit)
        self._all_written = True

    def _put(self, groups: Iterable[list[Any]], *, wait: bool = True) -> list[Any] | None:
        """Copy groups of pieces into the ring; return the first for which there is no room, if not `wait`."""
        return next((group for group in groups if not self._ring.put(group, wait=wait)), None)

    def _lay_out(self) -> MetadataImage:
        """In a thread: lay the file out; rank 0 makes it."""
        content, is_first = self._content, self._comm.rank == 0
        self._may_begin.wait()
        if self._ring.stopped:
            raise CheckpointError(f"{self.path}: was given up before it was begun")
        with naming_write_errors(self.path):
            metadata_image = (content if is_first else replace(content, small={})).metadata_image()
            if is_first:
                self._temporary.create(metadata_image.nbytes)
        return metadata_image

    def _write(self) -> np.ndarray:
        """In a thread: write the blocks that come through the ring and sync; return their checksums, uint64."""
        ring = self._ring
        sums, plan = np.zeros(len(self._own), np.uint64), self._content.plan
        sizes = plan.block_bytes(self._own)
        try:
            offsets = self._laying.result().offsets
            with naming_write_errors(self.path), contextlib.ExitStack() as stack:
                fd = self._opened(stack)
                views: dict[int, np.ndarray] = {}
                blocks = BlockWriter(fd, plan, offsets, views.__getitem__)
                while staged := ring.take(BlockWriter.AT_ONCE):
                    places = [place for piece in staged for place in piece.key.places]
                    for piece in staged:
                        data, of = np.asarray(piece.arrived()), list(piece.key.places)
                        keys, ends = self._own[of].tolist(), (np.asarray(piece.key.begins) + sizes[of]).tolist()
                        parts = zip(keys, piece.key.begins, ends, strict=True)
                        views.update((key, data[begin:end]) for key, begin, end in parts)
                    sums[places] = blocks.write(self._own[places])
                    views.clear()
                    ring.release(staged)
                if not ring.stopped:
                    self._reads.check(self.path)
                    disk.sync(fd)
        except BaseException:
            ring.stop()  # who puts more in must not wait for room
            raise
        finally:
            self._reads.end()
        return sums

    def _opened(self, stack: contextlib.ExitStack) -> int:
        """In a thread: open the file as soon as rank 0 has made it; return its descriptor, which the stack closes."""
        while True:
            try:
                return stack.enter_context(self._temporary.opened())
            except TemporaryFileGoneError:
                late = self._made_s is not None and time.monotonic() - self._made_s > VISIBLE_WITHIN_S
                if late or self._comm.rank == 0 or self._ring.stopped:
                    raise
            time.sleep(LOOK_S)


_uncommitted: dict[PendingSave, None] = {}
"""All saves under way, in the order in which they were begun, which is the same on all ranks of each."""

_process = os.getpid()


def _finish(saves: Iterable[PendingSave]) -> None:
    """Wait for all of them and raise the first error. Collective over the ranks of each."""
    problem: Exception | None = None
    for save in saves:
        try:
            save.wait()
        except Exception as error:  # of any kind: the other ranks wait for the next one
            problem = problem or error
    if problem is not None:
        raise problem


@atexit.register
def _leave() -> None:
    if os.getpid() == _process:  # not in a child that was forked: its threads are not there
        for save in list(_uncommitted):
            save.leave()


def _give_up(saves: Iterable[PendingSave]) -> None:
    for save in saves:
        save.give_up()


before_finalize(lambda: _finish(list(_uncommitted)), lambda: _give_up(list(_uncommitted)))
