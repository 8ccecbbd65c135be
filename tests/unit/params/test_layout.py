import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.params.layout import ALIGNMENT_BYTES, FlatLayout, ParamSlot, Run

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex128]

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def params(draw):
    """Parameters of a model: names, shapes, and further names of tied ones."""
    shapes = draw(st.lists(SHAPES, max_size=8))
    ties = draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    return [
        (f"layer.{index}", shape, tuple(f"tied.{index}.{tie}" for tie in range(count)))
        for index, (shape, count) in enumerate(zip(shapes, ties, strict=True))
    ]


@st.composite
def with_blocks(draw):
    model = draw(params())
    granularity = {name: draw(st.sampled_from([1, "row", "whole"])) for name, _, _ in model}
    return FlatLayout.plan(model, draw(st.sampled_from(DTYPES)), draw(st.integers(1, 9)), granularity=granularity)


in_order = st.builds(FlatLayout.plan, params(), st.sampled_from(DTYPES), st.integers(1, 9))
"""Layouts of which any element may be the first of a shard: parameters lie in their order, with the least padding."""
layouts = st.one_of(in_order, with_blocks())


def buffer_of(layout):
    """A flat buffer with elements 1, 2, 3, ... of parameters, and 0 elsewhere."""
    buffer, values, next_value = np.zeros(layout.padded_numel, dtype=np.int64), {}, 1
    for slot in layout.slots:
        values[slot.fqn] = np.arange(next_value, next_value + slot.numel).reshape(slot.shape)
        next_value += slot.numel
        buffer[slot.offset : slot.end] = values[slot.fqn].ravel()
    return buffer, values


def param_runs(layout, name):
    """(rank, run) for each rank that has a part of a parameter."""
    runs = ((rank, layout.param_run(name, rank)) for rank in range(layout.num_shards))
    return [(rank, run) for rank, run in runs if run is not None]


@given(layouts)
@settings(max_examples=80, deadline=None)
def test_shards_put_together_by_the_runs_of_parameters_are_the_parameters(layout):
    buffer, values = buffer_of(layout)
    shards = buffer.reshape(layout.num_shards, layout.shard_numel)
    for slot in layout.slots:
        for name in (slot.fqn, *slot.aliases):
            runs = [shards[rank, run.offset : run.offset + run.numel] for rank, run in param_runs(layout, name)]
            joined = np.concatenate([np.zeros(0, np.int64), *runs]).reshape(slot.shape)
            assert np.array_equal(joined, values[slot.fqn])


@given(layouts)
@settings(max_examples=80, deadline=None)
def test_shards_put_together_by_the_runs_of_ranks_are_the_parameters(layout):
    buffer, values = buffer_of(layout)
    shards = buffer.reshape(layout.num_shards, layout.shard_numel)
    joined = [np.zeros(slot.numel, np.int64) for slot in layout.slots]
    for rank in range(layout.num_shards):
        for run in layout.runs(rank):
            joined[run.index][run.start : run.start + run.numel] = shards[rank, run.offset : run.offset + run.numel]
    for slot, found in zip(layout.slots, joined, strict=True):
        assert np.array_equal(found.reshape(slot.shape), values[slot.fqn])


@given(layouts)
@settings(max_examples=80, deadline=None)
def test_runs_tile_each_parameter_once_in_order(layout):
    for slot in layout.slots:
        end = 0
        for _, run in param_runs(layout, slot.fqn):
            assert run.numel > 0
            assert run.start == end
            end += run.numel
        assert end == slot.numel


@given(in_order)
@settings(max_examples=80, deadline=None)
def test_the_runs_of_a_rank_are_those_of_parameters_in_order_of_its_shard(layout):
    for rank in range(layout.num_shards):
        runs, end = layout.runs(rank), 0
        assert runs == [run for slot in layout.slots for r, run in param_runs(layout, slot.fqn) if r == rank]
        assert layout.runs(rank, apart=True) == [run._replace(offset=0) for run in runs]
        for run in runs:
            assert run.offset >= end
            end = run.offset + run.numel
        assert end <= layout.shard_numel


@given(layouts)
@settings(max_examples=80, deadline=None)
def test_slots_and_gaps_tile_the_buffer_without_overlap(layout):
    runs = [(slot.offset, slot.end) for slot in layout.slots if slot.numel] + layout.gaps()
    end = 0
    for begin, stop in sorted(runs):
        assert begin == end < stop
        end = stop
    assert end == layout.padded_numel


@given(in_order)
@settings(max_examples=80, deadline=None)
def test_parameters_and_shards_start_at_aligned_bytes_and_shards_are_no_longer_than_needed(layout):
    assert ALIGNMENT_BYTES == 16
    size = layout.dtype.itemsize
    assert all(slot.offset * size % ALIGNMENT_BYTES == 0 for slot in layout.slots)
    assert layout.shard_numel * size % ALIGNMENT_BYTES == 0
    used = layout.slots[-1].end if layout.slots else 0
    needed = -(-used // layout.num_shards)
    assert needed <= layout.shard_numel < needed + ALIGNMENT_BYTES // size


def test_a_layout_below_several_paths_has_names_below_the_first_and_aliases_below_the_others():
    layout = FlatLayout.plan([("w", (2,), ("v",)), ("b", (3,), ())], torch.float32, 2)
    found = layout.known_as(("", "x.", "y."), "{}{}".format)
    assert [(slot.fqn, slot.aliases) for slot in found.slots] == [
        ("w", ("v", "x.w", "x.v", "y.w", "y.v")),
        ("b", ("x.b", "y.b")),
    ]
    assert param_runs(found, "y.b") == param_runs(layout, "b")


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_slots_and_gaps_make_up_the_flat_buffer(layout):
    numel = sum(math.prod(slot.shape) for slot in layout.slots)
    assert layout.padded_numel == numel + sum(end - begin for begin, end in layout.gaps())


def test_a_parameter_is_cut_where_a_shard_ends():
    layout = FlatLayout.plan([("weight", (3, 5), ()), ("bias", (3,), ())], torch.float32, 3)
    assert layout.slots == (ParamSlot("weight", (3, 5), 0), ParamSlot("bias", (3,), 16))
    assert (layout.shard_numel, layout.padded_numel) == (8, 24)
    assert layout.gaps() == [(15, 16), (19, 24)]
    assert [layout.runs(rank) for rank in range(3)] == [[Run(0, 0, 8, 0)], [Run(0, 8, 7, 0)], [Run(1, 0, 3, 0)]]
    assert param_runs(layout, "weight") == [(0, Run(0, 0, 8, 0)), (1, Run(0, 8, 7, 0))]


def test_a_rank_that_holds_padding_only_has_no_runs():
    layout = FlatLayout.plan([("weight", (4,), ())], torch.float32, 3)
    assert [len(layout.runs(rank)) for rank in range(3)] == [1, 0, 0]


def test_an_unknown_name_has_no_run():
    layout = FlatLayout.plan([("weight", (4,), ("alias",))], torch.float32, 2)
    assert param_runs(layout, "alias") == param_runs(layout, "weight")
    with pytest.raises(KeyError, match="bias"):
        layout.param_run("bias", 0)


def test_the_fingerprint_shows_every_difference():
    def fingerprint(name="w", shape=(2, 3), aliases=(), dtype=torch.float32, num_shards=2):
        return FlatLayout.plan([(name, shape, aliases)], dtype, num_shards).fingerprint()

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(name="v"),
        fingerprint(shape=(3, 2)),
        fingerprint(aliases=("v",)),
        fingerprint(dtype=torch.int32),
        fingerprint(num_shards=3),
    ]
    assert len({fingerprint(), *others}) == 6


@pytest.mark.parametrize(
    ("given_twice", "model"),
    [
        ("w", [("w", (1,), ()), ("w", (2,), ())]),
        ("w", [("w", (1,), ()), ("v", (2,), ("w",))]),
        ("t", [("w", (1,), ("t",)), ("v", (2,), ("t",))]),
        ("w", [("w", (1,), ("w",))]),
    ],
)
def test_a_name_given_twice_is_refused(given_twice, model):
    with pytest.raises(ValueError, match=f"^parameter name '{given_twice}' is given twice$"):
        FlatLayout.plan(model, torch.float32, 1)


@pytest.mark.parametrize("num_shards", [0, -1])
def test_a_layout_without_ranks_is_refused(num_shards):
    with pytest.raises(ValueError, match=f"^a layout needs at least one shard, not {num_shards}$"):
        FlatLayout.plan([("w", (1,), ())], torch.float32, num_shards)
