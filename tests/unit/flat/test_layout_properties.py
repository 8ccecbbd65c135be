"""What holds for every layout, with real tensors laid out by it and far beyond the sizes that fit into memory."""

import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from hpcfsdp.flat.layout import FlatLayout

PRIMES = [2, 3, 5, 7, 11, 13, 31]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]

# No dimensions, no elements, one element, primes: what a shard ends inside of, and what does not reach the next one.
SHAPES = st.one_of(
    st.just(()),
    st.just((0,)),
    st.just((1,)),
    st.lists(st.sampled_from([0, 1, *PRIMES]), min_size=1, max_size=3).map(tuple),
)
# Pure arithmetic has no limit: whole models of 10^12 elements on thousands of ranks.
HUGE_SHAPES = st.lists(st.integers(1, 10**5), max_size=2).map(tuple)


@st.composite
def params(draw, shapes=SHAPES, max_size=7):
    found = draw(st.lists(shapes, max_size=max_size))
    ties = draw(st.lists(st.integers(0, 2), min_size=len(found), max_size=len(found)))
    return [
        (f"{index}.weight", shape, tuple(f"{index}.tied.{tie}" for tie in range(count)))
        for index, (shape, count) in enumerate(zip(found, ties, strict=True))
    ]


WORLDS = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 64]))
layouts = st.builds(FlatLayout.plan, params(), st.sampled_from(DTYPES), WORLDS)
huge_layouts = st.builds(FlatLayout.plan, params(HUGE_SHAPES), st.sampled_from(DTYPES), st.integers(1, 4096))

check = settings(max_examples=100, deadline=None)


def values_of(layout):
    """A tensor for every parameter, as bytes that are all different from zero and from those next to them."""
    found, count = {}, 1
    for slot in layout.slots:
        size = slot.numel * layout.dtype.itemsize
        found[slot.fqn] = (torch.arange(count, count + size) % 251 + 1).to(torch.uint8)
        count += size
    return found


def flatten(layout, values):
    """The whole buffer, in bytes: one row for every element."""
    size = layout.dtype.itemsize
    buffer = torch.zeros(layout.padded_numel, size, dtype=torch.uint8)
    for slot in layout.slots:
        buffer[slot.offset : slot.end] = values[slot.fqn].view(slot.numel, size)
    return buffer


def shards_of(layout, buffer):
    return list(buffer.split(layout.shard_numel)) if layout.shard_numel else [buffer] * layout.num_shards


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name].flatten(), value), name


@given(layouts)
@check
def test_flattened_sharded_gathered_and_viewed_again_nothing_has_changed(layout):
    values = values_of(layout)
    shards = shards_of(layout, flatten(layout, values))
    assert len(shards) == layout.num_shards
    assert {len(shard) for shard in shards} == {layout.shard_numel}
    gathered = torch.cat(shards)
    got = {slot.fqn: gathered[slot.offset : slot.end] for slot in layout.slots}
    assert_equal(got, values)


@given(layouts)
@check
def test_real_tensors_are_viewed_in_their_own_shape_and_dtype(layout):
    buffer = flatten(layout, values_of(layout)).flatten().view(layout.dtype)
    assert buffer.numel() == layout.padded_numel
    for slot in layout.slots:
        view = buffer[slot.offset : slot.end].view(slot.shape)
        assert view.shape == slot.shape
        assert view.data_ptr() == buffer.data_ptr() + slot.offset * layout.dtype.itemsize or slot.numel == 0


@given(layouts, WORLDS)
@check
def test_extents_alone_carry_parameters_from_one_number_of_ranks_to_another(layout, num_shards):
    """Resharding: what ranks of the one layout hold is written where ranks of the other look for it."""
    other = FlatLayout.plan([(s.fqn, s.shape, s.aliases) for s in layout.slots], layout.dtype, num_shards)
    values = values_of(layout)
    shards = shards_of(layout, flatten(layout, values))
    whole = {slot.fqn: torch.zeros(slot.numel, layout.dtype.itemsize, dtype=torch.uint8) for slot in layout.slots}
    for rank, shard in enumerate(shards):
        for extent in layout.extents(rank):
            run = shard[extent.shard_offset : extent.shard_offset + extent.numel]
            whole[extent.fqn][extent.start : extent.start + extent.numel] = run
    rebuilt = torch.zeros(other.padded_numel, layout.dtype.itemsize, dtype=torch.uint8)
    parts = shards_of(other, rebuilt)
    for slot in other.slots:
        for extent in other.param_extents(slot.fqn):
            run = whole[extent.fqn][extent.start : extent.start + extent.numel]
            parts[extent.shard_rank][extent.shard_offset : extent.shard_offset + extent.numel] = run
    assert torch.equal(rebuilt, flatten(other, values))


@given(layouts)
@check
def test_every_element_of_every_parameter_lies_on_one_rank(layout):
    counts = {slot.fqn: torch.zeros(slot.numel, dtype=torch.int64) for slot in layout.slots}
    owned = torch.zeros(layout.num_shards, layout.shard_numel, dtype=torch.int64)
    for rank in range(layout.num_shards):
        for extent in layout.extents(rank):
            assert extent.shard_rank == rank
            counts[extent.fqn][extent.start : extent.start + extent.numel] += 1
            owned[rank, extent.shard_offset : extent.shard_offset + extent.numel] += 1
    assert all((count == 1).all() for count in counts.values())
    for begin, end in layout.gaps():
        owned.view(-1)[begin:end] += 1
    assert (owned == 1).all(), "parameters and gaps overlap, or leave something out"


@given(st.one_of(layouts, huge_layouts))
@check
def test_extents_are_where_the_slot_says(layout):
    for slot in layout.slots:
        for name in (slot.fqn, *slot.aliases):
            extents = layout.param_extents(name)
            assert sum(extent.numel for extent in extents) == slot.numel
            for extent in extents:
                assert extent.fqn == slot.fqn
                begin = extent.shard_rank * layout.shard_numel + extent.shard_offset
                assert begin == slot.offset + extent.start
                assert 0 <= extent.shard_offset < extent.shard_offset + extent.numel <= layout.shard_numel
            assert [e.shard_rank for e in extents] == list(range(*_ranks(extents)))


def _ranks(extents):
    return (extents[0].shard_rank, extents[-1].shard_rank + 1) if extents else (0,)


@given(st.one_of(layouts, huge_layouts), st.data())
@check
def test_all_ways_to_ask_for_extents_agree(layout, data):
    rank = data.draw(st.integers(0, layout.num_shards - 1))
    here = layout.extents(rank)
    by_name = {slot.fqn: layout.param_extents(slot.fqn) for slot in layout.slots}
    assert set(here) == {extent for extents in by_name.values() for extent in extents if extent.shard_rank == rank}
    for name, slot in layout.by_name.items():
        assert layout.param_extent(name, rank) == next((e for e in here if e.fqn == slot.fqn), None)


@given(st.one_of(layouts, huge_layouts))
@check
def test_gaps_are_apart_from_slots_and_small(layout):
    align = max(1, 16 // layout.dtype.itemsize)
    gaps = layout.gaps()
    assert all(0 <= begin < end <= layout.padded_numel for begin, end in gaps)
    for slot in layout.slots:
        assert all(end <= slot.offset or slot.end <= begin for begin, end in gaps if slot.numel)
    # Between parameters less than an alignment; at the end less than one for each shard and the last parameter.
    last = max((slot.end for slot in layout.slots), default=0)
    assert all(end - begin < align for begin, end in gaps if end <= last)
    assert layout.padded_numel - last < align * layout.num_shards


@given(params(), st.sampled_from(DTYPES), WORLDS)
@check
def test_the_same_model_is_always_laid_out_the_same(model, dtype, num_shards):
    layout = FlatLayout.plan(model, dtype, num_shards)
    again = FlatLayout.plan(((name, torch.Size(shape), aliases) for name, shape, aliases in model), dtype, num_shards)
    assert layout == again
    assert hash(layout) == hash(again)
    assert layout.fingerprint() == again.fingerprint()
    assert layout.gaps() == again.gaps()
    assert [slot.fqn for slot in layout.slots] == [name for name, _, _ in model], "the order given is the order kept"


@given(params(), st.sampled_from(DTYPES), WORLDS, WORLDS)
@check
def test_the_number_of_ranks_moves_no_parameter(model, dtype, few, many):
    """Also the content of the buffer is the same but for the padding at the end."""
    one, other = (FlatLayout.plan(model, dtype, ranks) for ranks in (few, many))
    assert one.slots == other.slots
    assert one.numel == other.numel == sum(math.prod(shape) for _, shape, _ in model)


@given(params(), st.data())
@check
def test_another_model_has_another_fingerprint(model, data):
    assume(model)
    index = data.draw(st.integers(0, len(model) - 1))
    name, shape, aliases = model[index]
    changed = data.draw(
        st.sampled_from([(f"{name}.x", shape, aliases), (name, (*shape, 1), aliases), (name, shape, (*aliases, "new"))])
    )
    other = [*model[:index], changed, *model[index + 1 :]]
    plan = [FlatLayout.plan(each, torch.float32, 3).fingerprint() for each in (model, other)]
    assert plan[0] != plan[1]


@given(st.one_of(layouts, huge_layouts))
@check
def test_names_change_without_positions(layout):
    renamed = layout.renamed("prefix.{}".format)
    aliased = layout.aliased([renamed, renamed.renamed("again.{}".format)])
    for found in (renamed, aliased):
        assert [(slot.offset, slot.shape) for slot in found.slots] == [(s.offset, s.shape) for s in layout.slots]
        assert (found.shard_numel, found.dtype, found.gaps()) == (layout.shard_numel, layout.dtype, layout.gaps())
    places = lambda extents: [(e.shard_rank, e.start, e.numel, e.shard_offset) for e in extents]  # noqa: E731
    for slot in layout.slots:
        expected = places(layout.param_extents(slot.fqn))
        assert places(renamed.param_extents(f"prefix.{slot.fqn}")) == expected
        for name in (slot.fqn, f"prefix.{slot.fqn}", f"again.prefix.{slot.fqn}"):
            assert places(aliased.param_extents(name)) == expected
    assert set(aliased.by_name) == {
        form.format(name) for name in layout.by_name for form in ("{}", "prefix.{}", "again.prefix.{}")
    }


@given(layouts)
@check
def test_aliases_of_a_layout_of_other_slots_are_refused(layout):
    longer = FlatLayout.plan(
        [*((s.fqn, s.shape, s.aliases) for s in layout.slots), ("new", (1,), ())], layout.dtype, layout.num_shards
    )
    with pytest.raises(ValueError, match=r"shorter|longer"):
        layout.aliased([longer])
