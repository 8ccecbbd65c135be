"""``open``: a checkpoint as a mapping of tensors that are read on access. Needs no MPI."""

import math
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.stats import decoded
from hpcfsdp.errors import nearest


def open(path: str | os.PathLike[str], *, verify: bool = True) -> "Checkpoint":
    """Not collective. Open a checkpoint for reading: close it afterwards, or use it in a ``with`` statement.

    Args:
        path: the checkpoint's file.
        verify: compare the bytes with their checksums.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    index = open_index(os.path.expanduser(path))
    return Checkpoint(index, BlockReader(index, verify=verify))


class Checkpoint(Mapping[str, "LazyTensor"]):
    """The tensors of a checkpoint by their paths, ``"model/<name>"`` and ``"optim/state/<name>/<key>"``.

    Further paths of tied tensors are keys as well. One thread may use it at a time.

    Attributes:
        index: everything of the file but the elements.
        info: step, world size, ``extra``, the configuration.
        param_groups: hyper-parameters of the optimizer's groups, with the names of their parameters; None without an
            optimizer.
        metrics: curves recorded during training, by name: steps (int64) and values (float64).
    """

    def __init__(self, index: CheckpointIndex, reader: BlockReader) -> None:
        self.index, self.info = index, index.info
        self.param_groups, self.metrics = index.param_groups, index.metrics
        self._reader = reader.__enter__()

    def close(self) -> None:
        """Close the file; tensors of it cannot be read any more."""
        self._reader.__exit__()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, path: str) -> "LazyTensor":
        """Return a tensor by its path.

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
        """Return a tensor by its path, or `default` where there is none."""
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
    """A tensor in a checkpoint. Indexing reads little more of the file than the requested elements.

    ``tensor[2:5, ::2]`` is a ``torch.Tensor`` of the same dtype; ``numpy.asarray(tensor)`` is all of it as numbers that
    numpy knows, bfloat16 and 8-bit floats as float32.

    Attributes:
        path: under which it was asked for.
        shape, ndim: of the whole tensor.
        dtype: torch's name of it, "bfloat16".
        numel, nbytes: of all elements.
    """

    def __init__(self, path: str, spec: schema.TensorSpec, reader: BlockReader) -> None:
        self.path, self.shape, self.dtype, self.ndim = path, spec.shape, spec.dtype, len(spec.shape)
        self.numel, self.nbytes = spec.numel, spec.nbytes
        self._spec, self._reader = spec, reader

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        """Return a part as a ``torch.Tensor``, by whole numbers, slices and ``...``; a copy.

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
        """Return a part in ``schema.numpy_dtype``, contiguous."""
        ranges, dropped = _ranges(key, self.shape)
        runs = _Runs(self.shape, ranges)
        output = np.empty(runs.count * runs.numel, schema.numpy_dtype(self.dtype))
        for first in range(0, runs.count if output.size else 0, _RUNS_AT_ONCE):
            end = min(first + _RUNS_AT_ONCE, runs.count)
            part = output[first * runs.numel : end * runs.numel]
            self._reader.read_runs(self._spec.path, runs.starts(first, end), part)
        return output.reshape([len(r) for dim, r in enumerate(ranges) if dim not in dropped])


_RUNS_AT_ONCE = 1 << 18


class _Runs:
    """The requested elements of a tensor as `count` contiguous runs of `numel` elements each."""

    def __init__(self, shape: tuple[int, ...], ranges: list[range]) -> None:
        # Later dimensions are whole, so that the range in this one is contiguous unless it has steps.
        cut = max((dim for dim, size in enumerate(shape) if len(ranges[dim]) != size), default=0)
        inner = math.prod(shape[cut:])
        self.numel, self._offset = inner, 0
        self._outer = [(r, math.prod(shape[dim + 1 :])) for dim, r in enumerate(ranges[:cut])]
        if shape and inner:
            places, row = ranges[cut], inner // shape[cut]
            if len(places) < 2 or places.step == 1:
                self.numel, self._offset = len(places) * row, (places[0] if places else 0) * row
            else:
                self.numel = row
                self._outer.append((places, row))
        self.count = math.prod(len(r) for r, _ in self._outer)

    def starts(self, first: int, end: int) -> np.ndarray:
        """Return the first elements of some of the runs, ascending, int64."""
        left = np.arange(first, end)
        found = np.full(end - first, self._offset)
        for places, stride in reversed(self._outer):
            left, place = np.divmod(left, len(places))
            found += (places[0] + place * places.step) * stride
        return found


def _ranges(key: Any, shape: tuple[int, ...]) -> tuple[list[range], set[int]]:
    """Return the requested range of each dimension, and the dimensions that integers remove; raise IndexError."""
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
            what = f"{part!r} is not supported as an index: use whole numbers, slices and '...', and index the result"
            raise IndexError(what) from None
        if not -size <= place < size:
            raise IndexError(f"{place} is outside of dimension {dim}, which has {size} elements")
        ranges.append(range(place % size, place % size + 1))
        dropped.add(dim)
    return ranges, dropped
