"""Who has what of a tensor, in each way of saying it, beside a map of each element to its ranks."""

import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp import _compat
from hpcfsdp._compat import ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.flat.layout import Box, FlatLayout, ShardExtent, TensorBlock
from hpcfsdp.tensor.convert import (
    boxes_extents,
    boxes_metadata,
    boxes_placements,
    each_once,
    extent_boxes,
    layout_boxes,
    mesh_boxes,
    metadata_boxes,
    plan_moves,
)
from hpcfsdp.tensor.metadata import validate_tiling
from hpcfsdp.tensor.sharded import all_boxes
from tests.unit.reshard.test_tiling import tilings

PROPERTIES = TensorProperties(dtype=torch.float32)
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


@given(placed())
@check
def test_a_rank_of_a_mesh_has_the_block_that_torch_says(drawn):
    shape, ranks, placements = drawn
    placements = tuple(Shard(p.dim % len(shape)) if p.is_shard() else p for p in placements)
    held = mesh_boxes(shape, ranks, placements)
    theirs = _compat.blocks_on_mesh(shape, tuple(ranks.shape), placements)
    for rank, (offsets, sizes) in zip(ranks.flatten().tolist(), theirs, strict=True):
        if math.prod(sizes):
            assert held[rank] == [Box(offsets, sizes)]
        elif math.prod(shape):
            assert rank not in held


@pytest.mark.parametrize("rows", [8, 16, 13, 5, 1])
def test_strided_placements_of_two_dimensional_sharding(rows):
    """Rows that are cut over tensor ranks first, and by the outer dimension of the mesh second."""
    ranks, placements = torch.arange(4).view(2, 2), (_StridedShard(0, split_factor=2), Shard(0))
    held = mesh_boxes((rows, 3), ranks, placements)
    local = local_on_mesh(numbered((rows, 3)), ranks, placements)
    theirs = _compat.blocks_on_mesh((rows, 3), (2, 2), placements)
    for rank, (offsets, sizes) in enumerate(theirs):
        assert sum(box.sizes[0] for box in held.get(rank, [])) == sizes[0] == len(local[rank])
        if rank in held:
            assert held[rank][0].offsets == offsets
    if rows % 4 == 0:
        assert [held[rank][0].offsets[0] * 4 // rows for rank in range(4)] == [0, 2, 1, 3]
    validate_tiling(boxes_metadata((rows, 3), held, PROPERTIES))


def test_strides_that_one_rank_has_are_one_block():
    assert mesh_boxes((6,), torch.arange(1), [_StridedShard(0, split_factor=3)]) == {0: [Box((0,), (6,))]}
    found = mesh_boxes((3, 6), torch.arange(2), [_StridedShard(1, split_factor=2)])
    assert found == {
        0: [Box((0, 0), (3, 2)), Box((0, 3), (3, 2))],
        1: [Box((0, 2), (3, 1)), Box((0, 5), (3, 1))],
    }


@given(placed())
@check
def test_placements_are_found_again_from_blocks(drawn):
    shape, ranks, placements = drawn
    held = mesh_boxes(shape, ranks, placements)
    found = boxes_placements(shape, held, ranks)
    assert mesh_boxes(shape, ranks, found) == held
    once = each_once(held)
    found = boxes_placements(shape, once, ranks, once=True)
    assert each_once(mesh_boxes(shape, ranks, found)) == once
    if math.prod(shape):
        replicated = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
        assert all(found[axis].is_replicate() for axis in replicated)


@given(meshes(max_ranks=12), st.data())
@check
def test_placements_are_the_same_where_there_is_one_way_to_say_it(ranks, data):
    shape = data.draw(st.lists(st.integers(24, 30), min_size=1, max_size=3).map(tuple))
    kinds = [Replicate(), *map(Shard, range(len(shape)))]
    # Over a single rank, all placements are the same.
    placements = tuple(data.draw(st.sampled_from(kinds)) if size > 1 else kinds[0] for size in ranks.shape)
    held = mesh_boxes(shape, ranks, placements)
    assert boxes_placements(shape, held, ranks) == placements
    assert boxes_placements(shape, each_once(held), ranks, once=True) == placements


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((2,), (Shard(0), Shard(0))),  # the second cut leaves nothing to the second ranks
        ((3, 1), (Shard(0), Shard(1))),
        ((1, 3), (Shard(0), Shard(1))),
        ((5, 2), (Shard(1), Shard(1))),
        ((2, 1, 1), (Shard(0), Shard(0))),
    ],
)
def test_placements_that_leave_nothing_to_some_ranks(shape, placements):
    ranks = torch.arange(4).view(2, 2)
    held = mesh_boxes(shape, ranks, placements)
    assert len(held) < 4
    assert boxes_placements(shape, held, ranks) == placements


def test_one_row_is_cut_or_replicated():
    """Of a dimension that is one element long, the first rank has all: as a replica, if blocks are named once."""
    ranks = torch.arange(8).view(2, 4)
    cut, replicas = (Shard(1), Shard(0)), (Replicate(), Shard(0))
    held = mesh_boxes((8, 1), ranks, cut)
    assert held == each_once(mesh_boxes((8, 1), ranks, replicas))
    assert boxes_placements((8, 1), held, ranks) == cut
    assert boxes_placements((8, 1), held, ranks, once=True) == replicas


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda held: held.update({9: held.pop(3)}),
            r"rank\(s\) \[9\] have blocks, and are not in the mesh of \[2, 2\] ranks",
        ),
        (lambda held: held.pop(3), r"rank 3 would have the block at \[3, 2\] of size \[2, 2\], and has nothing"),
        (
            lambda held: held.update({2: held[3], 3: held[2]}),
            r"\(dim=0\), Shard\(dim=1\)\], rank 2 would have the block",
        ),
        (lambda held: held[1].append(Box((4, 3), (1, 1))), r"rank 1 has .* and the block at \[4, 3\] .*one block"),
        (lambda held: held.pop(0), "rank 0 would have"),
        (lambda held: held.clear(), "rank 0 would have"),
    ],
    ids=["stranger", "missing", "exchanged", "two blocks", "first", "nothing"],
)
def test_blocks_that_are_no_cut_of_a_mesh(change, message):
    ranks = torch.arange(4).view(2, 2)
    held = mesh_boxes((5, 4), ranks, [Shard(0), Shard(1)])
    change(held)
    with pytest.raises(ShardingError, match=message):
        boxes_placements((5, 4), held, ranks)
    with pytest.raises(ShardingError):
        boxes_placements((5, 4), held, ranks, once=True)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([Shard(0)], r"1 placement\(s\) are for a mesh of as many dimensions, not 2"),
        ([Shard(0), Partial()], r"\(Shard\(dim=0\), Partial\(sum\)\) has no values of its own: redistribute it first"),
        ([Replicate(), Shard(2)], r"shape \[4, 6\] has no dimension 2"),
        ([Replicate(), Shard(-3)], r"shape \[4, 6\] has no dimension -3"),
    ],
)
def test_placements_that_are_no_cut(placements, message):
    with pytest.raises(ShardingError, match=message):
        mesh_boxes((4, 6), torch.arange(4).view(2, 2), placements)


@st.composite
def laid_out(draw):
    """A parameter among others, laid out by each of the ranks that are parallel over tensors; its shape, and a mesh."""
    shape = draw(SHAPES)
    num_shards, size, copies = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    before, after = draw(st.lists(SHAPES, max_size=2)), draw(st.lists(SHAPES, max_size=2))
    boxes = [Box((0,) * len(shape), shape)] * size
    kind = draw(st.sampled_from([None, Replicate(), *map(Shard, range(len(shape)))]))
    blocks = [None] * size
    if kind is not None:
        boxes = [Box(*block) for block in _compat.blocks_on_mesh(shape, (size,), (kind,))]
        blocks = [TensorBlock(shape, tuple(boxes), rank, (kind,)) for rank in range(size)]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.int8]))
    layouts = []
    for rank, block in enumerate(blocks):
        params = [(f"before.{n}", one, ()) for n, one in enumerate(before)]
        params += [("w", boxes[rank].sizes, ("tied",))]
        params += [(f"after.{n}", one, ()) for n, one in enumerate(after)]
        layouts.append(FlatLayout.plan(params, dtype, num_shards, {"w": block} if block else None))
    ranks = torch.tensor(draw(st.permutations(range(copies * num_shards * size)))).view(copies, num_shards, size)
    return shape, layouts, boxes, ranks


def flattened(shape, layouts, boxes, ranks):
    """By rank, the elements in its shard, in the order of memory."""
    found = {}
    for tensor_rank, (layout, box) in enumerate(zip(layouts, boxes, strict=True)):
        buffer = torch.full((layout.padded_numel,), -1)
        slot = layout.by_name["w"]
        buffer[slot.offset : slot.end] = numbered(shape)[box.slices].flatten()
        for shard_rank, shard in enumerate(buffer.view(layout.num_shards, layout.shard_numel)):
            for replica in ranks:
                found[int(replica[shard_rank, tensor_rank])] = [e for e in shard.tolist() if e >= 0]
    return found


@given(laid_out())
@check
def test_a_rank_has_the_blocks_of_a_layout_that_its_shard_is(drawn):
    shape, layouts, boxes, ranks = drawn
    held = layout_boxes(layouts, "w", ranks)
    assert layout_boxes(layouts, "tied", ranks) == held
    if not math.prod(shape):
        assert held == {int(ranks.flatten()[0]): [Box((0,) * len(shape), shape)]}
        return
    in_memory = {
        rank: [e for box in of for e in numbered(shape)[box.slices].flatten().tolist()] for rank, of in held.items()
    }
    assert in_memory == {
        rank: elements for rank, elements in flattened(shape, layouts, boxes, ranks).items() if elements
    }
    assert all(len(of) <= max(1, 2 * len(shape) - 1) for of in held.values())
    assert all(of == sorted(of) for of in held.values())


@given(SHAPES, st.integers(1, 9))
@check
def test_extents_of_a_layout_are_those_of_a_file(shape, num_shards):
    layout = FlatLayout.plan([("before", (3,), ()), ("w", shape, ())], torch.float32, num_shards)
    extents = layout.param_extents("w")
    held = layout_boxes([layout], "w")
    if math.prod(shape):
        assert extent_boxes(shape, extents) == held
    places = [(e.fqn, e.shard_rank, e.start, e.numel, 0) for e in extents]
    assert boxes_extents("w", shape, held) == tuple(itertools.starmap(ShardExtent, places))


@pytest.mark.parametrize(
    "ranks", [torch.arange(0), torch.arange(2), torch.arange(5), torch.arange(6).view(2, 3)[:, :2]]
)
def test_a_mesh_that_a_layout_was_not_made_for(ranks):
    layout = FlatLayout.plan([("w", (4,), ())], torch.float32, 3)
    with pytest.raises(ShardingError, match=r"'w' is laid out for 3 shard\(s\) by 1 tensor rank\(s\), and the mesh of"):
        layout_boxes([layout], "w", ranks)


@st.composite
def metadatas(draw):
    """The metadata of blocks of any kind, dealt to ranks in any order."""
    shape, boxes = draw(tilings(max_size=7))
    ranks = draw(st.lists(st.integers(0, 8), min_size=len(boxes), max_size=len(boxes)))
    shards = [ShardMetadata(list(b.offsets), list(b.sizes), f"rank:{r}/cpu") for b, r in zip(boxes, ranks, strict=True)]
    return ShardedTensorMetadata(shards, torch.Size(shape), PROPERTIES)


@given(metadatas())
@check
def test_shards_are_blocks_and_stretches_of_a_file(metadata):
    shape = tuple(metadata.size)
    held = metadata_boxes(metadata, range(9))
    expected = {}
    for shard in metadata.shards_metadata:
        box = Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        elements = numbered(shape)[box.slices].flatten().tolist()
        expected.setdefault(shard.placement.rank(), []).extend(elements)
    assert owners(shape, held) == owners_of(math.prod(shape), expected)
    assert list(held) == sorted(held)
    assert all(boxes == sorted(boxes) for boxes in held.values())
    again = boxes_metadata(shape, held, PROPERTIES)
    validate_tiling(again)
    assert metadata_boxes(again) == held
    if math.prod(shape):
        told = {str(shard) for shard in metadata.shards_metadata if math.prod(shard.shard_sizes)}
        assert {str(shard) for shard in again.shards_metadata} == told
    extents = boxes_extents("w", shape, held)
    by_rank = {
        rank: [e for x in extents if x.shard_rank == rank for e in range(x.start, x.start + x.numel)]
        for rank in range(9)
    }
    assert owners_of(math.prod(shape), by_rank) == owners(shape, held)


@st.composite
def stretches(draw, shape):
    """Extents that tile a tensor, over nine ranks, in any order; neighbours may be on one rank."""
    numel = math.prod(shape)
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=9))})
    return draw(
        st.permutations([ShardExtent("w", draw(st.integers(0, 8)), a, b - a, 0) for a, b in itertools.pairwise(cuts)])
    )


@given(SHAPES, st.data())
@check
def test_stretches_of_a_file_are_blocks(shape, data):
    extents = data.draw(stretches(shape))
    held = extent_boxes(shape, extents)
    expected = {}
    for extent in extents:
        expected.setdefault(extent.shard_rank, []).extend(range(extent.start, extent.start + extent.numel))
    assert owners(shape, held) == owners_of(math.prod(shape), expected)
    validate_tiling(boxes_metadata(shape, held, PROPERTIES))
    again = boxes_extents("w", shape, held)
    assert extent_boxes(shape, again) == held
    assert boxes_extents("w", shape, extent_boxes(shape, again)) == again
    assert all(a.shard_rank != b.shard_rank for a, b in itertools.pairwise(again))
    for rank, elements in expected.items():
        mine = [extent for extent in again if extent.shard_rank == rank]
        ends = list(itertools.accumulate((extent.numel for extent in mine), initial=0))
        assert [extent.shard_offset for extent in mine] == ends[:-1]
        assert ends[-1] == len(elements)


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ([(0, 0, 5), (1, 4, 2)], r"element 4 of \[2, 3\] is on the ranks 0 and 1"),
        ([(1, 0, 6), (1, 0, 6)], r"element 0 of \[2, 3\] is on the ranks 1 and 1"),
        ([(1, 5, 1), (0, 0, 4)], r"element 4 of \[2, 3\] is on no rank, the first that is missing"),
        ([(0, 0, 5)], r"element 5 of \[2, 3\] is on no rank"),
        ([], r"element 0 of \[2, 3\] is on no rank"),
        ([(0, 0, 5), (1, 5, 2)], r"2 element\(s\) from 5 on, on rank 1, are not in \[2, 3\]"),
        ([(3, -1, 7)], r"7 element\(s\) from -1 on, on rank 3, are not"),
        ([(0, 0, 6), (2, 3, -1)], r"-1 element\(s\) from 3 on, on rank 2, are not"),
    ],
)
def test_stretches_that_do_not_tile(extents, message):
    with pytest.raises(ShardingError, match=message):
        extent_boxes((2, 3), [ShardExtent("w", rank, start, numel, 0) for rank, start, numel in extents])


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({0: [Box((0, 0), (2, 2))], 4: [Box((0, 1), (2, 2))]}, r"element .*\[2, 3\] is on the ranks 0 and 4|overlap"),
        ({0: [Box((0, 0), (2, 2))]}, r"element 2 of \[2, 3\] is on no rank|element \[0, 2\]"),
        ({0: [Box((0, 0), (2, 3))], 7: [Box((1, 1), (1, 3))]}, r"\[1, 1\] of size \[1, 3\] on rank.7.* is not within"),
        ({0: [Box((0,), (6,))]}, r"\[0\] of size \[6\] on rank.0.* is not within"),
    ],
    ids=["overlap", "gap", "beyond", "dimensions"],
)
def test_blocks_that_do_not_tile(held, message):
    with pytest.raises(ShardingError, match=message):
        boxes_extents("w", (2, 3), held)
    with pytest.raises(ShardingError, match=message):
        boxes_metadata((2, 3), held, PROPERTIES)


def metadata_of(size, *shards):
    found = [ShardMetadata(list(offsets), list(sizes), placement) for offsets, sizes, placement in shards]
    return ShardedTensorMetadata(found, torch.Size(size), PROPERTIES)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([((0,), (3,), "rank:0/cpu"), ((2,), (2,), "rank:1/cpu")], r"overlap: both have element \[2\]"),
        ([((0,), (3,), "rank:0/cpu")], r"no shard has element \[3\]"),
        ([((0,), (5,), "rank:0/cpu")], "is not within"),
        (
            [((0,), (4,), "rank:4/cpu")],
            r"\[0\] of size \[4\] is placed on rank:4/cpu, which is none of the ranks range",
        ),
        ([((0,), (4,), None)], "is placed on None, which is no rank"),
        ([((0,), (4,), "trainer/cpu")], "is placed on trainer/cpu, which is no rank"),
    ],
)
def test_metadata_that_is_refused(shards, message):
    with pytest.raises(ShardingError, match=message):
        metadata_boxes(metadata_of((4,), *shards), range(4))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), st.integers(1, 9), st.data())
@check
def test_chunks_by_the_specification_of_torch(shape, num, data):
    """Torch places chunks without rows beyond the tensor, and refuses its own metadata for it."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    theirs = ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in range(num)]).build_metadata(torch.Size(shape), PROPERTIES)
    held = mesh_boxes(shape, torch.arange(num), [Shard(dim)])
    assert metadata_boxes(theirs) == held
    assert (
        mesh_boxes(shape, torch.arange(num), boxes_placements(shape, metadata_boxes(theirs), torch.arange(num))) == held
    )
    if math.prod(shape):
        ours = boxes_metadata(shape, held, PROPERTIES)
        assert ours.shards_metadata == [shard for shard in theirs.shards_metadata if math.prod(shard.shard_sizes)]


def test_of_replicas_the_first_is_listed():
    ranks = torch.tensor([[2, 3], [0, 1]])
    held = mesh_boxes((4, 3), ranks, [Replicate(), Shard(0)])
    top, bottom = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))
    assert held == {2: [top], 3: [bottom], 0: [top], 1: [bottom]}
    assert each_once(held) == {2: [top], 3: [bottom]}
    assert each_once({0: [top], 1: [top, bottom]}) == {0: [top], 1: [bottom]}
    for make in (
        lambda given: boxes_metadata((4, 3), given, PROPERTIES),
        lambda given: boxes_extents("w", (4, 3), given),
    ):
        make(each_once(held))
        with pytest.raises(ShardingError, match=re.compile(r"on rank:2.*on rank:0.*overlap|on the ranks 2 and 0")):
            make(held)


def test_shards_lie_where_they_are_said_to():
    held = mesh_boxes((4,), torch.arange(2), [Shard(0)])
    found = boxes_metadata((4,), held, PROPERTIES, "rank:{0}/cuda:{0}".format)
    assert [str(shard.placement) for shard in found.shards_metadata] == ["rank:0/cuda:0", "rank:1/cuda:1"]


@st.composite
def distributions(draw, shape):
    """One of any kind, on ranks from 0 to 8."""
    kind = draw(st.sampled_from(["mesh", "layout", "extents"]))
    if kind == "extents":
        return extent_boxes(shape, draw(stretches(shape)))
    ranks = draw(meshes())
    if kind == "mesh":
        kinds = [Replicate(), *map(Shard, range(len(shape)))]
        return mesh_boxes(shape, ranks, [draw(st.sampled_from(kinds)) for _ in ranks.shape])
    size = ranks.shape[-1]
    kind = draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))]))
    boxes = tuple(Box(*block) for block in _compat.blocks_on_mesh(shape, (size,), (kind,)))
    block = TensorBlock(shape, boxes, 0, (kind,))
    params = [("before", (5,), ()), ("w", boxes[0].sizes, ())]
    first = FlatLayout.plan(params, torch.float32, ranks.numel() // size, {"w": block})
    return layout_boxes([first.of_tensor_rank(rank) for rank in range(size)], "w", ranks.view(-1, size))


@given(SHAPES, st.data())
@check
def test_values_come_from_any_distribution_into_any_other(shape, data):
    sources, targets = data.draw(distributions(shape)), data.draw(distributions(shape))
    ranks = data.draw(st.permutations(range(9)))
    values = numbered(shape) + 100

    def memory(held, rank):
        blocks = [values[box.slices].flatten() for box in held.get(rank, [])]
        return torch.cat(blocks) if blocks else values.new_empty(0)

    have = [memory(sources, rank) for rank in ranks]
    plans = [plan_moves(place, ranks, shape, sources, targets) for place in range(9)]
    for place, rank in enumerate(ranks):
        expected = memory(targets, rank)
        got = torch.full_like(expected, -1)
        for moves, source in [(plans[place].kept, have[place]), *zip(plans[place].received, have, strict=True)]:
            for index, begin, to, numel in moves:
                assert index == 0
                assert (got[to : to + numel] == -1).all()
                got[to : to + numel] = source[begin : begin + numel]
        assert torch.equal(got, expected)
        for other in range(9):
            assert plans[place].received[other] == plans[other].sent[place]


def test_ranks_that_values_cannot_come_from():
    here, there = {0: [Box((0,), (4,))]}, {5: [Box((0,), (4,))]}
    for sources, targets in ((here, there), (there, here)):
        with pytest.raises(ShardingError, match=r"rank\(s\) \[5\] have blocks, and are none of the 2 ranks"):
            plan_moves(0, [0, 1], (4,), sources, targets)


def test_what_a_rank_has_that_others_have_in_part():
    """The replica of a block is no source, and what lies after it in memory is found all the same."""
    top, bottom = Box((0,), (3,)), Box((3,), (1,))
    plan = plan_moves(1, [0, 1], (4,), {0: [top], 1: [top, bottom]}, {0: [Box((0,), (4,))]})
    assert plan.sent[0] == [(0, 3, 3, 1)]


@pytest.fixture
def rank():
    """Rank 4 of six."""
    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    yield 4
    dist.destroy_process_group()


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Shard(0), Shard(0))], ids=str)
def test_tensors_of_torch_are_told_alike(rank, placements):
    shape, mesh = (7, 4), DeviceMesh("cpu", torch.tensor([[5, 4, 3], [2, 1, 0]]), _init_backend=False)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    made = DTensor.from_local(torch.zeros(sizes), mesh, placements, run_check=False, shape=shape, stride=(4, 1))
    held = mesh_boxes(made.shape, made.device_mesh.mesh, made.placements)
    assert held == all_boxes(made)
    assert held.get(rank, []) == [Box(tuple(offsets), tuple(sizes))] * bool(math.prod(sizes))
    once = each_once(held)
    metadata = boxes_metadata(shape, once, PROPERTIES)
    shards = [
        _compat.Shard(torch.zeros(shard.shard_sizes), shard)
        for shard in metadata.shards_metadata
        if shard.placement.rank() == rank
    ]
    sharded = _compat.sharded_tensor(shards, metadata, dist.group.WORLD)
    assert metadata_boxes(sharded.metadata(), range(6)) == all_boxes(sharded) == dict(sorted(once.items()))
    assert boxes_placements(shape, metadata_boxes(sharded.metadata()), mesh.mesh, once=True) == placements


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((16384,), (Shard(0),)), ((16, 1024), (Replicate(), Shard(1))), ((8, 32, 64), (Shard(0), Shard(1), Shard(0)))],
    ids=str,
)
def test_16384_ranks(mesh, placements):
    shape, ranks = (40000, 1029), torch.arange(16384).view(mesh)
    held = mesh_boxes(shape, ranks, placements)
    once = each_once(held)
    assert sum(box.numel for boxes in once.values() for box in boxes) == math.prod(shape)
    assert metadata_boxes(boxes_metadata(shape, once, PROPERTIES), range(16384)) == once
    assert boxes_placements(shape, held, ranks) == placements


def test_a_shard_of_16384():
    layout = FlatLayout.plan([("bias", (7,), ()), ("w", (4097, 129), ())], torch.bfloat16, 16384)
    held = layout_boxes([layout], "w")
    assert metadata_boxes(boxes_metadata((4097, 129), held, PROPERTIES)) == held
    extents = layout.param_extents("w")
    assert extent_boxes((4097, 129), extents) == held
    assert [(e.shard_rank, e.start) for e in boxes_extents("w", (4097, 129), held)] == [
        (e.shard_rank, e.start) for e in extents
    ]
    rows = mesh_boxes((4097, 129), torch.arange(3), [Shard(0)])
    plan = plan_moves(1, range(16384), (4097, 129), held, rows)
    assert sum(move.numel for moves in (plan.kept, *plan.received) for move in moves) == 1366 * 129
