"""The numbers of a run by step, as columns (of 100,000 steps a few megabytes), and curves thinned for a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfsdp.text.json_input import number, seconds_of, step_of, text

NESTED = ("memory", "straggler")  # objects in a record, whose numbers become columns: "memory.peak_bytes"
KNOWN = frozenset(
    "loss grad_norm lr seconds tokens tokens_per_s bytes_per_s flop_utilisation comm_share comm_share_max busy_s_mean "
    "busy_s_max restart straggler.rank straggler.behind_s memory.now_bytes memory.peak_bytes memory.peak_rank "
    "memory.parameters_bytes memory.gradients_bytes memory.optimizer_bytes memory.gathered_bytes "
    "memory.checkpoints_bytes memory.capacity_bytes".split()
)
MOST_OTHERS = 40  # columns beside the known ones


@dataclass(frozen=True)
class Series:
    """Records of steps."""

    steps: np.ndarray  # int64, increasing
    seconds: np.ndarray  # when each step was recorded, seconds since the epoch, float64; NaN where unknown
    # by name, float64 with a value for each step; NaN where a record has none, or none that is finite
    columns: Mapping[str, np.ndarray]
    not_finite: np.ndarray  # steps whose loss was recorded and is not finite, int64
    hosts: Mapping[int, str] = field(default_factory=dict)  # the host of each rank that was a straggler
    replaced: int = 0  # records of steps that occur again later; the later ones count

    def __len__(self) -> int:
        return len(self.steps)

    def column(self, name: str) -> np.ndarray:
        """Return a value for each step, NaN where there is none."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found

    def points(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps with a value of a column, and the values."""
        values = self.column(name)
        known = np.isfinite(values)
        return self.steps[known], values[known]

    def has(self, name: str) -> bool:
        """Return whether any step has a value."""
        return bool(np.isfinite(self.column(name)).any())

    def last(self, name: str) -> float | None:
        """Return the last value of a column; None without one."""
        _, values = self.points(name)
        return float(values[-1]) if len(values) else None

    @property
    def ends_not_finite(self) -> bool:
        """Whether the last step's loss is not finite."""
        return bool(len(self.not_finite)) and bool(self.not_finite[-1] == self.steps[-1])

    @property
    def others(self) -> list[str]:
        """Columns that only this run's program knows, in the order of their first values."""
        return [name for name in self.columns if name not in KNOWN and self.has(name)]


class SeriesBuilder:
    """Collects records."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._seconds: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._not_finite: list[bool] = []
        self._hosts: dict[int, str] = {}
        self._num_others = 0

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add a record; False if it has no step."""
        step = step_of(record)
        if step is None:
            return False
        self._seconds.append(seconds_of(record.get("date")))
        self._not_finite.append("loss" in record and math.isnan(number(record["loss"])))
        for name, value in record.items():
            if name in NESTED and isinstance(value, dict):
                for inner, part in value.items():
                    self._put(f"{name}.{inner}", part)
            elif name != "step":
                self._put(name, value)
        straggler = record.get("straggler")
        if isinstance(straggler, dict) and isinstance(straggler.get("host"), str):
            rank = number(straggler.get("rank"))
            if not math.isnan(rank):
                self._hosts[int(rank)] = text(straggler["host"], 100)
        self.steps.append(step)
        return True

    def _put(self, name: str, value: Any) -> None:
        found = number(value)
        if math.isnan(found):
            return
        column = self._columns.get(name)
        if column is None:
            if name not in KNOWN:
                if self._num_others == MOST_OTHERS:
                    return
                self._num_others += 1
            column = self._columns[name] = []
        if len(column) <= len(self.steps):  # the record has not given it under another name
            column += [math.nan] * (len(self.steps) - len(column))
            column.append(found)

    def build(self) -> Series:
        """Return the series of all records so far."""
        count = len(self.steps)
        steps = np.array(self.steps, np.int64)
        order = np.argsort(steps, kind="stable")
        kept = order[np.append(np.diff(steps[order]) > 0, True)] if count else order  # the last of each step
        columns = {
            name: np.array(column + [math.nan] * (count - len(column)), np.float64)[kept]
            for name, column in self._columns.items()
        }
        return Series(
            steps=steps[kept],
            seconds=np.array(self._seconds, np.float64)[kept],
            columns=columns,
            not_finite=steps[kept][np.array(self._not_finite, bool)[kept]],
            hosts=dict(self._hosts),
            replaced=count - len(kept),
        )


BINS = 300  # a picture is about as many pixels wide


def thinned(steps: np.ndarray, values: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest point of each bin, in the order of steps; all of a short curve."""
    if len(steps) <= 2 * bins:
        return steps, values
    kept = []
    for part in np.array_split(np.arange(len(steps)), bins):
        here = values[part]
        kept += sorted({int(part[np.argmin(here)]), int(part[np.argmax(here)])})
    return steps[kept], values[kept]


def averaged(steps: np.ndarray, values: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of each bin, at its last step; all of a short curve. `values` may have further columns."""
    if len(steps) <= bins:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), bins)
    return np.array([steps[part[-1]] for part in parts]), np.array([values[part].mean(axis=0) for part in parts])


def spaced(steps: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Return marks without those that would lie on top of another one."""
    if len(steps) < 2:
        return steps
    width = max((int(steps.max()) - int(steps.min())) / bins, 1e-9)
    _, first = np.unique(((steps - steps.min()) / width).astype(np.int64), return_index=True)
    return steps[first]
