"""Boxes and runs of elements, each as the other, and what two lists of runs have in common."""

import itertools
import math
from itertools import chain

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.format.metadata import select
from hpcfsdp.params.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import chunk_box, common_runs, joined_boxes, run_boxes, whole_box
from hpcfsdp.reshard.redistribute import Transfer, intersect
from tests.unit.reshard.distributions import box_runs, chunk_runs, whole_runs


@st.composite
def shapes_and_runs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    cuts = sorted(draw(st.sets(st.integers(0, math.prod(shape)), max_size=8)))
    return shape, list(zip(cuts[::2], cuts[1::2], strict=False))


@pytest.mark.hdf5
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


SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 7))
def test_chunks_are_those_of_torch(shape, num):
    chunks = torch.empty(shape).chunk(num)
    boxes = [chunk_box(shape, num, chunk) for chunk in range(num)]
    assert [box.sizes for box in boxes if box] == [
        tuple(chunk.shape) for chunk in chunks if chunk.shape[0] or not shape[0]
    ][: 1 if not shape[0] else None]
    ends = [box.offsets[0] + box.sizes[0] for box in boxes if box]
    assert [box.offsets[0] for box in boxes if box] == [0, *ends[:-1]]


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    begins = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return shape, Box(begins, tuple(draw(st.integers(1, size - b)) for size, b in zip(shape, begins, strict=True)))


@given(boxes())
def test_the_runs_of_a_box_are_its_elements_in_order(drawn):
    shape, box = drawn
    whole = torch.arange(math.prod(shape)).view(shape)
    block = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
    found = torch.full_like(block, -1)
    runs = list(box_runs(7, shape, box))
    for run in runs:
        assert run.index == 7
        found[run.offset : run.offset + run.numel] = torch.arange(run.start, run.start + run.numel)
    assert torch.equal(found, block)
    assert runs == sorted(runs)


def test_runs_are_as_long_as_can_be():
    assert list(box_runs(0, (4, 3, 2), Box((1, 0, 0), (2, 3, 2)))) == [Run(0, 6, 12, 0)]
    assert list(box_runs(0, (4, 3, 2), Box((1, 1, 0), (2, 2, 2)))) == [Run(0, 8, 4, 0), Run(0, 14, 4, 4)]
    assert list(box_runs(0, (), Box((), ()))) == [Run(0, 0, 1, 0)]
    assert not list(box_runs(0, (0, 3), Box((0, 0), (0, 3))))


def elements_of(shape, box):
    """Places in row-major order of a tensor, as a block has them."""
    return torch.arange(math.prod(shape)).view(shape)[box.slices].flatten().tolist()


@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.data())
def test_a_stretch_of_elements_is_blocks_one_after_the_other(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    boxes = run_boxes(shape, start, numel)
    assert [element for box in boxes for element in elements_of(shape, box)] == list(range(start, start + numel))
    assert all(box.numel for box in boxes)
    assert boxes == sorted(boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_stretch_is_as_few_blocks_as_can_be():
    assert run_boxes((4, 3, 2), 0, 24) == [whole_box((4, 3, 2))]
    assert run_boxes((4, 3, 2), 6, 12) == [Box((1, 0, 0), (2, 3, 2))]
    assert run_boxes((4, 3, 2), 8, 2) == [Box((1, 1, 0), (1, 1, 2))]
    assert run_boxes((4, 3, 2), 1, 22) == [
        Box((0, 0, 1), (1, 1, 1)),
        Box((0, 1, 0), (1, 2, 2)),
        Box((1, 0, 0), (2, 3, 2)),
        Box((3, 0, 0), (1, 2, 2)),
        Box((3, 2, 0), (1, 1, 1)),
    ]
    assert run_boxes((), 0, 1) == [Box((), ())]
    assert run_boxes((3, 0), 0, 0) == []


@st.composite
def boxes_within(draw, shape):
    """Any block of a tensor, an empty one, too."""
    begins = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(begins, tuple(draw(st.integers(0, size - b)) for size, b in zip(shape, begins, strict=True)))


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.integers(0, 9), st.data())
def test_the_runs_that_two_blocks_share(shape, offset, data):
    frame, box = data.draw(boxes_within(shape)), data.draw(boxes_within(shape))
    runs = list(common_runs(3, frame, box, offset))
    in_frame, in_box = elements_of(shape, frame), elements_of(shape, box)
    found = []
    for index, start, numel, at in runs:
        assert index == 3
        part = in_frame[start : start + numel]
        assert part == in_box[at - offset : at - offset + numel]
        assert len(part) == numel > 0
        found += part
    assert found == sorted(set(in_frame) & set(in_box))
    assert runs == sorted(runs)


def test_runs_end_where_either_block_does():
    columns, whole = Box((0, 1), (3, 2)), whole_box((3, 4))
    assert list(common_runs(0, columns, whole, 10)) == [Run(0, 0, 2, 11), Run(0, 2, 2, 15), Run(0, 4, 2, 19)]
    assert list(common_runs(0, whole, columns)) == [Run(0, 1, 2, 0), Run(0, 5, 2, 2), Run(0, 9, 2, 4)]
    assert list(common_runs(0, columns, columns)) == [Run(0, 0, 6, 0)]


@given(st.lists(st.integers(0, 6), max_size=4).map(tuple), st.data())
def test_blocks_of_a_run_hold_its_elements_in_their_order(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    elements = [element for box in run_boxes(shape, start, numel) for element in elements_of(shape, box)]
    assert elements == list(range(start, start + numel))


@st.composite
def tilings(draw, numels):
    """A distribution of tensors over a few ranks, each element once."""
    ranks = draw(st.integers(1, 4))
    held = [[] for _ in range(ranks)]
    for index, numel in enumerate(numels):
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=5))})
        for begin, end in itertools.pairwise(cuts):
            held[draw(st.integers(0, ranks - 1))].append((index, begin, end - begin))
    runs = []
    for of_rank in held:
        offset, mine = {}, []
        for index, start, numel in sorted(of_rank):
            mine.append(Run(index, start, numel, offset.get(index, 0)))
            offset[index] = offset.get(index, 0) + numel
        runs.append(mine)
    return runs


@given(st.data(), st.lists(st.integers(0, 12), max_size=4))
def test_moves_bring_every_element_from_any_distribution_to_any_other(data, numels):
    sources, targets = data.draw(tilings(numels)), data.draw(tilings(numels))
    values = [torch.arange(numel) + 100 * index for index, numel in enumerate(numels)]

    def memory(runs, fill):
        held = [torch.full((sum(r.numel for r in runs if r.index == i),), -1) for i in range(len(numels))]
        for run in runs if fill else ():
            held[run.index][run.offset : run.offset + run.numel] = values[run.index][run.start : run.start + run.numel]
        return held

    have = [memory(runs, True) for runs in sources]
    get = [memory(runs, False) for runs in targets]
    for giver, given_runs in enumerate(sources):
        for taker, taken_runs in enumerate(targets):
            for index, source, target, numel in intersect(given_runs, taken_runs):
                get[taker][index][target : target + numel] = have[giver][index][source : source + numel]
    for runs, found in zip(targets, get, strict=True):
        for expected, tensor in zip(memory(runs, True), found, strict=True):
            assert torch.equal(tensor, expected)


def test_the_shards_of_a_layout_tile_its_parameters():
    layout = FlatLayout.plan([("a", (3, 5), ()), ("empty", (0,), ()), ("b", (7,), ())], torch.float32, 3)
    runs = [layout.runs(rank) for rank in range(3)]
    assert sorted(runs[0] + runs[1] + runs[2])[0] == Run(0, 0, 8, 0)
    assert sum(run.numel for of_rank in runs for run in of_rank) == 22
    assert intersect(runs[0], whole_runs([(3, 5), (0,), (7,)])) == [Transfer(0, 0, 0, 8)]
    assert layout.runs(1, apart=True)[0] == runs[1][0]._replace(offset=0)


@given(st.lists(SHAPES | st.just(()), max_size=5), st.integers(1, 5))
def test_chunks_of_rows_tile_tensors_that_have_rows(shapes, num):
    chunks = [chunk_runs(shapes, num, chunk) for chunk in range(num)]
    for index, shape in enumerate(shapes):
        runs = [run for chunk in chunks for run in chunk if run.index == index]
        if shape:
            ends = [run.start + run.numel for run in runs]
            assert [run.start for run in runs] == [0, *ends[:-1]][: len(runs)]
            assert sum(run.numel for run in runs) == math.prod(shape)
        else:
            assert runs == [Run(index, 0, 1, 0)] * num
    odd = range(1, len(shapes), 2)
    for chunk, runs in enumerate(chunks):
        assert chunk_runs(shapes, num, chunk, odd) == [run for run in runs if run.index % 2]


@pytest.mark.parametrize(("num", "chunk", "expected"), [(2, 1, Box((2,), (1,))), (4, 3, None), (1, 0, Box((0,), (3,)))])
def test_chunks_of_a_vector(num, chunk, expected):
    assert chunk_box((3,), num, chunk) == expected
