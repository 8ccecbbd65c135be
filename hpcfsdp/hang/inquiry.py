"""Questions to all nodes of a job, and their answers, as files in the folder of the run.

The folder is the one medium that also a job without progress, a node without its rank 0, and a command on a login node
share. Someone creates ``hang/request-JOB.json``, or ``request.json`` for all jobs. A rank on each node adds what it
knows of its node. Who has asked writes the report, and removes the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "hang"
_FORGOTTEN_S = 120.0
"""A request of this age belongs to someone who has been killed."""


@dataclass(frozen=True)
class Request:
    """A question to the nodes.

    Attributes:
        name: unique, begins with the time.
        job: whose nodes answer; "" for all jobs that use the folder.
        reason: who asks, and why.
        asked_s: seconds since the epoch.
    """

    name: str
    job: str
    reason: str
    asked_s: float


class Inquiry:
    """The requests in the folder of a run. No method is collective."""

    def __init__(self, run_dir: Path) -> None:
        """Touches no disk."""
        self.folder = run_dir / FOLDER

    def ask(self, job: str, reason: str) -> tuple[Request, bool]:
        """Make a request, unless there is one.

        Returns:
            The request, and whether it is a new one.

        Raises:
            OSError: the folder cannot be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        now_s = time.time()
        name = time.strftime("%Y-%m-%dT%H-%M-%SZ-", time.gmtime(now_s)) + secrets.token_hex(2)
        mine = Request(name, job, reason, now_s)
        draft = self.folder / f".{name}"
        draft.write_text(json.dumps(asdict(mine)))
        try:
            while True:
                for found in self.requests(job):
                    if now_s - found.asked_s < _FORGOTTEN_S:
                        return found, False
                try:
                    os.link(draft, self._path(job))  # fails where there is a request, and shows it whole
                except FileExistsError:
                    if not any(now_s - found.asked_s < _FORGOTTEN_S for found in self.requests(job)):
                        self._path(job).unlink(missing_ok=True)
                else:
                    (self.folder / name).mkdir(exist_ok=True)
                    return mine, True
        finally:
            draft.unlink(missing_ok=True)

    def requests(self, job: str) -> list[Request]:
        """The requests that wait for answers of this job; "": those to all jobs alone."""
        found = []
        for path in dict.fromkeys((self._path(job), self._path(""))):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Request(**json.loads(path.read_text())))
        return found

    def claim(self, request: Request, job: str, node: int) -> bool:
        """Whether this process is the first of its node to answer."""
        with contextlib.suppress(OSError):
            (self.folder / request.name).mkdir(exist_ok=True)
            os.close(os.open(self._part(request, job, node).with_suffix(".claim"), os.O_CREAT | os.O_EXCL))
            return True
        return False

    def answer(self, request: Request, job: str, node: int, part: dict[str, Any]) -> None:
        """Add what is known of a node."""
        path = self._part(request, job, node)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(part))
        draft.rename(path)

    def answers(self, request: Request) -> list[dict[str, Any]]:
        """What the nodes have added so far."""
        found = []
        for path in sorted((self.folder / request.name).glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def report_path(self, request: Request, job: str) -> Path:
        """Where the report about a job goes."""
        return self.folder / f"{request.name}-{job}.txt"

    def latest_report(self, job: str, since_s: float) -> Path | None:
        """The newest report about a job that was written after a time, in seconds since the epoch."""
        found = sorted(self.folder.glob(f"*-{job}.txt"))
        with contextlib.suppress(OSError):
            return found[-1] if found and found[-1].stat().st_mtime >= since_s else None
        return None

    def write_report(self, request: Request, job: str, text: str) -> Path:
        """Write the report about a job, and return its path."""
        path = self.report_path(request, job)
        draft = path.with_suffix(".draft")
        draft.write_text(text)
        return draft.rename(path)

    def close(self, request: Request) -> None:
        """Remove the request with its answers."""
        if request in self.requests(request.job):
            self._path(request.job).unlink(missing_ok=True)
        shutil.rmtree(self.folder / request.name, ignore_errors=True)
        with contextlib.suppress(OSError):  # it has reports
            self.folder.rmdir()

    def _path(self, job: str) -> Path:
        return self.folder / (f"request-{job}.json" if job else "request.json")

    def _part(self, request: Request, job: str, node: int) -> Path:
        return self.folder / request.name / f"{job}.{node:05d}.json"
