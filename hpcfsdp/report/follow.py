"""Follows the files of a run that goes on: reads what is new, and keeps the last steps. No collective, no locks."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.catalog import latest, step_of as step_of_file
from hpcfsdp.launch.lock import training_in
from hpcfsdp.report.run_checkpoints import SavedCheckpoint, checkpoints_of
from hpcfsdp.report.run_events import Event
from hpcfsdp.report.run_folder import CONFIG, EVENTS, METRICS, Run, read_config, read_hangs, silent_s_of
from hpcfsdp.report.run_logs import LEVELS, LogNotes
from hpcfsdp.report.series import SeriesBuilder
from hpcfsdp.text.json_input import Tail, text

LAST_RECORDS = 2000
LAST_WARNINGS = 3
MOST_LOGS = 16
"""Logs of the first ranks that are followed: a file system has better things to do than to show a thousand files."""


class Follower:
    """The run in a folder, as far as it has come. The folder may appear later."""

    def __init__(self, folder: Path) -> None:
        """Touches no disk."""
        self.folder = folder
        self._metrics = Tail(folder / METRICS)
        self._events = Tail(folder / EVENTS)
        self._logs: dict[Path, Tail] = {}
        self._records: deque[dict[str, Any]] = deque(maxlen=LAST_RECORDS)
        self._seen: list[Event] = []
        self.warnings: deque[str] = deque(maxlen=LAST_WARNINGS)
        """The last warnings and errors of ranks, with date and rank."""

    def poll(self) -> bool:
        """Read what is new; whether there was anything.

        Raises:
            OSError: a file is there and cannot be read.
        """
        records, rewritten = self._metrics.poll()
        if rewritten:  # by a run that resumes, without the steps that it trains again
            self._records.clear()
        self._records.extend(record for record in records if record.get("kind", "train") == "train")
        events, anew = self._events.poll()
        if anew:
            self._seen.clear()
        self._seen.extend(map(Event.of, events))
        return any((records, events, self._poll_logs(), rewritten, anew))

    def _poll_logs(self) -> bool:
        found = []
        for rank in range(MOST_LOGS):
            path = self.folder / "logs" / f"rank-{rank:04d}.jsonl"
            if path not in self._logs:
                if not path.exists():
                    break
                self._logs[path] = Tail(path, 1 << 16)
            for record in self._logs[path].poll()[0]:
                if record.get("level") in LEVELS:
                    date, place = text(record.get("date"), 30), text(record.get("rank"), 10)
                    found.append(f"{date} rank {place}: {text(record.get('message'), 400)}")
        self.warnings.extend(sorted(found))  # by date
        return bool(found)

    @property
    def has_begun(self) -> bool:
        """Whether there is any record or event."""
        return bool(self._records or self._seen)

    def run(self) -> Run:
        """The run so far, with the last ``LAST_RECORDS`` steps at most, and the checkpoints of its events.

        Raises:
            OSError: a file is there and cannot be read.
        """
        builder = SeriesBuilder()
        for record in self._records:
            builder.add(record)
        holder = training_in(self.folder)
        config, config_text = read_config(self.folder / CONFIG)
        return Run(
            folder=self.folder,
            series=builder.build(),
            held_out=(),
            events=tuple(self._seen),
            checkpoints=self._checkpoints(),
            notes=LogNotes(),
            hangs=read_hangs(self.folder / "hang"),
            holder="" if holder is None else str(holder),
            tallies={},
            silent_s=silent_s_of(self.folder),
            config=config,
            config_text=config_text,
        )

    def _checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        found = tuple(checkpoints_of(self._seen).values())
        if not found:
            path = latest(self.folder / "checkpoints")
            with contextlib.suppress(FileNotFoundError):  # removed since
                if path is not None:
                    found = (SavedCheckpoint(step_of_file(path), str(path), path.stat().st_mtime, present=True),)
        return found
