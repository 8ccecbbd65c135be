"""Tensors of a checkpoint as torch tensors over mapped pages: their elements stay in the file until they are read."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from hpcfsdp.checkpoint.convert.output import Step
from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import open_file
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec

_ALIGNMENT = 64


class MappedTensors:
    """Read-only tensors over mapped pages; a context manager, after which they must not be used.

    ``open`` verifies all checksums. Tensors that are not contiguous in this one file are copied into a temporary file.
    """

    def __init__(self, index: CheckpointIndex, specs: Iterable[TensorSpec], spool_folder: Path) -> None:
        """Touches no disk. `spool_folder` has room for the temporary file."""
        self._index, self._specs = index, list(specs)
        self._spool_folder = spool_folder
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._stack = contextlib.ExitStack()

    def open(self, step: Step) -> MappedTensors:
        """Verifies and maps the tensors; raises as ``BlockReader``. Returns the object itself, for ``with``."""
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(BlockReader(self._index))
            fd = stack.enter_context(open_file(self._index.info.path, self._index.footer))
            spool = stack.enter_context(tempfile.TemporaryFile(dir=self._spool_folder))
            end = 0
            for spec in self._specs:
                begin = self._begin_of(spec)
                if begin is None:
                    end += -end % _ALIGNMENT
                    self._places[spec.path] = 1, end
                else:
                    self._places[spec.path] = 0, begin
                for block in reader.blocks(spec.path):
                    if begin is None:
                        disk.write(spool.fileno(), [memoryview(block.view(np.uint8))], end)
                        end += block.nbytes
                    step(block.nbytes)
            self._maps = [_map(fd, stack), _map(spool.fileno(), stack)] if end else [_map(fd, stack)]
            self._stack = stack.pop_all()
        return self

    def __enter__(self) -> MappedTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def tensor(self, path: str) -> torch.Tensor:
        """A tensor by its own path, read-only."""
        spec = self._index.tensors[path]
        dtype = getattr(torch, spec.dtype)
        if not spec.numel:
            return torch.empty(spec.shape, dtype=dtype)
        which, offset = self._places[path]
        pages = self._maps[which]
        with warnings.catch_warnings():  # that its memory cannot be written to
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(pages, dtype=dtype, count=spec.numel, offset=offset).view(spec.shape)

    def release(self) -> None:
        """Drops the pages that have been read from this process's memory."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def _begin_of(self, spec: TensorSpec) -> int | None:
        """The first byte of a tensor in the file; None unless it is contiguous there."""
        rows = self._index.rows_of(spec.path)
        begins = np.unique(rows["byte_offset"].astype(np.int64) - rows["start"].astype(np.int64) * spec.itemsize)
        return int(begins[0]) if len(begins) == 1 and not rows["file"].any() else None


def _map(fd: int, stack: contextlib.ExitStack) -> mmap.mmap:
    pages = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
    stack.callback(_unmap, pages)
    return pages


def _unmap(pages: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a tensor over it is alive: it goes with the last one
        pages.close()
