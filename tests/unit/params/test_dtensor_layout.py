"""What holds for every layout of rows, with real tensors cut by it."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.layout import ALIGNMENT_BYTES

SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 13, 16])
check = settings(max_examples=150, deadline=None)


@st.composite
def layouts(draw):
    shapes = draw(st.lists(st.lists(SIZES, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5))
    dims = [draw(st.integers(0, len(shape) - 1)) for shape in shapes]
    params = [(f"p{index}", shape, dim, (), None) for index, (shape, dim) in enumerate(zip(shapes, dims, strict=True))]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return DTensorLayout.plan(params, dtype, draw(st.sampled_from([1, 2, 3, 4, 7, 16])))


def values_of(layout):
    """A tensor for each parameter, without zeros."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(slot.shape, generator=generator).add(1).to(layout.dtype) for slot in layout.slots]


def chunk(value, slot, ranks, rank):
    chunks = value.chunk(ranks, slot.dim)
    return chunks[rank] if rank < len(chunks) else value.narrow(slot.dim, 0, 0)


def scattered(layout, values):
    """The buffer of all shards, filled by pieces; what belongs to no parameter is NaN."""
    shards = torch.full((layout.padded_numel,), torch.nan, dtype=layout.dtype)
    for index, value in enumerate(values):
        for rows in layout.rows(index):
            rows.in_shards.of(shards).copy_(rows.of_param(value))
    return shards


@check
@given(layouts())
def test_each_rank_has_the_chunks_of_torch(layout):
    values = values_of(layout)
    shards = scattered(layout, values).view(layout.num_shards, layout.shard_numel)
    for slot, value in zip(layout.slots, values, strict=True):
        for rank in range(layout.num_shards):
            expected = chunk(value, slot, layout.num_shards, rank) if value.numel() else value
            shape = slot.chunk_shape(slot.rows_of(rank)[1])
            assert math.prod(shape) == expected.numel() or not value.numel()
            own = shards[rank, slot.offset : slot.offset + math.prod(shape)].view(shape)
            if own.numel():
                assert torch.equal(own, expected), (slot, rank)


@check
@given(layouts())
def test_pieces_bring_whole_parameters_back(layout):
    values = values_of(layout)
    shards = scattered(layout, values)
    for index, value in enumerate(values):
        whole = torch.zeros_like(value)
        for rows in layout.rows(index):
            rows.of_param(whole).copy_(rows.in_shards.of(shards))
        assert torch.equal(whole, value)
        assert sum(math.prod(rows.in_shards.shape) for rows in layout.rows(index)) == value.numel()
        assert len(layout.rows(index)) <= 2


@check
@given(layouts())
def test_gaps_are_what_no_parameter_owns(layout):
    shards = scattered(layout, values_of(layout))
    assert int(shards.isnan().sum()) == sum(math.prod(gap.shape) for gap in layout.gaps())
    for gap in layout.gaps():
        assert gap.of(shards).isnan().all()
        gap.of(shards).zero_()
    assert not shards.isnan().any()


@check
@given(layouts())
def test_whole_parameters_do_not_overlap_and_none_begins_the_memory(layout):
    end = 1  # the address of shared memory tells transports what it is
    for slot in layout.slots:
        assert slot.start >= end
        assert slot.start * layout.dtype.itemsize % ALIGNMENT_BYTES == slot.offset * layout.dtype.itemsize % 1 == 0
        end = slot.start + slot.numel
    assert end <= layout.whole_numel
    assert layout.whole_numel % layout.num_shards == 0


def test_a_gradient_with_other_strides_is_cut_without_a_copy():
    layout = DTensorLayout.plan([("p", (5, 4), 0, (), None)], torch.float32, 2)
    grad = torch.arange(20.0).view(4, 5).t()
    parts = [rows.of_param(grad) for rows in layout.rows(0)]
    assert [part.untyped_storage().data_ptr() for part in parts] == [grad.untyped_storage().data_ptr()] * 2
    assert torch.equal(torch.cat([parts[0].flatten(0, 1), parts[1]]), grad)


def test_equal_layouts_have_equal_fingerprints():
    def plan(dim=0, ranks=2, dtype=torch.float32):
        return DTensorLayout.plan([("p", (4, 4), dim, ("q",), None)], dtype, ranks).fingerprint()

    assert plan() == plan()
    assert len({plan(), plan(dim=1), plan(ranks=3), plan(dtype=torch.float64)}) == 4


@pytest.mark.parametrize("itemsize", [1, 2])
def test_alignment_is_that_of_the_narrowest_dtype(itemsize):
    params = [("p", (3,), 0, (), None), ("q", (3,), 0, (), None)]
    layout = DTensorLayout.plan(params, torch.float32, 1, itemsize=itemsize)
    assert [slot.start for slot in layout.slots] == [16 // itemsize, 32 // itemsize]
