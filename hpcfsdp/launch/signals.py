"""Signals that announce the end of a job, as a flag that the program reads between steps."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import popen_fork, process, util
from types import FrameType
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_END = signal.SIGRTMAX - 1
"""What a process of multiprocessing gets from its parent as SIGTERM. It is not lost behind a SIGTERM that waits."""
_WAKE = signal.SIGRTMAX  # interrupts the main thread of such a process, in which a handler is to run


class StopSignals:
    """A context in which the first of ``STOP_SIGNALS`` sets ``received``, and later ones do nothing.

    The handler saves no checkpoint: it may run in the middle of a collective. Once a signal has arrived the handlers
    stay after the end of the context: the program is about to leave, and another signal must not kill it meanwhile.
    """

    def __init__(self) -> None:
        self.received: int = 0  # number of the signal, 0 before one arrives
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("signals can be handled in the main thread alone: enter hpcfsdp.preemption() there")
        shield_children()
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._note)
            self._previous.setdefault(number, before)  # entered again where other code has set handlers meanwhile
        return self

    def __exit__(self, *_: object) -> None:
        previous, self._previous = self._previous, {}
        if self.received:
            return
        for number, handler in previous.items():
            if signal.getsignal(number) == self._note:  # not where the program, or exit_requeue, has set another one
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside of Python

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number


def _is_handled(number: int) -> bool:
    return isinstance(getattr(signal.getsignal(number), "__self__", None), StopSignals)


def _in_child() -> None:
    if _is_handled(signal.SIGTERM):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


@functools.cache
def shield_children() -> None:
    """Not collective. Have processes of multiprocessing outlive signals that this one handles, and leave MPI to it.

    A scheduler may signal all processes of a job. The signals are blocked while such a process starts: they wait, here
    and there, also where a new program is started. Once it runs, a ``_Shield`` takes over. Programs of the user, and
    processes that ``os.fork`` makes, get signals as ever.
    """
    _wrap(process.BaseProcess, "start", _starting)
    _wrap(util, "spawnv_passfds", _starting)  # the tracker of resources, too
    terminate = popen_fork.Popen.terminate
    popen_fork.Popen.terminate = lambda popen: (_end if popen.pid in _shielded else terminate)(popen)
    util.register_after_fork(_shield, lambda shield: shield.take(os.getppid(), _kept_away()))


class _Shield:
    """Travels with a process of multiprocessing, and shields it where it arrives, as the one that starts it is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return self.take, (os.getpid(), _kept_away())

    @staticmethod
    def take(parent: int, numbers: set[int]) -> None:
        """Ignore USR1 and USR2 until the program handles them. Let TERM wait for a thread that asks who has sent it.

        For torch's loop of data workers has a handler of its own for TERM, which ends them.
        """
        for number in numbers:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers - {signal.SIGTERM})
        if signal.SIGTERM in numbers:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, _END])  # loky's processes start without
            signal.signal(_WAKE, lambda *_: None)
            # A signal that another thread takes does not interrupt the main one, which runs the handler.
            with _masked(signal.SIG_BLOCK, signal.valid_signals()):
                threading.Thread(target=_await_end, args=(parent,), name="hpcfsdp-signals", daemon=True).start()
            _wrap(subprocess.Popen, "__init__", lambda *_: _masked(signal.SIG_UNBLOCK, [signal.SIGTERM, _END]))
        shield_children()


_shield = _Shield()
_shielded: set[int] = set()


def _await_end(parent: int) -> None:
    """Pass on a SIGTERM from the parent, or from this process itself, and no other."""
    while True:
        found = signal.sigwaitinfo([signal.SIGTERM, _END])
        if found.si_signo == _END or found.si_pid in (parent, os.getpid()):
            data = sys.modules.get("torch.utils.data")
            if data is not None and data.get_worker_info() is not None:
                os._exit(0)  # as torch's handler has it: another end of a data worker is a failure
            with _masked(signal.SIG_UNBLOCK, [signal.SIGTERM]):
                os.kill(os.getpid(), signal.SIGTERM)
            signal.pthread_kill(threading.main_thread().ident, _WAKE)


def _wrap(owner: Any, name: str, context: Callable[..., Any]) -> None:
    """Have a function run within `context`, which gets its arguments."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        with context(*given):
            return function(*given, **named)

    setattr(owner, name, call)


@contextlib.contextmanager
def _starting(started: Any, *_: Any) -> Iterator[None]:
    is_process = isinstance(started, process.BaseProcess)
    if is_process:
        started._hpcfsdp_shield = _shield
    blocked = [_END, *filter(_is_handled, STOP_SIGNALS)]
    with _masked(signal.SIG_BLOCK, blocked), env.without_mpi("mpi4py.MPI" in sys.modules):
        yield
        if is_process and signal.SIGTERM in _kept_away():
            _shielded.add(started.pid)


def _end(popen: popen_fork.Popen) -> None:
    if popen.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(popen.pid, _END)


def _kept_away() -> set[int]:
    """Return the signals that do not end this process."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return {number for number in STOP_SIGNALS if number in blocked or _is_handled(number)}


@contextlib.contextmanager
def _masked(how: int, numbers: Iterable[int]) -> Iterator[None]:
    before = signal.pthread_sigmask(how, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Not collective. From now on none of ``STOP_SIGNALS`` ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
