"""Python stacks of a process, written by a signal handler in C: also while the process is stuck in C code.

A process registers a file without a name for SIGQUIT. Processes of the same user send the signal and read the file
through ``/proc``.
"""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

SIGNAL = signal.SIGQUIT
"""kill -QUIT, scancel --signal=QUIT. Its default would be to end the process and to write a core file."""
ANSWER_S = 2.0  # how long a process may take to write its stacks
_SETTLED_S = 0.05


@dataclass(frozen=True)
class Process:
    """A process of this system, as ``/proc`` shows it."""

    state: str  # of its main thread: R (runs), S (sleeps), D (waits in the kernel), T (stopped), Z; "" if it has ended
    wchan: str = ""  # where in the kernel it waits
    cpu_s: float = 0.0


def arm() -> int:
    """Not collective. Have SIGQUIT write the stacks of this process. Returns the descriptor of the file to read.

    -1, and nothing is changed, where the program has a handler of its own for this signal.
    """
    if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):  # shells ignore it in background jobs
        return -1
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        caught = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
        if caught >> (SIGNAL - 1) & 1:  # by C code: faulthandler.register
            return -1
    fd = os.memfd_create("hpcfsdp-stacks", os.MFD_CLOEXEC)
    faulthandler.register(SIGNAL, file=fd, all_threads=True)
    return fd


def disarm(fd: int) -> None:
    """Not collective. Undo ``arm``."""
    if fd >= 0:
        faulthandler.unregister(SIGNAL)
        os.close(fd)


def start_of(pid: int) -> int:
    """Return when a process began, in clock ticks since the boot; 0 if there is none of this pid."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def process(pid: int, started: int) -> Process:
    """Return the process with this pid and start."""
    fields = _stat(pid)
    if not fields or int(fields[19]) != started:
        return Process("")
    wchan = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        wchan = file.read().strip("0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    return Process(fields[0], wchan, (int(fields[11]) + int(fields[12])) / ticks)


def ask_all(pids_and_files: Sequence[tuple[int, int]]) -> list[str]:
    """Not collective. Return the stacks of processes (pid, descriptor), "" where none comes within ``ANSWER_S``."""
    begins = [size(pid, fd) for pid, fd in pids_and_files]
    for (pid, fd), begin in zip(pids_and_files, begins, strict=True):
        if fd >= 0 and begin is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, SIGNAL)
    sizes, until_s, quiet_s = begins, time.monotonic() + ANSWER_S, time.monotonic()
    while time.monotonic() < until_s:
        time.sleep(0.01)
        found = [size(pid, fd) for pid, fd in pids_and_files]
        if found != sizes:
            sizes, quiet_s = found, time.monotonic()
        answered = all(now is None or now != begin for now, begin in zip(sizes, begins, strict=True))
        if answered and time.monotonic() - quiet_s > _SETTLED_S:
            break
    return [_read(pid, fd, begin) for (pid, fd), begin in zip(pids_and_files, begins, strict=True)]


def main_frames(text: str, main_thread: int) -> list[tuple[str, int, str]]:
    """Return the frames of the main thread, the innermost first, as (file, line, function)."""
    threads = re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE)
    wanted = [part for part in threads if re.match(rf"(?:Current t|T)hread 0x0*{main_thread:x}\b", part)]
    found = re.findall(r'^  File "(.*)", line (\d{1,9}) in (.*)$', wanted[-1] if wanted else "", re.MULTILINE)
    return [(file, int(line), function) for file, line, function in found]


def size(pid: int, fd: int) -> int | None:
    """Return the bytes that SIGQUIT has written so far in a process; None where it writes no stacks."""
    try:
        return os.stat(f"/proc/{pid}/fd/{fd}").st_size
    except OSError:
        return None


def _read(pid: int, fd: int, begin: int | None) -> str:
    if fd < 0 or begin is None:
        return ""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat behind the name of the program, which may contain spaces."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
