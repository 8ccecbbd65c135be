"""Peak memory of a training step, of the engine and of stock torch, next to the analytic peak.

hpcfsdp is measured in the processes that the launcher started, since only these are ranks of MPI. Then each of them
starts a new process for every other engine, with empty memory. These processes communicate over gloo. Each is
``python -m tests.bench.memory JSON``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.bench.harness import Ratio, Table, mib
from hpcfsdp.bench.step import NAMES, OWN, STOCK, loss_of, make_batch, make_model, training_step, units
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.launch import rendezvous
from hpcfsdp.world import World
from tests.bench.processes import measured_in_new_process
from tests.bench.pss import Peak, Sampler, give_back_at_once, sampled, trim

PLAIN = "plain"
_WHOLE = (PLAIN, "ddp")
_ADAMW = 4
"""Tensors for each parameter: itself, its gradient, and two moments."""
_WARMUP = 3
_STORE_TIMEOUT_S = 300.0


def measure(world: World, *, layers: int, width: int, repeats: int, keep_freed: bool = False) -> Table:
    """Measure the engines, one after the other. Collective over all ranks.

    Call it before anything large has been in memory: hpcfsdp comes first, in this process. Unless `keep_freed`, memory
    that is freed within a step goes back to the system at once: then the peak is the memory of the engine alone.
    """
    sizes = _unit_sizes(layers, width)
    options = {"layers": layers, "width": width, "repeats": repeats, "keep_freed": keep_freed}
    options |= {"rank": world.rank, "ranks": world.size, "node": world.node_rank}
    found, activations = {OWN: sample(world.host, None, OWN, **options)}, {}
    for engine in (PLAIN, *STOCK):
        store, address = rendezvous.open_store(world.comm, single_node=world.num_nodes == 1, timeout_s=_STORE_TIMEOUT_S)
        with raise_together(world.host):
            given = {"address": address, "port": store.port, "engine": engine, **options}
            *found[engine], activations[engine] = measured_in_new_process(__name__, given, engine)
    peaks = {}
    for engine, (baseline, steps) in found.items():
        ranks = None if engine in _WHOLE else world.size
        peaks[engine] = baseline, Peak(tuple(steps), analytic_bytes(sizes, ranks, activations[PLAIN]))
    return table(peaks)


def table(found: Mapping[str, tuple[int, Peak]]) -> Table:
    """Return a row for each engine, as a multiple of the analytic peak, and hpcfsdp's peak as a multiple of its peak.

    `found` has for each engine the bytes before there is a model, and the peaks of steps above these.
    """
    own = found[OWN][1].highest
    ratios = {engine: own / peak.highest for engine, (_, peak) in found.items()}
    rows = [
        (engine, mib(baseline), *peak.cells(), "" if engine == OWN else f"{ratios[engine]:.2f}x")
        for engine, (baseline, peak) in found.items()
    ]
    as_json = {}
    for engine, (baseline, peak) in found.items():
        sizes = {"baseline_bytes": baseline, **peak.as_json("steps_bytes")}
        as_json[engine] = {"engine": engine, **sizes, "hpcfsdp_ratio": ratios[engine]}
    columns = ("engine", "baseline", "peak above it", "min-max of steps", "analytic", "peak / analytic", "hpcfsdp / it")
    shown = [
        Ratio.of_rounds(f"peak memory of a step / {NAMES[engine]}", [ratios[engine]])
        for engine in found
        if engine in STOCK
    ]
    return Table(columns, rows, as_json, ratios=shown)


def analytic_bytes(unit_numels: Sequence[int], ranks: int | None, activation_bytes: int, itemsize: int = 4) -> int:
    """Return the least peak of a step: parameters, gradients, AdamW's state and activations.

    A rank of `ranks` that shard holds its part of the state, and whole the two largest units and the gradient of the
    largest one.
    """
    state = _ADAMW * sum(unit_numels) * itemsize
    if ranks is None:
        return state + activation_bytes
    largest = sorted(unit_numels)[-2:]
    return state // ranks + (sum(largest) + largest[-1]) * itemsize + activation_bytes


def saved_bytes(forward: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """Return what autograd keeps for backward after `forward`, in bytes: every storage once, without parameters."""
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
    """Return the parameter elements of each unit, the root last."""
    with torch.device("meta"):
        model = make_model(layers, width)
    inner = [sum(param.numel() for param in module.parameters()) for module in units(model, Block)]
    return [*inner, sum(param.numel() for param in model.parameters()) - sum(inner)]


def sample(
    comm: Communicator, group: Any, engine: str, *, layers: int, repeats: int, keep_freed: bool, node: int, **shape: Any
) -> tuple[int, list[int]]:
    """Build an engine over `group`, take steps, and sample their memory; `node` is the number of this rank's node.

    Collective over `comm`. Return bytes for each rank, the sum over all ranks divided by their number: before there is
    a model, and the peak of each step above that.
    """
    if not keep_freed:
        give_back_at_once()
    training_step(PLAIN, None, layers=1, **shape)()  # the first use of torch's kernels takes memory: it does not count
    pids = [pid for where, pid in comm.all_gather_object((node, os.getpid())) if where == node]
    with raise_together(comm):
        sampler = Sampler(pids) if pids[0] == os.getpid() else None  # one for each node
    baseline, _ = sampled(comm, sampler, lambda: None)
    step = training_step(engine, group, layers=layers, **shape)
    peaks = [sampled(comm, sampler, step)[1] for _ in range(_WARMUP + repeats)][_WARMUP:]
    if sampler is not None:
        sampler.close()
    del step
    trim()  # the next engines need the room
    totals = [sum(values) for values in zip(*comm.all_gather_object([baseline, *peaks]), strict=True)]
    baseline, *peaks = (total // comm.size for total in totals)
    return baseline, [peak - baseline for peak in peaks]


def main(address: str, port: int, engine: str, **options: Any) -> None:
    """Measure one engine, and print its samples and what autograd keeps for a backward of the plain model, as JSON.

    Collective over the processes of the engine, which meet by the store at the address.
    """
    torch.set_num_threads(1)
    rank, ranks = options["rank"], options["ranks"]
    store = dist.TCPStore(address, port, ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    samples = sample(TorchGroupCommunicator(dist.group.WORLD), dist.group.WORLD, engine, **options)
    activations = 0
    if engine == PLAIN:
        model = make_model(options["layers"], options["width"])
        activations = saved_bytes(lambda: loss_of(model, make_batch(rank)), model)
    print(json.dumps([*samples, activations]), flush=True)
    dist.barrier()
    os._exit(0)  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
