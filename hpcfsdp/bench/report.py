"""Measurements as rows of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcfsdp.bench.collectives import MIB, Measurement
from hpcfsdp.bench.timing import Times

COLLECTIVES = ("collective", "size", "way", "median", "min-max", "against gloo", "against the floor")
BACKENDS = ("engine", "backend", "step", "min-max", "against gloo")


def collective_rows(found: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """One row for each way, with how many times faster than gloo, and how many times slower than memory allows."""
    return [
        (
            one.collective,
            f"{one.nbytes / MIB:g} MiB",
            name,
            readable(times.median_s),
            _spread(times),
            _faster(times, one.ways.get("gloo")),
            f"{times.median_s / one.floor_s:.2f}x" if one.floor_s else "",
        )
        for one in found
        for name, times in one.ways.items()
    ]


def backend_rows(found: Mapping[str, Mapping[str, Times]]) -> list[tuple[str, ...]]:
    """One row for each engine and backend, with how many times faster than gloo."""
    return [
        (engine, name, readable(times.median_s), _spread(times), _faster(times, ways["gloo"]))
        for engine, ways in found.items()
        for name, times in ways.items()
    ]


def collective_json(found: Sequence[Measurement]) -> list[dict[str, object]]:
    return [
        {"collective": one.collective, "bytes": one.nbytes, "floor_s": one.floor_s, "ways": _as_json(one.ways)}
        for one in found
    ]


def backend_json(found: Mapping[str, Mapping[str, Times]]) -> dict[str, object]:
    return {engine: _as_json(ways) for engine, ways in found.items()}


def readable(seconds: float) -> str:
    """0.0015 -> "1.50 ms"."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _spread(times: Times) -> str:
    low, high = times.spread_s
    return f"{readable(low)} - {readable(high)}"


def _faster(times: Times, gloo: Times | None) -> str:
    return f"{gloo.median_s / times.median_s:.2f}x" if gloo is not None and gloo is not times else ""


def _as_json(ways: Mapping[str, Times]) -> dict[str, object]:
    return {name: {"median_s": times.median_s, "seconds": list(times.seconds)} for name, times in ways.items()}
