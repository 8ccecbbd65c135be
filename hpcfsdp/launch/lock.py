"""One training at a time in a run's folder: who trains there is in a file, which shows that it still does."""

from __future__ import annotations

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
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import UsageError

log = logging.getLogger("hpcfsdp.train")

NAME = "running.json"
BEAT_S = 10.0
"""The holder touches the file as often as this."""
SILENT_S = 150.0
"""A holder of whom nothing is seen for so long is dead. Clients of NFS may see a new time after a minute only."""
LOOK_S = 1.0


@dataclass(frozen=True)
class Holder:
    """A job in a folder.

    Attributes:
        host, pid: of its rank 0.
        system: of the running system and the processes that it sees: a pid means something to those who have the same.
        started: of the process, as its system counts it; another process may get the pid.
        job, restart: that the scheduler knows it by, and how often it has put it into the queue again.
        since: when it took the folder, ISO 8601.
        token: of this one alone.
    """

    host: str
    pid: int
    system: str
    started: str
    job: str
    restart: str
    since: str
    token: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        job, restart = env.scheduler_job()
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        pid = os.getpid()
        return cls(env.host_name(), pid, _system(), _started(pid), job, restart, since, secrets.token_hex(8))

    def is_dead_for(self, other: Holder) -> bool:
        """Whether `other`, which is this process, knows without waiting that this one has ended."""
        if self.job and self.job == other.job and self.restart != other.restart:
            return True  # the scheduler has ended it, and started it again
        return self.is_seen_by(other) and _started(self.pid) != self.started

    def is_seen_by(self, other: Holder) -> bool:
        """Whether `other` sees this one's process, if there is one."""
        return bool(self.system) and self.system == other.system

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """A folder that this process holds, from ``take`` until ``release``. For one rank alone."""

    def __init__(self, folder: Path) -> None:
        """Touches no disk."""
        self.folder, self.path = folder, folder / NAME
        self._mine = Holder.here()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_told = False

    def take(self, *, by_force: bool = False) -> None:
        """Take the folder, which is made if it is missing. Waits for a sign of life where there is a holder.

        Args:
            by_force: ask no holder.

        Raises:
            UsageError: another job holds it.
            OSError: it cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self._made():
            found = self._token()
            holder = None if by_force else self._living()
            if holder is not None:
                raise UsageError(
                    f"{self.folder} is another training's: {holder}. Two would write into each other's files: choose "
                    f"another run_dir, or end that one; if it has ended, remove {self.path}, or give --take_over true"
                )
            log.warning("%s was left behind by a training that has ended, or is taken from it", self.path)
            self._remove(found)
            by_force = False  # one that comes at the same time is asked
        self._thread = threading.Thread(target=self._beat, name="hpcfsdp-run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the folder is somebody else's by now; where it has been removed, make it again and log that.

        Raises:
            UsageError: it is.
            OSError: it cannot be written to.
        """
        if not self.path.exists():
            self._tell_of_removal()
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._made():
                self._has_told = False
                return
        holder = self._holder()
        if holder is not None and holder.token != self._mine.token:
            raise UsageError(
                f"{self.folder} has been taken over by another training: {holder}. This one has not shown for "
                f"{SILENT_S:.0f} s that it lives, or was told to be over; it stops, and saves nothing more there"
            )

    def release(self) -> None:
        """Give the folder back, if it is still held."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with contextlib.suppress(OSError):
            holder = self._holder()
            if holder is not None and holder.token == self._mine.token:
                self.path.unlink()

    def _made(self) -> bool:
        """Whether the file could be made, which it can where there is none."""
        draft = self.path.with_name(f".{NAME}.{self._mine.token}")
        draft.write_text(json.dumps(dataclasses.asdict(self._mine)) + "\n")
        try:
            os.link(draft, self.path)  # the file appears with what is in it
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with open(self.path, "x") as file:
                    file.write(draft.read_text())
            except FileExistsError:
                return False
        finally:
            draft.unlink()
        return True

    def _remove(self, token: str | None) -> None:
        """Remove the file, unless it is by now that of another one, who has come for it at the same time."""
        aside = self.path.with_name(f".{NAME}.{self._mine.token}.old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if self._token(aside) != token:
                with contextlib.suppress(OSError):
                    os.link(aside, self.path)
            aside.unlink()

    def _token(self, path: Path | None = None) -> str | None:
        holder = self._holder(path)
        return None if holder is None else holder.token

    def _holder(self, path: Path | None = None) -> Holder | None:
        """Who holds the folder; None if nobody does, or the file says nothing."""
        try:
            found: dict[str, Any] = json.loads((path or self.path).read_text())
            return Holder(**found)
        except (OSError, ValueError, TypeError):
            return None

    def _living(self) -> Holder | None:
        """The holder, if it is seen to live; None if it does not, which may take a while to be sure of."""
        holder, before, began_s, has_told = self._holder(), self._touched(), time.monotonic(), False
        while before is not None:
            if holder is not None and holder.is_dead_for(self._mine):
                return None
            if holder is not None and holder.is_seen_by(self._mine):
                return holder
            if time.monotonic() - began_s > SILENT_S:
                return None
            if not has_told and time.monotonic() - began_s > LOOK_S:
                has_told = True
                log.warning(
                    "%s is held by %s: waiting up to %d s for a sign that it lives",
                    self.folder,
                    holder or "somebody",
                    SILENT_S,
                )
            time.sleep(LOOK_S)
            now, newer = self._touched(), self._holder()
            if now != before and newer is not None:
                return newer
            before = before if now is not None else None
        return None

    def _touched(self) -> int | None:
        """When the file was last touched, as the file system has it; None where there is none."""
        try:
            with open(self.path) as file:  # clients of NFS ask the server when a file is opened
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _beat(self) -> None:
        """In a thread: show that this process lives."""
        while not self._ended.wait(BEAT_S):
            try:
                holder = self._holder()
                if holder is None or holder.token == self._mine.token:
                    os.utime(self.path)
            except FileNotFoundError:
                self._tell_of_removal()
            except OSError as error:
                log.debug("%s: %s", self.path, error)

    def _tell_of_removal(self) -> None:
        if not self._has_told:
            self._has_told = True
            what = self.path if self.folder.exists() else f"the run's folder {self.folder}"
            log.error("%s was removed while the training goes on; it is made again at the next save", what)


def _system() -> str:
    """The running system and its space of process numbers; empty where it is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process of this system was started, as it counts; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
