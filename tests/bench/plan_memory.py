"""The peak of a rank in steps on CPUs, next to what ``hpcfsdp plan`` predicts."""

from __future__ import annotations

from hpcfsdp.bench import planned
from hpcfsdp.bench.harness import Table, mib
from hpcfsdp.world import World
from tests.bench.memory import sample
from tests.bench.pss import keep_freed


def measure(world: World, *, layers: int, width: int, repeats: int) -> Table:
    """Sample the memory of steps, and plan them. Collective over all ranks.

    Call it before anything large has been in memory.
    """
    options = {"layers": layers, "width": width, "repeats": repeats, "keep_freed": False}
    options |= {"rank": world.rank, "ranks": world.size, "node": world.node_rank}
    peaks = {engine: max(sample(world.host, None, engine, **options)[1]) for engine in planned.engines(world)}
    keep_freed()
    as_json = planned.measure(world, layers=layers, width=width, repeats=repeats).as_json
    rows = []
    for engine, peak in peaks.items():
        nbytes = as_json[engine]["planned_bytes"]
        as_json[engine]["peak_bytes"] = peak
        rows.append((engine, mib(peak), mib(nbytes), f"{nbytes / peak:.3f}x"))
    return Table(("engine", "peak of a rank", "planned", "planned / it"), rows, as_json)
