"""What ``hpcfsdp plan`` predicts of steps on CPUs, next to their measured time.

The plan needs to know the machine: its links are measured as by ``hpcfsdp doctor``, its other rates by a step that
communicates nothing, with all ranks busy. ``hpcfsdp plan --links`` reads them from the JSON of this benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hpcfsdp.bench import step as steps
from hpcfsdp.bench.harness import Table, Times, in_turn, mib, readable
from hpcfsdp.comm.mpi.node_memory import memory_limit
from hpcfsdp.doctor.speed import measure_links
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.plan.layouts import OPTIMIZERS, Setup
from hpcfsdp.plan.links import Link, Links
from hpcfsdp.plan.meta_trace import trace
from hpcfsdp.plan.step_time import Machine, replay
from hpcfsdp.plan.traced_step import TracedStep
from hpcfsdp.world import World

_COMPUTE, _OPTIMIZER = "forward and backward", "optimizer"


class Compared(NamedTuple):
    """A step of one engine, measured and planned."""

    times: Times
    planned_s: float
    planned_bytes: int  # the peak of a rank


def measure(world: World, *, layers: int, width: int, repeats: int) -> Table:
    """Time steps, and plan them. Collective over all ranks."""
    if world.topology.ranks_per_node is None:
        raise UsageError(f"bench: plan needs as many ranks on each node, not {world.topology}")
    shape = {"layers": layers, "width": width, "rank": world.rank, "ranks": world.size}
    links = measure_links(world)
    ways: dict[str, Callable[[], Any]] = _without_communication(world, layers, width)
    ways |= {engine: steps.training_step(engine, None, **shape) for engine in engines(world)}
    times = in_turn(world.host, ways, repeats=repeats, warmup=3)
    with torch.device("meta"):
        model, ids = steps.make_model(layers, width), steps.make_batch(0).to("meta")
    tokens = steps.BATCH * steps.CONTEXT
    step = trace(model, steps.units(model, Block), lambda model: steps.loss_of(model, ids), name="GPT", tokens=tokens)
    machine = _machine(world, step, times, links)
    found = {}
    for engine in engines(world):
        memory, time = replay(step, _setup(engine, world), machine)
        found[engine] = Compared(times[engine], time.seconds, memory.peak.nbytes)
    rates = {"flops": machine.flops, "memory_bytes_per_s": machine.memory_bytes_per_s}
    return table(found, {"links": links, "compute": rates})


def engines(world: World) -> tuple[str, ...]:
    """Return what is planned: hpcfsdp's engines, also with "node" where ranks are on several nodes."""
    return steps.OWN, steps.OWN_ROWS, *(steps.ON_NODES if world.num_nodes > 1 else ())


def table(found: Mapping[str, Compared], facts: Mapping[str, Any]) -> Table:
    """Return a row for each engine; `facts` of the machine are for ``hpcfsdp plan --links``."""
    rows, as_json = [], {}
    for engine, (times, planned_s, planned_bytes) in found.items():
        ratio = planned_s / times.median_s
        rows.append((engine, readable(times.median_s), readable(planned_s), f"{ratio:.2f}x", mib(planned_bytes)))
        planned = {"planned_s": planned_s, "planned_bytes": planned_bytes}
        as_json[engine] = {"seconds": list(times.seconds), **planned, "ratio": ratio}
    columns = ("engine", "step", "planned", "planned / it", "planned peak of a rank")
    rates = facts["compute"]
    note = (
        f"With all ranks busy, one computes {rates['flops'] / 1e9:.1f} GFLOP/s, and accesses "
        f"{rates['memory_bytes_per_s'] / 1e9:.1f} GB/s of memory."
    )
    return Table(columns, rows, as_json, [note], facts=[("facts", dict(facts))])


def _without_communication(world: World, layers: int, width: int) -> dict[str, Callable[[], Any]]:
    """Return the parts of the floor of ``hpcfsdp bench step``."""
    torch.manual_seed(0)
    model, ids = steps.make_model(layers, width), steps.make_batch(world.rank)
    share = nn.Parameter(torch.zeros(sum(param.numel() for param in model.parameters()) // world.size))
    share.grad = torch.randn_like(share)

    def compute() -> None:
        steps.loss_of(model, ids).backward()
        model.zero_grad()

    return {_COMPUTE: compute, _OPTIMIZER: torch.optim.AdamW([share], lr=1e-4).step}


def _machine(world: World, step: TracedStep, times: Mapping[str, Times], links: Mapping[str, Any]) -> Machine:
    accessed = OPTIMIZERS["adamw"].loop_passes * 4 * step.numel / world.size
    within, between = (
        Link(one["latency_s"], one["bytes_per_s"], "measured") if one else Link(0.0, 1e30, "none")
        for one in (links["within"], links["between"])
    )
    rates = step.flops / times[_COMPUTE].median_s, accessed / times[_OPTIMIZER].median_s
    return Machine(world.local_size, Links(within, between), *rates, on_cpu=True)


def _setup(engine: str, world: World) -> Setup:
    return Setup(
        shards=world.size,
        front="fully_shard" if engine.startswith(steps.OWN_ROWS) else "class",
        nodes_of_shards=world.num_nodes,
        kept_over=world.local_size if engine in steps.ON_NODES else 0,
        node_bytes=memory_limit(),
    )
