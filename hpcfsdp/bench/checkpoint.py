"""Saving and loading a sharded model, by the engine and by its peers, on one disk and in one run.

The model is many parameters of one size and nothing else. Peers hold the same values, sharded by FSDP2 over gloo, on
accelerators over their own backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard

from hpcfsdp import accelerator, checkpoint
from hpcfsdp._compat import local_of
from hpcfsdp.bench.harness import Ratio, Table, Times, ratio_cell, time_cells, timed, times_json
from hpcfsdp.bench.step import OWN
from hpcfsdp.checkpoint import CheckpointManager, HDF5Writer
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.world import World

FSDP2, FRESH = "fsdp2", "hpcfsdp, fresh"
RAW, DCP, SAFETENSORS, GATHERED = "raw", "dcp", "safetensors", "h5py on rank 0"
SUMS, COPY = "xxh3", "memcpy"
SAVE, LOAD, LOAD_CACHED, HELD, FLOORS = "save", "load", "load, cached", "training held", "in memory"
COLUMNS = "save columns"
UNIT_TENSORS = 10
"""Parameters of one unit."""
_SETTLE_S = 0.5
_WARMUP = 1
_FILES_AT_ONCE = 7
"""Most files of the model's size in the folder: one for each way to save, a managed one and its successor."""


def measure(world: World, *, nbytes: int, tensors: int, folder: str | os.PathLike[str] | None, repeats: int) -> Table:
    """Save and load in every way in turn, and compare loaded values with saved ones. Collective over all ranks.

    All parameters, float32, have about `nbytes`. Files are made in a new folder in `folder`, by default the current
    one, on the disk that is measured and that all ranks share, and removed again. If the world has accelerators, the
    models lie there, and hpcfsdp is compared with DCP and with one copy to pinned memory alone.
    """
    shape, device = shape_of(nbytes, tensors), world.device
    with scratch(world.host, folder, _FILES_AT_ONCE * tensors * math.prod(shape) * 4) as place:
        group = dist.group.WORLD if accelerator.is_accelerator(device) else dist.new_group(backend="gloo")
        own = make_model(OWN, None, tensors, shape, device)
        peer = make_model(FSDP2, group, tensors, shape, device)
        times = _Savings(world.host, place, own, peer, group, device).run(repeats)
    return table(tensors * math.prod(shape) * 4, tensors, times)


def table(nbytes: int, tensors: int, found: Mapping[str, Mapping[str, Times]]) -> Table:
    """Return a row for each task and way.

    The columns compare its speed with that of raw files, DCP's time with it, and it with hpcfsdp's time. Work in memory
    is compared with hpcfsdp's saving. The tasks are ``SAVE``, ``LOAD`` (the page cache holds nothing of the files,
    where the file system has one), ``LOAD_CACHED``, ``HELD`` (an asynchronous save, until training goes on; and one
    copy of the same bytes), ``FLOORS``, and ``COLUMNS`` (torch.distributed.checkpoint saves as many DTensors, of which
    each rank has columns, with hpcfsdp's writer and its own). `nbytes` are those over all ranks.
    """
    rows = []
    for task, ways in found.items():
        for way, times in ways.items():
            of_raw = f"{100 * ways[RAW].ratio_to(times):.0f}%" if RAW in ways and way != RAW else ""
            against = "" if way == OWN else ratio_cell(times, ways.get(OWN, found[SAVE][OWN]))
            speed = f"{nbytes / times.median_s / 1e9:.2f}"
            rows.append((task, way, *time_cells(times), speed, of_raw, ratio_cell(ways.get(DCP), times), against))
    tasks = {task: times_json(ways) for task, ways in found.items()}
    columns = ("task", "way", "median", "min-max", "GB/s", "of raw", "dcp / it", "it / hpcfsdp")
    ratios = [
        Ratio.of_speeds(f"{task}{', fresh' if way == FRESH else ''}: speed / DCP", ways[way], ways[DCP])
        for task, ways in found.items()
        for way in (OWN, FRESH)
        if {way, DCP} <= set(ways)
    ]
    ratios += [
        Ratio.of_speeds(f"{task}: speed / raw files", ways[OWN], ways[RAW])
        for task, ways in found.items()
        if {OWN, RAW} <= set(ways)
    ]
    if {OWN, COPY} <= set(found.get(HELD, {})):
        ratios.append(Ratio.of_times("training held / one copy", found[HELD][OWN], found[HELD][COPY]))
    return Table(columns, rows, {"bytes": nbytes, "tensors": tensors, **tasks}, ratios=ratios)


def shape_of(nbytes: int, tensors: int) -> tuple[int, int]:
    """Return rows and columns, about as many: `tensors` of this shape in float32 take about `nbytes` bytes."""
    numel = max(1, nbytes // (4 * tensors))
    columns = math.isqrt(numel)
    return numel // columns, columns


def make_model(engine: str, group: Any, tensors: int, shape: tuple[int, int], device: torch.device) -> nn.Module:
    """Return a model of that many parameters, with values that all differ, in units of a few. Collective over `group`.

    `engine` is "fsdp2" or "hpcfsdp".
    """
    generator = torch.Generator().manual_seed(0)
    mesh = DeviceMesh.from_group(group, device.type) if engine == FSDP2 else None
    units: list[nn.Module] = []
    for first in range(0, tensors, UNIT_TENSORS):  # one by one: the whole model need not fit into one process
        unit = nn.Module()
        for index in range(min(UNIT_TENSORS, tensors - first)):
            unit.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape, generator=generator).to(device)))
        units.append(FullyShardedDataParallel(unit, group) if mesh is None else fully_shard(unit, mesh=mesh))
    return nn.ModuleList(units)


@contextlib.contextmanager
def scratch(comm: Communicator, folder: str | os.PathLike[str] | None, nbytes: int) -> Iterator[Path]:
    """Make a folder on a disk with room for so many bytes, removed again at the end. Collective over `comm`."""
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


class _Savings:
    """The ways to save and load a model. All methods are collective over all ranks."""

    def __init__(
        self, comm: Communicator, folder: Path, own: nn.Module, peer: nn.Module, group: Any, device: torch.device
    ) -> None:
        self._comm, self._folder, self._own, self._peer, self._group = comm, folder, own, peer, group
        self._device = device if accelerator.is_accelerator(device) else None
        self._mine = [param.detach().view(-1) for param in own.parameters()]  # this rank's shards
        self._theirs = {name: value.to_local() for name, value in peer.state_dict().items()}
        host = {"device": "cpu", "pin_memory": self._device is not None}
        self._spare = [torch.empty_like(shard, **host) for shard in self._mine]
        self._saved = {id(model): _digest(model) for model in (own, peer)}
        columns = peer.state_dict() if self._device is None else {}  # not compared there
        self._columns = {name: _columns_like(value) for name, value in columns.items()}
        self._manager = CheckpointManager(folder / "managed", keep_last=1, asynchronous=True)
        self._steps = itertools.count(1)

    def run(self, repeats: int) -> dict[str, dict[str, Times]]:
        """Time every way once in each round; each loads the files that its namesake saved."""
        dcp_save = functools.partial(dcp.save, process_group=self._group)
        files = self._path(DCP)
        load = {
            RAW: self._load_raw,
            OWN: lambda: checkpoint.load(self._path(OWN), model=self._own, fresh=False),
            FRESH: lambda: checkpoint.load(self._path(OWN), model=self._own),
            DCP: lambda: dcp.load(
                self._peer.state_dict(), storage_reader=dcp.FileSystemReader(files), process_group=self._group
            ),
            SAFETENSORS: self._load_safetensors,
        }
        save = {
            RAW: self._save_raw,
            OWN: lambda: checkpoint.save(self._path(OWN), model=self._own),
            # The writer of torch forces files to the disk by default.
            DCP: lambda: dcp_save(self._peer.state_dict(), storage_writer=dcp.FileSystemWriter(files)),
            SAFETENSORS: self._save_safetensors,
            GATHERED: self._save_gathered,
        }
        columns = {
            OWN: lambda: dcp_save(self._columns, storage_writer=HDF5Writer(self._path(OWN))),
            DCP: lambda: dcp_save(self._columns, storage_writer=dcp.FileSystemWriter(files)),
        }
        later = {OWN: lambda: self._manager.save(next(self._steps), model=self._own), COPY: self._copy}
        tasks: dict[str, tuple[Callable[[str], object], dict[str, Callable[[], object]]]] = {  # prepare, then time
            SAVE: (self._remove, save),
            LOAD: (self._drop, load),
            LOAD_CACHED: (self._cache, load),
            HELD: (self._settle, later),
            FLOORS: (self._settle, {SUMS: self._sum_up}),
            # Last: the files of loads make way.
            COLUMNS: (self._remove, columns),
        }
        if self._device is not None:
            tasks = {
                task: (prepare, {name: way for name, way in ways.items() if name in (OWN, DCP, COPY)})
                for task, (prepare, ways) in tasks.items()
                if task in (SAVE, LOAD, HELD)
            }
        found: dict[str, dict[str, list[float]]] = {task: {name: [] for name in tasks[task][1]} for task in tasks}
        for count in range(_WARMUP + repeats):
            for task, (prepare, ways) in tasks.items():
                for name, way in ways.items():
                    checks = count == 0 and task == LOAD
                    model = self._own if name in (OWN, FRESH, RAW) else self._peer  # into which a way loads
                    for param in model.parameters() if checks else ():
                        param.detach().zero_()
                    prepare(name)
                    gc.collect()
                    seconds, _ = timed(self._comm, way, finish=self._finish)
                    with raise_together(self._comm) if checks else contextlib.nullcontext():
                        if checks and _digest(model) != self._saved[id(model)]:
                            raise HpcfsdpError(f"{name} has loaded values that differ from the saved ones")
                    if count >= _WARMUP:
                        found[task][name].append(seconds)
        self._manager.close()
        return {task: {name: Times(tuple(s)) for name, s in ways.items()} for task, ways in found.items()}

    def _path(self, name: str) -> Path:
        """Return the path of the file that a way saves, or of its folder with files of all ranks."""
        return self._folder / (OWN if name == FRESH else name).replace(" ", "-")

    def _own_file(self, name: str) -> Path:
        return self._path(name) / f"rank-{self._comm.rank}"

    def _all_files(self, name: str) -> list[Path]:
        path = self._path(name)
        return [path] if path.is_file() else sorted(path.iterdir())

    def _remove(self, name: str) -> None:
        """Remove a way's files, so that no save waits for their removal."""
        if self._comm.rank == 0:
            path = self._path(name)
            if path.is_file():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
            if name in (RAW, SAFETENSORS):
                path.mkdir()
            os.sync()  # nor for data of other ways in the page cache
            time.sleep(_SETTLE_S)  # nor for the disk's own work after a removal
        self._comm.barrier()

    def _drop(self, name: str) -> None:
        """Drop a way's files from the page cache; they have been forced to the disk."""
        for path in self._all_files(name):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _cache(self, name: str) -> None:
        """Read a way's files into the page cache, as far as there is room."""
        buffer = bytearray(1 << 22)
        for path in self._all_files(name) if self._comm.rank == 0 else ():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    def _settle(self, name: str) -> None:
        """Wait for saves in the background."""
        self._manager.wait()

    def _save_raw(self) -> None:
        with open(self._own_file(RAW), "xb", buffering=0) as file:
            disk.write(file.fileno(), [memoryview(shard.numpy()) for shard in self._mine], 0)
            os.fsync(file.fileno())

    def _load_raw(self) -> None:
        offset = 0
        with open(self._own_file(RAW), "rb", buffering=0) as file:
            for shard in self._mine:
                offset += disk.read(file.fileno(), memoryview(shard.numpy()).cast("B"), offset)

    def _save_safetensors(self) -> None:
        from safetensors.torch import save_file

        save_file(self._theirs, self._own_file(SAFETENSORS))
        _force_to_disk(self._own_file(SAFETENSORS))

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
        with h5py.File(self._path(GATHERED), "w") as file:
            for name, value in state.items():
                file.create_dataset(name, data=value.numpy())
        _force_to_disk(self._path(GATHERED))

    def _sum_up(self) -> None:
        """Compute the checksums of a save or a load, and nothing else."""
        for shard in self._mine:
            data = shard.view(torch.uint8).numpy()
            for begin in range(0, data.size, schema.BLOCK_BYTES):
                schema.checksum(data[begin : begin + schema.BLOCK_BYTES])

    def _copy(self) -> None:
        for shard, spare in zip(self._mine, self._spare, strict=True):
            spare.copy_(shard, non_blocking=True)

    def _finish(self) -> None:
        if self._device is not None:
            accelerator.synchronize(self._device)


def _columns_like(value: DTensor) -> DTensor:
    """Return a matrix of the same shape, on the same ranks, of which each has columns."""
    rows, columns = value.shape
    mesh, step = value.device_mesh, -(-columns // value.device_mesh.size())
    own = max(0, min(step, columns - step * mesh.get_local_rank()))
    local = torch.randn(rows, own)
    return DTensor.from_local(local, mesh, [Shard(1)], shape=value.shape, stride=(columns, 1))


def _force_to_disk(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _digest(model: nn.Module) -> list[int]:
    """Return checksums of this rank's part of each parameter."""
    values = [local_of(param.detach()).cpu() for param in model.parameters()]
    return [schema.checksum(np.ascontiguousarray(value.numpy())) for value in values]
