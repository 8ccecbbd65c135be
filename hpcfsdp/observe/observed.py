"""``Run``: the observation of a training, in the program's own loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcfsdp import env, timeline
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.manager import Saved
from hpcfsdp.comm import communicator_for, raise_together
from hpcfsdp.errors import RankLostError, UsageError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.observe.facts import agree_on_facts, start_facts
from hpcfsdp.observe.held_memory import Holdings, memory_of
from hpcfsdp.observe.perfetto import Trace, steps_to_trace
from hpcfsdp.observe.records import EventsFile, MetricsFile, append_end, finite, last_step, read_records
from hpcfsdp.observe.step_figures import Curves, Pipeline, Sums, check_names, flat_numbers
from hpcfsdp.observe.trackers import Tracker, check_trackers, make_trackers
from hpcfsdp.state.model import communicator_of, device_of
from hpcfsdp.timeline import Recorder
from hpcfsdp.world import before_finalize, current_world

log = logging.getLogger("hpcfsdp.observe")

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
_REQUEUE = 75  # the exit code of ``hpcfsdp.exit_requeue``


class Run:
    """Observes a training: figures of each step in ``metrics.jsonl``, what happens in ``events.jsonl``::

        with hpcfsdp.observe.Run("runs/mine", model=model, optimizer=optimizer) as run:
            for x, y in batches:
                ...
                run.step(loss=loss, tokens=x.numel())

    docs/how-to/tracking.md lists the figures. Rank 0 of the model writes. A process observes one run at a time.

    ``step`` neither waits for other ranks nor for a device: figures of a step are reduced while the next one runs (on a
    device: the one after it), and are written then. ``flush``, ``series`` and ``close`` write those that are left.

    Attributes:
        directory: the folder of the run.
        latest: the newest record that was written; None before the first. Memory by kind is in that of rank 0 alone.
    """

    @public_call("observe.Run")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        resume_step: int | None = None,
        resumed_from: str | os.PathLike[str] | CheckpointInfo | None = None,
        every: int = 1,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        memory: bool = True,
        trace: bool | range = False,
        trackers: Iterable[str | Tracker] = (),
        on_record: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Begin to observe. Collective over the ranks of the model.

        Args:
            directory: on a file system that all ranks share; made if it is missing.
            model: sharded or plain. None: the ranks of the world, and no figures of the model.
            optimizer: its learning rate is recorded, the one of its first group.
            resume_step: the last step that was done before: records of later ones are dropped. Default: that of
                `resumed_from`, else the last one in the folder, so that nothing is dropped; 0 drops all.
            resumed_from: the checkpoint that the training goes on from: its path, or what loading it has returned.
                ``series`` continues its curves; without it, or from memory, those in the folder.
            every: steps in a record, which has their means.
            flops_per_token: operations of a forward and backward for one token. Default: 6 for each trained parameter,
                which leaves out attention.
            peak_flops: operations per second of one rank's device at most. Default: those of one large matrix product,
                in the dtype of the model, which takes a moment now.
            memory: False to leave memory out, and torch's peak of the device's memory alone, which is reset otherwise.
            trace: write ``trace.json``, of the third to the fifth step, or of a range of steps counted from 1.
            trackers: "tensorboard", "wandb", or objects with the methods of ``Tracker``.
            on_record: called with each record, on every rank.

        Raises:
            UsageError: on all ranks. A run is being observed already, an argument is wrong, or the library of a tracker
                is not installed.
            OSError, HpcfsdpError: rank 0 cannot write to the folder.
        """
        self.directory = Path(directory)
        self.latest: dict[str, Any] | None = None
        world = current_world()
        on_host = world.host if world is not None else None
        self._comm = communicator_of(model) if model is not None else on_host or communicator_for(None, required=False)
        self._every, self._on_record, self._traced = every, on_record, None
        self._trackers: list[Tracker] = []
        self._series = Curves()
        self._metrics: MetricsFile | None = None
        self._events: EventsFile | None = None
        given = list(trackers)
        with raise_together(self._comm):
            self._check(every, resume_step, flops_per_token, peak_flops)
            self._traced = steps_to_trace(trace)
            check_trackers(given)
        self._step = 0
        with raise_together(self._comm):  # apart: what was opened would stay open if another rank has raised
            if self._comm.rank == 0:
                self._open(given, resume_step, resumed_from)
        self._step = self._comm.broadcast_object(self._step)
        device = device_of(model) if model is not None else world.device if world is not None else torch.device("cpu")
        self._optimizer = optimizer
        self._memory = memory_of(device) if memory else None
        self._holdings = Holdings(model, optimizer) if memory and self._comm.rank == 0 else None
        self._facts = agree_on_facts(self._comm, model, device, flops_per_token, peak_flops)
        self._recorder = Recorder(device)
        self._trace = Trace(self.directory, self._comm, self._recorder, self._facts.rank, env.host_name())
        self._sums = Sums(keeps_on_device=self._recorder.is_timed)
        # A device still computes the figures of the last step when the next one ends on the host.
        self._pipeline = Pipeline(self._comm, self._facts, lag=1 if self._recorder.is_timed else 0)
        self._steps_done, self._closed = 0, False
        self._handles: list[Any] = []
        self._optimizer_began: Any = None
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_optimizer))
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer))
        self.event("start", **start_facts(self._comm, self._facts, device, resumed_from))
        _open_runs.add(self)
        timeline.recorder = self._recorder
        if self._memory is not None:
            self._memory.read()  # the peak from here on
        self._begin_trace()
        self._recorder.end_interval()
        self._step_began = self._recorder.now()

    # In the loop

    @public_call("observe.Run.step")
    def step(
        self,
        *,
        loss: Any = None,
        tokens: float | None = None,
        grad_norm: Any = None,
        lr: Any = None,
        step: int | None = None,
        reduce: bool = True,
        **values: Any,
    ) -> None:
        """Record the figures of a step, at its end. Collective over the ranks of the model.

        Numbers may be tensors of one element; those on a device are read when it has computed them.

        Args:
            loss: the mean over this rank's tokens. The record has the mean over all ranks, weighted by tokens if they
                are given.
            tokens: of this rank in this step. The record has the sum over ranks; tensor-parallel ranks, which compute
                with the same tokens, count once.
            grad_norm: of all gradients, the same on all ranks.
            lr: the learning rate. Default: that of the optimizer's first group.
            step: its number, by default one more than the last.
            reduce: False if `loss` is the mean over all ranks already.
            values: further numbers by name, of rank 0.

        Raises:
            UsageError: a value is no number, a name is taken, `step` is not greater than the last one, or the run is
                closed.
        """
        if self._closed:
            raise UsageError("observe.Run.step: this run is closed: make another one")
        number = self._step + 1 if step is None else step
        if number <= self._step:
            raise UsageError(
                f"observe.Run.step: step {number} is not after {self._step}, the last one of this run in "
                f"{self.directory}: choose another folder, or resume_step=0 to drop the records of an earlier run"
            )
        check_names(values)
        if lr is None and self._optimizer is not None:
            lr = self._optimizer.param_groups[0].get("lr")
        self._sums.add(loss, tokens, lr, {"grad_norm": grad_norm, **values}, reduce=reduce)
        self._step, self._steps_done = number, self._steps_done + 1
        recorder = self._recorder
        if recorder.traces:
            recorder.add_span(timeline.STEPS, f"step {number}", self._step_began, recorder.now())
        if self._sums.steps >= self._every:
            self._submit()
        if self._traced is not None:
            with recorder.paused():
                if self._steps_done == self._traced.stop - 1:
                    self._end_trace()
                else:
                    self._begin_trace()
            self._step_began = recorder.now() if recorder.traces else None

    def event(self, kind: str, **facts: Any) -> None:
        """Add a line to ``events.jsonl``, on rank 0; on other ranks do nothing. Not collective.

        Args:
            kind: of the event, such as "signal".
            facts: values for JSON by name.
        """
        if self._events is not None:
            self._events.write_event(kind, self._step, facts)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose time does not count as that of a step, such as an evaluation. Not collective."""
        with self._recorder.paused():
            yield

    @contextlib.contextmanager
    def saving(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Return a context around ``checkpoint.save`` to `path`, whose time becomes an event. Not collective."""
        began_ns = time.perf_counter_ns()
        with self.paused():
            yield
        seconds = (time.perf_counter_ns() - began_ns) / 1e9
        if self._comm.rank == 0:
            self.checkpoint(Saved(Path(path), self._step, os.stat(path).st_size, seconds, seconds, False))

    def checkpoint(self, saved: Saved) -> None:
        """Add `saved` to ``events.jsonl``: for ``CheckpointManager(on_saved=run.checkpoint)``. Not collective."""
        facts = {"path": str(saved.path), "bytes": saved.nbytes, "seconds": round(saved.seconds, 6)}
        facts |= {"held_s": round(saved.held_s, 6), "asynchronous": saved.asynchronous}
        if self._events is not None:
            self._events.write_event("checkpoint", saved.step, facts)
        now_ns = time.perf_counter_ns()
        name = f"checkpoint of step {saved.step}"
        self._recorder.add_span(timeline.CHECKPOINTS, name, now_ns - int(saved.seconds * 1e9), now_ns)

    @public_call("observe.Run.record")
    def record(self, kind: str, **values: Any) -> None:
        """Write a record of another kind than "train" for this step, on rank 0. Not collective.

        Args:
            values: for JSON by name; numbers go to the trackers as "kind/name".

        Raises:
            UsageError: for "train", whose records ``step`` writes.
        """
        if kind == "train":
            raise UsageError('observe.Run.record: the records "train" are those of step(): give yours another kind')
        record, others = finite({"step": self._step, "kind": kind, **values})
        if others:
            record["not_finite"] = others
        if self._metrics is not None:
            self._metrics.write(record)
            self._log(record, f"{kind}/")
        if self._on_record is not None:
            self._on_record(record)

    @public_call("observe.Run.flush")
    def flush(self) -> None:
        """Write the records that are full, and wait for them. Collective over the ranks of the model."""
        self._write(self._pipeline.flush())

    @public_call("observe.Run.series")
    def series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Flush, and return the curves of the run for a checkpoint. Collective over the ranks of the model::

            checkpoint.save(path, model=model, optimizer=optimizer, step=step, metrics=run.series())

        Name -> steps and values: loss, grad_norm, lr, tokens_per_s, comm_share, flop_utilisation, memory_peak_bytes.
        Those of rank 0, whose curves a checkpoint holds, continue what the run has resumed from.
        """
        self.flush()
        return {name: (list(steps), list(values)) for name, (steps, values) in self._series.curves.items()}

    @public_call("observe.Run.close")
    def close(self, outcome: str = "complete", message: str = "") -> None:
        """Write what is left, and the event of the end. Collective over the ranks of the model.

        Later calls do nothing.

        Args:
            outcome: "complete", "stopped", "error", or "lost" where the job goes on without a rank.
            message: why.
        """
        if self._closed:
            return
        with self._recorder.paused():
            if self._sums.steps:
                self._submit()
            self.flush()
            if self._recorder.traces:
                self._end_trace()
        self._let_go(outcome, message)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._closed:
            return
        if kind is None:
            self.close()
        elif isinstance(error, SystemExit) and error.code == _REQUEUE:
            self._let_go("stopped", "")
        elif getattr(error, "raised_on_all_ranks", False):  # then all ranks come here
            self.close("error", f"{kind.__name__}: {error}")
        else:
            self._let_go("lost" if isinstance(error, RankLostError) else "error", f"{kind.__name__}: {error}")

    # Parts of it

    def _check(self, every: Any, resume_step: Any, *positive: Any) -> None:
        if timeline.recorder is not None:
            raise UsageError("observe.Run: this process observes a run already: close() that first")
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"observe.Run: every must be a number of steps, at least 1, not {every!r}")
        if resume_step is not None and (not isinstance(resume_step, int) or resume_step < 0):
            raise UsageError(f"observe.Run: resume_step must be a step, at least 0, not {resume_step!r}")
        for name, value in zip(("flops_per_token", "peak_flops"), positive, strict=True):
            if value is not None and not value > 0:
                raise UsageError(f"observe.Run: {name} must be positive, not {value!r}")

    def _open(self, trackers: list[str | Tracker], resume_step: int | None, resumed_from: Any) -> None:
        """Open the files, and take up the steps and curves of an earlier run. On rank 0."""
        is_info = isinstance(resumed_from, CheckpointInfo)
        path = (resumed_from.path if resumed_from.source == "file" else None) if is_info else resumed_from
        index = None if path is None else open_index(path)
        if resume_step is None and is_info:
            resume_step = resumed_from.step
        elif resume_step is None:
            resume_step = index.info.step if index is not None else last_step(read_records(self.directory / METRICS))
        self._step = resume_step
        self.directory.mkdir(parents=True, exist_ok=True)
        self._trackers = make_trackers(trackers, self.directory, resume_step=self._step)
        self._metrics = MetricsFile(self.directory / METRICS, resume_step=self._step)
        self._events = EventsFile(self.directory / EVENTS)
        if index is not None:
            self._series.continue_from(index.metrics, self._step)
        else:
            for record in read_records(self.directory / METRICS):
                if record.get("kind") == "train":
                    self._series.add(record)

    def _submit(self) -> None:
        """Send off a full record. Collective over the ranks of the model."""
        self._sums.send_to_host()
        interval = self._recorder.end_interval()
        memory = self._memory.read() if self._memory is not None else (0, 0)
        sums, self._sums = self._sums, Sums(keeps_on_device=self._recorder.is_timed)
        self._write(self._pipeline.put(self._step, sums, interval, memory, self._recorder.pop_most_gathered()))

    def _write(self, complete: Iterable[tuple[dict[str, Any], int]]) -> None:
        for record, gathered in complete:
            if self._holdings is not None and "memory" in record:
                record["memory"] |= self._holdings.figures(gathered)
                if self._memory is not None and self._memory.capacity_bytes:
                    record["memory"]["capacity_bytes"] = self._memory.capacity_bytes
            self.latest = record
            if self._metrics is not None:
                self._metrics.write(record)
                self._series.add(record)
                self._log(record)
            if self._on_record is not None:
                self._on_record(record)

    def _log(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """Give figures to the trackers, on rank 0. Drop one that fails: it must not end the training."""
        for tracker in list(self._trackers):
            try:
                tracker.log(int(record["step"]), flat_numbers(record, prefix))
            except Exception:
                log.exception("the tracker %s has failed, and gets no more figures", type(tracker).__name__)
                self._trackers.remove(tracker)

    def _begin_trace(self) -> None:
        """Begin the trace if the next step is the first of it; that is collective over the ranks of the model."""
        if self._traced is not None and self._steps_done + 1 == self._traced.start:
            self._trace.begin()

    def _end_trace(self) -> None:
        """Write the trace. Collective over the ranks of the model."""
        self._traced = None
        self._trace.end()

    def _before_optimizer(self, *_: Any) -> None:
        if self._holdings is not None:
            self._holdings.look_at_gradients()
        if self._recorder.traces:
            self._optimizer_began = self._recorder.now()

    def _after_optimizer(self, *_: Any) -> None:
        began, self._optimizer_began = self._optimizer_began, None
        if self._recorder.traces and began is not None:
            self._recorder.add_span(timeline.UNITS, "optimizer step", began, self._recorder.now())

    def _let_go(self, outcome: str, message: str) -> None:
        """End without the others. Not collective."""
        self._closed = True
        _open_runs.discard(self)
        if timeline.recorder is self._recorder:
            timeline.recorder = None
        if self._recorder.traces:
            self._trace.write_part()
        for handle in self._handles:
            handle.remove()
        if outcome in ("error", "lost") and self._comm.rank:  # the others may not know of it, and may never end
            append_end(self.directory / EVENTS, self._step, outcome, f"rank {self._facts.rank}: {message}")
        self.event("end", outcome=outcome, message=message)
        for tracker in self._trackers:
            with contextlib.suppress(Exception):
                tracker.close()
        for opened in (self._metrics, self._events, self._memory):
            if opened is not None:
                opened.close()
        self._metrics = self._events = None


_open_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def _flush_open_runs() -> None:
    """Write what is left, before ``hpcfsdp.finalize`` ends the communication. Collective over all ranks."""
    for run in list(_open_runs):
        run.flush()


before_finalize(_flush_open_runs)
