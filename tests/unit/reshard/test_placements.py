"""Blocks of the ranks of a mesh, beside a map of each element to its ranks, and beside torch's."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.placements import block_at, mesh_blocks, mesh_boxes, rows_on_mesh
from hpcfsdp.reshard.sharded_tensors import all_boxes
from hpcfsdp.reshard.tiling import find_fault

SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
check = settings(max_examples=150, deadline=None)


def numbered(shape):
    """A tensor whose elements are their own places in row-major order."""
    return torch.arange(math.prod(shape)).view(shape)


def owners(shape, held):
    """For each element the ranks that have it, and how often."""
    found = [[] for _ in range(math.prod(shape))]
    for rank, boxes in held.items():
        for box in boxes:
            for element in numbered(shape)[box.slices].flatten().tolist():
                found[element].append(rank)
    return [sorted(ranks) for ranks in found]


def owners_of(numel, by_rank):
    """The same of elements that are listed by rank."""
    found = [[] for _ in range(numel)]
    for rank, elements in by_rank.items():
        for element in elements:
            found[element].append(rank)
    return [sorted(ranks) for ranks in found]


@st.composite
def meshes(draw, max_ranks=9, max_dims=3):
    """Ranks on a mesh, in any order."""
    sizes = []
    for _ in range(draw(st.integers(1, max_dims))):
        sizes.append(draw(st.integers(1, max(1, max_ranks // math.prod(sizes)))))
    return torch.tensor(draw(st.permutations(range(math.prod(sizes))))).view(sizes)


@st.composite
def placed(draw, strided=False):
    """A shape, a mesh, and placements on it; several along one dimension, too."""
    shape, ranks = draw(SHAPES), draw(meshes())
    kinds = [st.just(Replicate())]
    if shape:
        kinds.append(st.builds(Shard, st.integers(-len(shape), len(shape) - 1)))
        if strided:
            dims = st.integers(0, len(shape) - 1)
            kinds.append(st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 4)))
    return shape, ranks, tuple(draw(st.one_of(kinds)) for _ in range(ranks.ndim))


def local_on_mesh(whole, ranks, placements):
    """By rank, what torch's own way to split leaves of a tensor."""
    found = {}
    for place in itertools.product(*map(range, ranks.shape)):
        block = whole
        for size, at, placement in zip(ranks.shape, place, placements, strict=True):
            if not placement.is_replicate():
                dim = placement.dim % whole.ndim
                strides = getattr(placement, "split_factor", 1)
                pieces = [piece.chunk(size, dim) for piece in block.chunk(strides, dim)]
                parts = [piece[at] for piece in pieces if at < len(piece)]
                block = torch.cat(parts, dim) if parts else block.narrow(dim, 0, 0)
        found[int(ranks[place])] = block
    return found


def torchs_blocks(shape, ranks, placements):
    """By rank, the block that torch computes with; where strides leave it several, from the first on."""
    found = {}
    for place, rank in zip(itertools.product(*map(range, ranks.shape)), ranks.flatten().tolist(), strict=True):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, tuple(ranks.shape), list(place), placements)
        found[rank] = Box(tuple(offsets), tuple(sizes))
    return found


@given(placed(strided=True))
@check
def test_the_blocks_of_a_mesh_are_the_elements_that_chunks_leave(drawn):
    shape, ranks, placements = drawn
    held = mesh_boxes(shape, ranks, placements)
    local = local_on_mesh(numbered(shape), ranks, placements)
    assert owners(shape, held) == owners_of(math.prod(shape), {r: t.flatten().tolist() for r, t in local.items()})
    assert list(held) == [rank for rank in ranks.flatten().tolist() if rank in held]
    assert all(boxes == sorted(boxes) for boxes in held.values())
    if math.prod(shape):
        assert all(box.numel for boxes in held.values() for box in boxes)
    else:
        assert held == {int(ranks.flatten()[0]): [Box((0,) * len(shape), shape)]}


@given(placed(strided=True).filter(lambda drawn: math.prod(drawn[0]) and drawn[0]))
@check
def test_rows_of_ranks_are_their_boxes_where_these_are_whole_rows(drawn):
    shape, ranks, placements = drawn
    held = mesh_boxes(shape, ranks, placements)
    rows = rows_on_mesh(shape, ranks, placements)
    boxes = [held.get(rank, []) for rank in ranks.flatten().tolist()]
    cut_apart = any(p.dim % len(shape) for p in placements if not p.is_replicate())
    if rows is None:
        assert cut_apart or any(len(of_rank) > 1 for of_rank in boxes)
        return
    for begin, end, of_rank in zip(*(edges.tolist() for edges in rows), boxes, strict=True):
        expected = [Box((begin, *[0] * (len(shape) - 1)), (end - begin, *shape[1:]))] if begin < end else []
        assert of_rank == expected


@given(placed())
@check
def test_a_rank_of_a_mesh_has_the_block_that_torch_says(drawn):
    shape, ranks, placements = drawn
    placements = tuple(Shard(p.dim % len(shape)) if p.is_shard() else p for p in placements)
    held = mesh_boxes(shape, ranks, placements)
    blocks = mesh_blocks(shape, ranks, placements)
    places = itertools.product(*map(range, ranks.shape))
    assert [block_at(shape, ranks.shape, placements, place) for place in places] == list(blocks.values())
    assert list(blocks) == ranks.flatten().tolist()
    for rank, theirs in torchs_blocks(shape, ranks, placements).items():
        if theirs.numel:
            assert [blocks[rank]] == held[rank] == [theirs]
        else:
            assert blocks[rank].sizes == theirs.sizes
            assert not math.prod(shape) or rank not in held


@pytest.mark.parametrize("rows", [8, 16, 13, 5, 1])
def test_strided_placements_of_two_dimensional_sharding(rows):
    """Rows that are cut over tensor ranks first, and by the outer dimension of the mesh second."""
    ranks, placements = torch.arange(4).view(2, 2), (_StridedShard(0, split_factor=2), Shard(0))
    held = mesh_boxes((rows, 3), ranks, placements)
    local = local_on_mesh(numbered((rows, 3)), ranks, placements)
    theirs = torchs_blocks((rows, 3), ranks, placements)
    for rank, (offsets, sizes) in theirs.items():
        assert sum(box.sizes[0] for box in held.get(rank, [])) == sizes[0] == len(local[rank])
        if rank in held:
            assert held[rank][0].offsets == offsets
    if rows % 4 == 0:
        assert [held[rank][0].offsets[0] * 4 // rows for rank in range(4)] == [0, 2, 1, 3]
    assert find_fault((rows, 3), [box for boxes in held.values() for box in boxes]) is None


def test_strides_that_one_rank_has_are_one_block():
    assert mesh_boxes((6,), torch.arange(1), [_StridedShard(0, split_factor=3)]) == {0: [Box((0,), (6,))]}
    found = mesh_boxes((3, 6), torch.arange(2), [_StridedShard(1, split_factor=2)])
    assert found == {
        0: [Box((0, 0), (3, 2)), Box((0, 3), (3, 2))],
        1: [Box((0, 2), (3, 1)), Box((0, 5), (3, 1))],
    }


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], r"1 placement\(s\) were given for a mesh of 2 dimension\(s\)"),
        ([Shard(0), Replicate(), Replicate()], r"3 placement\(s\) were given for a mesh of 2 dimension\(s\)"),
        ([Shard(0), Partial()], r"\(Shard\(dim=0\), Partial\(sum\)\) has no values of its own: redistribute it first"),
        ([Replicate(), Shard(2)], r"shape \[4, 6\] has no dimension 2"),
        ([Replicate(), Shard(-3)], r"shape \[4, 6\] has no dimension -3"),
    ],
)
@pytest.mark.parametrize("divide", [mesh_boxes, rows_on_mesh])
def test_placements_that_are_no_cut(divide, placements, message):
    with pytest.raises(ShardingError, match=message):
        divide((4, 6), torch.arange(4).view(2, 2), placements)


@pytest.mark.parametrize("placement", [Partial(), _StridedShard(0, split_factor=2)], ids=str)
def test_placements_that_leave_no_block(placement):
    with pytest.raises(ShardingError, match="is not made of blocks"):
        mesh_blocks((4, 6), torch.arange(2), [placement])


@pytest.fixture
def rank():
    """Rank 4 of six."""
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    yield 4
    dist.destroy_process_group()


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0))], ids=str)
def test_a_tensor_of_torch_has_the_blocks_of_its_mesh(rank, placements):
    shape, mesh = (7, 4), DeviceMesh("cpu", torch.tensor([[5, 4, 3], [2, 1, 0]]), _init_backend=False)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    made = DTensor.from_local(torch.zeros(sizes), mesh, placements, run_check=False, shape=shape, stride=(4, 1))
    held = mesh_boxes(made.shape, made.device_mesh.mesh, made.placements)
    assert held == all_boxes(made)
    assert held.get(rank, []) == [Box(tuple(offsets), tuple(sizes))] * bool(math.prod(sizes))


@pytest.mark.parametrize(
    ("mesh", "placements", "copies"),
    [
        ((16384,), [Shard(0)], 1),
        ((16, 1024), [Replicate(), Shard(1)], 16),
        ((8, 32, 64), [Shard(0), Shard(1), Shard(0)], 1),
    ],
    ids=str,
)
def test_16384_ranks(mesh, placements, copies):
    shape, ranks = (40000, 1029), torch.arange(16384).view(mesh)
    held = [box for boxes in mesh_boxes(shape, ranks, placements).values() for box in boxes]
    assert sum(box.numel for box in held) == math.prod(shape) * copies
    assert find_fault(shape, list(dict.fromkeys(held))) is None
