"""Samples per second of HDF5 files in one process: ThreadedLoader, a DataLoader with spawned workers, raw reads."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hpcfsdp.bench.harness import Ratio, Table, Times, readable
from hpcfsdp.data import HDF5Dataset, ResumableSampler, ThreadedLoader

SHAPE, CHUNK, BATCH = (128, 128), 16, 32  # samples of 64 KiB, chunks of 1 MiB
KINDS = {"contiguous": {}, "chunked": {"chunks": (CHUNK, *SHAPE)}, "gzip": {"chunks": (CHUNK, *SHAPE)}}
KINDS["gzip"] |= {"compression": "gzip", "compression_opts": 1}
_RAW_BYTES = 1 << 20


class Plain(Dataset[torch.Tensor]):
    """A set as programs have it: h5py, opened in each worker."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count, self._rows = path, count, None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._rows is None:
            self._rows = h5py.File(self._path)["x"]
        return torch.from_numpy(self._rows[index])


def measure(*, samples: int, folder: str | None, repeats: int) -> Table:
    """Time one epoch of each way, from the start of the loop on, in turn; with an empty page cache and a full one."""
    rows, ratios, as_json = [], [], {}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for kind, options in KINDS.items():
            path = Path(made, f"{kind}.h5")
            _write(path, samples, options)
            for cache in ("cold", "warm"):
                times = {name: list[tuple[float, float]]() for name in ("hpcfsdp", "DataLoader", "raw read")}
                for _ in range(repeats):
                    for name, found in times.items():
                        if cache == "cold":
                            _drop(path)
                        found.append(_epoch(name, path, samples))
                whole = {name: Times(tuple(seconds for seconds, _ in found)) for name, found in times.items()}
                first = {name: Times(tuple(seconds for _, seconds in found)) for name, found in times.items()}
                own = whole["hpcfsdp"]
                for name, found in whole.items():
                    speeds = sorted(samples / seconds for seconds in found.seconds)
                    ratio = "" if found is own else f"{1 / own.ratio_to(found):.2f}x"
                    shown = f"{samples / found.median_s:.0f}", f"{speeds[0]:.0f} - {speeds[-1]:.0f}"
                    rows.append((f"{kind}, {cache}", name, *shown, readable(first[name].median_s), ratio))
                    as_json[f"{kind}, {cache}, {name}"] = {"seconds": found.seconds, "first_s": first[name].seconds}
                for name in ("DataLoader", "raw read"):
                    ratios.append(Ratio.of_speeds(f"samples/s of {kind}, {cache} / {name}", own, whole[name]))
    columns = ("file", "way", "samples/s", "min-max", "first batch", "hpcfsdp / it")
    return Table(columns, rows, as_json, ratios=ratios, facts=(("samples", samples),))


def _write(path: Path, samples: int, options: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("x", (samples, *SHAPE), np.float32, **options)
        for first in range(0, samples, CHUNK):
            rows[first : first + CHUNK] = np.round(random.normal(size=(min(CHUNK, samples - first), *SHAPE)), 1)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is not on the disk yet stays in the cache


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _epoch(name: str, path: Path, samples: int) -> tuple[float, float]:
    """Return the seconds of an epoch, and those until its first batch."""
    began, first = time.perf_counter(), 0.0
    with contextlib.closing(_batches(name, path, samples)) as batches:
        for _ in batches:
            first = first or time.perf_counter() - began
    return time.perf_counter() - began, first


def _batches(name: str, path: Path, samples: int) -> Iterator[Any]:
    if name == "hpcfsdp":
        dataset = HDF5Dataset(path, "x")
        yield from ThreadedLoader(dataset, batch_sampler=ResumableSampler(dataset, global_batch=BATCH, rank=0, ranks=1))
    elif name == "DataLoader":
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn", "drop_last": True}
        yield from DataLoader(Plain(path, samples), batch_size=BATCH, shuffle=True, **options)
    else:
        buffer, begin = bytearray(_RAW_BYTES), 0
        with path.open("rb", buffering=0) as file:
            while read := os.preadv(file.fileno(), [buffer], begin):
                begin += read
                yield begin
