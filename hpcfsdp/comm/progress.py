"""The progress of collectives: one loop that waits, times out, and names the missing ranks.

A collective is a generator. It posts messages or flags, yields a ``Condition``, and continues when that holds. A wait
for one collective advances all others that this process has begun, so they never block each other. No call blocks
inside of MPI: the loop handles signals and timeouts at once.
"""

import atexit
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hpcfsdp import _compat, timeline
from hpcfsdp.errors import CommunicationError, CrossedCallsError, HangError, RankLostError
from hpcfsdp.hang import calls, events, lost, waits, watch as hang
from hpcfsdp.hang.waits import LongWait, named

log = logging.getLogger("hpcfsdp.comm")

_YIELD_AFTER = 4
"""Polls before the process yields the core. On a free core that costs next to nothing; where ranks outnumber cores the
awaited peer gets the core at once."""
_CLOCK_EVERY = 8
_YIELD_S, _SLEEP_PART, _SLEEP_S = 0.001, 0.05, 0.0002
"""How long a wait yields the core, before it sleeps between polls, for a part of the wait so far, and for how long at
most. A process that yields gives the core to others of its group alone, and SLURM, like a terminal, makes each rank a
group: there a rank that only yields keeps two thirds of a core that it shares with the rank for which it waits."""
_THREAD_SLEEP_S = 0.0001
"""Sleep of the thread: a link of 10 GB/s moves 1 MB meanwhile, less than a network's buffers hold."""


class Condition(NamedTuple):
    """The condition that a collective waits for: this, or an object with two such methods."""

    holds: Callable[[], bool]  # returns whether the wait is over, or raises the error that ends it
    missing: Callable[[], Sequence[int]]  # returns the ranks that have not arrived yet


class Sent(Condition):
    """The last ``Condition`` of a collective that has written its outputs: that others have read its inputs."""


Steps = Generator[Condition, None, None]


class Running:
    """A collective in progress. See ``Work`` in communicator.py.

    Its `owner`, the communicator or another object, has a method `departed`: the ranks that have left the program.
    """

    def __init__(self, steps: Steps, label: str, rank: int, timeout_s: float, owner: Any, number: Any = None) -> None:
        self.label, self.owner, self.number = label, owner, number
        self.optional = False  # whether it may never complete, like a receive without a send
        self._error_is_raised = False
        self._steps, self._rank, self._timeout_s = steps, rank, timeout_s
        self._condition: Condition | None = None
        self._error: BaseException | None = None
        self._in_inference_mode = torch.is_inference_mode_enabled()  # and so may be tensors that it writes to
        self.done = False  # whether it has ended, also with an error
        self.ended_ns = 0  # when, by ``time.perf_counter_ns``, if the run is observed
        self._stepping = threading.Lock()
        events.ring.note(events.BEGIN, label)
        thread = threading.current_thread()
        if thread not in _threads and not _compat.in_backward():  # autograd's threads take turns
            _threads.add(thread)
        self._advance()
        if not self.done:
            _in_progress.append(self)
            _begun.set()

    def is_completed(self) -> bool:
        advance_all()  # others, too: this one may wait for a rank that waits for one of them
        self._advance()
        self._check_lost()
        return self.done

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the collective is complete. Raises if it failed, or took longer (default: than its timeout)."""
        if not self.done:
            self._wait(self._timeout_s if timeout_s is None else timeout_s, firm=timeout_s is None)
        self._raise()

    def wait_for_outputs(self) -> None:
        """Return when the outputs may be used. The inputs must not change before ``wait`` has returned."""
        if not self._has_outputs():
            self._wait(self._timeout_s, firm=True, is_over=self._has_outputs)
        if self.done:
            self._raise()

    def _has_outputs(self) -> bool:
        return self.done or isinstance(self._condition, Sent)

    def _raise(self) -> None:
        self._error_is_raised = True
        if self._error is not None:
            call, text = calls.current(), self._error.args
            if isinstance(self._error, CommunicationError) and call not in text[0]:
                self._error.args = (f"{call}: {text[0]}",)
            raise self._error

    def __del__(self) -> None:
        is_known = self._error_is_raised or isinstance(self._error, RankLostError)  # the next call raises that, too
        if self.done and self._error is not None and not is_known:
            log.error("%s failed, and no caller waited for it: %s", self.label, self._error)

    def _wait(self, timeout_s: float, *, firm: bool, is_over: Callable[[], bool] | None = None) -> None:
        long_wait: LongWait | None = None
        recorder = timeline.recorder
        begun_wait = recorder.begin_wait() if recorder is not None else None
        _awaited.add(self)
        try:
            for waited_s in self._waiting(is_over or (lambda: self.done)):
                if waited_s > timeout_s:
                    self._give_up(functools.partial(_timed_out, timeout_s, long_wait))
                elif waited_s > waits.LOOK_AFTER_S:
                    self._check_departed()
                    long_wait = long_wait or LongWait(self.label, self.owner, self.number)
                    if waited_s > long_wait.due_s:
                        look = functools.partial(long_wait.look, waited_s, self._rank, firm=firm and not _others_run())
                        self._give_up(look, CrossedCallsError)
                    watcher = hang.watcher
                    if watcher is not None and 0 < watcher.limit_s <= waited_s and not self.done:
                        self._explain(watcher, waited_s)
        finally:
            _awaited.discard(self)
            _begun.set()
            if long_wait is not None:
                long_wait.end(failed=self.failed)
            if begun_wait is not None:
                recorder.end_wait(begun_wait, self.label)

    def _waiting(self, is_over: Callable[[], bool]) -> Iterator[float]:
        """Advance all collectives until `is_over`. Yields the seconds of the wait from time to time."""
        began_s, polls, waited_s = time.monotonic(), 0, 0.0
        while not is_over():
            self._advance()
            if len(_in_progress) > 1:
                advance_all()
            polls += 1
            if polls < _YIELD_AFTER:
                continue
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min(waited_s * _SLEEP_PART, _SLEEP_S))
            if polls % _CLOCK_EVERY == 0:
                self._check_lost()
                waited_s = time.monotonic() - began_s
                yield waited_s

    def _advance(self) -> None:
        """Continue until a condition does not hold yet."""
        if self.done or not self._stepping.acquire(blocking=False):  # another thread advances it
            return
        try:
            if self._condition is None or self._condition.holds():
                self._take_steps()
        except StopIteration:
            self._finish(None)
        except BaseException as error:  # an interrupt, too: a later wait must not take this for complete
            self._finish(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._stepping.release()

    @_compat.outside_of_modes
    @torch.no_grad()
    def _take_steps(self) -> None:
        """Continue, as the condition holds."""
        if torch.is_inference_mode_enabled() != self._in_inference_mode:
            with torch.inference_mode(self._in_inference_mode):
                return self._take_steps()
        self._condition = next(self._steps)
        while self._condition.holds():
            self._condition = next(self._steps)
        return None

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        events.ring.note(events.END, self.label)
        if timeline.recorder is not None:
            self.ended_ns = time.perf_counter_ns()
        self._condition = None
        if self in _in_progress:
            _in_progress.remove(self)
        try:
            self._steps.close()
        finally:
            self.done = True  # last: another thread may wait for it, and use the same memory at once

    def _explain(self, watcher: hang.Watcher, waited_s: float) -> None:
        """Write a report about the hang, and end with an error unless the others have come meanwhile."""
        path = watcher.explain(f"has waited {waited_s:.0f} s in {self.label}")
        if lost.current is not None:  # watchers of all nodes end ranks that hang, as soon as they do for the limit
            until_s = time.monotonic() + watcher.limit_s + lost.REPORTED_WITHIN_S
            while not self.done and time.monotonic() < until_s:
                time.sleep(_SLEEP_S)
                self._advance()
                self._check_lost()
        self._advance()
        where = f"{path} says where each rank is" if path is not None else "the log says why there is no report"
        text = f"the job hangs; {where}. HPCFSDP_HANG_S sets the time, where ranks are this slow"
        self._give_up(lambda missing: f"waited {waited_s:.0f} s for {named(missing)}: {text}", HangError)

    def _check_lost(self) -> None:
        """End with an error if ranks have died: no rank goes on with this world."""
        try:
            if not self.done:
                lost.check(self.label)
        except RankLostError as error:
            with self._stepping:
                if not self.done:
                    self._finish(error)

    def _check_departed(self) -> None:
        if departed := self.owner.departed():
            self._advance()  # what they sent before they left
            self._give_up(functools.partial(_left, departed))

    def _give_up(
        self, reason: Callable[[Sequence[int]], str | None], kind: type[CommunicationError] = CommunicationError
    ) -> None:
        """End with an error if `reason`, called with the missing ranks, returns one."""
        with self._stepping:  # no other thread advances it meanwhile
            why = None if self.done else reason(self._condition.missing() if self._condition is not None else [])
            if why:
                where = f"{self.label} on rank {self._rank}: " if kind is not CrossedCallsError else ""
                self._finish(kind(where + why))


def _left(departed: set[int], missing: Sequence[int]) -> str | None:
    ranks = departed.intersection(missing)
    return f"{named(sorted(ranks))} left the program without taking part" if ranks else None


def _timed_out(timeout_s: float, long_wait: LongWait | None, missing: Sequence[int]) -> str:
    known = long_wait.others(missing) if long_wait is not None else ""
    return (
        f"waited {timeout_s:g} s for {named(missing)}, which did not take part. They hang, have left, or call other "
        "collectives; TORCH_DISTRIBUTED_DEBUG=DETAIL compares the calls of all ranks and names the one that differs"
        + (f" ({known})" if known else "")
    )


class Finished:
    """The work of a collective that is complete when its call returns."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


_in_progress: list[Running] = []
_awaited: set[Running] = set()
_begun = threading.Event()  # set when a collective has begun, and when a wait has ended
_threads: set[threading.Thread] = set()
"""Threads that have begun collectives. If several of them run, one may make the call that another waits for."""


def _others_run() -> bool:
    """Return whether several threads that have begun collectives run."""
    _threads.difference_update([thread for thread in tuple(_threads) if not thread.is_alive()])
    return len(_threads) > 1


def advance_all() -> None:
    """Continue all collectives in progress, on any thread."""
    for work in tuple(_in_progress):
        work._advance()


def run(
    steps: Steps, label: str, rank: int, timeout_s: float, async_op: bool, owner: Any, number: Any = None
) -> Running | None:
    """Begin a collective of `owner`, with its `number` there, and complete it unless `async_op`."""
    work = Running(steps, label, rank, timeout_s, owner, number)
    if async_op:
        return work
    work.wait()
    return None


def complete(owner: object) -> None:
    """Complete all collectives of `owner` in progress, and raise the first error. Receives without a message end."""
    errors = []
    for work in tuple(_in_progress):
        if work.owner is owner:
            try:
                work.wait(0.0 if work.optional and not work.is_completed() else None)
            except CommunicationError as error:
                if not work.optional:
                    errors.append(error)
    if errors:
        raise errors[0]


def abandon() -> None:
    """Not collective. End all collectives in progress with an error: ranks that take part were lost."""
    for work in tuple(_in_progress):
        work._error_is_raised = True  # no caller may come
        with work._stepping:
            if not work.done:
                work._finish(CommunicationError(f"{work.label} on rank {work._rank}: ranks were lost before its end"))
    _threads.clear()


_ended = threading.Event()
_thread: threading.Thread | None = None
_process = 0  # the thread's: a process that was forked from it has no such thread


def start_thread() -> None:
    """Not collective. Have a thread advance all collectives of this process, until ``stop_thread``.

    Optional: it takes time of a core. MPI must have been started with MPI_THREAD_MULTIPLE.
    """
    global _thread, _process
    if _thread is None:
        _process = os.getpid()
        _ended.clear()
        _thread = threading.Thread(target=_advance_until_ended, name="hpcfsdp-progress", daemon=True)
        _thread.start()
        atexit.register(stop_thread)  # before MPI ends


def stop_thread() -> None:
    """Not collective. End the thread, if there is one."""
    global _thread
    thread, _thread = _thread, None
    if thread is not None and os.getpid() == _process:
        _ended.set()
        _begun.set()
        thread.join()
        atexit.unregister(stop_thread)


def _advance_until_ended() -> None:
    while not _ended.is_set():
        _begun.wait()
        _begun.clear()
        # A wait of the program advances all collectives itself.
        while _in_progress and not _awaited and not _ended.wait(_THREAD_SLEEP_S):
            advance_all()
