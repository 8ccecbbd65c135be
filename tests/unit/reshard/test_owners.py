"""Tensors that ranks share brought to their owners and back, for every cut, on ranks that are threads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate, Shard

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.reshard import owners as owning
from hpcfsdp.reshard.boxes import whole_box
from hpcfsdp.reshard.owners import BlockSharding, FlatSharding, OwnerExchange, RanksByDim, choose_owners
from hpcfsdp.reshard.placements import mesh_blocks
from tests.unit.reshard.layouts import VALUES, layout_of

MESHES = [(1, 1, 1), (1, 3, 1), (2, 2, 1), (3, 1, 1), (1, 2, 2), (2, 2, 2), (2, 1, 3), (1, 1, 3)]
"""Replicas x shards x tensor-parallel ranks."""


def lattice_of(mesh, seed=0):
    """The ranks of a mesh, in any order."""
    ranks = np.random.default_rng(seed).permutation(math.prod(mesh)).reshape(mesh)
    return RanksByDim.of(ranks)


def cuts_of(mesh, rank=0):
    """The cuts of all parameters, as `rank` has their layout."""
    ranks_by_dim = lattice_of(mesh)
    layout = layout_of(mesh[1], mesh[2], int(ranks_by_dim.places[rank][2]))
    return [FlatSharding(layout, index, ranks_by_dim) for index in range(len(VALUES))]


def elements(cut, boxes):
    """The numbers of the elements in boxes."""
    numbers = torch.arange(cut.numel).view(cut.view)
    return [number for box in boxes for number in numbers[box.slices].flatten().tolist()]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_senders_and_the_owner_have_each_element_once(mesh):
    size = math.prod(mesh)
    for cut in cuts_of(mesh):
        for owner in range(size):
            sent = dict(cut.senders(owner))
            assert owner not in sent
            found = elements(cut, cut.boxes(owner))
            for rank, boxes in sent.items():
                assert list(boxes) == list(cut.boxes(rank))
                found += elements(cut, boxes)
            assert sorted(found) == list(range(cut.numel))
            assert {rank for rank in range(size) if cut.boxes(rank) and cut.sends(rank, owner)} == set(sent)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_senders_are_of_the_replica_of_the_owner(mesh):
    places = lattice_of(mesh).places
    for cut in cuts_of(mesh):
        for owner in range(math.prod(mesh)):
            assert {int(places[rank][0]) for rank, _ in cut.senders(owner)} <= {int(places[owner][0])}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_shares_and_copies_are_those_of_all_ranks(mesh):
    for cut in cuts_of(mesh):
        expected = {rank: cut.boxes(rank) for rank in range(math.prod(mesh)) if cut.boxes(rank)}
        assert {rank: list(boxes) for rank, boxes in cut.copies()} == expected
        ranks, numels = cut.shares()
        numel_of = {rank: sum(box.numel for box in boxes) for rank, boxes in expected.items()}
        assert dict(zip(ranks.tolist(), numels.tolist(), strict=True)) == numel_of


def shard_of(cut, rank, value):
    """The memory of a rank's boxes."""
    parts = [value.reshape(cut.view)[box.slices].reshape(-1) for box in cut.boxes(rank)]
    return torch.cat(parts) if parts else torch.empty(0)


@pytest.mark.parametrize("limit", [1, 1 << 22], ids=["one by one", "together"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_tensors_are_gathered_and_scattered(run_ranks, monkeypatch, mesh, limit):
    monkeypatch.setattr(owning, "BATCH_NUMEL", limit)
    size = math.prod(mesh)
    owners = [(3 * index + 1) % size for index in range(len(VALUES))]

    def body(comm):
        shardings = cuts_of(mesh, comm.rank)
        moves = OwnerExchange(comm, shardings, owners)
        chosen = [index for index in range(len(VALUES)) if index != 1]
        shards = {index: shard_of(cut, comm.rank, VALUES[index]) for index, cut in enumerate(shardings)}
        whole = {index: torch.full(cut.shape, -1.0) for index, cut in enumerate(shardings) if moves.owns(index)}
        moves.gather(chosen, shards.__getitem__, whole.__getitem__, torch.float32)
        for index in set(whole) & set(chosen):
            assert torch.equal(whole[index], VALUES[index])
            whole[index] *= 2
        before = shards[1].clone()
        moves.scatter(chosen, whole.__getitem__, shards.__getitem__, torch.float32)
        for index in chosen:
            assert torch.equal(shards[index], 2 * shard_of(shardings[index], comm.rank, VALUES[index]))
        assert torch.equal(shards[1], before)

    found = run_ranks(size, body)
    assert found == [None] * size, found


@given(st.data())
@settings(max_examples=60)
def test_blocks_of_any_mesh(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    dims = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    placements = data.draw(st.lists(dims, min_size=len(mesh), max_size=len(mesh)))
    boxes = mesh_blocks(shape, torch.arange(math.prod(mesh)).view(mesh), placements)
    cut = BlockSharding(shape, {rank: box for rank, box in boxes.items() if box.numel})
    for owner in range(math.prod(mesh)):
        sent = dict(cut.senders(owner))
        found = [number for boxes in (cut.boxes(owner), *sent.values()) for number in elements(cut, boxes)]
        assert sorted(found) == list(range(cut.numel))
        assert {rank for rank, _ in cut.copies() if cut.sends(rank, owner)} == set(sent)


# Owners


def flat_cuts(shapes, size):
    layout = FlatLayout.plan([(str(n), shape, ()) for n, shape in enumerate(shapes)], torch.float32, size)
    ranks_by_dim = RanksByDim.of(np.arange(size)[None, :, None])
    return [FlatSharding(layout, index, ranks_by_dim) for index in range(len(shapes))]


def test_a_tensor_stays_on_the_rank_that_has_it():
    shardings = flat_cuts([(8, 8)] * 6, 3)
    assert choose_owners(shardings, [1.0] * 6, 3, 0.0) == [0, 0, 1, 1, 2, 2]
    comm = FakeCommunicator(1, 3)
    moves = OwnerExchange(comm, shardings, [0, 0, 1, 1, 2, 2])
    assert all(moves.stays(index) for index in range(6))


def test_work_is_balanced():
    costs = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    owners = choose_owners(flat_cuts([(8, 8)] * 10, 2), costs, 2, 0.0)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(2)]
    assert loads == [9.0, 9.0]


def test_no_rank_is_idle_where_a_tensor_is_cut_over_all():
    owners = choose_owners(flat_cuts([(8, 8)] * 4, 4), [1.0] * 4, 4, 1e-9)
    assert sorted(owners) == [0, 1, 2, 3]


@pytest.mark.parametrize(("move_cost", "owners"), [(0.1, [0, 1]), (2.0, [0, 0])])
def test_a_move_that_costs_more_than_it_saves_is_left_out(move_cost, owners):
    cut = BlockSharding((8,), {0: whole_box((8,))})
    assert choose_owners([cut, cut], [10.0, 10.0], 2, move_cost) == owners


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8), st.integers(1, 5))
@settings(max_examples=60)
def test_the_choice_does_not_depend_on_the_rank(shapes, size):
    costs = [float(math.prod(shape)) for shape in shapes]
    first = choose_owners(flat_cuts(shapes, size), costs, size, 0.5)
    assert first == choose_owners(flat_cuts(shapes, size), costs, size, 0.5)
    assert all(0 <= owner < size for owner in first)


class Counting(FakeCommunicator):
    """Counts the bytes that a rank sends to others."""

    sent = 0

    def _exchange(self, label, outputs, inputs, async_op):
        self.sent += sum(tensor.nbytes for rank, tensor in enumerate(inputs) if rank != self.rank)


@pytest.mark.parametrize("size", [2, 4, 64])
def test_each_element_moves_once_in_each_direction(size):
    shapes = [(16, 24)] * 5
    shardings = flat_cuts(shapes, size)
    owners = choose_owners(shardings, [1.0] * 5, size, 1e-9)
    total = 0
    for rank in range(size):
        comm = Counting(rank, size)
        moves = OwnerExchange(comm, shardings, owners)
        shards = {index: torch.zeros(moves.numel_here(index)) for index in range(5)}
        whole = {index: torch.zeros(shape) for index, shape in enumerate(shapes)}
        moves.gather(range(5), shards.__getitem__, whole.__getitem__, torch.float32)
        moves.scatter(range(5), whole.__getitem__, shards.__getitem__, torch.float32)
        total += comm.sent
    everything = sum(math.prod(shape) for shape in shapes) * 4
    assert 0 < total <= 2 * everything
