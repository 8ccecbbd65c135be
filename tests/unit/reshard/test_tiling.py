import itertools
import math

import pytest
from hypothesis import given, strategies as st

from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.tiling import Fault, find_fault, find_outside


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
            return Fault(element, tuple(holding[:2]))
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
    assert find_fault((3, 3), boxes[:-1]) == Fault((1, 1), ())


def test_equal_volume_does_not_hide_an_overlap():
    boxes = [Box((0, 0), (2, 4)), Box((1, 0), (2, 4))]
    assert find_fault((4, 4), boxes) == Fault((1, 0), (0, 1))


def test_a_tensor_without_dimensions_is_one_element():
    assert find_fault((), [Box((), ())]) is None
    assert find_fault((), []) == Fault((), ())
    assert find_fault((), [Box((), ())] * 2) == Fault((), (0, 1))


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
    assert find_fault(shape, boxes) == Fault(gone.offsets, ())
    boxes.append(boxes[77])
    assert find_fault(shape, boxes) in (Fault(gone.offsets, ()), Fault(boxes[77].offsets, (77, len(boxes) - 1)))
