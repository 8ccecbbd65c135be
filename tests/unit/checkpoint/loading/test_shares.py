import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.loading import loader as shares
from hpcfsdp.checkpoint.loading.loader import rows_needed, select_share
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.tensors import NO_RUNS, LocalShards, Runs, StateTensor, replicated

FIELDS = ("start", "numel", "count", "stride")


def row_blocks(numel, cuts):
    """Runs of elements that lie in order."""
    edges = sorted({0, numel, *(cut * numel // 100 for cut in cuts)})
    return [(first, end - first, 1, end - first) for first, end in itertools.pairwise(edges)]


def column_blocks(shape, cuts):
    """Runs with a stride: blocks of columns."""
    rows, columns = shape
    edges = sorted({0, columns, *(cut * columns // 100 for cut in cuts)})
    return [(first, end - first, rows, columns) for first, end in itertools.pairwise(edges)]


def index_of(shapes, blocks):
    """The index of a file whose tensors lie one after the other, last first."""
    specs, rows, first_rows, offset = {}, [], {}, 0
    for place, (shape, found) in reversed(list(enumerate(zip(shapes, blocks, strict=True)))):
        spec = TensorSpec(f"model/{place}", shape, "float32")
        of = np.zeros(len(found), schema.EXTENT_DTYPE)
        for name, values in zip(FIELDS, zip(*found, strict=True), strict=False):
            of[name] = values
        of["tensor"], of["byte_offset"] = place, offset + of["start"] * 4
        offset += spec.nbytes
        specs[place], rows = spec, [of, *rows]
    for place, of in enumerate(rows):
        first = sum(map(len, rows[:place]))
        first_rows[specs[place].path] = first, first + len(of)
    tensors = {specs[place].path: specs[place] for place in sorted(specs)}
    return CheckpointIndex(
        info=None,
        tensors=tensors,
        links={"model/also 0": "model/0"},
        extents=np.concatenate(rows),
        param_groups=None,
        scalars=None,
        rng={},
        footer=None,
        first_rows=first_rows,
    )


def tensors_of(shapes, whole, shards, replicas, rank):
    """The tensors of a model as a rank of replicas x shards has them."""
    layout = FlatLayout.plan([(str(i), shape, ()) for i, shape in enumerate(shapes)], torch.float32, shards)
    copies = np.arange(shards * replicas).reshape(replicas, shards).T
    pieces = LocalShards.of_shard(layout, torch.zeros(layout.shard_numel)).pieces(rank % shards)
    found = []
    for place, slot in enumerate(layout.slots):
        if place in whole:
            found.append((f"model/{slot.fqn}", replicated(slot.fqn, torch.zeros(slot.shape))))
            continue
        first, edges = layout.param_edges(slot.fqn)
        runs = Runs(edges, copies[first : first + len(edges) - 1]) if slot.numel else NO_RUNS
        own = (pieces[place],) if place in pieces else ()
        found.append((f"model/{slot.fqn}", StateTensor(slot.fqn, slot.shape, torch.float32, runs, own)))
    return found


def elements(row):
    """Which elements of its tensor a row has."""
    start, numel, count, stride = (int(row[name]) for name in FIELDS)
    return {start + number * stride + place for number in range(count) for place in range(numel)}


def rows_to_check(index, tensors, peers, rank, num_ranks):
    """What a rank checks, if all of its node need the same rows."""
    needed = rows_needed(index, tensors, peers, num_ranks)
    return select_share(index, needed, list(peers).index(rank), len(peers))


@contextlib.contextmanager
def stretches_of(nbytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "_RANGE_BYTES", nbytes)
        yield


@st.composite
def files(draw):
    """Shapes of tensors, and the index of a file that has them."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=4))
    blocks = []
    for shape in shapes:
        cuts = draw(st.lists(st.integers(1, 99), max_size=3))
        columns = shape[0] > 1 and draw(st.booleans())
        numel = shape[0] * shape[1]
        blocks.append(column_blocks(shape, cuts) if columns else row_blocks(numel, cuts) if numel else [])
    return shapes, index_of(shapes, blocks)


@settings(deadline=None)
@given(
    file=files(),
    mesh=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    whole=st.sets(st.integers(0, 3)),
    nodes=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    nbytes=st.integers(1, 400),
)
def test_the_ranks_of_each_node_check_what_any_of_them_loads_and_each_row_once(file, mesh, whole, nodes, nbytes):
    (shapes, index), (shards, replicas) = file, mesh
    num_ranks = shards * replicas
    models = [tensors_of(shapes, whole, shards, replicas, rank) for rank in range(num_ranks)]
    for node in set(nodes[:num_ranks]):
        peers = [rank for rank in range(num_ranks) if nodes[rank] == node]
        with stretches_of(nbytes):
            found = [rows_to_check(index, models[rank], peers, rank, num_ranks).tolist() for rank in peers]
        everything = sorted(place for share in found for place in share)
        assert len(set(everything)) == len(everything)
        needed = set()
        for rank in peers:
            for path, tensor in models[rank]:
                mine = {piece.start + place for piece in tensor.pieces for place in range(piece.numel)}
                first, end = index.first_rows[path]
                needed |= {place for place in range(first, end) if elements(index.extents[place]) & mine}
        # Between the runs of a row there are elements of others: it may be checked for these.
        assert needed <= set(everything)
        spans = {place for place in everything if int(index.extents[place]["count"]) > 1}
        if len(peers) < num_ranks:
            assert set(everything) - needed <= spans
        for share in found:
            offsets = index.extents["byte_offset"][share].tolist()
            assert offsets == sorted(offsets)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 300))
def test_all_ranks_check_about_as_much(sizes, num_ranks, nbytes):
    index = index_of([(size, 1) for size in sizes], [row_blocks(size, ()) for size in sizes])
    tensors = tensors_of([(size, 1) for size in sizes], (), num_ranks, 1, 0)
    with stretches_of(nbytes):
        found = [rows_to_check(index, tensors, range(num_ranks), rank, num_ranks) for rank in range(num_ranks)]
    total, turns = 4 * sum(sizes), -(-4 * sum(sizes) // (num_ranks * nbytes))
    for share in found:
        assert 4 * index.extents["numel"][share].sum() <= total / num_ranks + turns * 4 * max(sizes)


@pytest.mark.parametrize("shapes", [[(5, 3), (7, 2)], [(4, 4)]])
@pytest.mark.parametrize("node", [[1, 3, 5, 7], [0, 1, 2, 3], [6, 7]])
def test_a_rank_finds_all_that_it_needs_where_others_have_other_layouts(shapes, node):
    """Ranks that are parallel over tensors: `runs` tells of the first, and the others lay shards out otherwise."""
    index = index_of(shapes, [row_blocks(rows * columns, [20, 40, 60, 80]) for rows, columns in shapes])
    first = tensors_of(shapes, (), 4, 1, 0)
    for rank in node:
        shard, other = divmod(rank, 2)
        ahead = [(2, 3)] * other  # a parameter of which only some have a part
        own = tensors_of([*ahead, *shapes], (), 4, 1, shard)[other:]
        copies = [dataclasses.replace(of.runs, ranks=of.runs.ranks * 2) for _, of in first]
        tensors = [
            (path, dataclasses.replace(mine, runs=runs))
            for (path, _), (_, mine), runs in zip(first, own, copies, strict=True)
        ]
        needed = set(rows_needed(index, tensors, node, 8).tolist())
        for path, tensor in tensors:
            mine = {piece.start + place for piece in tensor.pieces for place in range(piece.numel)}
            begin, end = index.first_rows[path]
            assert {place for place in range(begin, end) if elements(index.extents[place]) & mine} <= needed


def test_tied_tensors_are_checked_once_and_what_is_not_loaded_is_not_checked():
    index = index_of([(2, 3), (2, 3)], [row_blocks(6, (50,)), row_blocks(6, ())])
    [(_, tensor), _] = tensors_of([(2, 3), (2, 3)], (), 1, 1, 0)
    assert rows_to_check(index, [("model/also 0", tensor), ("model/0", tensor)], [0], 0, 1).tolist() == [0, 1]
    assert rows_to_check(index, [], [0], 0, 1).tolist() == []


def test_ranks_take_ranges_of_a_file_in_turn():
    index = index_of([(64, 1)], [row_blocks(64, [25, 50, 75])])
    tensors = tensors_of([(64, 1)], (), 2, 1, 0)
    with stretches_of(64):
        assert rows_to_check(index, tensors, [0, 1], 0, 2).tolist() == [0, 2]
        assert rows_to_check(index, tensors, [0, 1], 1, 2).tolist() == [1, 3]
    assert rows_to_check(index, tensors, [0, 1], 0, 2).tolist() == [0, 1]
