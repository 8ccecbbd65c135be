"""What holds for every layout, with real tensors laid out by it and far beyond the sizes that fit into memory."""

import math

import torch
from hypothesis import assume, given, settings, strategies as st

from hpcfsdp.params.layout import FlatLayout

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


@st.composite
def with_blocks(draw):
    """A layout whose shards end between blocks."""
    model = draw(params())
    granularity = {name: draw(st.sampled_from([1, "row", "whole"])) for name, _, _ in model}
    return FlatLayout.plan(model, draw(st.sampled_from(DTYPES)), draw(WORLDS), granularity=granularity)


in_order = st.builds(FlatLayout.plan, params(), st.sampled_from(DTYPES), WORLDS)
layouts = st.one_of(in_order, with_blocks())
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
def test_runs_alone_carry_parameters_from_one_number_of_ranks_to_another(layout, num_shards):
    """Resharding: what ranks of the one layout hold is written where ranks of the other look for it."""
    other = FlatLayout.plan([(s.fqn, s.shape, s.aliases) for s in layout.slots], layout.dtype, num_shards)
    values = values_of(layout)
    shards = shards_of(layout, flatten(layout, values))
    whole = {slot.fqn: torch.zeros(slot.numel, layout.dtype.itemsize, dtype=torch.uint8) for slot in layout.slots}
    for rank, shard in enumerate(shards):
        for run in layout.runs(rank):
            part = shard[run.offset : run.offset + run.numel]
            whole[layout.slots[run.index].fqn][run.start : run.start + run.numel] = part
    rebuilt = torch.zeros(other.padded_numel, layout.dtype.itemsize, dtype=torch.uint8)
    parts = shards_of(other, rebuilt)
    for slot in other.slots:
        for rank, run in param_runs(other, slot.fqn):
            parts[rank][run.offset : run.offset + run.numel] = whole[slot.fqn][run.start : run.start + run.numel]
    assert torch.equal(rebuilt, flatten(other, values))


@given(layouts)
@check
def test_every_element_of_every_parameter_is_on_one_rank(layout):
    counts = {slot.fqn: torch.zeros(slot.numel, dtype=torch.int64) for slot in layout.slots}
    owned = torch.zeros(layout.num_shards, layout.shard_numel, dtype=torch.int64)
    for rank in range(layout.num_shards):
        for run in layout.runs(rank):
            counts[layout.slots[run.index].fqn][run.start : run.start + run.numel] += 1
            owned[rank, run.offset : run.offset + run.numel] += 1
    assert all((count == 1).all() for count in counts.values())
    for begin, end in layout.gaps():
        owned.view(-1)[begin:end] += 1
    assert (owned == 1).all(), "parameters and gaps overlap, or leave something out"


def param_runs(layout, name):
    """(rank, run) for each rank that has a part of a parameter."""
    slot = layout.by_name[name]
    ranks = range(slot.offset // layout.shard_numel, -(-slot.end // layout.shard_numel)) if slot.numel else ()
    return [(rank, layout.param_run(name, rank)) for rank in ranks]


@given(st.one_of(layouts, huge_layouts))
@check
def test_runs_are_where_the_slot_says(layout):
    for slot in layout.slots:
        for name in (slot.fqn, *slot.aliases):
            runs = param_runs(layout, name)
            assert sum(run.numel for _, run in runs) == slot.numel
            for rank, run in runs:
                assert layout.slots[run.index] is slot
                assert rank * layout.shard_numel + run.offset == slot.offset + run.start
                assert 0 <= run.offset < run.offset + run.numel <= layout.shard_numel
            first, edges = layout.param_edges(name)
            assert edges.tolist() == [*(run.start for _, run in runs), slot.numel]
            assert not runs or runs[0][0] == first


@given(st.one_of(layouts, huge_layouts), st.data())
@check
def test_all_ways_to_ask_for_runs_agree(layout, data):
    rank = data.draw(st.integers(0, layout.num_shards - 1))
    here = layout.runs(rank)
    assert here == [run for slot in layout.slots for r, run in param_runs(layout, slot.fqn) if r == rank]
    for name, slot in layout.by_name.items():
        assert layout.param_run(name, rank) == next((run for run in here if layout.slots[run.index] is slot), None)


@given(st.one_of(in_order, huge_layouts))
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
    assert sum(slot.numel for slot in one.slots) == sum(math.prod(shape) for _, shape, _ in model)


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
    renamed = layout.known_as(("prefix.",), "{}{}".format)
    aliased = layout.known_as(("", "prefix.", "again.prefix."), "{}{}".format)
    for found in (renamed, aliased):
        assert [(slot.offset, slot.shape) for slot in found.slots] == [(s.offset, s.shape) for s in layout.slots]
        assert (found.shard_numel, found.dtype, found.gaps()) == (layout.shard_numel, layout.dtype, layout.gaps())
    for slot in layout.slots:
        expected = param_runs(layout, slot.fqn)
        assert param_runs(renamed, f"prefix.{slot.fqn}") == expected
        for name in (slot.fqn, f"prefix.{slot.fqn}", f"again.prefix.{slot.fqn}"):
            assert param_runs(aliased, name) == expected
    assert set(aliased.by_name) == {
        form.format(name) for name in layout.by_name for form in ("{}", "prefix.{}", "again.prefix.{}")
    }
