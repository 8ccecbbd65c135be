"""Measurements as rows of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hpcfsdp.bench import checkpoint, host, memory, optim_state, step
from hpcfsdp.bench.collectives import MIB, Measurement
from hpcfsdp.bench.timing import Times

COLLECTIVES = ("collective", "size", "way", "median", "min-max", "against gloo", "against the floor")
BACKENDS = ("engine", "backend", "step", "min-max", "against gloo")
STEP = ("engine", "step", "min-max", "x floor", "hpcfsdp / it")
HOST = ("engine", "per unit", "min-max", "over plain", "min-max", "hpcfsdp / it, over plain")
MEMORY = ("engine", "baseline", "peak above it", "min-max of steps", "analytic", "peak / analytic", "hpcfsdp / it")
OPTIM_STATE = ("call", "engine", "median", "min-max", "fsdp1 / hpcfsdp")
CHECKPOINT = ("task", "way", "median", "min-max", "GB/s", "of raw", "dcp / it", "it / hpcfsdp")
OPTIM_STATE_MEMORY = ("call", "ranks", "engine", "peak", "min-max of calls", "analytic", "peak / analytic")


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


def step_rows(found: step.Measurement) -> list[tuple[str, ...]]:
    """One row for each engine, as a multiple of the floor, and what hpcfsdp takes as a multiple of it."""
    return [
        (
            engine,
            readable(times.median_s),
            _spread(times),
            f"{times.ratio_to(found.times[step.FLOOR]):.2f}x",
            "" if engine == step.OWN else f"{found.times[step.OWN].ratio_to(times):.2f}x",
        )
        for engine, times in found.times.items()
    ]


def host_rows(found: host.Measurement) -> list[tuple[str, ...]]:
    """One row for each engine, for each unit of the model, and what hpcfsdp adds as a multiple of what it adds."""
    over = {engine: found.over_plain(engine) for engine in found.times if engine != host.PLAIN}
    return [
        (
            engine,
            readable(found.per_unit(engine).median_s),
            _spread(found.per_unit(engine)),
            readable(over[engine].median_s) if engine in over else "",
            _spread(over[engine]) if engine in over else "",
            f"{over[step.OWN].ratio_to(over[engine]):.2f}x" if engine in over and engine != step.OWN else "",
        )
        for engine in found.times
    ]


def memory_rows(found: Sequence[memory.Peak]) -> list[tuple[str, ...]]:
    """One row for each engine, as a multiple of what is to be expected, and what hpcfsdp takes as a multiple of it."""
    own = next(one for one in found if one.engine == step.OWN)
    return [
        (
            one.engine,
            _mib(one.baseline_bytes),
            _mib(one.peak_bytes),
            f"{_mib(min(one.steps_bytes))} - {_mib(max(one.steps_bytes))}",
            _mib(one.analytic_bytes),
            f"{one.peak_bytes / one.analytic_bytes:.3f}x",
            "" if one is own else f"{own.peak_bytes / one.peak_bytes:.2f}x",
        )
        for one in found
    ]


def optim_state_rows(found: optim_state.Measurement) -> list[tuple[str, ...]]:
    """One row for each call and engine, with how many times as long as hpcfsdp FSDP1 takes."""
    return [
        (
            way,
            engine,
            readable(times.median_s),
            _spread(times),
            f"{engines[optim_state.FSDP1].ratio_to(times):.2f}x" if engine == step.OWN else "",
        )
        for way, engines in found.times.items()
        for engine, times in engines.items()
    ]


def optim_state_memory_rows(found: Sequence[optim_state.Peak]) -> list[tuple[str, ...]]:
    """One row for each call, kind of rank and engine, as a multiple of what is to be expected."""
    return [
        (
            one.way,
            one.ranks,
            one.engine,
            _mib(one.peak_bytes),
            f"{_mib(min(one.calls_bytes))} - {_mib(max(one.calls_bytes))}",
            _mib(one.analytic_bytes),
            f"{one.peak_bytes / one.analytic_bytes:.3f}x",
        )
        for one in found
    ]


def checkpoint_rows(found: checkpoint.Measurement) -> list[tuple[str, ...]]:
    """One row for each task and way.

    With its speed as a part of that of raw files, how many times as long as it DCP takes, and how many times as long as
    hpcfsdp it takes. What is computed in memory is compared with hpcfsdp's saving.
    """
    return [
        (
            task,
            way,
            readable(times.median_s),
            _spread(times),
            f"{found.nbytes / times.median_s / 1e9:.2f}",
            _percent(ways.get(checkpoint.RAW), times),
            "" if way == checkpoint.DCP else _ratio(ways.get(checkpoint.DCP), times),
            "" if way == step.OWN else _ratio(times, ways.get(step.OWN, found.times[checkpoint.SAVE][step.OWN])),
        )
        for task, ways in found.times.items()
        for way, times in ways.items()
    ]


def collective_json(found: Sequence[Measurement]) -> list[dict[str, object]]:
    return [
        {"collective": one.collective, "bytes": one.nbytes, "floor_s": one.floor_s, "ways": _as_json(one.ways)}
        for one in found
    ]


def backend_json(found: Mapping[str, Mapping[str, Times]]) -> dict[str, object]:
    return {engine: _as_json(ways) for engine, ways in found.items()}


def step_json(found: step.Measurement) -> dict[str, object]:
    own = found.times[step.OWN]
    return {
        engine: {**one, "loss": found.losses[engine], "hpcfsdp_ratio": own.ratio_to(found.times[engine])}
        for engine, one in _as_json(found.times).items()
    }


def host_json(found: host.Measurement) -> dict[str, object]:
    """Seconds for each unit; engines that were skipped with the reason alone."""
    per_unit = _as_json({engine: found.per_unit(engine) for engine in found.times})
    over = {engine: found.over_plain(engine).median_s for engine in found.times}
    measured = {engine: {**one, "median_over_plain_s": over[engine]} for engine, one in per_unit.items()}
    return {**measured, **{engine: {"skipped": reason} for engine, reason in found.skipped.items()}}


def memory_json(found: Sequence[memory.Peak]) -> dict[str, object]:
    own = next(one for one in found if one.engine == step.OWN)
    return {
        one.engine: {
            **asdict(one),
            "peak_bytes": one.peak_bytes,
            "analytic_ratio": one.peak_bytes / one.analytic_bytes,
            "hpcfsdp_ratio": own.peak_bytes / one.peak_bytes,
        }
        for one in found
    }


def optim_state_json(found: optim_state.Measurement) -> dict[str, object]:
    times = {
        way: {
            engine: {**one, "hpcfsdp_ratio": engines[step.OWN].ratio_to(engines[engine])}
            for engine, one in _as_json(engines).items()
        }
        for way, engines in found.times.items()
    }
    peaks = [
        {**asdict(one), "peak_bytes": one.peak_bytes, "analytic_ratio": one.peak_bytes / one.analytic_bytes}
        for one in found.peaks
    ]
    return {"parameters": found.parameters, "times": times, "memory": peaks}


def checkpoint_json(found: checkpoint.Measurement) -> dict[str, object]:
    tasks: dict[str, object] = {task: _as_json(ways) for task, ways in found.times.items()}
    return {"bytes": found.nbytes, "tensors": found.tensors, **tasks}


def readable(seconds: float) -> str:
    """0.0015 -> "1.50 ms"."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _ratio(times: Times | None, other: Times) -> str:
    return "" if times is None else f"{times.ratio_to(other):.2f}x"


def _percent(times: Times | None, other: Times) -> str:
    return "" if times is None or times is other else f"{100 * times.ratio_to(other):.0f}%"


def _mib(nbytes: int) -> str:
    return f"{round(nbytes / MIB, 1) + 0.0:.1f} MiB"  # zero has no sign: a peak may be a page below its baseline


def _spread(times: Times) -> str:
    low, high = times.spread_s
    return f"{readable(low)} - {readable(high)}"


def _faster(times: Times, gloo: Times | None) -> str:
    return f"{gloo.median_s / times.median_s:.2f}x" if gloo is not None and gloo is not times else ""


def _as_json(ways: Mapping[str, Times]) -> dict[str, dict[str, object]]:
    return {name: {"median_s": times.median_s, "seconds": list(times.seconds)} for name, times in ways.items()}
