"""Parameters are placed so that no shard ends within a block of them, with little padding."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.errors import ShardingError
from hpcfsdp.params.granularity import block_numel, place_blocks
from hpcfsdp.params.layout import FlatLayout, TensorBlock
from hpcfsdp.reshard.placements import mesh_blocks

ITEMS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 12)).map(lambda pair: (math.prod(pair), pair[1])), max_size=9
)


def edges_within(offset, numel, shard_numel):
    """The edges of shards inside of a parameter, counted from its first element."""
    first = offset // shard_numel + 1
    return [edge * shard_numel - offset for edge in range(first, -(-(offset + numel) // shard_numel))]


@given(ITEMS, st.integers(1, 9), st.sampled_from([1, 2, 4, 16]))
@settings(max_examples=300, deadline=None)
def test_no_shard_ends_within_a_block(items, num_shards, align):
    offsets, shard_numel = place_blocks(tuple(items), num_shards, align)
    assert shard_numel % align == 0
    taken = []
    for (numel, block), offset in zip(items, offsets, strict=True):
        assert offset % align == 0
        if numel:
            assert all(edge % block == 0 for edge in edges_within(offset, numel, shard_numel))
            taken.append((offset, offset + numel))
    taken.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(taken))
    assert not taken or taken[-1][1] <= shard_numel * num_shards


def padding(shapes, granularity, num_shards, dtype=torch.float32):
    layout = FlatLayout.plan(
        [(str(index), shape, ()) for index, shape in enumerate(shapes)],
        dtype,
        num_shards,
        granularity=dict.fromkeys(map(str, range(len(shapes))), granularity),
    )
    return layout.padded_numel / sum(slot.numel for slot in layout.slots) - 1


def gpt(width=1600, layers=1):
    block = [(width,)] * 4 + [(3 * width, width), (3 * width,), (width, width), (width,)]
    return [*block, (4 * width, width), (4 * width,), (width, 4 * width), (width,)] * layers


def llama(width=4096, hidden=11008, layers=1):
    return ([(width,)] * 2 + [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]) * layers


def experts(width=2048, hidden=1408, count=64):
    own = [(hidden, width), (hidden, width), (width, hidden)]
    return [(width,)] * 2 + [(width, width)] * 4 + [(count, width)] + own * count


@pytest.mark.parametrize(
    ("shapes", "granularity", "num_shards", "most"),
    [
        (gpt(), "row", 8, 0.002),
        (gpt(), "row", 64, 0.02),
        (gpt(layers=4), "row", 1024, 0.02),
        (llama(), "row", 64, 0.01),
        (llama(layers=4), "row", 1024, 0.15),
        (llama(layers=4), "whole", 8, 0.1),
        (experts(), "row", 1024, 0.02),
        (experts(), "whole", 8, 0.02),
        (gpt(), 64, 1024, 0.02),
    ],
)
def test_models_need_little_padding(shapes, granularity, num_shards, most):
    assert 0 <= padding(shapes, granularity, num_shards) <= most


def test_elements_are_laid_out_as_ever():
    shapes = [("a", (3, 5), ()), ("b", (7,), ())]
    one, other = (FlatLayout.plan(shapes, torch.float32, 3, granularity=given) for given in (None, {"a": 1, "b": 1}))
    assert one == other


def test_whole_parameters_lie_on_one_rank_each():
    layout = FlatLayout.plan(
        [(name, (6, 6), ()) for name in "abcdef"], torch.float32, 3, granularity=dict.fromkeys("abcdef", "whole")
    )
    assert [len(layout.runs(rank)) for rank in range(3)] == [2, 2, 2]
    assert all(run.numel == 36 for rank in range(3) for run in layout.runs(rank))


def test_blocks_of_tensor_parallel_ranks_keep_their_own_rows():
    shape, placement = (6, 10), torch.distributed.tensor.Shard(1)
    boxes = tuple(mesh_blocks(shape, torch.arange(3), [placement]).values())
    for rank, columns in enumerate((4, 4, 2)):
        block = TensorBlock(shape, boxes, 0, (placement,))
        layout = FlatLayout.plan(
            [("w", block.box.sizes, ())], torch.float64, 2, {"w": block}, granularity={"w": "row"}
        ).of_tensor_rank(rank)
        assert layout.slots[0].shape == (6, columns)
        assert all(run.numel % columns == 0 for shard in range(2) for run in layout.runs(shard))


@pytest.mark.parametrize(
    ("granularity", "text"),
    [
        (7, "7 elements, which do not divide the 15 elements of its shape (3, 5)"),
        (0, "'weight' is 0: give a positive number"),
        (-3, "'weight' is -3: give a positive number"),
        (True, "'weight' is True"),
        (2.5, "'weight' is 2.5"),
        ("column", "'weight' is 'column'"),
    ],
)
def test_what_is_no_granularity_is_refused(granularity, text):
    with pytest.raises(ShardingError) as caught:
        FlatLayout.plan([("weight", (3, 5), ())], torch.float32, 2, granularity={"weight": granularity})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("granularity", "shape", "numel"),
    [("row", (3, 5), 5), ("row", (7,), 1), ("row", (), 1), ("whole", (3, 5), 15), ("whole", (), 1), (4, (8,), 4)],
)
def test_blocks(granularity, shape, numel):
    assert block_numel(granularity, shape) == numel
