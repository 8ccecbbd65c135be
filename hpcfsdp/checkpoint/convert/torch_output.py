"""Write checkpoints in torch's formats: a file of ``torch.save``, or a folder of ``torch.distributed.checkpoint``."""

import contextlib
import logging
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hpcfsdp.checkpoint.convert.output import MODEL, OPTIM, Selection, Step, new_files, new_folder
from hpcfsdp.checkpoint.convert.source import STEP_KEY
from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import open_file
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointError

METADATA_NAME = ".metadata"

_ALIGNMENT = 64
_PIECE_BYTES = 16 << 20


class MappedTensors:
    """Read-only tensors over mapped pages. They must not be used after the context that ``open`` returns."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._maps: list[mmap.mmap] = []
        self._places: dict[str, tuple[int, int]] = {}

    def open(self, paths: Iterable[str], spool_folder: Path, step: Step) -> contextlib.ExitStack:
        """Verify and map the tensors; raise as ``BlockReader``.

        Those that are not contiguous in this one file are copied into a temporary file, for which there is room.
        """
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(BlockReader(self._index))
            fd = stack.enter_context(open_file(self._index.info.path, self._index.footer))
            spool = stack.enter_context(tempfile.TemporaryFile(dir=spool_folder))
            end = 0
            for spec in map(self._index.resolve, paths):
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
            for each in (fd, spool.fileno()) if end else (fd,):
                self._maps.append(mmap.mmap(each, os.fstat(each).st_size, access=mmap.ACCESS_READ))
                stack.callback(_unmap, self._maps[-1])
            return stack.pop_all()

    def tensor(self, path: str) -> torch.Tensor:
        """Return a tensor by its own path, read-only."""
        spec = self._index.tensors[path]
        dtype = getattr(torch, spec.dtype)
        if not spec.numel:
            return torch.empty(spec.shape, dtype=dtype)
        which, offset = self._places[path]
        with warnings.catch_warnings():  # that its memory cannot be written to
            warnings.simplefilter("ignore", UserWarning)
            flat = torch.frombuffer(self._maps[which], dtype=dtype, count=spec.numel, offset=offset)
        return flat.view(spec.shape)

    def release(self) -> None:
        """Drop the pages that have been read from this process's memory."""
        for pages in self._maps:
            pages.madvise(mmap.MADV_DONTNEED)

    def _begin_of(self, spec: TensorSpec) -> int | None:
        """Return the first byte of a tensor in the file; None unless it is contiguous there."""
        rows = self._index.rows_of(spec.path)
        begins = np.unique(rows["byte_offset"].astype(np.int64) - rows["start"].astype(np.int64) * spec.itemsize)
        return int(begins[0]) if len(begins) == 1 and not rows["file"].any() else None


def _unmap(pages: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a tensor over it is alive: it goes with the last one
        pages.close()


def to_pt(index: CheckpointIndex, selection: Selection, target: Path, force: bool, step: Step) -> list[Path]:
    """Write a state dict with ``torch.save``; see ``export_checkpoint``. Tied tensors share their storage."""
    mapped = MappedTensors(index)
    with new_files({target: selection.nbytes}, force=force) as fds:
        with mapped.open(selection.tensors, target.parent, step):
            sink = _Sink(fds[target], mapped.release, step)
            try:
                torch.save(_state_dict(index, selection, mapped), sink)
            except Exception as error:
                raise sink.failure or error from None
        if sink.failure is not None:
            raise sink.failure
    return [target]


def to_dcp(index: CheckpointIndex, selection: Selection, target: Path, force: bool, step: Step) -> list[Path]:
    """Write a ``torch.distributed.checkpoint`` folder, with a copy for each name of a tied tensor."""
    mapped, copies = MappedTensors(index), sum(selection.tensors[path].nbytes for path in selection.ties.values())
    with (
        new_folder(target, selection.nbytes + copies, force=force, mark=METADATA_NAME) as folder,
        mapped.open(selection.tensors, folder.parent, step),
        _quiet(),
    ):
        writer, planner = dcp.FileSystemWriter(folder), _ReleasingPlanner(mapped.release, step)
        try:
            dcp.save(_state_dict(index, selection, mapped), storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            if isinstance(first, OSError):
                raise first from None
            raise CheckpointError(f"{target}: torch could not write the checkpoint: {first}") from error
    return sorted(target.iterdir())


def _state_dict(index: CheckpointIndex, selection: Selection, mapped: MappedTensors) -> dict[str, Any]:
    """Return the model's state dict, or with an optimizer {"model", "optimizer", "step"}, its state by names."""
    tensors = {path: mapped.tensor(index.resolve(path).path) for path in selection.tensors}
    tensors |= {alias: tensors[path] for alias, path in selection.ties.items()}
    # In the order of the file; aliases without their tensor have no other order.
    model = {path.removeprefix(MODEL): tensor for path, tensor in tensors.items() if path.startswith(MODEL)}
    if selection.groups is None:
        return model
    state: dict[str, dict[str, Any]] = {}
    values = {path.removeprefix(OPTIM): tensor for path, tensor in tensors.items() if path.startswith(OPTIM)}
    for name, value in {**values, **(selection.scalars or {})}.items():
        fqn, key = name.rsplit("/", 1)
        state.setdefault(fqn, {})[key] = value
    optimizer = {"state": state, "param_groups": selection.groups}
    return {"model": model, "optimizer": optimizer, STEP_KEY: index.info.step}


class _Sink:
    """The file object for ``torch.save``. It keeps errors until the end: torch does not handle them in between."""

    def __init__(self, fd: int, release: Callable[[], None], step: Step) -> None:
        self._fd, self._release, self._step = fd, release, step
        self._end = self._since_release = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, view.nbytes, _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            if self.failure is None:
                try:
                    disk.write(self._fd, [piece], self._end)
                except OSError as error:
                    self.failure = error
            self._end += piece.nbytes
            self._step(piece.nbytes)
            self._since_release += piece.nbytes
            if self._since_release >= _PIECE_BYTES:
                self._release()
                self._since_release = 0
        return view.nbytes

    def flush(self) -> None:
        """Nothing waits to be written."""


class _ReleasingPlanner(dcp.DefaultSavePlanner):
    """Give the tensors of the state dict one by one, and release the pages of the previous one."""

    def __init__(self, release: Callable[[], None], step: Step) -> None:
        super().__init__()
        self._release, self._step = release, step

    def resolve_data(self, write_item: Any) -> Any:
        self._release()
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            self._step(data.nbytes)
        return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings about saving from one process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)
