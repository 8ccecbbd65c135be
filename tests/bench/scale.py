"""What a rank pays at a world size that this machine does not have: time, memory, and objects that ranks exchange.

One process is one rank of up to thousands. It runs the real engine, state dicts and checkpoints, with a communicator
that imagines the other ranks: all of them hold what this one holds. Tensors that it would receive have their real
sizes, and objects that it would gather are unpickled once for each rank. So all work and memory of this rank is real,
and the network is missing: docs/explanation/scaling.md has a model of the network.

Each rank is a process of its own, ``python -m tests.bench.scale JSON``, once for times and once for memory.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.bench.harness import MIB, Table, mib, readable
from hpcfsdp.bench.step import OWN, loss_of, make_batch, make_model, wrap
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.checkpoint.saving.content import Content, SaveArguments, bytes_in_memory, collect_content
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.progress import Finished
from hpcfsdp.comm.reduce import OptionalTensors
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.launch.topology import Topology
from hpcfsdp.output.figure_file import new_figure, write_figure
from hpcfsdp.state.tensors import StateTensor
from hpcfsdp.units.unit_mesh import GroupCache
from tests.bench.host import shard_rows
from tests.bench.processes import measured_in_new_process

RANKS_PER_NODE = 8
_MARKERS = "osD^vx+*"
_SLOW_S = 2.0
"""What takes longer is measured once."""
_WARMUP = 2
"""Steps before the one that counts."""


class PhaseCost(NamedTuple):
    """What one rank pays for one phase: time of this process alone, as nothing is sent, and memory.

    Attributes:
        peak_bytes: the most memory of Python and numpy above that before the phase, of which `kept_bytes` stay.
            Tensors do not count.
        gathered_bytes: pickled objects that the rank receives from all ranks, or in a broadcast.
    """

    seconds: float
    peak_bytes: int
    kept_bytes: int
    gathered_bytes: int


class RankCosts(NamedTuple):
    """The costs of one rank at one world size, by phase."""

    ranks: int
    rank: int
    costs: dict[str, PhaseCost]


class ImaginedCommunicator(FakeCommunicator):
    """Acts as if each of `size` ranks held what this process holds, at the real price for this process.

    `gathered_bytes` are those of pickled objects received so far. `of_rank_0` is what rank 0 broadcasts where this rank
    gives None, pickled, `row` what another rank scatters to this one, if it has as many bytes.
    """

    gathered_bytes = 0
    of_rank_0 = pickle.dumps(None)
    row = torch.empty(0, dtype=torch.uint8)

    def _all_gather_object(self, value: Any) -> list[Any]:
        sent = pickle.dumps(value)
        self.gathered_bytes += self.size * len(sent)
        return [pickle.loads(sent) for _ in range(self.size)]

    def _broadcast_object(self, value: Any, src: int) -> Any:
        is_empty = value is None or (isinstance(value, tuple) and value[0] is None)
        sent = self.of_rank_0 if self.rank != src and is_empty else pickle.dumps(value)
        self.gathered_bytes += len(sent)
        return value if self.rank == src else pickle.loads(sent)

    def _exchange(
        self, label: str, outputs: OptionalTensors, inputs: OptionalTensors, async_op: bool
    ) -> Finished | None:
        given = self.row if inputs[self.rank] is None else inputs[self.rank]
        for output in outputs:
            if output is not None and output.numel() == given.numel():
                output.detach().view(-1).copy_(given.detach().view(-1))
            elif output is not None:
                output.detach().zero_()  # the other ranks would send other sizes than this one does
        return Finished() if async_op else None


def measure(*, world_sizes: Sequence[int], layers: int, width: int, repeats: int) -> Table:
    """Measure the first, the middle and the last rank at each world size. Not collective, in one process."""
    for ranks in world_sizes:
        if ranks < RANKS_PER_NODE or ranks % RANKS_PER_NODE:
            raise UsageError(f"bench: --world-sizes {ranks} is no multiple of {RANKS_PER_NODE}, the ranks of a node")
    found = []
    for ranks in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            for rank in (0, ranks // 2, ranks - 1):  # the first one writes the file that all of them load
                options = {"layers": layers, "width": width, "folder": folder, "repeats": repeats}
                timed, traced = (costs_of(rank, ranks, traced=flag, **options) for flag in (False, True))
                both = [name for name in traced if name in timed]
                costs = {name: traced[name]._replace(seconds=timed[name].seconds) for name in both}
                found.append(RankCosts(ranks, rank, costs))
    return table(found)


def table(found: Sequence[RankCosts]) -> Table:
    """Return for each phase a row for each world size: of the three ranks the one that pays the most."""
    rows = []
    for phase in dict.fromkeys(phase for one in found for phase in one.costs):
        for ranks in dict.fromkeys(one.ranks for one in found):
            costs = [one.costs[phase] for one in found if one.ranks == ranks and phase in one.costs]
            seconds, *sizes = map(max, zip(*costs, strict=True))
            rows.append((phase, str(ranks), readable(seconds), *map(mib, sizes)))
    as_json = [{**one._asdict(), "costs": {name: cost._asdict() for name, cost in one.costs.items()}} for one in found]
    return Table(("phase", "ranks", "time", "peak of metadata", "kept", "objects received"), rows, as_json)


def costs_of(rank: int, ranks: int, **options: Any) -> dict[str, PhaseCost]:
    """Return the costs of one rank by phase, measured in a new process. `options`: those of ``main``."""
    given = {"rank": rank, "ranks": ranks, **options}
    costs = measured_in_new_process(__name__, given, f"rank {rank} of {ranks}")
    return {name: PhaseCost(*cost) for name, cost in costs.items()}


class _Phases:
    """Measures phases, by name."""

    def __init__(self, comm: ImaginedCommunicator, repeats: int, traced: bool) -> None:
        self._comm, self._repeats, self._traced = comm, repeats, traced
        self.costs: dict[str, PhaseCost] = {}

    def __call__(self, name: str, phase: Callable[[], Any], *, once: bool = False) -> Any:
        """Run a phase, several times for its time unless it works only `once`. Returns its result."""
        before = self._comm.gathered_bytes
        if self._traced:
            tracemalloc.start()
            began, _ = tracemalloc.get_traced_memory()
            result = phase()
            kept, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.costs[name] = PhaseCost(0.0, peak - began, kept - began, self._comm.gathered_bytes - before)
            return result
        times: list[float] = []
        while not times or (len(times) < self._repeats and not once and times[0] < _SLOW_S):
            result = None  # freed before it is made again
            began_s = time.perf_counter()
            result = phase()
            times.append(time.perf_counter() - began_s)
        self.costs[name] = PhaseCost(sorted(times)[len(times) // 2], 0, 0, 0)
        return result


def main(*, ranks: int, rank: int, layers: int, width: int, folder: str, repeats: int, traced: bool) -> None:
    """Be one rank, and print its costs as JSON. The first rank writes a checkpoint into `folder`, and all load it.

    Each phase runs `repeats` times, unless it is `traced`: then its memory is measured, and not its time.
    """
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    comm = ImaginedCommunicator(rank, ranks, topology=Topology.regular(ranks // RANKS_PER_NODE, RANKS_PER_NODE))
    phases = _Phases(comm, repeats, traced)
    torch.manual_seed(0)
    module = make_model(layers, width)

    def shard() -> nn.Module:
        GroupCache.current().remember_ranks(comm, tuple(range(ranks)))
        GroupCache.current().remember(comm, dist.group.WORLD)
        return wrap(OWN, module, comm, unit=Block)

    model = phases("wrap the model", shard, once=True)
    optimizer = _train(phases, "step", model, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # types of state dicts are deprecated
        _state_dicts(phases, model, optimizer)
    _checkpoints(phases, comm, model, optimizer, Path(folder, "step.h5"))
    model = make_model(layers, width)
    phases("fully_shard the model", lambda: shard_rows(model, Block, comm), once=True)
    optimizer = _train(phases, "step, fully_shard", model, rank)
    phases("plan of a save, fully_shard", lambda: collect_content(comm, SaveArguments(model, optimizer)))
    print(json.dumps(phases.costs), flush=True)


def _train(phases: _Phases, name: str, model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """Measure a step, after some for warming up, and return the optimizer."""
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-4), make_batch(rank)

    def step() -> None:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(_WARMUP):
        step()
    phases(name, step)
    return optimizer


def _state_dicts(phases: _Phases, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kinds = stock.StateDictType
    whole = kinds.FULL_STATE_DICT, stock.FullStateDictConfig, stock.FullOptimStateDictConfig
    sharded = kinds.SHARDED_STATE_DICT, stock.ShardedStateDictConfig, stock.ShardedOptimStateDictConfig
    for name, (kind, *configs), options in (
        ("full", whole, {"offload_to_cpu": True, "rank0_only": True}),
        ("sharded", sharded, {"_use_dtensor": True}),
        ("ShardedTensor", sharded, {}),
    ):
        with FullyShardedDataParallel.state_dict_type(model, kind, *(config(**options) for config in configs)):
            phases(f"{name} state dict", model.state_dict)
            states = functools.partial(FullyShardedDataParallel.optim_state_dict, model, optimizer)
            phases(f"{name} optimizer state dict", states)


def _checkpoints(
    phases: _Phases, comm: ImaginedCommunicator, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> None:
    given = SaveArguments(model, optimizer)
    collected = phases("plan of a save", lambda: collect_content(comm, given))
    content, tensors = collected.content, collected.tensors
    if comm.rank == 0:
        image = phases("layout of the file, rank 0", content.metadata_image)
        sums = np.zeros(len(content.plan.blocks), np.uint64)
        phases(
            "table of the file, rank 0",
            lambda plan=content.plan: image.with_footer(plan.extent_rows(image.offsets, [sums.tobytes()]), None),
        )
        if not path.exists():
            _write(path, content, tensors)
    del collected, content, tensors
    index = checkpoint.open_index(path)
    lean = replace(index, rng={kind: value[:0] for kind, value in index.rng.items()})
    comm.of_rank_0 = pickle.dumps((None, (lean, 0)))  # no error, and what it has opened
    comm.row = torch.from_numpy(rng.packed(rng.capture(comm.device)))
    phases("load", lambda: checkpoint.load(path, model=model, optimizer=optimizer))


def _write(path: Path, content: Content, tensors: Sequence[StateTensor]) -> None:
    """Write the file as all ranks would: their shards hold what those of this rank hold, or zeros."""
    plan, metadata_image = content.plan, content.metadata_image()
    own, mine = set(plan.blocks_of(0).tolist()), bytes_in_memory(plan, tensors)

    def bytes_of(index: int) -> np.ndarray:
        if index in own:
            return mine(index)
        tensor, numel = plan.blocks[["tensor", "numel"]][index].item()
        return np.zeros(numel * plan.specs[tensor].itemsize, np.uint8)

    temporary = TemporaryFile(path, "imagined")
    temporary.create(metadata_image.nbytes)
    with temporary.opened() as fd:
        writer = BlockWriter(fd, plan, metadata_image.offsets, bytes_of)
        sums = writer.write(np.arange(len(plan.blocks)))
    order = np.argsort(plan.blocks["rank"], kind="stable")
    temporary.commit(metadata_image, plan.extent_rows(metadata_image.offsets, [sums[order].tobytes()]))


def draw_scale(found: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw time, memory and received objects of each phase over world sizes: `found` is the JSON of ``table``."""
    sizes_in_mib = ("peak_bytes", MIB, "peak of metadata (MiB)"), ("gathered_bytes", MIB, "objects received (MiB)")
    kinds = (("seconds", 1.0, "time (s)"), *sizes_in_mib)
    figure = new_figure(11.0, 4.2)
    sizes = list(dict.fromkeys(one["ranks"] for one in found))
    phases = list(dict.fromkeys(phase for one in found for phase in one["costs"]))
    panels = figure.subplots(1, len(kinds))
    for axes, (kind, unit, label) in zip(panels, kinds, strict=True):
        for place, phase in enumerate(phases):
            costs = [(one["ranks"], one["costs"][phase][kind]) for one in found if phase in one["costs"]]
            most = [max(cost for ranks, cost in costs if ranks == size) / unit for size in sizes]
            style = {"marker": _MARKERS[place % len(_MARKERS)], "color": f"C{place % 10}"}
            axes.plot(sizes, most, label=phase, linewidth=1, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{ranks:,}" for ranks in sizes], fontsize=7, rotation=45)
        axes.set_xlabel("ranks")
        axes.set_title(label, fontsize=9)
        axes.grid(linewidth=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(title, fontsize=8)
    write_figure(figure, path)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
