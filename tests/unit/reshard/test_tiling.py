"""Blocks and hyperslabs are held against their elements one by one, which the functions never look at."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format.index import check_extents
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, box_blocks
from hpcfsdp.errors import CheckpointCorruptError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard import tiling as hyperslabs
from hpcfsdp.reshard.tiling import TilingError, TilingFault, byte_ranges, find_fault, find_outside, first_untiled


@st.composite
def tilings(draw, max_dims=4, max_size=6, max_cuts=8):
    """A shape, and blocks that tile it, cut in any way and in any order."""
    shape = tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        number = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if dims:
            dim = draw(st.sampled_from(dims))
            at = draw(st.integers(1, sizes[dim] - 1))
            one, other = list(sizes), list(sizes)
            one[dim], other[dim] = at, sizes[dim] - at
            moved = [o + (at if d == dim else 0) for d, o in enumerate(offsets)]
            boxes[number : number + 1] = [Box(offsets, tuple(one)), Box(tuple(moved), tuple(other))]
    return shape, draw(st.permutations(boxes))


def looked_for(shape, boxes):
    """What ``find_fault`` finds, element by element."""
    for element in itertools.product(*map(range, shape)):
        holding = [
            number
            for number, (offsets, sizes) in enumerate(boxes)
            if all(o <= at < o + size for at, o, size in zip(element, offsets, sizes, strict=True))
        ]
        if len(holding) != 1:
            return TilingFault(element, tuple(holding[:2]))
    return None


@given(tilings())
def test_tilings_are_accepted(tiling):
    shape, boxes = tiling
    assert find_outside(shape, boxes) is None
    assert find_fault(shape, boxes) is None


@given(tilings(), st.data())
def test_the_first_faulty_element_is_found(tiling, data):
    shape, boxes = tiling
    number = data.draw(st.integers(0, len(boxes) - 1))
    kind = data.draw(st.sampled_from(["gone", "twice", "smaller", "moved"]))
    offsets, sizes = boxes[number]
    if kind == "gone":
        del boxes[number]
    elif kind == "twice":
        boxes.append(boxes[data.draw(st.integers(0, len(boxes) - 1))])
    elif shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        if kind == "smaller" and sizes[dim]:
            sizes = (*sizes[:dim], sizes[dim] - 1, *sizes[dim + 1 :])
        elif kind == "moved" and offsets[dim]:
            offsets = (*offsets[:dim], offsets[dim] - 1, *offsets[dim + 1 :])
        boxes[number] = Box(offsets, sizes)
    assert find_fault(shape, boxes) == looked_for(shape, boxes)


def test_a_pinwheel_that_no_cut_goes_through():
    boxes = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert find_fault((3, 3), boxes) is None
    assert find_fault((3, 3), boxes[:-1]) == TilingFault((1, 1), ())


def test_equal_volume_does_not_hide_an_overlap():
    boxes = [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))]
    assert find_fault((4, 4), boxes) == TilingFault((1, 0), (0, 1))


def test_a_tensor_without_dimensions_is_one_element():
    assert find_fault((), [Box((), ())]) is None
    assert find_fault((), []) == TilingFault((), ())
    assert find_fault((), [Box((), ())] * 2) == TilingFault((), (0, 1))


def test_a_tensor_without_elements_needs_no_blocks():
    assert find_fault((0, 3), []) is None
    assert find_fault((0, 3), [Box((0, 0), (0, 3))]) is None


@pytest.mark.parametrize(
    "box",
    [Box((0, 2), (2, 2)), Box((-1, 0), (1, 1)), Box((0, 0), (-1, 1)), Box((0,), (1,)), Box((0, 0, 0), (1, 1, 1))],
    ids=["beyond", "before", "negative", "fewer dimensions", "more dimensions"],
)
def test_the_first_block_that_is_not_within_the_tensor(box):
    assert find_outside((3, 3), [Box((0, 0), (1, 3)), box, box]) == 1


@pytest.mark.parametrize("shape", [(16384, 3), (256, 256), (32, 16, 32), (8, 16, 16, 8)])
def test_16384_blocks(shape):
    """In any order; a fault among them is told from all others."""
    per_dim = [min(size, 16384) if len(shape) < 3 else size for size in shape]
    if shape == (16384, 3):
        per_dim[1] = 1
    steps = [size // parts for size, parts in zip(shape, per_dim, strict=True)]
    grid = itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True)))
    boxes = [Box(offsets, tuple(steps)) for offsets in grid][::-1]
    assert len(boxes) >= 16384
    assert math.prod(shape) == sum(box.numel for box in boxes)
    assert find_fault(shape, boxes) is None
    gone = boxes.pop(5000)
    assert find_fault(shape, boxes) == TilingFault(gone.offsets, ())
    boxes.append(boxes[77])
    assert find_fault(shape, boxes) in (
        TilingFault(gone.offsets, ()),
        TilingFault(boxes[77].offsets, (77, len(boxes) - 1)),
    )


FIELDS = ["tensor", "count", "start", "numel", "stride"]


def rows_of(*rows, dtype=BLOCK_DTYPE):
    """Rows from tuples of ``FIELDS``."""
    found = np.zeros(len(rows), dtype)
    for row, values in zip(found, rows, strict=True):
        for name, value in zip(FIELDS, values, strict=True):
            row[name] = value
    return found


def by_elements(rows, numels):
    """What ``first_untiled`` is to find."""
    taken, bad = [np.zeros(numel, int) for numel in numels], set()
    for row in rows:
        tensor, count, start, numel, stride = (int(row[name]) for name in FIELDS)
        begins = start + np.arange(count) * stride
        if not count or not numel or begins[-1] + numel > numels[tensor]:
            bad.add(tensor)
            continue
        for begin in begins:
            taken[tensor][begin : begin + numel] += 1
    return min(bad | {tensor for tensor, counts in enumerate(taken) if (counts != 1).any()}, default=None)


@st.composite
def slab_tilings(draw):
    """Tensors, each cut into boxes, those into others, as often as may be, in any order; and a fault, or none."""
    numels, found = [], [np.zeros(0, BLOCK_DTYPE)]
    for tensor in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(draw(st.integers(0, 6)) if shape else 0):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(0, box.sizes[dim]))
            for low, high in ((0, at), (at, box.sizes[dim])):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += low
                sizes[dim] = high - low
                boxes.append(Box(tuple(offsets), tuple(sizes)))
        numels.append(int(np.prod(shape)))
        for box in boxes:
            found.append(box_blocks(shape, box, 1, draw(st.sampled_from([2, 7, 30, 1000]))))
            found[-1]["tensor"] = tensor
    rows = np.concatenate(found)
    rows = rows[draw(st.permutations(range(len(rows))))]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(rows)))
        what = draw(st.sampled_from([*FIELDS[1:], "gone", "twice"]))
        if what == "gone":
            rows = np.delete(rows, slice(at, at + 1))
        elif what == "twice":
            rows = np.append(rows, rows[at : at + 1])
        elif at < len(rows):
            rows[what][at] = max(0, int(rows[what][at]) + draw(st.integers(-3, 3)))
    return rows, numels


@given(slab_tilings())
@settings(max_examples=1500, deadline=None)
def test_the_verdict_is_that_of_looking_at_every_element(made):
    rows, numels = made
    assert first_untiled(rows, numels) == by_elements(rows, numels)


@given(slab_tilings())
@settings(max_examples=300, deadline=None)
def test_the_verdict_does_not_depend_on_how_much_is_looked_at_together(made):
    rows, numels = made
    expected, before = by_elements(rows, numels), hyperslabs.MOST_PARTS
    hyperslabs.MOST_PARTS = -3 * len(rows)  # with four parts for each row: little more than one
    try:
        assert first_untiled(rows, numels) == expected
    except TilingError as error:
        assert error.tensor is not None
    finally:
        hyperslabs.MOST_PARTS = before


def test_strided_rows_of_one_tensor_beside_plain_ones_of_others():
    rows = rows_of((0, 1, 0, 5, 5), (2, 4, 0, 2, 3), (2, 4, 2, 1, 3), (3, 2, 0, 1, 1), (3, 1, 2, 3, 3))
    assert first_untiled(rows, [5, 0, 12, 5]) is None
    assert first_untiled(rows, [5, 1, 12, 5]) == 1
    assert first_untiled(rows, [5, 0, 13, 5]) == 2
    assert first_untiled(rows[[0, 1, 3, 4]], [5, 0, 12, 5]) == 2
    assert first_untiled(rows[[0, 1, 2, 4]], [5, 0, 12, 5]) == 3
    assert first_untiled(rows[:0], [0, 0]) is None


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    "row",
    [(0, 2, 0, 1, HUGE), (0, HUGE >> 32, 0, 1, 1 << 40), (0, 1, HUGE, 2, 2), (0, 1, 0, HUGE, 1), (0, 2, 1, HUGE, HUGE)],
)
def test_numbers_that_are_too_large_for_their_sums_are_found(row):
    assert first_untiled(rows_of(row), [1 << 40]) == 0


def test_more_elements_than_can_be_counted_are_a_value_error():
    with pytest.raises(ValueError, match="are more than any file has"):
        first_untiled(rows_of(), [1 << 61, 1 << 61])
    with pytest.raises(ValueError, match="there is no tensor 1, only 1"):
        first_untiled(rows_of((1, 1, 0, 1, 1)), [1])


def extents(rows, offsets):
    """Rows as they stand in the table of extents, without what a check does not look at."""
    found = np.zeros(len(rows), [*BLOCK_DTYPE.descr, ("file", "<u4"), ("byte_offset", "<u8")])
    for name in BLOCK_DTYPE.names:
        found[name] = rows[name]
    found["byte_offset"] = offsets
    return found


def columns(count, width, *edges):
    """Rows that cut a matrix into columns."""
    return rows_of(
        *((0, count, low, high - low, width) for low, high in zip((0, *edges), (*edges, width), strict=True))
    )


def test_a_few_rows_that_describe_millions_of_runs_take_no_memory():
    rows = columns(20_000_000, 8, 3, 4)
    tracemalloc.start()
    assert first_untiled(rows, [160_000_000]) is None
    assert first_untiled(rows[:2], [160_000_000]) == 0
    numbers = [rows[name].astype(np.int64) for name in ("start", "numel", "count", "stride")]
    begins, ends = byte_ranges(*numbers, np.zeros(3, np.int64))
    assert (begins.tolist(), ends.tolist()) == ([0], [160_000_000])
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_rows_that_would_have_to_be_cut_too_often_are_refused(monkeypatch):
    monkeypatch.setattr(hyperslabs, "MOST_PARTS", 1000)
    whole = columns(5000, 6, 2)
    halves = rows_of((0, 15000, 0, 1, 2), (0, 15000, 1, 1, 2))
    mixed = np.concatenate([whole[:1], halves])
    with pytest.raises(TilingError, match="in more than 1000 parts") as caught:
        first_untiled(mixed, [30000])
    assert caught.value.tensor == 0
    spec = TensorSpec("model/w", (30000,), "uint8")
    rows = extents(mixed, mixed["start"])
    with pytest.raises(CheckpointCorruptError, match=r"^a\.h5: damaged: model/w: its runs are interleaved"):
        check_extents("a.h5", {spec.path: spec}, rows, [], 30000)
    counts = [column.astype(np.int64) for column in (whole["start"], whole["numel"], whole["count"], whole["stride"])]
    with pytest.raises(TilingError):
        byte_ranges(*counts, np.arange(2))


@st.composite
def placed(draw):
    """Rows of runs in a file: begins, numels, counts, strides and owners; what has one owner does not overlap."""
    found, taken = [], {}
    for _ in range(draw(st.integers(0, 6))):
        numel, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        begin, stride, owner = draw(st.integers(0, 40)), numel + draw(st.integers(0, 4)), draw(st.integers(0, 2))
        own = {begin + run * stride + byte for run in range(count) for byte in range(numel)}
        if not own & taken.setdefault(owner, set()):
            taken[owner] |= own
            found.append((begin, numel, count, stride, owner))
    return np.array(found, np.int64).reshape(-1, 5)


@given(placed())
@settings(max_examples=1000, deadline=None)
def test_stretches_are_the_bytes_of_rows_and_overlap_where_rows_do(rows):
    expected = np.zeros(100, int)
    for begin, numel, count, stride, _ in rows:
        for run in range(count):
            expected[begin + run * stride : begin + run * stride + numel] += 1
    begins, ends = byte_ranges(*rows.T)
    assert np.all(np.diff(begins) >= 0)
    found = np.zeros(100, int)
    for begin, end in zip(begins, ends, strict=True):
        found[begin:end] += 1
    assert found.tolist() == expected.tolist()
    assert bool(np.any(begins[1:] < ends[:-1])) == bool((expected > 1).any())


def test_a_strided_tensor_that_lies_on_another_thing_is_refused():
    spec = {"model/w": TensorSpec("model/w", (10, 8), "uint8")}
    rows = columns(10, 8, 3)
    check_extents("a.h5", spec, extents(rows, [7, 10]), [(0, 7), (87, 90)], 90)
    for regions in ([(0, 8)], [(50, 51)], [(86, 90)]):
        with pytest.raises(CheckpointCorruptError, match="two of its byte ranges overlap"):
            check_extents("a.h5", spec, extents(rows, [7, 10]), regions, 90)
    with pytest.raises(CheckpointCorruptError, match="model/w ends beyond the file's 86 bytes"):
        check_extents("a.h5", spec, extents(rows, [7, 10]), [], 86)
    with pytest.raises(CheckpointCorruptError, match="two of its byte ranges overlap"):
        check_extents("a.h5", spec, extents(rows, [7, 9]), [], 90)
    # The second columns stand elsewhere, in rows of eight too, and the region between them.
    check_extents("a.h5", spec, extents(rows, [0, 100]), [(3, 8), (105, 108)], 200)
    with pytest.raises(CheckpointCorruptError, match="two of its byte ranges overlap"):
        check_extents("a.h5", spec, extents(rows, [0, 100]), [(3, 9)], 200)
