"""What a rank pays at a world size that this machine does not have: time, memory, and objects that ranks exchange.

One process is one rank of up to thousands. It runs the real engine, state dicts and checkpoints, with a communicator
that imagines the other ranks: all of them hold what this one holds. Tensors that it would receive have their real
sizes, and objects that it would gather are unpickled once for each rank. So all work and memory of this rank is real,
and the network is missing: docs/explanation/scaling.md has a model of the network.

Each rank is a process of its own, ``python -m hpcfsdp.bench.scale JSON``, once for times and once for memory.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from hpcfsdp import checkpoint, fsdp
from hpcfsdp.bench.host import shard_rows
from hpcfsdp.bench.new_process import measured_in_new_process
from hpcfsdp.bench.step import OWN, loss_of, make_batch, make_model, wrap
from hpcfsdp.bench.tables import Table, mib, readable
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.checkpoint.saving.content import Content, SaveArguments, bytes_in_memory, collect_content
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile, extent_rows
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.progress import Finished
from hpcfsdp.comm.reduce import OptionalTensors
from hpcfsdp.errors import UsageError
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.launch.topology import Topology
from hpcfsdp.state.tensors import StateTensor
from hpcfsdp.units.group_cache import GroupCache

RANKS_PER_NODE = 8
_SLOW_S = 2.0
"""What takes longer is measured once."""
_WARMUP = 2
"""Steps before the one that counts."""


@dataclass(frozen=True)
class Cost:
    """What one rank pays for one phase.

    Attributes:
        seconds: of this process alone; nothing is sent.
        peak_bytes: the most memory of Python and numpy above that before the phase. Tensors do not count.
        kept_bytes: the part of it that stays.
        gathered_bytes: pickled objects that the rank receives from all ranks, or in a broadcast.
    """

    seconds: float
    peak_bytes: int
    kept_bytes: int
    gathered_bytes: int


@dataclass(frozen=True)
class Rank:
    """The costs of one rank at one world size, by phase."""

    ranks: int
    rank: int
    costs: dict[str, Cost]


@dataclass(frozen=True)
class _Order:
    """The arguments of one process."""

    ranks: int
    rank: int
    layers: int
    width: int
    folder: str
    repeats: int
    traced: bool


class ImaginedCommunicator(FakeCommunicator):
    """As if each of `size` ranks held what this process holds, at the real price for this process.

    Attributes:
        gathered_bytes: of pickled objects received so far.
        of_rank_0: what rank 0 broadcasts where this rank gives None, pickled.
        row: what another rank scatters to this one, if it has as many bytes.
    """

    gathered_bytes = 0
    of_rank_0 = pickle.dumps(None)
    row = torch.empty(0, dtype=torch.uint8)

    def _all_gather_object(self, value: Any) -> list[Any]:
        sent = pickle.dumps(value)
        self.gathered_bytes += self.size * len(sent)
        return [pickle.loads(sent) for _ in range(self.size)]

    def _broadcast_object(self, value: Any, src: int) -> Any:
        sent = self.of_rank_0 if self.rank != src and _is_empty(value) else pickle.dumps(value)
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


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and value[0] is None)


def measure(*, world_sizes: Sequence[int], layers: int, width: int, repeats: int) -> list[Rank]:
    """Not collective, in one process. The first, the middle and the last rank at each world size.

    Raises:
        UsageError: a world size that is less than the ranks of a node, or no multiple of them.
    """
    for ranks in world_sizes:
        if ranks < RANKS_PER_NODE or ranks % RANKS_PER_NODE:
            raise UsageError(f"bench: --world-sizes {ranks} is no multiple of {RANKS_PER_NODE}, the ranks of a node")
    found = []
    for ranks in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            for rank in (0, ranks // 2, ranks - 1):  # the first one writes the file that all of them load
                order = _Order(ranks, rank, layers, width, folder, repeats, traced=False)
                timed, traced = _in_process(order), _in_process(replace(order, traced=True))
                costs = {
                    name: replace(cost, seconds=timed[name].seconds) for name, cost in traced.items() if name in timed
                }
                found.append(Rank(ranks, rank, costs))
    return found


def table(found: Sequence[Rank]) -> Table:
    """For each phase a row for each world size: of the three ranks the one that pays the most."""
    names = dict.fromkeys(phase for one in found for phase in one.costs)
    sizes = dict.fromkeys(one.ranks for one in found)
    by_phase = {
        (phase, ranks): [one.costs[phase] for one in found if one.ranks == ranks and phase in one.costs]
        for phase in names
        for ranks in sizes
    }
    rows = [
        (
            phase,
            str(ranks),
            readable(max(cost.seconds for cost in costs)),
            *(
                mib(max(getattr(cost, kind) for cost in costs))
                for kind in ("peak_bytes", "kept_bytes", "gathered_bytes")
            ),
        )
        for (phase, ranks), costs in by_phase.items()
    ]
    as_json = [asdict(one) for one in found]
    return Table(("phase", "ranks", "time", "peak of metadata", "kept", "objects received"), rows, as_json)


def _in_process(order: _Order) -> dict[str, Cost]:
    costs = measured_in_new_process(__name__, asdict(order), f"rank {order.rank} of {order.ranks}")
    return {name: Cost(**cost) for name, cost in costs.items()}


class _Meter:
    """Measures phases, by name."""

    def __init__(self, comm: ImaginedCommunicator, order: _Order) -> None:
        self._comm, self._order = comm, order
        self.costs: dict[str, Cost] = {}

    def __call__(self, name: str, phase: Callable[[], Any], *, once: bool = False) -> Any:
        """Run a phase, several times for its time unless it works only `once`. Returns its result."""
        before = self._comm.gathered_bytes
        if self._order.traced:
            tracemalloc.start()
            began, _ = tracemalloc.get_traced_memory()
            result = phase()
            kept, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            self.costs[name] = Cost(0.0, peak - began, kept - began, self._comm.gathered_bytes - before)
            return result
        times: list[float] = []
        while not times or (len(times) < self._order.repeats and not once and times[0] < _SLOW_S):
            result = None  # freed before it is made again
            began_s = time.perf_counter()
            result = phase()
            times.append(time.perf_counter() - began_s)
        self.costs[name] = Cost(sorted(times)[len(times) // 2], 0, 0, 0)
        return result


def main(order: _Order) -> None:
    """Be one rank, and write its costs to standard output as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=order.rank, world_size=order.ranks)
    topology = Topology.regular(order.ranks // RANKS_PER_NODE, RANKS_PER_NODE)
    comm = ImaginedCommunicator(order.rank, order.ranks, topology=topology)
    meter = _Meter(comm, order)
    torch.manual_seed(0)
    module = make_model(order.layers, order.width)

    def shard() -> nn.Module:
        GroupCache.current().remember_ranks(comm, tuple(range(order.ranks)))
        GroupCache.current().remember(comm, dist.group.WORLD)
        return wrap(OWN, module, comm, unit=Block)

    model = meter("wrap the model", shard, once=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = make_batch(order.rank)
    step = _step_of(model, optimizer, ids)
    for _ in range(_WARMUP):
        step()
    meter("step", step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # types of state dicts are deprecated
        _state_dicts(meter, model, optimizer)
    _checkpoints(meter, comm, model, optimizer, Path(order.folder, "step.h5"))
    _rows(meter, comm, make_model(order.layers, order.width), ids)
    print(json.dumps({name: asdict(cost) for name, cost in meter.costs.items()}), flush=True)


def _state_dicts(meter: _Meter, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    whole = StateDictType.FULL_STATE_DICT, FullStateDictConfig, FullOptimStateDictConfig
    sharded = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig, ShardedOptimStateDictConfig
    for name, (kind, *configs), options in (
        ("full", whole, {"offload_to_cpu": True, "rank0_only": True}),
        ("sharded", sharded, {"_use_dtensor": True}),
        ("ShardedTensor", sharded, {}),
    ):
        with fsdp.FullyShardedDataParallel.state_dict_type(model, kind, *(config(**options) for config in configs)):
            meter(f"{name} state dict", model.state_dict)
            meter(
                f"{name} optimizer state dict",
                lambda: fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer),
            )


def _checkpoints(
    meter: _Meter, comm: ImaginedCommunicator, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> None:
    given = SaveArguments(model, optimizer)
    collected = meter("plan of a save", lambda: collect_content(comm, given))
    content, tensors = collected.content, collected.tensors
    if comm.rank == 0:
        metadata_image = meter("layout of the file, rank 0", content.metadata_image)
        sums = np.zeros(len(content.plan.blocks), np.uint64)

        meter(
            "table of the file, rank 0",
            lambda plan=content.plan: metadata_image.sealed(
                extent_rows(plan, metadata_image.offsets, [sums.tobytes()]), None
            ),
        )
        if not path.exists():
            _write(path, content, tensors)
    del collected, content, tensors
    index = checkpoint.open_index(path)
    lean = replace(index, rng={kind: value[:0] for kind, value in index.rng.items()})
    comm.of_rank_0 = pickle.dumps((lean, 0))
    comm.row = torch.from_numpy(rng.packed(rng.capture(comm.device)))
    meter("load", lambda: checkpoint.load(path, model=model, optimizer=optimizer))


def _rows(meter: _Meter, comm: ImaginedCommunicator, model: nn.Module, ids: torch.Tensor) -> None:
    """The same with ``fully_shard``, where it differs."""
    meter("fully_shard the model", lambda: shard_rows(model, Block, comm), once=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = _step_of(model, optimizer, ids)
    for _ in range(_WARMUP):
        step()
    meter("step, fully_shard", step)
    meter("plan of a save, fully_shard", lambda: collect_content(comm, SaveArguments(model, optimizer)))


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        loss_of(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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
    temporary.commit(metadata_image, extent_rows(plan, metadata_image.offsets, [sums[order].tobytes()]))


if __name__ == "__main__":
    main(_Order(**json.loads(sys.argv[1])))
