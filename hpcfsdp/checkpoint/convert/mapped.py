"""Tensors of a checkpoint as torch tensors whose elements stay in the file until somebody reads them."""

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

from hpcfsdp.checkpoint.access import opened, seal_of
from hpcfsdp.checkpoint.convert.output import Step
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointReplacedError

_ALIGNMENT = 64


class MappedTensors:
    """Read-only tensors over the pages of a file; a context manager, after which they must not be touched.

    All bytes are checked against their checksums on entry. A tensor whose bytes do not lie in order in this one file
    is put into a temporary file then.
    """

    def __init__(self, index: CheckpointIndex, specs: Iterable[TensorSpec], spool_folder: Path, files: Files) -> None:
        """Touches no disk.

        Args:
            specs: the tensors that will be asked for.
            spool_folder: where there is room for a temporary file.
        """
        self._index, self._specs, self._files = index, list(specs), files
        self._spool_folder = spool_folder
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._stack = contextlib.ExitStack()

    def open(self, step: Step) -> MappedTensors:
        """Check and map the tensors; the object itself, to be used in ``with``.

        Raises:
            CheckpointCorruptError: the bytes are not those that were written.
            CheckpointReplacedError: the file is another one by now.
        """
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(BlockReader(self._index, self._files))
            fd = stack.enter_context(opened(self._files, self._index.info.path))
            if seal_of(self._files, fd, self._index.info.path) != self._index.seal:
                raise CheckpointReplacedError(f"{self._index.info.path}: has been replaced since it was opened")
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
                        self._files.write(spool.fileno(), [memoryview(block.view(np.uint8))], end)
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
        """A tensor, by its own path; not to be written to."""
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
        """Let go of the pages that have been read. They come back when they are read again."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def _begin_of(self, spec: TensorSpec) -> int | None:
        """Where a tensor begins in the file, if all of it follows there in order."""
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
