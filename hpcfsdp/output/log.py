"""Log lines: rank 0 on stderr, every rank in a JSONL file of its own. Set up by commands, never by the library.

Both go on after a restart: in a job of a scheduler the first line names the job and the number of restarts, and each
JSON record has that number.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from hpcfsdp import env
from hpcfsdp.text import safe_files
from hpcfsdp.text.terminal import shown_lines, shown_message

LOGGER = logging.getLogger("hpcfsdp")


class _PlainFormatter(logging.Formatter):
    """``2026-01-02T03:04:05Z INFO [r003/128 nid001234] checkpoint: saved step=500``"""

    def __init__(self, rank: int, size: int, host: str) -> None:
        super().__init__()
        self._where = f"[r{rank:03d}/{size} {host}]"

    def format(self, record: logging.LogRecord) -> str:
        topic = record.name.removeprefix("hpcfsdp").lstrip(".")
        text = f"{_utc(record)} {record.levelname} {self._where} {topic}: {shown_message(record.getMessage())}"
        return text if not record.exc_info else f"{text}\n{shown_lines(self.formatException(record.exc_info))}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, rank: int, host: str) -> None:
        super().__init__()
        self._where = {"rank": rank, "host": host, **env.restarts()}

    def format(self, record: logging.LogRecord) -> str:
        entry = {"date": _utc(record), "level": record.levelname, **self._where}
        entry |= {"topic": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _StderrHandler(logging.StreamHandler):
    """Writes to the current ``sys.stderr``: a progress bar replaces it, and stays below the lines."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        pass


class _FileHandler(logging.FileHandler):
    """Appends to a file in a folder that others may write to."""

    def _open(self) -> TextIO:
        fd = safe_files.open_to_append(self.baseFilename)
        if safe_files.is_torn(fd):
            os.write(fd, b"\n")
        return os.fdopen(fd, "a", encoding="utf-8")


def set_up(rank: int, size: int, host: str, directory: Path | None = None) -> None:
    """Send what hpcfsdp logs to stderr (rank 0) and to ``directory/rank-<rank>.jsonl`` (every rank)."""
    close()
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    if rank == 0:
        _add(_StderrHandler(), _PlainFormatter(rank, size, host))
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        _add(_FileHandler(directory / f"rank-{rank:04d}.jsonl"), _JsonFormatter(rank, host))
    job = env.scheduler_job()
    if job.number:
        count = f", restart {job.restarts}" if job.restarts.isdecimal() else ""
        LOGGER.getChild("job").info("job %s%s", job.number, count)


def close() -> None:
    """Remove the handlers of ``set_up``."""
    for handler in list(LOGGER.handlers):
        LOGGER.removeHandler(handler)
        handler.close()


def _add(handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    LOGGER.addHandler(handler)


def _utc(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
