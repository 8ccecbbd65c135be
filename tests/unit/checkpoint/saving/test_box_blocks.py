"""The blocks of boxes, as the plug-in for torch's distributed checkpoints plans them."""

import numpy as np
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, box_blocks
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import levels_of
from hpcfsdp.reshard.tiling import first_untiled
from tests.unit.checkpoint.examples import grids, part


@given(grids(), st.integers(1, 60))
def test_blocks_of_a_box_are_its_elements_in_order(grid, block_bytes):
    shape, boxes = grid
    array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    for box in boxes:
        blocks = box_blocks(shape, box, 2, block_bytes)
        found = []
        for row in blocks:
            start, numel, count, stride = (int(row[name]) for name in ("start", "numel", "count", "stride"))
            assert numel * count * 2 <= max(2, block_bytes)
            assert ((count - 1) * stride + numel) * 2 <= max(2, block_bytes)
            assert stride == numel or count > 1
            found += [start + run * stride + within for run in range(count) for within in range(numel)]
        assert found == part(array, box).reshape(-1).tolist()


@given(grids(), st.integers(1, 60), st.randoms())
def test_boxes_of_a_grid_tile_it_and_fewer_or_more_do_not(grid, block_bytes, random):
    shape, boxes = grid
    blocks = [box_blocks(shape, box, 1, block_bytes) for box in boxes]
    random.shuffle(blocks)
    numel = int(np.prod(shape))
    assert first_untiled(np.concatenate(blocks), [numel]) is None
    assert first_untiled(np.concatenate([*blocks, blocks[0]]), [numel]) == 0
    assert first_untiled(np.concatenate([np.empty(0, BLOCK_DTYPE), *blocks[1:]]), [numel]) == 0


def test_the_first_tensor_that_is_not_tiled_is_reported():
    blocks = box_blocks((4,), Box((0,), (4,)), 4)
    assert first_untiled(blocks, [4, 0]) is None
    assert first_untiled(blocks, [4, 0, 3, 1]) == 2
    assert first_untiled(blocks, [5]) == 0
    assert first_untiled(np.empty(0, BLOCK_DTYPE), []) is None


def test_a_box_has_as_few_levels_as_can_be():
    assert levels_of((4, 5, 6), Box((0, 0, 0), (4, 5, 6))) == (0, 120, [])
    assert levels_of((4, 5, 6), Box((1, 0, 0), (2, 5, 6))) == (30, 60, [])
    assert levels_of((4, 5, 6), Box((0, 0, 2), (4, 5, 3))) == (2, 3, [(20, 6)])
    assert levels_of((4, 5, 6), Box((0, 1, 0), (4, 2, 6))) == (6, 12, [(4, 30)])
    assert levels_of((4, 5, 6), Box((0, 1, 1), (4, 2, 1))) == (7, 1, [(4, 30), (2, 6)])
    assert levels_of((), Box((), ())) == (0, 1, [])


def test_boxes_beside_each_other_are_cut_in_the_same_rows():
    blocks = [box_blocks((100, 10), Box((0, first), (100, size)), 4, 400) for first, size in ((0, 3), (3, 3), (6, 4))]
    assert {tuple(found["count"]) for found in blocks} == {(10,) * 10}
