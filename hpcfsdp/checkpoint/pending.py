"""A checkpoint that is written by a thread while training goes on, and committed at a later step boundary.

The thread that trains copies bytes and takes part in all messages between ranks; others lay the file out, compute
checksums and work on the disk. None ever forks the process.

So that writing needs no message, every rank lays the file out by itself: where tensors begin depends on nothing that
ranks may have differently. The small values, of which rank 0's count, are put behind the tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from hpcfsdp.checkpoint.content import Content, memory_of_blocks
from hpcfsdp.checkpoint.draft import BlockWriter, Draft, DraftMissingError, errors_of, extent_rows
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.skeleton import Skeleton, build_skeleton
from hpcfsdp.checkpoint.staging import Ring
from hpcfsdp.checkpoint.writer import places_by_stage
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError, HpcfsdpError
from hpcfsdp.state.tensors import StateTensor, staged_of
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


class Task(Generic[T]):
    """Work on a checkpoint in a thread of its own, which the end of the program does not wait for."""

    def __init__(self, path: Path, work: Callable[[], T]) -> None:
        self._path, self._work = path, work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="hpcfsdp-checkpoint", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._ended.is_set()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; whether it has come."""
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        """Wait for the end; what the work returned.

        Raises:
            CheckpointError: what the work raised; of other kinds of errors, one that names the file and says what.
        """
        self._ended.wait()
        if self._error is None:
            return self._result
        if isinstance(self._error, HpcfsdpError):
            raise self._error
        reason = f"{type(self._error).__name__}: {self._error}"
        raise CheckpointError(f"{self._path}: cannot write the checkpoint: {reason}") from self._error

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


class PendingSave:
    """A checkpoint under way. Methods are collective over its ranks unless they say otherwise.

    Attributes:
        path: what it will be called.
        ended: whether it has been committed, or given up.
    """

    def __init__(
        self,
        comm: Communicator,
        draft: Draft,
        content: Content,
        ring: Ring,
        committed: Callable[[Path], None],
    ) -> None:
        """Not collective; touches no disk.

        Args:
            comm: over the ranks of the plan, for this alone: its messages come between those of a training.
            ring: not in use. No block is larger.
            committed: called on rank 0, in the thread that has committed the file.
        """
        self.path, self.ended = draft.path, False
        self._comm, self._draft, self._content, self._ring, self._committed = comm, draft, content, ring, committed
        self._own = content.plan.blocks_of(comm.rank)
        self._laying: Task[Skeleton] | None = None
        self._task: Task[np.ndarray] | None = None
        self._commit_task: Task[None] | None = None
        self._all_written = False
        self._made_s: float | None = None

    def stage(self, tensors: Sequence[StateTensor]) -> None:
        """Copy what is to be saved, and begin to write. When this returns, the tensors may be changed.

        Where all ranks' bytes fit into their rings, nothing is waited for. Bytes beyond wait until those before them
        have been written. What has to be put together first is put together, copied and forgotten one after the other.

        Args:
            tensors: as the plan has them.

        Raises:
            CheckpointError: the file cannot be made, where that has to be waited for. There is nothing left of it.
        """
        comm, plan = self._comm, self._content.plan
        memory_of = memory_of_blocks(plan, tensors)
        places = places_by_stage(plan, tensors, self._own)
        first = deque(places.get(None, ()))
        self._ring.start()
        _uncommitted[self] = None
        try:
            with raise_together(comm):
                self._put(first, memory_of, wait=False)
            fits = not staged_of(tensors) and all(self._together(not first))
            # Not before: it would take half of the time from the copies.
            self._laying = Task(self.path, self._lay_out)
            self._task = Task(self.path, self._write)
            if not fits:
                # There is more than the ring holds. Who waits for room must not wait for a file that never comes.
                with raise_together(comm):
                    if comm.rank == 0:
                        self._laying.result()
                self._note_made()
                with raise_together(comm):
                    self._put(first, memory_of)
            for staged in staged_of(tensors):
                staged.gather()
                with raise_together(comm):
                    self._put(deque(places.get(staged, ())), memory_of)
                staged.free()
        except BaseException:
            self.give_up()
            raise
        self._ring.end()

    def advance(self) -> bool:
        """Find out how all ranks are getting on, and take the next step where they can; whether it is committed.

        Raises:
            CheckpointError: a rank could not write. All ranks raise, and the file is given up.
        """
        if self.ended:
            return True
        task = self._commit_task or (None if self._all_written else self._task)
        fine = task is None or not task.has_failed
        made = self._comm.rank != 0 or (self._laying.is_done and not self._laying.has_failed)
        all_done, all_fine, is_made = self._together(task is None or task.is_done, fine, made)
        if is_made:
            self._note_made()
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
        """Wait until it is committed.

        Raises:
            CheckpointError: as ``advance``.
        """
        while not self.advance():
            self.wait_for_threads(POLL_S)

    def wait_for_threads(self, timeout_s: float | None = None) -> None:
        """Not collective. Wait until this rank's threads have nothing to do, at most for that long."""
        for task in (self._laying, self._task, self._commit_task):
            if task is not None:
                task.wait(timeout_s)

    def give_up(self) -> None:
        """Not collective. Let this rank's threads come to their end, and on rank 0 remove what there is of the file.

        What another rank is just writing goes into a file without a name.
        """
        self.ended = True
        _uncommitted.pop(self, None)
        self._ring.stop()
        if self._comm.rank == 0:
            if self._laying is not None:
                self._laying.wait()  # or it would make the file afterwards
            self._draft.discard()

    def leave(self) -> None:
        """Not collective. The program ends: say so if the file is lost, and leave nothing half-written behind."""
        if self._commit_task is not None and self._commit_task.wait() and not self._commit_task.has_failed:
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
        """Collective. Every rank is done with what it was at."""
        if self._all_written:
            self.ended = True
            _uncommitted.pop(self, None)
            return
        offsets = np.asarray(self._laying.result().offsets, np.int64)
        sums = self._task.result().tobytes()
        everyone = self._comm.all_gather_object((schema.checksum(offsets.view(np.uint8)), sums))
        for rank, (digest, _) in enumerate(everyone):
            if digest != everyone[0][0]:  # say, other versions of HDF5
                error = CheckpointError(
                    f"{self.path}: rank {rank} has laid the file out otherwise than rank 0: have all ranks run the "
                    'same versions of hpcfsdp, h5py and HDF5, or save without "asynchronous"'
                )
                error.raised_on_all_ranks = True
                raise error
        if self._comm.rank == 0:
            self._commit_task = Task(self.path, lambda: self._commit([sums for _, sums in everyone]))
        self._all_written = True

    def _note_made(self) -> None:
        """Rank 0 has made the file."""
        self._made_s = self._made_s or time.monotonic()

    def _together(self, *facts: bool) -> list[bool]:
        """Collective. Of each fact, whether it is one on all ranks."""
        told = torch.tensor(facts, dtype=torch.int64, device=self._comm.device)
        self._comm.all_reduce(told, "min")
        return [bool(fact) for fact in told.tolist()]

    def _put(self, places: deque[int], memory_of: Callable[[int], torch.Tensor], *, wait: bool = True) -> None:
        """Copy blocks into the ring, as far as there is room for them, and take them from `places`."""
        # In groups: to wake the writer for each of thousands of small blocks takes longer than to copy them. A small
        # ring is filled while it is emptied.
        most = min(BlockWriter.AT_ONCE, self._ring.nbytes // 4)
        while places:
            pieces, nbytes = [], 0
            for place in places:
                memory = memory_of(int(self._own[place]))
                nbytes += memory.numel()
                if pieces and nbytes > most:
                    break
                pieces.append((place, memory))
            if not self._ring.put(pieces, wait=wait):
                return
            for _ in pieces:
                places.popleft()

    def _lay_out(self) -> Skeleton:
        """In a thread: find out where tensors begin; on rank 0, make the file."""
        content, is_first = self._content, self._comm.rank == 0
        with errors_of(self.path):
            skeleton = build_skeleton(
                content.plan.specs,
                content.plan.links,
                len(content.plan.blocks),
                content.attributes,
                content.small if is_first else {},
            )
            if is_first:
                self._draft.create(skeleton.nbytes)
        return skeleton

    def _write(self) -> np.ndarray:
        """In a thread: write what comes through the ring, and force it to the disk; the checksums, uint64."""
        draft, ring = self._draft, self._ring
        sums = np.zeros(len(self._own), np.uint64)
        try:
            offsets = self._laying.result().offsets
            with errors_of(self.path), self._opened() as fd:
                views: dict[int, np.ndarray] = {}
                blocks = BlockWriter(draft.files, fd, self._content.plan, offsets, views.__getitem__)
                while taken := ring.take(BlockWriter.AT_ONCE):
                    places = [block.key for block in taken]
                    views.update((int(self._own[block.key]), np.asarray(block.arrived())) for block in taken)
                    sums[places] = blocks.write(self._own[places])
                    views.clear()
                    ring.release(taken)
                if not ring.stopped:
                    draft.files.sync(fd)
        except BaseException:
            ring.stop()  # who puts more in must not wait for room
            raise
        return sums

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """In a thread: a descriptor of the file, as soon as rank 0 has made it."""
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    fd = stack.enter_context(self._draft.opened())
                    break
                except DraftMissingError:
                    made_s = self._made_s
                    late = made_s is not None and time.monotonic() - made_s > VISIBLE_WITHIN_S
                    if late or self._comm.rank == 0 or self._ring.stopped:
                        raise
                time.sleep(LOOK_S)
            yield fd

    def _commit(self, sums: Sequence[bytes]) -> None:
        """In a thread of rank 0."""
        with errors_of(self.path):
            skeleton = self._laying.result()
            self._draft.commit(skeleton, extent_rows(self._content.plan, skeleton.offsets, sums))
        self._committed(self.path)


_uncommitted: dict[PendingSave, None] = {}
"""All saves under way, in the order in which they were begun, which is the same on all ranks of each."""

_process = os.getpid()


def _finish(saves: Iterable[PendingSave]) -> None:
    """Collective over the ranks of each. Wait for all of them, and raise the first error."""
    problem: Exception | None = None
    for save in saves:
        try:
            save.wait()
        except Exception as error:  # of whatever kind: the other ranks wait for the next one
            problem = problem or error
    if problem is not None:
        raise problem


@atexit.register
def _leave() -> None:
    if os.getpid() == _process:  # not in a child that was forked: its threads are not there
        for save in list(_uncommitted):
            save.leave()


before_finalize(lambda: _finish(list(_uncommitted)))
