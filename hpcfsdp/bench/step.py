"""A training step of the engine, of stock torch over gloo, and of no communication at all, in one run.

docs/explanation/benchmarks.md shows its results. A step of a GPT is forward, backward, AdamW, and ``zero_grad``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import hpcfsdp.fsdp as ours
from hpcfsdp import fsdp2, timeline
from hpcfsdp.bench.harness import Ratio, Table, Times, in_turn, ratio_cell, time_cells, times_json
from hpcfsdp.comm import traffic
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.parallel import parallelize
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, VOCABULARY, Block
from hpcfsdp.world import World

FLOOR, OWN, OWN_ROWS = "floor", "hpcfsdp", "hpcfsdp_rows"
"""The last one is the engine under ``hpcfsdp.fully_shard``."""
ON_NODES = ("hpcfsdp_node", "hpcfsdp_rows_node")
"""Both with ``reshard_after_forward="node"``, which makes a difference between nodes."""
STOCK = ("ddp", "fsdp1", "fsdp2")
NAMES = {FLOOR: "the floor", OWN: "FullyShardedDataParallel", OWN_ROWS: "fully_shard"}
NAMES |= {"hpcfsdp_node": "FullyShardedDataParallel, node", "hpcfsdp_rows_node": "fully_shard, node"}
NAMES |= {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2"}
"""Names in the summary of all benchmarks."""
ENGINES = (FLOOR, *STOCK, OWN, OWN_ROWS)
IN_TWO_DIMENSIONS = (FLOOR, "fsdp1", "fsdp2", OWN, OWN_ROWS)
"""Engines that shard tensor-parallel layers."""
CONTEXT, BATCH, HEADS = 64, 2, 8
CPU = torch.device("cpu")
_WIDEST_HEAD = 128


class Moved(NamedTuple):
    """What a step of hpcfsdp moves and holds, as multiples of the bytes of all parameters."""

    between_nodes: float  # sent to other nodes by all ranks, for each node but one
    copied: float  # in collectives on a node's shared memory, for each node
    gathered: float  # of gathered values that a node holds at most; 0 where shards are the gathered values

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(f"{count:.2f}" for count in self)


def measure(world: World, *, layers: int, width: int, repeats: int, tensor: int = 1, fused: bool = False) -> Table:
    """Time steps of all engines: stock torch over gloo, hpcfsdp over the world. Collective over all ranks.

    `tensor` ranks compute with the same sequences. See ``training_step`` for `fused`.
    """
    if world.size % tensor or HEADS % tensor:
        raise UsageError(
            f"bench: --tensor {tensor} has to divide the {world.size} rank(s) and the {HEADS} heads of attention"
        )
    own, gloo = (None, dist.new_group(backend="gloo")) if tensor == 1 else _meshes(world, tensor)
    rank = world.rank if own is None else own.get_local_rank("shard")
    shape = {"layers": layers, "width": width, "tensor": tensor, "fused": fused}
    shape |= {"rank": rank, "ranks": world.size // tensor}
    losses: dict[str, float] = {}
    steps = {}
    for engine in (*(ENGINES if tensor == 1 else IN_TWO_DIMENSIONS), *(ON_NODES if world.host.spans_nodes else ())):
        take = training_step(engine, own if engine.startswith(OWN) else gloo, **shape)
        steps[engine] = lambda engine=engine, take=take: losses.update({engine: float(take())})
    times, found = in_turn(world.host, steps, repeats=repeats, warmup=3), dict(losses)
    with torch.device("meta"):
        nbytes = sum(param.nbytes for param in make_model(layers, width).parameters()) // tensor
    moved = {engine: moved_in(world, take, nbytes) for engine, take in steps.items() if engine.startswith(OWN)}
    return table(times, found, moved)


def moved_in(world: World, take: Callable[[], object], nbytes: int) -> Moved:
    """Count what one step moves, of a model of so many bytes. Collective over all ranks."""
    before = traffic.count.sent_to_nodes, traffic.count.copied
    timeline.recorder = recorder = timeline.Recorder(world.device)
    take()
    timeline.recorder = None
    sent, copied = traffic.count.sent_to_nodes - before[0], traffic.count.copied - before[1]
    counts = torch.tensor([sent, copied, recorder.most_gathered_bytes], dtype=torch.float64)
    world.host.all_reduce(counts, "sum")
    nodes = world.host.topology.num_nodes
    sizes = counts / nbytes / torch.tensor([max(1, nodes - 1), nodes, nodes])
    return Moved(*sizes.tolist())


def table(times: Mapping[str, Times], losses: Mapping[str, float], moved: Mapping[str, Moved]) -> Table:
    """Return a row for each engine, as a multiple of the floor, and hpcfsdp's time as a multiple of it.

    `losses` are those of this rank in the last step: equal but for rounding. The floor learns nothing. `moved` has
    hpcfsdp's engines: gloo does not count.
    """
    own, floor = times[OWN], times[FLOOR]
    rows = [
        (
            engine,
            *time_cells(one),
            f"{one.ratio_to(floor):.2f}x",
            ratio_cell(own, one),
            *(moved[engine].cells if engine in moved else [""] * len(Moved._fields)),
        )
        for engine, one in times.items()
    ]
    as_json = {
        engine: {**one, "loss": losses[engine], **({"moved": moved[engine]._asdict()} if engine in moved else {})}
        for engine, one in times_json(times, own).items()
    }
    ratios = [
        Ratio.of_times(f"{NAMES[engine]}: step time / {NAMES[other]}", times[engine], times[other])
        for engine in (OWN, OWN_ROWS, *ON_NODES)
        for other in (FLOOR, "fsdp2", "ddp")
        if {engine, other} <= set(times)
    ]
    columns = ("engine", "step", "min-max", "x floor", "hpcfsdp / it", "between nodes", "copied", "gathered")
    note = (
        "In parameter sizes: sent to other nodes by all ranks, for each node but one; copied in collectives on a node; "
        "gathered values that a node holds at most. gloo does not count."
    )
    return Table(columns, rows, as_json, [note], ratios=ratios)


def training_step(
    engine: str,
    group: Any,
    *,
    layers: int,
    width: int,
    rank: int,
    ranks: int,
    tensor: int = 1,
    context: int = CONTEXT,
    batch: int = BATCH,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    fused: bool = False,
) -> Callable[[], torch.Tensor]:
    """Return a function that takes one step of a new model and returns the loss. Collective over `group`.

    Args:
        engine: see ``wrap``, or "floor": the bare module, with an optimizer for a rank's share of the parameters.
        group: the engine's process group; a mesh ("shard", "tensor") for tensor-parallel layers.
        rank: chooses the data.
        ranks: that shard the parameters; `tensor` ranks divide each layer.
        context, batch: tokens of a sequence, sequences of a step.
        dtype: of computation and communication; what optimizers step is float32.
        fused: AdamW steps all parameters in one call, and not one by one.
    """
    torch.manual_seed(0)
    with device:
        model = make_model(layers, width, context)
    if engine == FLOOR:
        _keep_first_block(model, tensor)
        model.to(dtype)
        share = nn.Parameter(torch.zeros(sum(param.numel() for param in model.parameters()) // ranks, device=device))
        share.grad = torch.randn_like(share)  # with as many elements as a rank's shards
    else:
        if tensor > 1:
            parallelize(model, group["tensor"])
            group = group["shard"]
        model = wrap(engine, model, group, unit=Block, dtype=dtype, device=device)
    optimizer = torch.optim.AdamW([share] if engine == FLOOR else model.parameters(), lr=1e-4, fused=fused or None)
    zero_grad = model.zero_grad if engine == FLOOR else optimizer.zero_grad
    ids = make_batch(rank, context, batch).to(device)
    casts = engine == "ddp" and dtype != torch.float32  # the others keep parameters of this dtype

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype) if casts else contextlib.nullcontext():
            loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        zero_grad()
        return loss.detach()

    return step


def make_model(layers: int, width: int, context: int = CONTEXT) -> GPT:
    """Return the GPT of ``hpcfsdp train``, with an untied output embedding."""
    heads = max(HEADS, width // _WIDEST_HEAD)
    model = GPT(ModelConfig(layers=layers, width=width, heads=heads, context=context, dropout=0.0))
    model.head = nn.Linear(width, VOCABULARY, bias=False)
    return model


def make_batch(rank: int, context: int = CONTEXT, batch: int = BATCH) -> torch.Tensor:
    """Return a rank's training bytes, int64 (batch, context + 1)."""
    return torch.randint(0, VOCABULARY, (batch, context + 1), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each byte of a batch from the bytes before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings: FSDP1 and types of state dicts are deprecated, and warn of the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def wrap(
    engine: str,
    model: nn.Module,
    group: Any,
    *,
    unit: type[nn.Module],
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> nn.Module:
    """Return the model under an engine. Collective over `group`.

    Args:
        engine: "plain" (the bare model), "ddp", "fsdp1", "fsdp2" or "hpcfsdp"; "fsdp1_orig" and "hpcfsdp_orig" set
            ``use_orig_params``, "hpcfsdp_rows" uses ``fully_shard``; with "_node" each node keeps what it has gathered
            for a forward.
        group: its process group, or a mesh of one dimension.
        unit: the class of the modules that become units.
        dtype: in which units compute, and send values and gradients; "plain" and "ddp" do so in that of the model.
    """
    name, *styles = engine.split("_")
    mesh = group if isinstance(group, DeviceMesh) else None
    where = {"process_group": group} if mesh is None else {"device_mesh": mesh}
    narrow = None if dtype == torch.float32 else dtype
    with quiet():
        if name == "ddp":
            return DistributedDataParallel(model, process_group=group)
        if name == "fsdp2" or "rows" in styles:
            if name == "fsdp2" and mesh is None:
                mesh = DeviceMesh.from_group(group, device.type)
            rows: dict[str, Any] = {"mesh": mesh, "mp_policy": stock.MixedPrecisionPolicy(param_dtype=narrow)}
            for module in units(model, unit):
                kept = {"reshard_after_forward": "node"} if "node" in styles else {}
                (stock if name == "fsdp2" else fsdp2).fully_shard(module, **rows, **kept)
            (stock if name == "fsdp2" else fsdp2).fully_shard(model, **rows)
            return model
        mixed = None if narrow is None else stock.MixedPrecision(param_dtype=narrow)
        policy = ModuleWrapPolicy({unit})
        options = {**where, "auto_wrap_policy": policy, "device_id": device, "use_orig_params": "orig" in styles}
        if "node" in styles:
            options["reshard_after_forward"] = "node"
        if name in ("fsdp1", OWN):
            return (ours if name == OWN else stock).FullyShardedDataParallel(model, **options, mixed_precision=mixed)
    return model


def units(model: nn.Module, unit: type[nn.Module]) -> list[nn.Module]:
    """Return the modules that become units, without the model itself."""
    return [module for module in model.modules() if isinstance(module, unit)]


def _meshes(world: World, tensor: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return a mesh ("shard", "tensor") over the world, and the same one over gloo. Collective over all ranks."""
    mesh = world.mesh(shard=None, tensor=tensor)
    groups = []
    for dimension, size in enumerate(mesh.shape):
        for line in mesh.mesh.movedim(dimension, -1).reshape(-1, size).tolist():
            group = dist.new_group(line, backend="gloo")
            if world.rank in line:
                groups.append(group)
    return mesh, DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _keep_first_block(model: GPT, tensor: int) -> None:
    """Keep one rank's part of each tensor-parallel layer."""
    for block in model.blocks:
        layers = (block.attention.qkv, 0), (block.attention.merge, 1), (block.up, 0), (block.down, 1)
        for layer, dimension in layers:
            layer.weight = nn.Parameter(layer.weight.detach().chunk(tensor, dimension)[0].contiguous())
            if dimension == 0:
                layer.bias = nn.Parameter(layer.bias.detach().chunk(tensor)[0].contiguous())
