"""Values redistributed: planned on every rank alone, moved by all together; ranks are threads."""

import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.params.layout import FlatLayout, Run
from hpcfsdp.reshard.boxes import chunk_box, run_boxes, whole_box
from hpcfsdp.reshard.redistribute import RedistributePlan, ShardedBlocks, Transfer, batches, redistribute
from tests.unit.reshard.distributions import chunk_runs, whole_runs
from tests.unit.reshard.layouts import VALUES, layout_of

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=4)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32])
UNTOUCHED = -7


def numel_of(shape):
    return torch.Size(shape).numel()


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


@st.composite
def pieces(draw, shapes, size):
    """Runs by rank: each tensor cut anywhere, its pieces on any rank, with gaps between them in memory."""
    held = [[] for _ in range(size)]
    for index, shape in enumerate(shapes):
        numel, offsets = numel_of(shape), [0] * size
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
        for begin, end in itertools.pairwise(cuts):
            rank = draw(st.integers(0, size - 1))
            offsets[rank] += draw(st.integers(0, 2))
            held[rank].append(Run(index, begin, end - begin, offsets[rank]))
            offsets[rank] += end - begin
    return held


@st.composite
def distributions(draw, shapes, size):
    """Runs by rank, of any kind that there is."""
    kind = draw(st.sampled_from(["pieces", "rows", "flat shards", "whole"]))
    if kind == "pieces":
        return draw(pieces(shapes, size))
    if kind == "rows":
        with_rows = [shape or (1,) for shape in shapes]  # a tensor without dimensions would be on every rank
        return [chunk_runs(with_rows, size, rank) for rank in range(size)]
    if kind == "flat shards":
        layout = FlatLayout.plan([(str(i), shape, ()) for i, shape in enumerate(shapes)], torch.float32, size)
        return [layout.runs(rank, apart=True) for rank in range(size)]
    owner = draw(st.integers(0, size - 1))
    return [whole_runs(shapes) if rank == owner else [] for rank in range(size)]


def memory(runs, count, dtypes, values=None, step=1):
    """What holds some runs of `count` tensors: None for those of which there is no run, unlike them elsewhere."""
    held = [None] * count
    for index in {run.index for run in runs}:
        numel = max(run.offset + run.numel for run in runs if run.index == index)
        held[index] = torch.full((numel * step,), UNTOUCHED, dtype=dtypes[index])[::step]
    for run in runs if values is not None else ():
        held[run.index][run.offset : run.offset + run.numel] = values[run.index][run.start : run.start + run.numel]
    return held


@settings(max_examples=80, deadline=None)
@given(data=st.data(), size=st.integers(1, 4), shapes=SHAPES)
def test_every_value_arrives_and_nothing_else_is_touched(run_ranks, data, size, shapes):
    sources, targets = data.draw(distributions(shapes, size)), data.draw(distributions(shapes, size))
    values = [torch.arange(numel_of(shape)) + 3 * index for index, shape in enumerate(shapes)]  # exact in all dtypes
    count, step = len(shapes), data.draw(st.sampled_from([1, 2]))
    given_dtypes, taken_dtypes = ([data.draw(DTYPES) for _ in shapes] for _ in range(2))
    travelling, limit = data.draw(DTYPES), data.draw(st.sampled_from([0, 20, 1 << 20]))

    def body(comm):
        have = memory(sources[comm.rank], count, given_dtypes, values, step)
        get = memory(targets[comm.rank], count, taken_dtypes)
        plan = RedistributePlan.make(comm.rank, comm.size, sources.__getitem__, targets.__getitem__)
        for part in plan.parts(batches([numel_of(shape) for shape in shapes], limit)):
            redistribute(comm, part, have, get, travelling)
        return get

    for found, runs in zip(run_ranks(size, body), targets, strict=True):
        for got, expected in zip(found, memory(runs, count, taken_dtypes, values), strict=True):
            assert (got is None) == (expected is None)
            assert got is None or (got.dtype == expected.dtype and torch.equal(got, expected))


@given(data=st.data(), size=st.integers(1, 4), shapes=SHAPES, limit=st.integers(0, 30))
def test_ranks_plan_the_same_moves_and_parts_of_plans_are_the_plan(data, size, shapes, limit):
    sources, targets = data.draw(pieces(shapes, size)), data.draw(pieces(shapes, size))
    plans = [RedistributePlan.make(rank, size, sources.__getitem__, targets.__getitem__) for rank in range(size)]
    for giver in range(size):
        assert plans[giver].sent[giver] == plans[giver].received[giver] == []
        for taker in range(size):
            assert plans[giver].sent[taker] == plans[taker].received[giver]
    groups = batches([numel_of(shape) for shape in shapes], limit)
    for plan in plans:
        parts = list(plan.parts(groups))
        assert len(parts) == len(groups)
        for part, group in zip(parts, groups, strict=True):
            assert all(step.index in group for steps in (part.kept, *part.sent, *part.received) for step in steps)
        assert joined(part.kept for part in parts) == plan.kept
        for rank in range(size):
            assert joined(part.sent[rank] for part in parts) == plan.sent[rank]
            assert joined(part.received[rank] for part in parts) == plan.received[rank]


@given(sizes=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(0, 20))
def test_batches_are_as_large_as_the_limit_allows(sizes, limit):
    found = batches(sizes, limit)
    assert [index for group in found for index in group] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in group) for group in found]
    assert all(total <= limit or len(group) == 1 for total, group in zip(totals, found, strict=True))
    assert all(total + sizes[after.start] > limit for total, after in zip(totals[:-1], found[1:], strict=True))


def test_one_rank_alone_needs_no_collective():
    def refuse(*_):
        raise AssertionError("a collective")

    comm = FakeCommunicator()
    comm.all_to_all = refuse
    plan = RedistributePlan([Transfer(0, 1, 0, 3)], [[]], [[]])
    target = torch.zeros(3, dtype=torch.float64)
    redistribute(comm, plan, [torch.arange(4.0)], [target], torch.float32)
    assert target.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("dtype", "in_place"), [(torch.float32, True), (torch.float64, False)])
def test_a_run_of_the_right_dtype_is_sent_and_received_in_its_place(run_ranks, dtype, in_place):
    """Rank 0 has the rows 0 to 3 of a matrix, and rank 1 is to have them."""

    def body(comm):
        have, get = torch.arange(12, dtype=dtype), torch.zeros(12, dtype=dtype)
        seen, call = [], comm.all_to_all

        def watch(outputs, inputs, *, async_op):
            seen.append((outputs[1 - comm.rank].data_ptr(), inputs[1 - comm.rank].data_ptr()))
            return call(outputs, inputs, async_op=async_op)

        comm.all_to_all = watch
        whole = [Run(0, 0, 12, 0)]
        plan = RedistributePlan.make(comm.rank, 2, lambda r: whole * (r == 0), lambda r: whole * (r == 1))
        redistribute(comm, plan, [have], [get], torch.float32)
        [(received, sent)] = seen
        return sent == have.data_ptr() if comm.rank == 0 else (received == get.data_ptr(), get.tolist())

    assert run_ranks(2, body) == [in_place, (in_place, list(range(12)))]


def test_no_history_of_moves_is_kept(run_ranks):
    layout = FlatLayout.plan([("weight", (4, 4), ())], torch.float32, 2)

    def body(comm):
        shard = torch.nn.Parameter(torch.full((layout.shard_numel,), float(comm.rank)))
        found = torch.zeros(16, requires_grad=True)
        plan = RedistributePlan.make(comm.rank, 2, layout.runs, lambda _: whole_runs([(4, 4)]))
        redistribute(comm, plan, [shard], [found], torch.float32)
        return found.is_leaf, found.tolist()

    assert run_ranks(2, body) == [(True, [0.0] * 8 + [1.0] * 8)] * 2


SLOTS = range(len(VALUES))


def shards_of(layout, shard_rank, values, *, whole_shard):
    """By slot, the memory of a rank's runs."""
    shard = torch.full((layout.shard_numel,), -1.0)
    own = [torch.empty(0)] * len(layout.slots)
    for run in layout.runs(shard_rank):
        slot = layout.slots[run.index]
        block = values[run.index] if slot.block is None else values[run.index][slot.block.box.slices]
        own[run.index] = block.reshape(-1)[run.start : run.start + run.numel].clone()
        shard[run.offset : run.offset + run.numel] = own[run.index]
    return dict(enumerate([shard] * len(own) if whole_shard else own))


def whole_on_first(rank, index, size):
    return [whole_box(VALUES[index].shape)] if rank == 0 else []


def chunks(rank, index, size):
    if not VALUES[index].shape:
        return [whole_box(())] if rank == 0 else []
    box = chunk_box(VALUES[index].shape, size, rank)
    return [] if box is None else [box]


def ranges(rank, index, size):
    step = -(-VALUES[index].numel() // size)
    begin = min(rank * step, VALUES[index].numel())
    return run_boxes(VALUES[index].shape, begin, min(step, VALUES[index].numel() - begin))


@pytest.mark.parametrize("boxes", [whole_on_first, chunks, ranges])
@pytest.mark.parametrize("whole_shard", [False, True], ids=["own memory", "one shard"])
@pytest.mark.parametrize(("num_shards", "num_blocks"), [(1, 1), (3, 1), (1, 2), (2, 2), (2, 3)])
def test_boxes_are_gathered_from_shards_and_scattered_back(run_ranks, num_shards, num_blocks, whole_shard, boxes):
    def body(comm):
        shard_rank, block = divmod(comm.rank, num_blocks)
        layout = layout_of(num_shards, num_blocks, block)
        places = [divmod(rank, num_blocks) for rank in range(comm.size)]
        blocks = ShardedBlocks(comm, places, num_blocks, layout, whole_shard)
        shards = shards_of(layout, shard_rank, VALUES, whole_shard=whole_shard)
        own = {index: boxes(comm.rank, index, comm.size) for index in SLOTS}
        found = {index: torch.full((sum(box.numel for box in own[index]),), -2.0) for index in SLOTS}

        def of_rank(rank, index):
            return boxes(rank, index, comm.size)

        blocks.gather(shards, of_rank, found, torch.float32)
        for index in SLOTS:
            expected = [VALUES[index][box.slices].reshape(-1) for box in own[index]]
            assert torch.equal(found[index], torch.cat(expected) if expected else torch.empty(0))
        empty = shards_of(layout, shard_rank, [value * 0 for value in VALUES], whole_shard=whole_shard)
        blocks.scatter(found.get, of_rank, empty, torch.float32)
        assert all(torch.equal(empty[index], shards[index]) for index in SLOTS)

    assert run_ranks(num_shards * num_blocks, body) == [None] * (num_shards * num_blocks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_unsharded_parameters_come_from_the_first_rank_and_go_to_all(run_ranks, num_ranks):
    def body(comm):
        layout = layout_of(1, 1, 0)
        blocks = ShardedBlocks(comm, [(rank, 0) for rank in range(comm.size)], 1, layout, True)
        shards = shards_of(layout, 0, [value + comm.rank for value in VALUES], whole_shard=True)
        found = {index: torch.empty(value.numel()) for index, value in enumerate(VALUES)}
        blocks.gather(shards, lambda rank, index: [whole_box(VALUES[index].shape)], found, torch.float32)
        assert all(torch.equal(found[index], VALUES[index].reshape(-1)) for index in SLOTS)
        blocks.scatter(found.get, lambda rank, index: whole_on_first(rank, index, comm.size), shards, torch.float32)
        assert torch.equal(shards[0], shards_of(layout, 0, VALUES, whole_shard=True)[0])

    assert run_ranks(num_ranks, body) == [None] * num_ranks
