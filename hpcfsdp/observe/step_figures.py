"""The figures of some steps: what a rank adds up, how ranks reduce it in two small messages, and the record of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import UsageError
from hpcfsdp.observe.facts import Facts
from hpcfsdp.observe.records import finite, utc_now
from hpcfsdp.text import json_input
from hpcfsdp.timeline import Interval

SERIES = ("loss", "grad_norm", "lr", "tokens_per_s", "comm_share", "flop_utilisation", "memory_peak_bytes")
"""Figures that checkpoints hold as curves."""

_RANK_BITS = 22  # a rank is packed below a number, so that the maximum of both is the largest number and its rank
_SHARE = 10**6
_NOT_FINITE = ("nan", "inf", "-inf")
_RESERVED = {
    *("step", "kind", "date", "seconds", "tokens_per_s", "flop_utilisation", "comm_share", "comm_share_max"),
    *("busy_s_mean", "busy_s_max", "straggler", "memory", "restart", "steps", "not_finite"),
}


def pack(number: float, rank: int) -> int:
    """Return one int64 of a number >= 0, rounded down to a whole one below 2**41, and a rank."""
    return min(max(int(number), 0), (1 << 63 - _RANK_BITS) - 1) << _RANK_BITS | rank


def unpack(packed: int) -> tuple[int, int]:
    """Return the number and the rank."""
    return packed >> _RANK_BITS, packed & ((1 << _RANK_BITS) - 1)


class Sums:
    """What the program gives in some steps, added up on this rank."""

    def __init__(self, *, keeps_on_device: bool) -> None:
        self._keeps = keeps_on_device  # numbers on a device are read later; otherwise at once, which waits for it
        self.steps = 0
        self.tokens: float | None = None  # None where the program gives none
        self.is_reduced = False
        self._weight = 0.0
        self._sums: dict[str, Any] = {}  # floats, and 0-d float64 tensors on a device
        self._latest: dict[str, Any] = {}
        self._host: torch.Tensor | None = None
        self._on_device: list[str] = []

    def add(self, loss: Any, tokens: float | None, lr: Any, values: Mapping[str, Any], *, reduce: bool) -> None:
        """Add a step; nothing on an error. `loss` counts by its tokens, and is the same on all ranks unless reduced."""
        given = {"loss": loss, "lr": lr, **values}
        numbers = {name: scalar(name, value, self._keeps) for name, value in given.items() if value is not None}
        count = None if tokens is None else float(scalar("tokens", tokens))
        if count is not None and not count >= 0:
            raise UsageError(f"observe: tokens must be >= 0, got {tokens}")
        self.steps += 1
        self.is_reduced = not reduce
        if count is not None:
            self.tokens = (self.tokens or 0.0) + count
        if "loss" in numbers:
            weight = 1.0 if count is None or not reduce else count
            self._weight += weight
            numbers["loss"] = numbers["loss"] * weight
        if "lr" in numbers:
            self._latest["lr"] = numbers.pop("lr")
        for name, number in numbers.items():
            self._sums[name] = self._sums.get(name, 0.0) + number

    @_compat.outside_of_modes
    def send_to_host(self) -> None:
        """Begin to copy what is on a device; ``read`` after that work is done. Not collective."""
        merged = {**self._sums, **self._latest}
        self._on_device = [name for name, value in merged.items() if isinstance(value, torch.Tensor)]
        if self._on_device:
            stacked = torch.stack([merged[name] for name in self._on_device])
            self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self._host.copy_(stacked, non_blocking=True)

    def read(self) -> Totals:
        """Return the numbers."""
        merged = {**self._sums, **self._latest}
        if self._host is not None:
            merged |= dict(zip(self._on_device, self._host.tolist(), strict=True))
        loss = merged.pop("loss", None)
        values = {name: value if name in self._latest else value / self.steps for name, value in merged.items()}
        return Totals(self.steps, loss, self._weight, self.tokens, self.is_reduced, values)


@dataclass(frozen=True)
class Totals:
    """The sums of a rank as numbers."""

    steps: int
    loss: float | None  # the sum of losses times their weights; None where the program gives none
    weight: float
    tokens: float | None
    is_reduced: bool
    values: dict[str, float]  # means over the steps, and the latest learning rate


def scalar(name: str, value: Any, keep_on_device: bool = False) -> Any:
    """Return a number as float; if asked for, a tensor on a device as a 0-d float64 tensor of its own memory."""
    if isinstance(value, torch.Tensor):
        if _compat.local_of(value) is not value:
            raise UsageError(f"observe: {name} is a DTensor, a part of which is on each rank: give .full_tensor()")
        if value.numel() != 1:
            raise UsageError(f"observe: {name} must be one number, but has the shape {tuple(value.shape)}")
        if keep_on_device and accelerator.is_accelerator(value.device):
            return value.detach().reshape(()).double().clone()
        return float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"observe: {name} must be a number, not {type(value).__name__}") from None


def check_names(values: Mapping[str, Any]) -> None:
    """Raise a UsageError for a name that a record has for something else."""
    if taken := [name for name in values if name in _RESERVED]:
        raise UsageError(f"observe: {taken[0]!r} is a figure of every record: give yours another name")


class FigureReduction:
    """The figures of all ranks. Creating one is collective over `comm`, and waits for no rank."""

    def __init__(
        self, comm: Communicator, step: int, sums: Totals, interval: Interval, memory: tuple[int, int], facts: Facts
    ) -> None:
        self.step, self.sums, self._facts, self._size = step, sums, facts, comm.size
        seconds, waited_s = interval.read()
        seconds, waited_s = seconds / sums.steps, waited_s / sums.steps
        share, busy_s = waited_s / seconds, seconds - waited_s
        loss = sums.loss if sums.loss is not None and not sums.is_reduced else 0.0
        tokens = (sums.tokens or 0.0) / facts.copies / sums.steps
        added = [loss, sums.weight, tokens, seconds, share, busy_s]
        now, peak = memory  # bytes
        largest = [pack(number, facts.rank) for number in (busy_s * 1e6, share * _SHARE, peak >> 10, now >> 10)]
        self._added = torch.tensor(added, dtype=torch.float64, device=comm.device)
        self._largest = torch.tensor(largest, dtype=torch.int64, device=comm.device)
        options: dict[str, Any] = {"label": f"figures of step {step}", "async_op": True}
        self._work = comm.all_reduce(self._added, "sum", **options), comm.all_reduce(self._largest, "max", **options)

    def record(self) -> dict[str, Any]:
        """Wait for the other ranks, and return the record, without memory by kind."""
        for work in self._work:
            if work is not None:
                work.wait()
        loss, weight, tokens, seconds, share, busy_s = self._added.tolist()
        seconds, share, busy_s = (each / self._size for each in (seconds, share, busy_s))
        busiest, most_waiting, peak, now = (unpack(each) for each in self._largest.tolist())
        sums, facts = self.sums, self._facts
        record: dict[str, Any] = {"step": self.step, "kind": "train", "date": utc_now()}
        if sums.steps > 1:
            record["steps"] = sums.steps
        if sums.loss is not None:
            record["loss"] = sums.loss / sums.weight if sums.is_reduced else loss / weight if weight else math.nan
        record |= sums.values
        record["seconds"] = round(seconds, 6)
        if sums.tokens is not None:
            record["tokens"], record["tokens_per_s"] = round(tokens), round(tokens / seconds, 1)
            if facts.flops_per_token and facts.peak_flops:
                record["flop_utilisation"] = rounded(tokens / seconds * facts.flops_per_token / facts.peak_flops)
        record["comm_share"], record["comm_share_max"] = rounded(share), most_waiting[0] / _SHARE
        most_busy_s = busiest[0] / 1e6
        record["busy_s_mean"], record["busy_s_max"] = round(busy_s, 6), most_busy_s
        if self._size > 1:
            behind_s = round(max(0.0, most_busy_s - busy_s), 6)
            record["straggler"] = {"rank": busiest[1], "host": facts.hosts.get(busiest[1], ""), "behind_s": behind_s}
        if peak[0]:
            record["memory"] = {"now_bytes": now[0] << 10, "peak_bytes": peak[0] << 10, "peak_rank": peak[1]}
        record, others = finite(record)
        if others:
            record["not_finite"] = others
        return record


class Pipeline:
    """Figures of the last steps on their way to records: to be read from a device, then being reduced."""

    def __init__(self, comm: Communicator, facts: Facts, *, lag: int) -> None:
        self._comm, self._facts = comm, facts
        self._lag = lag  # records whose figures a device may still compute; they are not read yet
        self._unread: deque[tuple[int, Sums, Interval, tuple[int, int], int]] = deque()
        self._reducing: deque[tuple[FigureReduction, int]] = deque()

    def put(
        self, step: int, sums: Sums, interval: Interval, memory: tuple[int, int], gathered: int
    ) -> list[tuple[dict[str, Any], int]]:
        """Take the figures of a record, and return earlier ones that are complete. Collective over the model's ranks.

        `memory` is in bytes, now and at the peak; `gathered` the most bytes of gathered values on this rank, and comes
        back with its record.
        """
        self._unread.append((step, sums, interval, memory, gathered))
        complete = self._finish()
        self._begin(self._lag)
        return complete

    def flush(self) -> list[tuple[dict[str, Any], int]]:
        """Return all that are left; wait for the device and for other ranks. Collective over the ranks of the model."""
        complete = self._finish()
        self._begin(0)
        return complete + self._finish()

    def _begin(self, keep: int) -> None:
        while len(self._unread) > keep:
            step, sums, interval, memory, gathered = self._unread.popleft()
            interval.wait()
            reduction = FigureReduction(self._comm, step, sums.read(), interval, memory, self._facts)
            self._reducing.append((reduction, gathered))

    def _finish(self) -> list[tuple[dict[str, Any], int]]:
        found = [(reduction.record(), gathered) for reduction, gathered in self._reducing]
        self._reducing.clear()
        return found


def rounded(share: float) -> float:
    """Return a share with six significant digits."""
    return float(f"{share:.6g}")


@dataclass
class Curves:
    """Curves of a run: name -> steps and values."""

    curves: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the figures of a record. One that is not finite is in the curve as such; one that is no number is not."""
        step = json_input.step_of(record)
        if step is None:
            return
        memory, others = (record.get(name) for name in ("memory", "not_finite"))
        others = others if isinstance(others, Mapping) else {}
        peak = memory.get("peak_bytes") if isinstance(memory, Mapping) else None
        for name in SERIES:
            value = json_input.number(peak if name == "memory_peak_bytes" else record.get(name))
            if others.get(name) in _NOT_FINITE:
                value = float(others[name])
            elif math.isnan(value):
                continue
            steps, points = self.curves.setdefault(name, ([], []))
            steps.append(step)
            points.append(value)

    def continue_from(self, curves: Mapping[str, tuple[Iterable[Any], Iterable[Any]]], last: int) -> None:
        """Begin with these curves up to the step `last`."""
        for name, (steps, values) in curves.items():
            kept = [(int(step), float(value)) for step, value in zip(steps, values, strict=True) if step <= last]
            self.curves[name] = [step for step, _ in kept], [value for _, value in kept]


def flat_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record by name, as "memory/peak_bytes" for those within; without the step."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            found[f"{prefix}{name}"] = value
    return found
