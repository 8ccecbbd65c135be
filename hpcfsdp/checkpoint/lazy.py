"""``open``: a checkpoint as a mapping of tensors of which nothing is read before it is asked for. Needs no MPI."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.inspect.numbers import decoded
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import nearest


def open(path: str | os.PathLike[str], *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint to look into it; not collective. To be closed, or used in a ``with`` statement.

    Args:
        path: of the file.
        verify: compare what is read with its checksums.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    files = Files()
    index = open_index(os.path.expanduser(path), files)
    return Checkpoint(index, BlockReader(index, files, verify=verify))


class Checkpoint(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint by their paths, ``"model/<name>"`` and ``"optim/state/<name>/<key>"``.

    Further paths of tied tensors are keys as well. One thread may use it at a time.

    Attributes:
        index: everything of the file but the elements.
    """

    def __init__(self, index: CheckpointIndex, reader: BlockReader) -> None:
        self.index = index
        self._reader = reader.__enter__()

    @property
    def info(self) -> CheckpointInfo:
        """Step, world size, ``extra``, the configuration."""
        return self.index.info

    @property
    def param_groups(self) -> list[dict[str, Any]] | None:
        """Hyper-parameters of the optimizer's groups, with the names of their parameters; None without an optimizer."""
        return self.index.param_groups

    @property
    def metrics(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Numbers that training has noted, by name: steps (int64) and values (float64)."""
        return self.index.metrics

    def close(self) -> None:
        """Close the file; tensors of it cannot be read any more."""
        self._reader.__exit__()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, path: str) -> LazyTensor:
        """A tensor by its path.

        Raises:
            KeyError: there is none; names the nearest.
        """
        try:
            spec = self.index.resolve(path)
        except KeyError:
            raise KeyError(f"{self.info.path} holds no tensor {path!r}{nearest(path, list(self))}") from None
        return LazyTensor(path, spec, self._reader)

    def __contains__(self, path: object) -> bool:
        return path in self.index.tensors or path in self.index.links

    def get(self, path: str, default: Any = None) -> Any:
        """A tensor by its path, or `default` where there is none."""
        if path not in self:  # to ask for it would look for the nearest name
            return default
        return self[path]

    def __iter__(self) -> Iterator[str]:
        yield from self.index.tensors
        yield from self.index.links

    def __len__(self) -> int:
        return len(self.index.tensors) + len(self.index.links)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.info.path}: step {self.info.step}, {len(self)} tensors>"


class LazyTensor:
    """A tensor in a checkpoint. Indexing reads what is asked for, and of the file hardly more.

    ``tensor[2:5, ::2]`` is a ``torch.Tensor`` of the same dtype; ``numpy.asarray(tensor)`` is all of it as numbers that
    numpy knows, bfloat16 and 8-bit floats as float32.

    Attributes:
        path: under which it was asked for.
        shape: of the whole tensor.
        dtype: torch's name of it, "bfloat16".
    """

    def __init__(self, path: str, spec: schema.TensorSpec, reader: BlockReader) -> None:
        self.path = path
        self.shape = spec.shape
        self.dtype = spec.dtype
        self._spec, self._reader = spec, reader

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self._spec.numel

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._spec.nbytes

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        """A part as a ``torch.Tensor``, by whole numbers, slices and ``...``; a copy.

        Raises:
            IndexError: outside of the tensor, or of a kind that is not supported.
            CheckpointCorruptError: the bytes are not those that were written.
        """
        import torch

        found = self._read(key)
        return torch.from_numpy(found).view(getattr(torch, self.dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the elements are in a file: reading them makes a copy")
        values = decoded(self._read(...).reshape(-1), self.dtype).reshape(self.shape)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<LazyTensor {self.path}: {list(self.shape)} {self.dtype}>"

    def _read(self, key: Any) -> np.ndarray:
        """A part in ``schema.numpy_dtype``, contiguous."""
        ranges, dropped = _ranges(key, self.shape)
        runs = _Runs(self.shape, ranges)
        output = np.empty(runs.count * runs.numel, schema.numpy_dtype(self.dtype))
        if output.size:
            for first in range(0, runs.count, _RUNS_AT_ONCE):
                self._read_runs(runs, first, min(first + _RUNS_AT_ONCE, runs.count), output)
        return output.reshape([len(r) for dim, r in enumerate(ranges) if dim not in dropped])

    def _read_runs(self, runs: _Runs, first: int, end: int, output: np.ndarray) -> None:
        """Bring some of the runs to where they belong in the output."""
        starts, numel, path = runs.starts(first, end), runs.numel, self._spec.path
        output = output[first * numel : end * numel]
        for low, high in _stretches(starts, numel, self._spec.itemsize):
            begin, target = int(starts[low]), output[low * numel : high * numel]
            if high - low == 1:
                self._reader.read_into(path, begin, target)
                continue
            stretch = self._reader.read(path, begin, int(starts[high - 1]) + numel - begin)
            if len(stretch) == len(target):
                target[:] = stretch
            else:
                windows = np.lib.stride_tricks.sliding_window_view(stretch, numel)
                target.reshape(-1, numel)[:] = windows[starts[low:high] - begin]


_AT_ONCE_BYTES = 16 << 20
"""Most bytes of a stretch that is read for the runs in it, and of which only they are kept."""

_GAP_BYTES = 1 << 20
"""Between two runs: to read so many costs about as much as to begin another read."""

_RUNS_AT_ONCE = 1 << 18


class _Runs:
    """What is asked for of a tensor, as runs of elements that lie one behind the other in it; all of one length.

    Attributes:
        count: of the runs.
        numel: elements of each.
    """

    def __init__(self, shape: tuple[int, ...], ranges: list[range]) -> None:
        # Dimensions behind the last one that is cut are read whole, and what is asked for of that one at once.
        cut = max((dim for dim, size in enumerate(shape) if len(ranges[dim]) != size), default=0)
        inner = math.prod(shape[cut:])
        self.numel, self._offset = inner, 0
        self._outer = [(r, math.prod(shape[dim + 1 :])) for dim, r in enumerate(ranges[:cut])]
        if shape and inner:
            taken, row = ranges[cut], inner // shape[cut]
            if len(taken) < 2 or taken.step == 1:
                self.numel, self._offset = len(taken) * row, (taken[0] if taken else 0) * row
            else:
                self.numel = row
                self._outer.append((taken, row))
        self.count = math.prod(len(r) for r, _ in self._outer)

    def starts(self, first: int, end: int) -> np.ndarray:
        """The first elements of some of the runs, ascending, int64."""
        left = np.arange(first, end)
        found = np.full(end - first, self._offset)
        for taken, stride in reversed(self._outer):
            left, place = np.divmod(left, len(taken))
            found += (taken[0] + place * taken.step) * stride
        return found


def _stretches(starts: np.ndarray, numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first run, end) of runs to read at once: those with little between them, up to ``_AT_ONCE_BYTES``.

    Args:
        starts: of the runs, ascending.
        numel: of each run.
    """
    apart = (starts[1:] - starts[:-1] - numel) * itemsize > _GAP_BYTES
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
    reach = _AT_ONCE_BYTES // itemsize - numel  # from the start of the first run to that of the last
    for first, end in itertools.pairwise(edges):
        while first < end:
            stop = first + int(np.searchsorted(starts[first:end] - starts[first], reach, side="right"))
            stop = max(stop, first + 1)
            yield first, stop
            first = stop


def _ranges(key: Any, shape: tuple[int, ...]) -> tuple[list[range], set[int]]:
    """What of each dimension is asked for, and the dimensions that whole numbers take away.

    Raises:
        IndexError: outside of the tensor, or of a kind that is not supported.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has at most one '...'")
    at = dots[0] if dots else len(parts)
    given = len(parts) - len(dots)
    if given > len(shape):
        raise IndexError(f"{given} indices for a tensor of {len(shape)} dimensions")
    parts[at : at + len(dots)] = [slice(None)] * (len(shape) - given)
    ranges, dropped = [], set()
    for dim, (part, size) in enumerate(zip(parts, shape, strict=True)):
        if isinstance(part, slice):
            if part.step is not None and operator.index(part.step) <= 0:
                raise IndexError(f"a step of {part.step} is not supported: steps must be positive, as in torch")
            ranges.append(range(*part.indices(size)))
            continue
        try:
            place = operator.index(part)
        except TypeError:
            raise IndexError(
                f"{part!r} is not supported as an index: use whole numbers, slices and '...', and index the result"
            ) from None
        if not -size <= place < size:
            raise IndexError(f"{place} is outside of dimension {dim}, which has {size} elements")
        ranges.append(range(place % size, place % size + 1))
        dropped.add(dim)
    return ranges, dropped
