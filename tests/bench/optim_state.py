"""State dicts of a model and its optimizer, by the engine and by stock torch's FSDP1 over gloo, in one run.

The model is a row of linear layers, each a unit. Both engines have taken the same step, so that their state dicts, and
the state that they load, are compared, too. Their optimizers step flat parameters: with ``use_orig_params=True`` FSDP1
gives wrong values of state that it offloads on the CPU.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.fsdp import StateDictType

import hpcfsdp.fsdp as ours
from hpcfsdp._compat import ShardedTensor
from hpcfsdp.bench.harness import Ratio, Table, Times, time_cells, timed, times_json
from hpcfsdp.bench.step import OWN, wrap
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import whole_box
from hpcfsdp.reshard.sharded_tensors import local_blocks, properties_of
from hpcfsdp.world import World
from tests.bench.pss import Peak, Sampler, give_back_at_once, sampled

FSDP1 = "fsdp1"
ENGINES = (FSDP1, OWN)
MOMENTS = 2
"""State tensors of AdamW for each parameter, of its shape."""
_ROWS = 2
_WARMUP = 1
_MEMORY_CALLS = 3
_TOLERANCE = 1e-5
"""Engines may differ by this part of the sum of absolute values: they add gradients up in different orders."""

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


class Trained(NamedTuple):
    """A model that has taken a step. The methods of `api` are measured."""

    api: type[stock.FullyShardedDataParallel] | type[ours.FullyShardedDataParallel]
    model: nn.Module
    optimizer: torch.optim.Optimizer


class Way(NamedTuple):
    """A call that is measured, and the kind of its state dict; `rank0_only`: only rank 0 gets a full one."""

    call: str
    kind: StateDictType
    rank0_only: bool = False

    def __str__(self) -> str:
        form = "sharded" if self.kind is SHARDED else "full"
        return f"{self.call}, {form}" + (" on rank 0" if self.rank0_only else "")

    @property
    def loads(self) -> bool:
        return self.call == "optim_state_dict_to_load"

    def given(self, trained: Trained) -> dict[str, Any] | None:
        """Return the state dict that the call loads. Collective over the ranks of the model."""
        return Way("optim_state_dict", self.kind)(trained, None) if self.loads else None

    def __call__(self, trained: Trained, given: dict[str, Any] | None) -> dict[str, Any]:
        """Make the call. Collective over the ranks of the model."""
        api, model, optimizer = trained
        # New ones for each call, as torch writes into configurations.
        configs = stock.ShardedStateDictConfig(), stock.ShardedOptimStateDictConfig()
        if self.kind is FULL:
            # Everything is in host memory. FSDP1 cannot offload parameters there: it frees the gathered ones.
            of_optim = stock.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=self.rank0_only)
            configs = stock.FullStateDictConfig(offload_to_cpu=False, rank0_only=self.rank0_only), of_optim
        with api.state_dict_type(model, self.kind, *configs):
            if self.call == "state_dict":
                return model.state_dict()
            if self.loads:
                return api.optim_state_dict_to_load(model, optimizer, given)
            return api.optim_state_dict(model, optimizer)


WAYS = (
    Way("optim_state_dict", FULL, rank0_only=True),
    Way("optim_state_dict", FULL),
    Way("optim_state_dict", SHARDED),
    Way("optim_state_dict_to_load", FULL),
    Way("optim_state_dict_to_load", SHARDED),
    Way("state_dict", FULL, rank0_only=True),
    Way("state_dict", SHARDED),
)
MEMORY_WAYS = tuple(way for way in WAYS if way.loads or (way.rank0_only and way.call == "optim_state_dict"))
"""Calls with an analytic peak of memory."""


def measure(world: World, *, layers: int, width: int, repeats: int) -> Table:
    """Measure calls of all engines in turn: stock torch over gloo, hpcfsdp over the world. Collective over all ranks.

    Memory comes last, because from then on the C library returns freed memory at once, which takes time. State dicts of
    engines that differ are an error, and an engine that loads something other than its own state.
    """
    if world.size == 1:
        raise UsageError("bench: optim-state compares sharded state: start it with mpirun -n 2, or more")
    gloo = dist.new_group(backend="gloo")
    trained = {
        engine: train(engine, None if engine == OWN else gloo, layers=layers, width=width, rank=world.rank)
        for engine in ENGINES
    }
    gc.freeze()  # so that later collections skip the existing objects
    times = {str(way): _times(world.host, way, trained, repeats) for way in WAYS}
    peaks = _peaks(world.host, trained, {"layers": layers, "width": width})
    gc.unfreeze()
    return table(layers * _unit_numel(width), times, peaks)


def table(
    parameters: int, times: Mapping[str, Mapping[str, Times]], peaks: Mapping[tuple[str, str, str], Peak]
) -> Table:
    """Return a row for each call and engine, and FSDP1's time as a multiple of hpcfsdp's; then a table of peak memory.

    `parameters` are elements, `times` those of calls by way and engine, `peaks` those of calls by way, engine, and
    "rank 0" or "others", the highest of them.
    """
    rows = [
        (way, engine, *time_cells(one), f"{engines[FSDP1].ratio_to(one):.2f}x" if engine == OWN else "")
        for way, engines in times.items()
        for engine, one in engines.items()
    ]
    times_of = {way: times_json(engines, engines[OWN]) for way, engines in times.items()}
    memory = [
        {"way": way, "engine": engine, "ranks": ranks, **peak.as_json("calls_bytes")}
        for (way, engine, ranks), peak in peaks.items()
    ]
    as_json = {"parameters": parameters, "times": times_of, "memory": memory}
    peak_rows = [(way, ranks, engine, *peak.cells()) for (way, engine, ranks), peak in peaks.items()]
    columns = ("call", "ranks", "engine", "peak", "min-max of calls", "analytic", "peak / analytic")
    ratios = [Ratio.of_speeds(f"{way}: speed / FSDP1", engines[OWN], engines[FSDP1]) for way, engines in times.items()]
    second = Table(columns, peak_rows, None)
    columns = ("call", "engine", "median", "min-max", "fsdp1 / hpcfsdp")
    return Table(columns, rows, as_json, second=second, ratios=ratios)


def train(engine: str, group: Any, *, layers: int, width: int, rank: int) -> Trained:
    """Return a new model under an engine, after one step of its optimizer. Collective over `group`."""
    torch.manual_seed(0)
    model = wrap(engine, nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), group, unit=nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    api = ours.FullyShardedDataParallel if engine == OWN else stock.FullyShardedDataParallel
    return Trained(api, model, optimizer)


def analytic_bytes(way: Way, *, layers: int, width: int, ranks: int, is_first: bool, itemsize: int = 4) -> int:
    """Return the least peak of a call of `MEMORY_WAYS`.

    Loading: this rank's part of the state, and the two largest parameters. Gathering: the whole state on rank 0, and
    one unit on all ranks.
    """
    state = MOMENTS * layers * _unit_numel(width)
    if way.loads:
        params = sorted([width * width, width] * layers)
        return (math.ceil(state / ranks) + sum(params[-2:])) * itemsize
    return (state * is_first + _unit_numel(width)) * itemsize


def _unit_numel(width: int) -> int:
    return width * width + width


def _times(comm: Communicator, way: Way, trained: Mapping[str, Trained], repeats: int) -> dict[str, Times]:
    """Time the calls, and compare the results of the first ones. Collective over `comm`."""
    given = {engine: way.given(one) for engine, one in trained.items()}
    digests_of: dict[str, dict[str, Any]] = {}
    found: dict[str, list[float]] = {engine: [] for engine in trained}
    for count in range(_WARMUP + repeats):
        for engine, one in trained.items():
            seconds, result = timed(comm, partial(way, one, given[engine]))
            if count == 0:
                digests_of[engine] = dict(digests(result))
            if count >= _WARMUP:
                found[engine].append(seconds)
            del result
            gc.collect()
    first = next(iter(trained))
    with raise_together(comm):
        for engine, one in trained.items():
            if way.loads:
                own = dict(digests(one.optimizer.state_dict()))
                check_same(way, engine, digests_of[engine], "its optimizer", own)
            else:
                check_same(way, first, digests_of[first], engine, digests_of[engine])
    return {engine: Times(tuple(seconds)) for engine, seconds in found.items()}


def _peaks(
    comm: Communicator, trained: Mapping[str, Trained], shape: Mapping[str, int]
) -> dict[tuple[str, str, str], Peak]:
    """Sample the memory of each rank, see ``table``. Collective over `comm`."""
    give_back_at_once()
    with raise_together(comm):
        sampler = Sampler([os.getpid()])
    found = {}
    for way in MEMORY_WAYS:
        for engine, one in trained.items():
            call = partial(way, one, way.given(one))
            baselines, peaks = zip(*(sampled(comm, sampler, call) for _ in range(_MEMORY_CALLS)), strict=True)
            first, *others = comm.all_gather_object([peak - baselines[0] for peak in peaks])
            by_ranks = {"rank 0": first, "others": [max(calls) for calls in zip(*others, strict=True)]}
            for ranks, calls in by_ranks.items():
                analytic = analytic_bytes(way, **shape, ranks=comm.size, is_first=ranks == "rank 0")
                found[str(way), engine, ranks] = Peak(tuple(calls), analytic)
    sampler.close()
    return found


@dataclass(frozen=True)
class Digest:
    """A tensor without its values.

    Attributes:
        shape: of the whole tensor, if it is distributed; this rank stores `boxes` of it.
        size, sum: of absolute values on this rank, and of values, each weighted by its place.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    size: float
    sum: float

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Digest:
        shape, dtype = properties_of(tensor)
        blocks = local_blocks(tensor) if isinstance(tensor, ShardedTensor) else [(whole_box(shape), tensor)]
        size = total = 0.0
        for _, block in blocks:
            flat = block.detach().flatten().double()
            size += float(flat.abs().sum())
            total += float(flat.dot(torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype)))
        return cls(shape, dtype, tuple(box for box, _ in blocks), size, total)

    def agrees_with(self, other: object) -> bool:
        """Return whether they are the same, but for rounding."""
        kind = self.shape, self.dtype, self.boxes
        if not isinstance(other, Digest) or kind != (other.shape, other.dtype, other.boxes):
            return False
        bound = _TOLERANCE * max(self.size, other.size)
        return abs(self.size - other.size) <= bound and abs(self.sum - other.sum) <= bound


def digests(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a state dict by their paths, tensors as their digests, in any order."""
    if isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from digests(inner, f"{path}/{key}")
    else:
        yield path, Digest.of(value) if isinstance(value, torch.Tensor) else value


def check_same(way: Way, who: str, found: Mapping[str, Any], other: str, expected: Mapping[str, Any]) -> None:
    """Raise an HpcfsdpError with the first path where digests differ, if they do."""
    for path in dict.fromkeys((*expected, *found)):
        mine, its = (values.get(path, "nothing") for values in (found, expected))
        if not (mine.agrees_with(its) if isinstance(mine, Digest) else mine == its):
            raise HpcfsdpError(
                f"{way}: at {path} {who} has {mine}, {other} {its}: they did not do the same work, and their times are "
                "not comparable"
            )
