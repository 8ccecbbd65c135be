"""Saving and loading a sharded model, of the engine and of its peers, on one disk and in one run.

The model is many parameters of one size and nothing else. Peers hold the same values, sharded by FSDP2 over gloo.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard

from hpcfsdp import checkpoint
from hpcfsdp.bench.step import OWN
from hpcfsdp.bench.timing import Times
from hpcfsdp.checkpoint import CheckpointManager
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.world import World

FSDP2 = "fsdp2"
RAW, DCP, SAFETENSORS, GATHERED = "raw", "dcp", "safetensors", "h5py on rank 0"
SUMS, COPY = "xxh3", "memcpy"
SAVE, LOAD, LOAD_CACHED, HELD, FLOORS = "save", "load", "load, cached", "training held", "in memory"
UNIT_TENSORS = 10
"""Parameters of one unit."""
_SETTLE_S = 0.5
_WARMUP = 1
_FILES_AT_ONCE = 7
"""Most files of the model's size that lie in the folder together: one for each way to save, and a managed one with that
which takes its place."""


@dataclass(frozen=True)
class Measurement:
    """What saving and loading took.

    Attributes:
        nbytes: of the parameters, over all ranks.
        tensors: how many parameters.
        times: task -> way -> times. The tasks are ``SAVE``, ``LOAD`` (nothing of the files is in the page cache, where
            the file system knows one), ``LOAD_CACHED``, ``HELD`` (an asynchronous save, until training goes on, and the
            copying of the same bytes once) and ``FLOORS``.
    """

    nbytes: int
    tensors: int
    times: dict[str, dict[str, Times]]


class Way(NamedTuple):
    """One way to do a task, over all ranks.

    Attributes:
        prepare: before each run, outside of the time that counts.
    """

    task: str
    name: str
    prepare: Callable[[], object]
    call: Callable[[], object]


def measure(
    world: World, *, nbytes: int, tensors: int, folder: str | os.PathLike[str] | None, repeats: int
) -> Measurement:
    """Collective over all ranks. Save and load in every way in turn; what is loaded is compared with what was saved.

    Args:
        nbytes: of all parameters, float32; about.
        folder: on the disk that is measured, shared by all ranks; None is the current one. Files are made in a new
            folder there, which is removed again.

    Raises:
        HpcfsdpError: the file system has no room, or a way has loaded something other than what was saved.
    """
    shape = shape_of(nbytes, tensors)
    with scratch(world.host, folder, _FILES_AT_ONCE * tensors * math.prod(shape) * 4) as place, _quiet():
        gloo = dist.new_group(backend="gloo")
        own = make_model(OWN, None, tensors, shape)
        peer = make_model(FSDP2, gloo, tensors, shape)
        contest = _Contest(world.host, place, own, peer, gloo)
        try:
            times = contest.run(repeats)
            contest.close()
        finally:
            del contest, own, peer
            gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models hold it
    return Measurement(tensors * math.prod(shape) * 4, tensors, times)


def shape_of(nbytes: int, tensors: int) -> tuple[int, int]:
    """About square, of so many float32 that `tensors` of this shape take about `nbytes` bytes. Pure."""
    numel = max(1, nbytes // (4 * tensors))
    columns = math.isqrt(numel)
    return numel // columns, columns


class Unit(nn.Module):
    """Parameters that are sharded together."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__()
        for index, param in enumerate(params):
            self.register_parameter(f"p{index}", nn.Parameter(param))


def make_model(engine: str, group: Any, tensors: int, shape: tuple[int, int]) -> nn.Module:
    """Collective over `group`. As many parameters, with values that differ everywhere, in units of a few.

    Args:
        engine: "fsdp2" or "hpcfsdp".
        group: what the engine takes as its process group.
    """
    generator = torch.Generator().manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu") if engine == FSDP2 else None
    units: list[nn.Module] = []
    for first in range(0, tensors, UNIT_TENSORS):  # one by one: the whole model need not fit into one process
        count = min(UNIT_TENSORS, tensors - first)
        unit = Unit(torch.randn(shape, generator=generator) for _ in range(count))
        units.append(FullyShardedDataParallel(unit, group) if mesh is None else fully_shard(unit, mesh=mesh))
    return nn.ModuleList(units)


@contextlib.contextmanager
def scratch(comm: Communicator, folder: str | os.PathLike[str] | None, nbytes: int) -> Iterator[Path]:
    """Collective over `comm`. A new folder on a disk with room for so many bytes, removed again at the end.

    Raises:
        HpcfsdpError: there is no room, or no folder can be made.
    """
    base, made = Path(folder or "."), None
    with raise_together(comm):
        if comm.rank == 0:
            try:
                free = shutil.disk_usage(base).free
                made = tempfile.mkdtemp(prefix="hpcfsdp-bench-", dir=base) if free >= nbytes else None
            except OSError as error:
                raise HpcfsdpError(f"{base}: no folder can be made there: {error.strerror}") from None
            if made is None:
                raise HpcfsdpError(f"{base}: {nbytes} bytes are needed, {free} are free: choose another --folder")
    made = comm.broadcast_object(made)
    try:
        yield Path(made)
    finally:
        if comm.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


class _Contest:
    """The ways to save and load a model, as functions that are collective over all ranks."""

    def __init__(self, comm: Communicator, folder: Path, own: nn.Module, peer: nn.Module, group: Any) -> None:
        self._comm, self._folder, self._own, self._peer, self._group = comm, folder, own, peer, group
        self._mine = [param.detach().view(-1) for param in own.parameters()]  # this rank's shards
        self._theirs = {name: value.to_local() for name, value in peer.state_dict().items()}
        self._spare = [torch.empty_like(shard) for shard in self._mine]
        self._saved = {id(model): _digest(model) for model in (own, peer)}
        self._files = Files()
        self._manager, self._step = CheckpointManager(folder / "managed", keep_last=1, asynchronous=True), 0

    def ways(self) -> list[Way]:
        """Each loads what the one of its name has saved before."""
        calls = {
            SAVE: {
                RAW: self._save_raw,
                OWN: lambda: checkpoint.save(self._path(OWN), model=self._own),
                DCP: self._save_dcp,
                SAFETENSORS: self._save_safetensors,
                GATHERED: self._save_gathered,
            },
            LOAD: {
                RAW: self._load_raw,
                OWN: lambda: checkpoint.load(self._path(OWN), model=self._own),
                DCP: self._load_dcp,
                SAFETENSORS: self._load_safetensors,
            },
            HELD: {OWN: self._save_later, COPY: self._copy},
            FLOORS: {SUMS: self._sum_up},
        }
        calls[LOAD_CACHED] = calls[LOAD]
        prepare = {
            SAVE: self._remove,
            LOAD: self._drop,
            LOAD_CACHED: self._cache,
            HELD: self._settle,
            FLOORS: self._settle,
        }
        return [
            Way(task, name, lambda task=task, name=name: prepare[task](name), call)
            for task in (SAVE, LOAD, LOAD_CACHED, HELD, FLOORS)
            for name, call in calls[task].items()
        ]

    def run(self, repeats: int) -> dict[str, dict[str, Times]]:
        """Collective over all ranks. Every way once in each round."""
        found: dict[str, dict[str, list[float]]] = {}
        for count in range(_WARMUP + repeats):
            for way in self.ways():
                if count == 0 and way.task == LOAD:
                    self._forget(way.name)
                seconds = self._timed(way)
                if count == 0 and way.task == LOAD:
                    self._check(way.name)
                if count >= _WARMUP:
                    found.setdefault(way.task, {}).setdefault(way.name, []).append(seconds)
        return {task: {name: Times(tuple(s)) for name, s in ways.items()} for task, ways in found.items()}

    def close(self) -> None:
        """Collective over all ranks."""
        self._manager.close()

    def _timed(self, way: Way) -> float:
        """Collective over all ranks. Seconds of the slowest rank, which all start together."""
        way.prepare()
        gc.collect()
        self._comm.barrier()
        began_s = time.perf_counter()
        way.call()
        mine = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
        self._comm.all_reduce(mine, "max")
        return float(mine)

    def _path(self, name: str) -> Path:
        """Of what a way saves: one file, or a folder with files of all ranks."""
        return self._folder / name.replace(" ", "-")

    def _own_file(self, name: str) -> Path:
        return self._path(name) / f"rank-{self._comm.rank}"

    def _all_files(self, name: str) -> list[Path]:
        path = self._path(name)
        return [path] if path.is_file() else sorted(path.iterdir())

    def _remove(self, name: str) -> None:
        """Collective over all ranks. Each save makes new files: none is paid for letting go of the old ones."""
        if self._comm.rank == 0:
            path = self._path(name)
            if path.is_file():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
            if name in (RAW, SAFETENSORS):
                path.mkdir()
            os.sync()  # nor for writing out what others have left in the cache
            time.sleep(_SETTLE_S)  # nor for what the disk does when files are gone
        self._comm.barrier()

    def _drop(self, name: str) -> None:
        """Have the system forget what it keeps of a way's files; they have been forced to the disk."""
        for path in self._all_files(name):
            fd = self._files.open_to_read(path)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                self._files.close(fd)

    def _cache(self, name: str) -> None:
        """Have the system keep a way's files in memory, as far as there is room."""
        buffer = bytearray(1 << 22)
        for path in self._all_files(name) if self._comm.rank == 0 else ():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def _settle(self, name: str) -> None:
        """Collective over all ranks. Wait until nothing is written behind the training any more."""
        self._manager.wait()

    def _model(self, name: str) -> nn.Module:
        """What a way loads into."""
        return self._own if name in (OWN, RAW) else self._peer

    def _forget(self, name: str) -> None:
        for param in self._model(name).parameters():
            param.detach().zero_()

    def _check(self, name: str) -> None:
        """Collective over all ranks. Raise if a model does not have the values that were saved."""
        model = self._model(name)
        with raise_together(self._comm):
            if _digest(model) != self._saved[id(model)]:
                raise HpcfsdpError(f"{name} has loaded something other than what it has saved")

    def _save_raw(self) -> None:
        fd = os.open(self._own_file(RAW), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._files.write(fd, [memoryview(shard.numpy()).cast("B") for shard in self._mine], 0)
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _load_raw(self) -> None:
        fd, offset = self._files.open_to_read(self._own_file(RAW)), 0
        try:
            for shard in self._mine:
                offset += self._files.read(fd, memoryview(shard.numpy()).cast("B"), offset)
        finally:
            self._files.close(fd)

    def _save_dcp(self) -> None:
        writer = dcp.FileSystemWriter(self._path(DCP))  # forces files to the disk by default
        dcp.save(self._peer.state_dict(), storage_writer=writer, process_group=self._group)

    def _load_dcp(self) -> None:
        reader = dcp.FileSystemReader(self._path(DCP))
        dcp.load(self._peer.state_dict(), storage_reader=reader, process_group=self._group)

    def _save_safetensors(self) -> None:
        from safetensors.torch import save_file

        path = self._own_file(SAFETENSORS)
        save_file(self._theirs, path)
        fd = self._files.open_to_read(path)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _load_safetensors(self) -> None:
        from safetensors.torch import load_file

        loaded = load_file(self._own_file(SAFETENSORS))
        for name, value in self._theirs.items():
            value.copy_(loaded[name])

    def _save_gathered(self) -> None:
        with FullyShardedDataParallel.state_dict_type(
            self._own, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
        ):
            state = self._own.state_dict()
        if self._comm.rank:
            return
        path = self._path(GATHERED)
        with h5py.File(path, "w") as file:
            for name, value in state.items():
                file.create_dataset(name, data=value.numpy())
        fd = self._files.open_to_read(path)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _save_later(self) -> None:
        self._step += 1
        self._manager.save(self._step, model=self._own)

    def _sum_up(self) -> None:
        """As much as saving or loading computes of checksums, and nothing else."""
        for shard in self._mine:
            data = shard.view(torch.uint8).numpy()
            for begin in range(0, data.size, schema.BLOCK_BYTES):
                schema.checksum(data[begin : begin + schema.BLOCK_BYTES])

    def _copy(self) -> None:
        for shard, spare in zip(self._mine, self._spare, strict=True):
            spare.copy_(shard)


def _digest(model: nn.Module) -> list[int]:
    """Checksums of this rank's part of each parameter."""
    locals_of = [value.to_local() if hasattr(value, "to_local") else value for value in model.parameters()]
    return [schema.checksum(np.ascontiguousarray(value.detach().numpy())) for value in locals_of]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch says that types of state dicts are on their way out
        warnings.simplefilter("ignore", UserWarning)
        yield
