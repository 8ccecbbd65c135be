"""Runs of elements as boxes."""

import math
from itertools import chain

import h5py
import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.format.metadata import select
from hpcfsdp.reshard.boxes import joined_boxes

pytestmark = pytest.mark.hdf5


@st.composite
def shapes_and_runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    cuts = sorted(draw(st.sets(st.integers(0, math.prod(shape)), max_size=8)))
    return shape, list(zip(cuts[::2], cuts[1::2], strict=False))


@given(shapes_and_runs())
def test_boxes_hold_the_elements_in_their_order(case):
    shape, runs = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    found = joined_boxes(shape, runs)
    values = [elements[box.slices].reshape(-1).tolist() for box in found]
    assert list(chain.from_iterable(values)) == [element for begin, end in runs for element in range(begin, end)]
    assert [len(part) for part in values] == [box.numel for box in found]
    assert len(found) <= len(runs) * (2 * len(shape) - 1)
    space = h5py.h5s.create_simple(shape)
    select(space, found)
    assert space.get_select_npoints() == sum(map(len, values))


def test_rows_of_a_block_of_columns_are_one_box():
    runs = [(row * 10 + 2, row * 10 + 5) for row in range(3, 8)]
    assert joined_boxes((10, 10), runs) == [((3, 2), (5, 3))]
    assert joined_boxes((2, 5, 10), [(row * 10 + 2, row * 10 + 5) for row in range(10)]) == [((0, 0, 2), (2, 5, 3))]


def test_whole_tensors_are_one_box():
    assert joined_boxes((3, 4, 5), [(0, 60)]) == [((0, 0, 0), (3, 4, 5))]
    assert joined_boxes((7,), [(2, 3), (3, 6)]) == [((2,), (4,))]
    assert joined_boxes((7, 2), []) == []
