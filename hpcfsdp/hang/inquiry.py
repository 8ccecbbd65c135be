"""Questions to all nodes of a job, and their answers, as files in the folder of the run.

The folder is the one medium that also a job without progress, a node without its rank 0, and a command on a login node
share. Someone creates ``hang/request-JOB.json``, or ``request.json`` for all jobs. A rank on each node adds what it
knows of its node. Who has asked writes the report, and removes the rest. Others may be able to write to the folder of
a run: only files of this user or of root count, in a folder of this user or of root.
"""

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.text import json_input, safe_files

log = logging.getLogger("hpcfsdp.hang")

FOLDER = "hang"
_FORGOTTEN_S = 120.0
"""A request of this age belongs to someone who has been killed; one from so far in the future, to a wrong clock."""
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_REQUEST = {"name": str, "job": str, "reason": str, "asked_s": (float, int), "ends": bool}
_MOST_REQUEST_BYTES, _MOST_ANSWER_BYTES = 1 << 14, 1 << 24


@dataclass(frozen=True)
class HangRequest:
    """A request to the nodes of a job to say where their ranks are."""

    name: str  # unique, begins with the time; of letters, digits, - and _
    job: str  # whose nodes answer; "" for all jobs that use the folder
    reason: str  # who asks, and why
    asked_s: float  # since the epoch
    ends: bool = False  # whether nodes end their ranks that hang, where the job goes on without them

    @property
    def is_current(self) -> bool:
        """Return whether someone may still wait for answers."""
        return abs(time.time() - self.asked_s) < _FORGOTTEN_S


class Inquiry:
    """The requests in the folder of a run. No method is collective."""

    def __init__(self, run_dir: Path) -> None:
        """Touches no disk."""
        self.folder = run_dir / FOLDER
        self._has_warned = False

    def ask(self, job: str, reason: str, *, ends: bool = False) -> tuple[HangRequest, bool]:
        """Return a request, and whether it is new. Raises OSError where the folder is of another, or not writable."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        now_s = time.time()
        name = time.strftime("%Y-%m-%dT%H-%M-%SZ-", time.gmtime(now_s)) + secrets.token_hex(2)
        mine = HangRequest(name, job, reason, now_s, ends)
        with safe_files.own_folder(self.folder, make=True) as folder:
            try:
                with safe_files.create(f".{name}", folder=folder) as file:
                    file.write(json.dumps(asdict(mine)).encode())
                while True:
                    for found in self._requests(folder, job):
                        if found.is_current:
                            return found, False
                    try:  # fails where there is a request, and shows it whole
                        os.link(f".{name}", _file_of(job), src_dir_fd=folder, dst_dir_fd=folder)
                    except FileExistsError:
                        stale = self._requests(folder, job)
                        if not any(found.is_current for found in stale):
                            safe_files.remove(_file_of(job), folder=folder)
                            for found in stale:
                                _remove_answers(found, folder)
                    else:
                        with self._answers_to(mine, make=True):
                            return mine, True
            finally:
                safe_files.remove(f".{name}", folder=folder)

    def requests(self, job: str) -> list[HangRequest]:
        """Return the requests that wait for answers of this job; "": those to all jobs alone."""
        try:
            with safe_files.own_folder(self.folder) as folder:
                return self._requests(folder, job)
        except OSError as error:
            if not self._has_warned and not isinstance(error, FileNotFoundError):
                self._has_warned = True
                log.warning("%s: questions there are not answered: %s", self.folder, error.strerror)
            return []

    def claim(self, request: HangRequest, job: str, node: int) -> bool:
        """Return whether this process is the first of its node to answer."""
        with contextlib.suppress(OSError), self._answers_to(request, make=True) as folder:
            safe_files.create(f"{job}.{node:05d}.claim", folder=folder).close()
            return True
        return False

    def answer(self, request: HangRequest, job: str, node: int, part: dict[str, Any]) -> None:
        """Add what is known of a node. Raises OSError if the folder cannot be written to."""
        with self._answers_to(request) as folder:
            safe_files.replace(f"{job}.{node:05d}.json", json.dumps(part).encode(), folder=folder)

    def answers(self, request: HangRequest) -> list[dict[str, Any]]:
        """Return what the nodes have added so far: objects, see ``report.is_answer``."""
        with contextlib.suppress(OSError), self._answers_to(request) as folder:
            names = (name for name in sorted(os.listdir(folder)) if name.endswith(".json"))
            found = (_parsed(name, folder, _MOST_ANSWER_BYTES, dict) for name in names)
            return [answer for answer in found if answer is not None]
        return []

    def report_path(self, request: HangRequest, job: str) -> Path:
        return self.folder / f"{request.name}-{job}.txt"

    def latest_report(self, job: str, since_s: float) -> Path | None:
        """Return the newest report about a job that was written after a time, in seconds since the epoch."""
        with contextlib.suppress(OSError), safe_files.own_folder(self.folder) as folder:
            for name in sorted(os.listdir(folder), reverse=True):
                if name.endswith(f"-{job}.txt"):
                    written_s = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
                    return self.folder / name if written_s >= since_s else None
        return None

    def write_report(self, request: HangRequest, job: str, text: str) -> Path:
        path = self.report_path(request, job)
        with safe_files.own_folder(self.folder) as folder:
            safe_files.replace(path.name, text.encode(errors="backslashreplace"), folder=folder)
        return path

    def close(self, request: HangRequest) -> None:
        """Remove the request with its answers, as far as possible."""
        with contextlib.suppress(OSError), safe_files.own_folder(self.folder) as folder:
            for name in os.listdir(folder):  # of someone who was killed while asking
                if name.startswith(".") and time.time() - os.lstat(name, dir_fd=folder).st_mtime > _FORGOTTEN_S:
                    safe_files.remove(name, folder=folder)
            if request in self._requests(folder, request.job):
                safe_files.remove(_file_of(request.job), folder=folder)
            _remove_answers(request, folder)
        with contextlib.suppress(OSError):  # it has reports
            self.folder.rmdir()

    @contextlib.contextmanager
    def _answers_to(self, request: HangRequest, *, make: bool = False) -> Iterator[int]:
        if not _NAME.fullmatch(request.name):
            raise ValueError(f"the name of a request is of letters, digits, - and _, not {request.name!r}")
        with (
            safe_files.own_folder(self.folder) as folder,
            safe_files.own_folder(request.name, folder=folder, make=make) as answers,
        ):
            yield answers

    @staticmethod
    def _requests(folder: int, job: str) -> list[HangRequest]:
        found = []
        for name in dict.fromkeys((_file_of(job), _file_of(""))):
            request = _parsed(name, folder, _MOST_REQUEST_BYTES, _REQUEST)
            if request is not None and _file_of(request["job"]) == name and _NAME.fullmatch(request["name"]):
                found.append(HangRequest(**request))
        return found


def _file_of(job: str) -> str:
    return f"request-{job}.json" if job else "request.json"


def _remove_answers(request: HangRequest, folder: int) -> None:
    with contextlib.suppress(OSError), safe_files.own_folder(request.name, folder=folder) as answers:
        for name in os.listdir(answers):
            safe_files.remove(name, folder=answers)
        os.rmdir(request.name, dir_fd=folder)


def _parsed(name: str, folder: int, most_bytes: int, shape: json_input.Shape) -> Any:
    """Return the JSON of a file of this user or root; None where there is none."""
    try:
        return json_input.parse(safe_files.read(name, most_bytes, folder=folder, own=True), shape)
    except OSError:
        return None
