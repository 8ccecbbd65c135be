"""A lock on a run's folder: a file names the training that holds it, and shows that the training still runs."""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from hpcfsdp import env
from hpcfsdp.errors import UsageError
from hpcfsdp.hang import stacks
from hpcfsdp.text import json_input, safe_files

log = logging.getLogger("hpcfsdp.train")

NAME = "running.json"
BEAT_S = 10.0  # seconds between two touches of the file by its holder
SILENT_S = 150.0
"""A holder that does not touch the file for so long is dead. NFS clients may see a new time only after a minute."""
LOOK_S = 1.0


@dataclass(frozen=True)
class Holder:
    """A job that holds a folder."""

    host: str
    pid: int  # of its rank 0
    system: str  # the boot of the system and its pid namespace, in which `pid` is unique
    started: str  # when the process began, in the system's units; another process may get the same pid later
    job: str  # the scheduler's number of it
    restart: str  # how often the scheduler has requeued it
    since: str  # when it locked the folder, ISO 8601
    token: str  # unique for this holder

    @classmethod
    def here(cls) -> "Holder":
        job, pid, since = env.scheduler_job(), os.getpid(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        token = secrets.token_hex(8)
        return cls(env.host_name(), pid, system(), started(pid), job.number, job.restarts, since, token)

    def is_alive(self, observer: "Holder") -> bool | None:
        """Return whether this process runs; None if `observer`, the current process, cannot see that."""
        if self.job and self.job == observer.job and self.restart != observer.restart:
            return False  # the scheduler has ended it, and requeued the job
        if not self.system or self.system != observer.system:
            return None
        return runs(self.pid, self.started)

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}, since {self.since}"


_HOLDER = {each.name: str for each in dataclasses.fields(Holder)} | {"pid": int}


def training_in(folder: Path) -> Holder | None:
    """Return the training that runs in a folder, as far as its lock shows; None without one. Does not wait.

    A holder on another machine runs if it has touched the file within ``SILENT_S``.
    """
    path = folder / NAME
    holder = _read(path)
    is_alive = None if holder is None else holder.is_alive(Holder.here())
    if is_alive is None:
        touched_ns = _touched(path)
        is_alive = touched_ns is not None and time.time() - touched_ns / 1e9 < SILENT_S
    return holder if is_alive else None


class RunLock:
    """A folder that this process holds from ``acquire`` until ``release``. One rank of the job uses it."""

    def __init__(self, folder: Path) -> None:
        """Touches no disk."""
        self.folder, self.path = folder, folder / NAME
        self._mine = Holder.here()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hpcfsdp-run-lock", daemon=True)
        self._removal_logged = False

    def acquire(self, *, by_force: bool = False, alone: bool = False) -> None:
        """Lock the folder, or raise UsageError if another job holds it, unless it is taken `by_force`.

        Create it if it is missing. May wait ``SILENT_S`` to see whether another holder runs. No other job comes for it
        meanwhile if this one is `alone`.
        """
        while not self._create():
            found = _read(self.path)
            holder = None if by_force else self._living(found)
            if holder is not None:
                raise UsageError(
                    f"another training uses {self.folder}: {holder}. Two would overwrite each other's files: choose "
                    f"another run_dir, or end that training; if it has ended, remove {self.path}, or give "
                    "--take_over true"
                )
            text = "%s belongs to a training that has ended or is being replaced: this one takes the folder over"
            log.warning(text, self.path)
            if _read(self.path) == found:  # otherwise a job that came at the same time has taken it
                self.path.unlink(missing_ok=True)
            if not alone:
                time.sleep(LOOK_S)  # a job that has just found the same holder must not remove what is created now
            by_force = False  # a job that comes first keeps it
        self._thread.start()

    def check(self) -> None:
        """Raise UsageError if another job has taken the folder; create it again, and log that, if it was removed."""
        if not self.path.exists():
            self._log_removal()
            if self._create():
                self._removal_logged = False
                return
        holder = _read(self.path)
        if holder is not None and holder != self._mine:
            raise UsageError(
                f"{self.folder} has been taken over by another training: {holder}. Either this one did not touch "
                f"{self.path} for {SILENT_S:.0f} s, or the other one was started with --take_over true. This one "
                "stops, and saves nothing more there"
            )

    def release(self) -> None:
        """Unlock the folder, if this process still holds it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if _read(self.path) == self._mine:
                self.path.unlink()

    def _create(self) -> bool:
        """Create the file in its folder. Return whether there was none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            file = safe_files.create(self.path)
        except FileExistsError:
            return False
        try:
            with file:  # a reader that finds it empty waits until it is touched
                file.write(json.dumps(dataclasses.asdict(self._mine)).encode() + b"\n")
        except OSError:  # a full disk: without a holder in it the file would look like that of a job which has ended
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _living(self, holder: Holder | None) -> Holder | None:
        """Return the holder if it runs, None if not. On another machine only the time of the file shows that."""
        is_alive = None if holder is None else holder.is_alive(self._mine)
        if is_alive is not None:
            return holder if is_alive else None
        before, until_s = _touched(self.path), time.monotonic() + SILENT_S
        if before is not None:
            text = "%s is held by %s: waiting up to %d s to see whether it runs"
            log.warning(text, self.folder, holder or "a job", SILENT_S)
        now = before
        while now is not None and time.monotonic() <= until_s:
            time.sleep(LOOK_S)
            now, newer = _touched(self.path), _read(self.path)
            if now != before and newer is not None:
                return newer
        return None

    def _beat(self) -> None:
        """Touch the file at intervals, in a thread."""
        while not self._ended.wait(BEAT_S):
            try:
                if _read(self.path) in (None, self._mine):
                    os.utime(self.path, follow_symlinks=False)
            except FileNotFoundError:
                self._log_removal()
            except OSError as error:
                log.debug("%s: %s", self.path, error)

    def _log_removal(self) -> None:
        if not self._removal_logged:
            self._removal_logged = True
            what = self.path if self.folder.exists() else f"the run's folder {self.folder}"
            log.error("%s was removed during the training; the next save creates it again", what)


def _touched(path: Path) -> int | None:
    """Return when a file was last touched, in nanoseconds since the epoch; None where there is no file."""
    try:
        with safe_files.open_to_read(path) as file:  # clients of NFS ask the server when a file is opened
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> Holder | None:
    """Return the holder in a file; None if there is no file, or no holder in it."""
    try:
        found = json_input.parse(safe_files.read(path, 1 << 16), _HOLDER)
    except OSError:
        return None
    return None if found is None else Holder(**found)


def system() -> str:
    """Return the boot of the system and its pid namespace; "" if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def runs(pid: int, began: str) -> bool | None:
    """Return whether a process with this start runs here; None where the system hides processes of other users."""
    found = started(pid)
    if found or pid < 1:
        return found == began
    try:
        os.kill(pid, 0)
    except OSError as error:
        return None if isinstance(error, PermissionError) else False
    return None


def started(pid: int) -> str:
    """Return the start time of a process in the system's units; "" if there is no such process."""
    return str(stacks.start_of(pid) or "")
