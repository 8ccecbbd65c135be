"""Metrics of a run as JSON lines, one record each, in the order of steps.

In a job of a scheduler each record has the number of times that the job was requeued, as "restart".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcfsdp import env


class MetricsFile:
    """Appends records to a JSONL file. For one rank alone."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open the file, and drop records of steps after `resume_step`, from a run that ended later."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= resume_step]
            draft = path.with_name(f".{path.name}.partial")
            draft.write_text("".join(f"{line}\n" for line in kept))
            os.replace(draft, path)
        self._path, self._restarts = path, env.restarts()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record, which has a "step"."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # removed: write to a new file
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 - closed by close()
        self._file.write(json.dumps({**record, **self._restarts}) + "\n")

    def close(self) -> None:
        self._file.close()


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # an incomplete line
