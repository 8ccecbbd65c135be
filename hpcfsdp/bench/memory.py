"""Peak memory of a training step, of the engine and of stock torch, next to the analytic peak.

hpcfsdp is measured in the processes that the launcher started, since only these are ranks of MPI. Then each of them
starts a new process for every other engine, with empty memory. These processes communicate over gloo. Each is
``python -m hpcfsdp.bench.memory JSON``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.bench.new_process import measured_in_new_process
from hpcfsdp.bench.pss import Sampler, give_back_at_once, sampled, trim
from hpcfsdp.bench.step import NAMES, OWN, STOCK, loss_of, make_batch, make_model, training_step, units
from hpcfsdp.bench.tables import Ratio, Table, mib, peak_cells, peak_json
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.launch import rendezvous
from hpcfsdp.world import World

PLAIN = "plain"
ENGINES = (OWN, PLAIN, *STOCK)
_WHOLE = (PLAIN, "ddp")
_ADAMW = 4
"""Tensors for each parameter: itself, its gradient, and two moments."""
_WARMUP = 3
_STORE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Peak:
    """Bytes for each rank: the sum over all ranks, divided by their number.

    Attributes:
        baseline_bytes: before there is a model.
        steps_bytes: the peak of each step, above the baseline.
        analytic_bytes: the least peak above the baseline, see ``analytic_bytes``.
    """

    engine: str
    baseline_bytes: int
    steps_bytes: Sequence[int]
    analytic_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.steps_bytes)


@dataclass(frozen=True)
class _Order:
    """The arguments of a measurement on one rank."""

    engine: str
    layers: int
    width: int
    repeats: int
    rank: int
    ranks: int
    node: int
    keep_freed: bool
    store: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class _Samples:
    """The result of a measurement. Bytes, for each rank."""

    baseline_bytes: int
    steps_bytes: Sequence[int]
    activation_bytes: int = 0


def measure(world: World, *, layers: int, width: int, repeats: int, keep_freed: bool = False) -> list[Peak]:
    """Collective over all ranks. Measure the engines, one after the other.

    Call it before anything large has been in memory: hpcfsdp comes first, in this process.

    Args:
        repeats: steps that count, after some that do not.
        keep_freed: let the C library keep memory that is freed within a step. By default it goes back to the system
            at once: then the peak is the memory of the engine alone.
    """
    sizes = _unit_sizes(layers, width)
    found: dict[str, _Samples] = {}
    for engine in ENGINES:
        order = _Order(engine, layers, width, repeats, world.rank, world.size, world.node_rank, keep_freed)
        found[engine] = _sample(order, None, world.host) if engine == OWN else _sample_elsewhere(order, world)
    activation_bytes = found[PLAIN].activation_bytes
    return [
        Peak(
            engine,
            samples.baseline_bytes,
            samples.steps_bytes,
            analytic_bytes(sizes, None if engine in _WHOLE else world.size, activation_bytes),
        )
        for engine, samples in found.items()
    ]


def table(found: Sequence[Peak]) -> Table:
    """A row for each engine, as a multiple of the analytic peak, and hpcfsdp's peak as a multiple of its peak."""
    own = next(one for one in found if one.engine == OWN)
    rows = [
        (
            one.engine,
            mib(one.baseline_bytes),
            *peak_cells(one.steps_bytes, one.analytic_bytes),
            "" if one is own else f"{own.peak_bytes / one.peak_bytes:.2f}x",
        )
        for one in found
    ]
    as_json = {one.engine: {**peak_json(one), "hpcfsdp_ratio": own.peak_bytes / one.peak_bytes} for one in found}
    columns = ("engine", "baseline", "peak above it", "min-max of steps", "analytic", "peak / analytic", "hpcfsdp / it")
    ratios = [
        Ratio.of_rounds(f"peak memory of a step / {NAMES[one.engine]}", [own.peak_bytes / one.peak_bytes])
        for one in found
        if one.engine in STOCK
    ]
    return Table(columns, rows, as_json, ratios=ratios)


def analytic_bytes(unit_numels: Sequence[int], ranks: int | None, activation_bytes: int, itemsize: int = 4) -> int:
    """The least peak of a step: parameters, gradients, AdamW's state and activations.

    A sharded rank holds its part of the state, and whole the two largest units and the gradient of the largest one.

    Args:
        ranks: that shard; None for an engine that does not.
    """
    state = _ADAMW * sum(unit_numels) * itemsize
    if ranks is None:
        return state + activation_bytes
    largest = sorted(unit_numels)[-2:]
    return state // ranks + (sum(largest) + largest[-1]) * itemsize + activation_bytes


def saved_bytes(forward: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """Bytes that autograd keeps for backward after `forward`: every storage once, without parameters of `model`."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result  # not earlier: the addresses of freed storages might be used again
    return sum(seen.values())


def _unit_sizes(layers: int, width: int) -> list[int]:
    """Parameter elements of each unit, the root last."""
    with torch.device("meta"):
        model = make_model(layers, width)
    inner = [sum(param.numel() for param in module.parameters()) for module in units(model, Block)]
    return [*inner, sum(param.numel() for param in model.parameters()) - sum(inner)]


def _sample(order: _Order, group: Any, comm: Communicator) -> _Samples:
    """Collective over `comm`. Build the engine, take steps, and sample their memory."""
    if not order.keep_freed:
        give_back_at_once()
    shape = {"layers": order.layers, "width": order.width, "rank": order.rank, "ranks": order.ranks}
    # The first use of torch's kernels takes memory, which does not count.
    training_step(PLAIN, None, **{**shape, "layers": 1})()
    pids = [pid for node, pid in comm.all_gather_object((order.node, os.getpid())) if node == order.node]
    with raise_together(comm):
        sampler = Sampler(pids) if pids[0] == os.getpid() else None  # one for each node
    baseline, _ = sampled(comm, sampler, lambda: None)
    step = training_step(order.engine, group, **shape)
    peaks = [sampled(comm, sampler, step)[1] for _ in range(_WARMUP + order.repeats)][_WARMUP:]
    if sampler is not None:
        sampler.close()
    del step
    trim()  # the next engines need the room
    totals = [sum(values) for values in zip(*comm.all_gather_object([baseline, *peaks]), strict=True)]
    baseline, *peaks = (total // order.ranks for total in totals)
    return _Samples(baseline, tuple(peak - baseline for peak in peaks))


def _sample_elsewhere(order: _Order, world: World) -> _Samples:
    """Collective over all ranks. Call ``_sample`` in new processes, one for each rank."""
    store, address = rendezvous.open_store(world.comm, single_node=world.num_nodes == 1, timeout_s=_STORE_TIMEOUT_S)
    given = {**asdict(order), "store": (address, store.port)}
    with raise_together(world.host):
        return _Samples(**measured_in_new_process(__name__, given, order.engine))


def main(order: _Order) -> None:
    """Collective over the processes of one engine. Measure it and write the samples to standard output as JSON."""
    torch.set_num_threads(1)
    store = dist.TCPStore(*order.store, order.ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.ranks)
    samples = asdict(_sample(order, dist.group.WORLD, TorchGroupCommunicator(dist.group.WORLD)))
    if order.engine == PLAIN:
        model = make_model(order.layers, order.width)
        samples["activation_bytes"] = saved_bytes(lambda: loss_of(model, make_batch(order.rank)), model)
    print(json.dumps(samples), flush=True)
    dist.barrier()
    os._exit(0)  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it


if __name__ == "__main__":
    main(_Order(**json.loads(sys.argv[1])))
