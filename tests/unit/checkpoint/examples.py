"""Grids of boxes that tile a tensor, and the equality of nested values."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from hpcfsdp.params.layout import Box


def cut(shape, cuts):
    """All boxes of a grid: along each dimension between the edges that `cuts` name."""
    edges = [[0, *sorted(c for c in cuts[dim] if 0 < c < size), size] for dim, size in enumerate(shape)]
    spans = [list(itertools.pairwise(line)) for line in edges]
    return [
        Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        for spans in itertools.product(*spans)
    ]


def part(array, box):
    return array[tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))]


@st.composite
def grids(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return shape, cut(shape, [draw(st.sets(st.integers(1, 5), max_size=3)) for _ in shape])


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        same_keys = type(one) is type(other) and list(map(repr, one)) == list(map(repr, other))
        return same_keys and all(map(equal, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)
