"""Checkpoints of a run: those that its events name, and those in its folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hpcfsdp.checkpoint.format.catalog import checkpoint_files, step_of
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.errors import CheckpointError
from hpcfsdp.report.run_events import Event
from hpcfsdp.text.json_input import seconds_of

MOST_OPENED = 10
"""How many of the newest files are opened for their facts."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run has written.

    Attributes:
        path: as the event has it, or in the run's folder.
        seconds: when it was written, seconds since the epoch; NaN where unknown.
        nbytes: None where unknown.
        took_s, held_s: how long it took, and how long training was held for it; None where unknown.
        present: whether the file is there.
        world_size: ranks that wrote it; None where the file was not opened.
        fault: why it cannot be loaded, or "". Only the newest files are opened, and no tensors are read.
    """

    step: int
    path: str
    seconds: float = math.nan
    nbytes: int | None = None
    took_s: float | None = None
    held_s: float | None = None
    asynchronous: bool | None = None
    present: bool = False
    world_size: int | None = None
    fault: str = ""


def find_checkpoints(folder: Path, events: Iterable[Event]) -> tuple[SavedCheckpoint, ...]:
    """The checkpoints of a run by step; one file for each path, as in its last event.

    Raises:
        OSError: the folder of checkpoints cannot be read.
    """
    found = checkpoints_of(events, folder)
    for path in checkpoint_files(folder / "checkpoints"):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed since, by a training that keeps the last ones
            continue
        known = found.get(_key(str(path)), SavedCheckpoint(step_of(path), str(path), status.st_mtime))
        found[_key(str(path))] = replace(known, nbytes=known.nbytes or status.st_size, present=True, path=str(path))
    ordered = sorted(found.values(), key=lambda one: (one.step, 0.0 if math.isnan(one.seconds) else one.seconds))
    present = [place for place, one in enumerate(ordered) if one.present]
    for place in present[-MOST_OPENED:]:
        ordered[place] = _opened(ordered[place], folder)
    return tuple(ordered)


def checkpoints_of(events: Iterable[Event], folder: Path | None = None) -> dict[str, SavedCheckpoint]:
    """The checkpoints of events, by file name: one for each, as in its last event.

    Args:
        folder: of the run, to look whether each file is there; None not to look.
    """
    found: dict[str, SavedCheckpoint] = {}
    for event in events:
        if event.kind == "checkpoint" and event.step is not None:
            nbytes, name = event.number("bytes"), event.text("path")
            found[_key(name) or f"step {event.step}"] = SavedCheckpoint(
                step=event.step,
                path=name,
                seconds=event.seconds,
                nbytes=None if nbytes is None else int(nbytes),
                took_s=event.number("seconds"),
                held_s=event.number("held_s"),
                asynchronous=event.facts.get("asynchronous"),
                present=folder is not None and bool(name) and _where(folder, name).is_file(),
            )
    return found


def _key(path: str) -> str:
    """The name of the file: runs that moved to another folder keep it."""
    return os.path.basename(path)


def _where(folder: Path, path: str) -> Path:
    """The file itself; where it is not there, the one of that name in the run's folder, which may have been copied."""
    here = folder / "checkpoints" / os.path.basename(path)
    return Path(path) if os.path.isfile(path) or not here.is_file() else here


def _opened(one: SavedCheckpoint, folder: Path) -> SavedCheckpoint:
    try:
        info = open_index(_where(folder, one.path)).info
    except CheckpointError as error:
        return replace(one, fault=str(error))
    written = seconds_of(info.date)
    return replace(one, world_size=info.world_size, seconds=written if math.isnan(one.seconds) else one.seconds)
