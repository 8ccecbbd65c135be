"""Manage the checkpoints of a training in one folder: save, remove and load them."""

import bisect
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcfsdp import timeline
from hpcfsdp.checkpoint import retention
from hpcfsdp.checkpoint.format import catalog, disk, schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.loading.loader import load, load_from
from hpcfsdp.checkpoint.loading.match import check_patterns
from hpcfsdp.checkpoint.memory import windows
from hpcfsdp.checkpoint.memory.loading import MemorySource, held, newest
from hpcfsdp.checkpoint.memory.saving import MemorySaver
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.checkpoint.saving.content import Collected, Metrics, SaveArguments, collect_content
from hpcfsdp.checkpoint.saving.kept_plan import KeptPlan
from hpcfsdp.checkpoint.saving.pending import PendingSave, StagingRing
from hpcfsdp.checkpoint.saving.same_call import Facts, GivenPath, all_agree, compare_calls
from hpcfsdp.checkpoint.saving.state_reads import StateReads
from hpcfsdp.checkpoint.saving.temporary import naming_write_errors
from hpcfsdp.checkpoint.saving.writer import make_temporary_file, save_given, writer_class
from hpcfsdp.comm import Communicator, of_rank_0, raise_together
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReplacedError,
    UsageError,
)
from hpcfsdp.hang import lost
from hpcfsdp.hang.calls import public_call
from hpcfsdp.params.granularity import round_up
from hpcfsdp.state.model import communicator_of, device_of

log = logging.getLogger("hpcfsdp.checkpoint")

STAGING_BYTES = 4 << 30

_LINE_BYTES = 64  # copies begin at multiples of so many bytes, which makes them up to a third faster


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed.

    Attributes:
        path: of the file.
        step: of the training.
        nbytes: of the file.
        seconds: from the call of ``save`` until the commit.
        held_s: the part of it in which the program could not go on.
        asynchronous: whether it went on meanwhile.
    """

    path: Path
    step: int
    nbytes: int
    seconds: float
    held_s: float
    asynchronous: bool


class CheckpointManager:
    """Save checkpoints of a training to ``directory/step-<number>.h5``, remove old ones, and load the newest.

    Use it as a context manager: its end calls ``close``. After an exception that other ranks may not have, it does not
    call ``close`` and discards an uncommitted checkpoint. After any exception it keeps versions in memory.

    Attributes:
        directory: the folder of the checkpoints.
        passed_over: (file, reason) of files that the last ``load_latest`` could not load, newest first.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = False,
        staging_bytes: int = STAGING_BYTES,
        writer: str = "posix",
        names: Sequence[str] | None = None,
        on_saved: Callable[[Saved], None] | None = None,
        every: int | None = None,
        every_s: float | None = None,
        memory_every: int | None = None,
    ) -> None:
        """Not collective, but all ranks need the same arguments; touches no disk.

        Args:
            directory: on a file system that all ranks share; made when it is needed.
            keep_last: how many of the newest checkpoints stay after a commit. None keeps all; with `keep_every` None
                keeps one.
            keep_every: checkpoints of steps that are a multiple of this stay, too. The newest valid checkpoint always
                stays, and so do files that this process is reading.
            asynchronous: ``save`` copies the bytes of this rank and returns; a thread writes them. The file appears at
                a later call of ``step``, ``save``, ``wait`` or ``close``, and errors are raised there.
            staging_bytes: the most bytes of host memory for copies on this rank, at least 4 MiB (4 << 20). The first
                save allocates as much as the rank saves, up to this limit; ``close`` frees it. If there is more to
                copy, ``save`` waits for room.
            writer: see ``save``; asynchronous saves support only "posix".
            names: patterns for the model's tensors to save and load, for example trained adapters; see ``save``. None:
                all tensors.
            on_saved: called on rank 0 after each commit, for example ``observe.Run.checkpoint``; in another thread if
                saves are asynchronous.
            every: ``step`` saves a file at multiples of this step.
            every_s: ``step`` saves a file so many seconds after the last one, or after this call, by rank 0's clock.
            memory_every: ``step`` saves a version in memory at multiples of this step, from which ``load_latest`` loads
                while some of the processes live. Two versions take as much memory of this node twice, with
                several nodes four times, as files take of the ranks of the node. They stay until ``close`` or
                ``hpcfsdp.finalize``, also when this object is gone.

        Raises:
            UsageError: a number that is not whole or too small, `directory` is no path, or another writer than "posix"
                with `asynchronous`.
            TypeError, ValueError: `names` are no patterns.
            CheckpointError: the writer is unknown, or it cannot be used here.
        """
        retention.check_rules(keep_last, keep_every)
        if staging_bytes < schema.BLOCK_BYTES:
            raise UsageError(f"staging_bytes must be at least {schema.BLOCK_BYTES}, not {staging_bytes}")
        if asynchronous and writer != "posix":
            raise UsageError(f"asynchronous saves are written by 'posix', not by {writer!r}")
        writer_class(writer)
        check_patterns(names)
        for name, number in (("every", every), ("memory_every", memory_every)):
            if number is not None:
                retention.whole_number(name, number, least=1)
        if every_s is not None and not (isinstance(every_s, (int, float)) and every_s > 0):
            raise UsageError(f"every_s must be a positive number of seconds, not {every_s!r}")
        try:
            self.directory = Path(os.path.abspath(os.path.expanduser(directory)))
        except TypeError as error:
            raise UsageError(f"directory must be a path: {error}") from None
        self.passed_over: tuple[tuple[Path, str], ...] = ()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._asynchronous, self._staging_bytes = asynchronous, staging_bytes
        self._writer, self._names = writer, names
        self._on_saved = on_saved
        self._every, self._every_s, self._memory_every = every, every_s, memory_every
        self._file_s = time.monotonic()  # when the last file was begun
        self._memory = MemorySaver(self.directory)
        self._held_s = 0.0  # by the save in progress
        self._kept = KeptPlan()
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None  # its threads may still be running
        self._ring: StagingRing | None = None
        self._comms: list[tuple[Communicator, Communicator]] = []
        self._swept_s: float | None = None
        self._has_saved = self._warned = self._closed = False

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
            return
        if getattr(error, "raised_on_all_ranks", False):  # then all ranks come here
            self._close(keep_memory=True)
            return
        if self._pending is not None and not self._pending.ended:
            log.error("%s: was not committed, and is discarded because of an error", self._pending.path)
            self._pending.give_up()
        self._let_go()

    @public_call("CheckpointManager.save")
    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        data: Any = None,
    ) -> Path:
        """Save a checkpoint of a step, and replace an earlier one of this step. Collective over the model's ranks.

        Wait for a save in progress first. An asynchronous save captures the values of the call: afterwards everything
        may be changed, on an accelerator the optimizer's state by its steps and loads alone. Writing begins at once.

        Args:
            step: at least 0. A checkpoint of a higher step in the folder counts as newer; the log warns of it once.
            model, optimizer, extra, config, metrics, data: see ``save``.

        Returns:
            The path of the file; an asynchronous save makes it later.

        Raises:
            CheckpointError: the file cannot be written, or a value cannot be stored. Or the previous save has failed;
                this one has then not begun.
            DifferentCallsError: a rank makes another call, such as ``load_latest``.
            DisagreementError: ranks hold different models or optimizers, or give different values.
            UsageError: `step` is no whole number, or negative.
        """
        self._check_open()
        self.wait()
        given = SaveArguments(model, optimizer, step, extra, config, metrics, self._names, data)
        return self._save(communicator_of(model), given)

    def _save(self, comm: Communicator, given: SaveArguments, collected: Collected | None = None) -> Path:
        """Save a file, of content that may have been `collected` already. Collective over `comm`."""
        began_s, self._held_s, self._file_s = time.perf_counter(), 0.0, time.monotonic()
        step, model, optimizer = given.step, given.model, given.optimizer

        def path_of() -> Path:
            if comm.rank == 0 and self._has_saved and not self.directory.exists():
                log.error("%s was removed, with all checkpoints in it: this one goes into a new folder", self.directory)
            return catalog.checkpoint_path(self.directory, retention.whole_number("step", step, least=0))

        if not self._asynchronous:
            path = save_given(comm, path_of, given, self._writer)
            if comm.rank == 0:
                self._committed(path, step, began_s)
            return path
        temporary = make_temporary_file(comm, path_of, given, self._writer, asynchronous=True)
        if collected is None:
            with naming_write_errors(temporary.path):
                collected = collect_content(comm, given, self._kept)
        # Users may change arrays afterwards.
        given_small = collected.content.small.items()
        small = {path: np.array(v) if isinstance(v, np.ndarray) else v for path, v in given_small}
        content = replace(collected.content, small=small)
        own = self._own_communicator(comm)
        with raise_together(own):
            nbytes = sum(round_up(size, _LINE_BYTES) for size in collected.sizes(comm.rank))
            on_device = collected.is_on_accelerator
            ring, reads = self._ring_of(nbytes, pinned=on_device), StateReads(model, optimizer if on_device else None)
        pending = PendingSave(own, temporary, content, ring, lambda path: self._committed(path, step, began_s))
        self._last = pending
        pending.stage(collected, reads)
        self._pending = pending
        self._held_s += time.perf_counter() - began_s
        return temporary.path

    @public_call("CheckpointManager.step")
    def step(
        self,
        step: int | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | Callable[[], Mapping[str, Any] | None] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Metrics | Callable[[], Metrics | None] | None = None,
        data: Any = None,
    ) -> Path | None:
        """Advance a save in progress, and save what is due; call it after every training step.

        Collective over the ranks of the save, and of the model. Where nothing is due, only a save in progress or
        `every_s` need a message.

        Args:
            step: the number of the step that has been done. None: nothing is due.
            model, optimizer, extra, config, metrics, data: see ``save``. `extra` and `metrics` may be functions of no
                argument, called on all ranks: `extra` if anything is due, `metrics` if a file is. Versions in memory
                have no metrics.

        Returns:
            The path of a file that has been due, as ``save`` does; None without one.

        Raises:
            CheckpointError: the save has failed, on any rank; or as ``save``.
            UsageError: there is no `model`, or as ``save``.
        """
        self._advance(wait=False)
        if step is None:
            return None
        self._check_open()
        if model is None:
            raise UsageError("CheckpointManager.step: a step needs its model")
        number = retention.whole_number("step", step, least=0)
        to_memory = self._memory_every is not None and number % self._memory_every == 0
        to_file = self._every is not None and number % self._every == 0
        if self._every_s is not None and not to_file:
            comm = communicator_of(model)
            to_file = all_agree(comm, comm.rank != 0 or time.monotonic() - self._file_s >= self._every_s)[0]
        if not (to_memory or to_file):
            return None
        recorder, comm, collected = timeline.recorder, communicator_of(model), None
        with recorder.paused() if to_file and recorder is not None else contextlib.nullcontext():
            found = extra() if callable(extra) else extra
            curves = (metrics() if callable(metrics) else metrics) if to_file else None
            given = SaveArguments(model, optimizer, number, found, config, curves, self._names, data)
            if to_memory:
                collected = self._save_in_memory(comm, given, with_rng=to_file and self._asynchronous)
            if not to_file:
                return None
            self.wait()
            return self._save(comm, given, collected)

    def _save_in_memory(self, comm: Communicator, given: SaveArguments, *, with_rng: bool) -> Collected:
        """Save a version in memory; return the content. Collective over `comm`."""
        if comm.topology is None:
            raise UsageError("memory_every needs ranks that communicate over MPI: call hpcfsdp.init()")
        saver = self._memory

        def facts() -> Facts:
            saver.finish()  # so that all ranks have the last version before one of them begins another
            return {"directory": GivenPath(self.directory), **given.facts()}

        compare_calls(comm, "CheckpointManager.step", facts)
        own: Any = self._own_communicator(comm)
        collected = collect_content(comm, given, self._kept, with_rng=with_rng)
        if saver.needs_tensors(own, collected):
            self._kept = KeptPlan()
            collected = collect_content(comm, given, self._kept, with_rng=with_rng)
        saver.save(own, collected, given.step, rng.capture(device_of(given.model)))
        return collected

    @public_call("CheckpointManager.wait")
    def wait(self) -> None:
        """Wait until a save in progress is committed, if there is one. Collective over its ranks.

        Raises:
            CheckpointError: the save has failed, on any rank.
        """
        self._advance(wait=True)

    @public_call("CheckpointManager.close")
    def close(self) -> None:
        """Wait for a save in progress, and free the staging memory, versions in memory, and the communicators.

        Collective over the ranks of the save, and of all models that were saved asynchronously.

        Raises:
            CheckpointError: the save has failed, on any rank.
        """
        self._close(keep_memory=False)

    def _close(self, *, keep_memory: bool) -> None:
        try:
            self.wait()
            for _, own in self._comms:
                if self._memory_every is not None:
                    with raise_together(own):
                        self._memory.finish()
                if hasattr(own, "close"):  # not all kinds have one
                    own.close()
            # In a job that outlives ranks they are needed until all ranks have ended their training.
            if self._memory_every is not None and not keep_memory and not lost.goes_on:
                windows.drop(self.directory)
        finally:
            self._let_go()

    def latest(self) -> Path | None:
        """Not collective. Return the checkpoint of the highest step in the folder, damaged or not; None without one.

        On a shared file system ranks may see another rank's file at different times.
        """
        return catalog.latest(self.directory)

    @public_call("CheckpointManager.load_latest")
    def load_latest(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, data: Any = None, fresh: bool = True
    ) -> CheckpointInfo | None:
        """Load the checkpoint of the highest step that is not damaged. Collective over the model's ranks.

        With `memory_every` that may be a version in memory: the last one of which the ranks, together, have all parts,
        however many and whichever they are. It comes before a file of the same step.

        If any rank cannot read a checkpoint, all ranks skip it, log a warning, and try the one before it; see
        ``passed_over``.

        Args:
            model, optimizer, data, fresh: see ``load``. If no file can be loaded, the model has NaN in its tensors
                unless `fresh` is False.

        Returns:
            The result of ``load``, whose `source` is "memory" or "file"; None if there are no checkpoints.

        Raises:
            CheckpointMismatchError: a checkpoint belongs to another model or optimizer. Older ones are not tried.
            CheckpointCorruptError: there are checkpoints, but none can be loaded.
        """
        self._check_open()
        self.wait()
        comm = communicator_of(model)
        facts = {"directory": GivenPath(self.directory), "fresh": bool(fresh), "data": data is not None}
        compare_calls(comm, "CheckpointManager.load_latest", lambda: facts)

        def files() -> list[Path]:
            try:
                return catalog.checkpoint_files(self.directory)
            except OSError as error:
                raise CheckpointError(f"{self.directory}: the folder cannot be listed: {disk.reason(error)}") from error

        found = of_rank_0(comm, files)
        passed: tuple[tuple[Path, str], ...] = ()
        self.passed_over = passed
        sources: list[Path | MemorySource] = list(found)
        version = None
        if self._memory_every is not None:
            everyone = comm.all_gather_object(held(self.directory))
            version = newest(everyone)
            if version is not None:
                place = bisect.bisect_right([catalog.step_of(path) for path in found], version.step)
                sources.insert(place, MemorySource(self.directory, version, everyone, model))
        for source in reversed(sources):
            info = self._load(comm, source, model, optimizer, data, fresh=fresh)
            if info is not None:
                if version is not None:
                    windows.keep(self.directory, version.token)
                if self.passed_over and comm.rank == 0:
                    log.warning("using the older checkpoint %s step=%d instead", info.path, info.step)
                return info
        if sources:
            lines = "".join(f"\n  {path.name}: {problem}" for path, problem in self.passed_over)
            text = f"{self.directory}: none of its checkpoints can be loaded:{lines}"
            raise CheckpointCorruptError(text).on_all_ranks()
        return None

    def _load(
        self,
        comm: Communicator,
        source: Path | MemorySource,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        data: Any,
        *,
        fresh: bool,
    ) -> CheckpointInfo | None:
        """Load, or record the reason why not; the same on all ranks."""
        path = source.path if isinstance(source, MemorySource) else source
        given: dict[str, Any] = {"model": model, "optimizer": optimizer, "names": self._names}
        given |= {"data": data, "fresh": fresh}
        while True:
            info, error = None, None
            try:
                if isinstance(source, MemorySource):
                    info = load_from(comm, source.open, verify=False, **given)
                else:
                    with retention.reading(path):
                        info = load(path, **given)
            except CheckpointError as caught:
                error = caught
            own = None if error is None else (type(error), str(error))
            problems = [problem for problem in comm.all_gather_object(own) if problem is not None]
            if not problems:
                return info
            for kind, message in problems:
                if issubclass(kind, CheckpointMismatchError):
                    raise error if isinstance(error, kind) else kind(message)
            if all(issubclass(kind, CheckpointReplacedError) for kind, _ in problems):
                continue  # a job that saves the same step: its file is as good
            problem = problems[0][1].replace(f"{path}: ", "", 1)
            self.passed_over += ((path, problem),)
            if comm.rank == 0:
                log.warning("%s cannot be loaded, trying the one before it: %s", path, problem)
            return None

    def _advance(self, *, wait: bool) -> None:
        self._memory.advance()
        if self._pending is None:
            return
        began_s = time.perf_counter()
        try:
            self._pending.wait() if wait else self._pending.advance()
        finally:
            self._held_s += time.perf_counter() - began_s
            if self._pending.ended:
                self._last, self._pending = self._pending, None

    def _committed(self, path: Path, step: int, began_s: float) -> None:
        """On rank 0: logs the save and removes old checkpoints. The file is safe: errors here do not fail the save."""
        seconds = time.perf_counter() - began_s
        self._has_saved = True
        try:
            nbytes = path.stat().st_size
            log.info("saved %s step=%d bytes=%d secs=%.2f", path, step, nbytes, seconds)
            saved = Saved(path, step, nbytes, seconds, self._held_s or seconds, self._asynchronous)
            try:
                if self._on_saved is not None:
                    self._on_saved(saved)
            except Exception as error:  # as in removals: the file is safe
                log.warning("on_saved has failed: %s: %s", type(error).__name__, error)
            newest = catalog.latest(self.directory)
            if not self._warned and newest is not None and catalog.step_of(newest) > step:
                self._warned = True
                log.warning(
                    "saved step=%d, but %s has a higher step, so load_latest and keep_last take it for the newer one: "
                    "remove it if it belongs to another run",
                    step,
                    newest,
                )
            rules = {"keep_last": self._keep_last, "keep_every": self._keep_every}
            removal = retention.plan_removal(self.directory, **rules, spare=(path,))
            for damaged, problem in removal.damaged.items():
                log.warning("%s is damaged: %s", damaged, problem)
            retention.remove(removal.going)
            for old in removal.going:
                log.info("removed %s", old)
            now_s = time.monotonic()
            if self._swept_s is None or now_s - self._swept_s >= catalog.ABANDONED_AFTER_S:  # it reads the whole folder
                self._swept_s = now_s
                for left in retention.abandoned(self.directory, time.time()):
                    disk.remove(left)
                    log.info("removed %s, which an interrupted save had left behind", left)
        except Exception as error:
            log.warning("old checkpoints were not removed: %s", error)

    def _own_communicator(self, comm: Communicator) -> Communicator:
        """Return a communicator of the same ranks for saves in progress. Collective over `comm`, the first time."""
        for known, own in self._comms:
            if known == comm:  # of a group of torch there are several objects
                return own
        self._comms.append((comm, comm.subgroup(range(comm.size))))
        return self._comms[-1][1]

    def _ring_of(self, nbytes: int, *, pinned: bool) -> StagingRing:
        """Return a ring of at most `staging_bytes` that no thread uses."""
        if self._last is not None:
            self._last.wait_for_threads()  # one that has failed on another rank
            self._last = None
        nbytes = min(nbytes, self._staging_bytes)
        if self._ring is None or self._ring.nbytes < nbytes or self._ring.pinned < pinned:
            self._drop_ring()  # not both at a time
            self._ring = StagingRing(nbytes, align=_LINE_BYTES, pinned=pinned)
        return self._ring

    def _drop_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
        self._ring = None

    def _let_go(self) -> None:
        self._closed = True
        self._kept = KeptPlan()
        self._drop_ring()
        self._last = None
        self._comms = []

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"{self.directory}: this CheckpointManager has been closed: make another one")
