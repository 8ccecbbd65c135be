"""Stop all ranks after the same step when the job is about to end, and leave with an exit code that asks to requeue."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from hpcfsdp import env
from hpcfsdp.errors import LaunchError, UsageError
from hpcfsdp.hang import events
from hpcfsdp.hang.calls import public_call
from hpcfsdp.launch import scheduler
from hpcfsdp.launch.signals import StopSignals, ignore_stop_signals
from hpcfsdp.world import World, current_world, finalize

if TYPE_CHECKING:
    import torch

    from hpcfsdp.comm.communicator import Work

EXIT_REQUEUE = 75
"""Stopped with a complete checkpoint, run me again (EX_TEMPFAIL of sysexits.h)."""

_EVERY_S = 0.05  # about how often ranks ask each other, where steps are shorter
_MOST_STEPS = 20  # the most steps between two questions: steps may suddenly become longer
_SPARE_S = 30.0  # what a stop before the end of the job takes besides steps and saves: to leave, and clocks that differ


class Preemption:
    """A context in which signals, or the end of the job, make ``requested`` true: see ``preemption``, `before_end_s`.

    Attributes:
        reason: why all ranks stop, "" as long as they go on.
        signal: the number of the signal that is the reason, or 0. The same on all ranks.
    """

    def __init__(self, *, before_end_s: float | None = None) -> None:
        if before_end_s is not None and not before_end_s >= 0:
            raise UsageError(f"before_end_s must be a number of seconds, 0 for never, or None, not {before_end_s}")
        self.reason = ""
        self.signal = 0
        self._signals = StopSignals()
        self._before_end_s = before_end_s
        self._end_s: float | None = None
        self._step: int | None = None
        self._since = 0  # steps since the ranks have asked each other
        self._every = 1
        self._asked_s: float | None = None
        self._longest_s = 0.0  # the longest time between two calls: a step, and mostly a checkpoint
        self._world: World | None = None  # in which the ranks have asked each other
        self._asked: tuple[torch.Tensor, Work | None] | None = None  # what the ranks ask each other in the background

    def __enter__(self) -> Preemption:
        self._signals.__enter__()
        if not env.launcher_rank():  # one rank asks for all
            self._end_s = scheduler.job_end()
        return self

    def __exit__(self, *error: object) -> None:
        self._signals.__exit__(*error)

    def seconds_left(self) -> float | None:
        """Not collective. Return the seconds until the scheduler ends the job; None if no end is known.

        Known on rank 0 at once, and on all ranks after the second call of ``requested``.
        """
        return None if self._end_s is None else self._end_s - time.time()

    @public_call("stop.requested")
    def requested(self, step: int) -> bool:
        """Return whether to save and stop now, equal on all ranks. Collective over all ranks, after each step.

        It waits neither for a device nor, until a signal has arrived, for other ranks: these answer while the next step
        runs. If the signal has reached all ranks they stop at once, otherwise one step later. Asked again for the same
        step it gives the same answer. Once true it stays true.

        Args:
            step: the number of the step that is done, the same on all ranks.

        Raises:
            LaunchError: there is no world: call ``hpcfsdp.init()`` first.
            CommunicationError: ranks ask for different steps.
        """
        world = current_world()
        if self.reason or (step == self._step and world in (None, self._world)):
            return bool(self.reason)
        if world is None:
            raise LaunchError("stop.requested: call hpcfsdp.init() first")
        if world is not self._world:  # ranks were lost, and others have taken their places: all begin anew
            self._world, self._asked, self._asked_s = world, None, None
            self._since, self._every = 0, 1
        self._step = step
        events.ring.note(events.STEP, str(step))
        now_s = time.monotonic()
        step_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        self._asked_s, self._longest_s = now_s, max(self._longest_s, step_s)
        if self._asked is not None:
            self._decide(*self._asked, at_once=False)
            self._asked = None
        self._since += 1
        if not self.reason and self._since >= self._every:
            self._since = 0
            left_s, before_s = self.seconds_left(), self._before_end_s
            early_s = 2 * self._longest_s + _SPARE_S if before_s is None else before_s
            number, ends = self._signals.received, left_s is not None and before_s != 0 and left_s <= early_s
            self._asked = self._ask(world, step, number, ends, step_s)
            if number or ends:
                self._decide(*self._asked, at_once=True)
        return bool(self.reason)

    def _ask(self, world: World, step: int, number: int, ends: bool, step_s: float) -> tuple[torch.Tensor, Work | None]:
        """Begin to exchange signals, and whether the job ends soon. Collective over all ranks."""
        import torch  # MPI has started by now

        end_s = -1.0 if self._end_s is None else self._end_s
        asked = [number, ends, not (number or ends), end_s, step_s]
        values = torch.tensor(asked, dtype=torch.float64, device="cpu")  # host memory: it need not wait for a device
        return values, world.host.all_reduce(values, "max", label=f"stop.requested({step})", async_op=True)

    def _decide(self, values: torch.Tensor, work: Work | None, *, at_once: bool) -> None:
        """Stop if a rank has asked for it; `at_once`: only if all have, since the others do not wait for the answer."""
        if work is not None:
            work.wait()
        signal_number, ends, some_goes_on, end_s, step_s = values.tolist()
        number, self._end_s = int(signal_number), None if end_s < 0 else end_s
        if step_s > 0:  # from what all ranks know alike, and not from a clock: they must ask at the same steps
            self._every = max(1, min(_MOST_STEPS, 2 * self._every, int(_EVERY_S / step_s)))
        if not (number or ends) or (at_once and some_goes_on):
            return
        self.signal = number
        if number:
            self.reason = f"signal {number} ({signal.Signals(number).name})"
        else:
            self.reason = f"{self.seconds_left():.0f} s before the end of the job"


def preemption(*, before_end_s: float | None = None) -> Preemption:
    """Not collective. Return a context that handles the signals of schedulers, and knows when the job ends::

        with hpcfsdp.preemption() as stop:
            world = hpcfsdp.init()
            ...
            for step in range(first, last):
                train(step)
                if stop.requested(step):
                    hpcfsdp.checkpoint.save(path, model=model, optimizer=optimizer, step=step)
                    hpcfsdp.exit_requeue()

    USR1, USR2 and TERM, sent to any rank at any time, also in a save, end no rank from here on: they make
    ``stop.requested`` true. So does the end of the job, where SLURM, PBS, LSF or Flux has one. Enter it before
    ``hpcfsdp.init()``, in the main thread of every rank: a signal may arrive while the program starts.

    Args:
        before_end_s: stop this many seconds before the end of the job; 0: stop only for signals. Default: early enough
            for twice the longest time between two calls of ``requested`` so far (a step, a checkpoint), and 30 seconds.

    Raises:
        UsageError: `before_end_s` is negative.
        LaunchError: on entering, this is not the main thread.
    """
    return Preemption(before_end_s=before_end_s)


@public_call("hpcfsdp.exit_requeue")
def exit_requeue() -> NoReturn:
    """``hpcfsdp.finalize()``, then end the program with exit code 75: run me again. Collective over all ranks.

    Job scripts requeue the job on this code (``jobs/``). Signals that arrive meanwhile do not change it.

    Raises:
        SystemExit: with 75.
        CheckpointError: a checkpoint that was being written is lost.
    """
    ignore_stop_signals()
    finalize()
    sys.exit(EXIT_REQUEUE)
