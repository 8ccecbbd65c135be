"""Metadata of sharded tensors beside torch's own functions, where these are right, and by themselves where not."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed._shard.sharded_tensor import utils as stock
from torch.distributed.remote_device import _remote_device as Remote
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp._compat import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.tensor import metadata as ours
from tests.unit.tensor.test_tiling import tilings

SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def rank():
    """Rank 1 of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=SIZE)
    yield 1
    dist.destroy_process_group()


def shard_at(offsets, sizes, rank=1, **facts):
    tensor = torch.zeros(sizes, **facts)
    return Shard(tensor, ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu"))


def of_rank(boxes, rank, size, **facts):
    """The metadata that a rank has built of its blocks; None for none."""
    properties = TensorProperties(**{"dtype": torch.float32, "layout": torch.strided, "requires_grad": False, **facts})
    shards = [ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{rank}/cpu") for box in boxes]
    return ShardedTensorMetadata(shards, torch.Size(size), properties) if shards else None


def dealt(boxes, size, ranks=SIZE, **facts):
    """Blocks dealt to ranks in turn."""
    return [of_rank(boxes[rank::ranks], rank, size, **facts) for rank in range(ranks)]


def test_placements_have_a_rank_and_a_device():
    for function in (ours.parse_and_validate_remote_device, stock._parse_and_validate_remote_device):
        assert function(dist.group.WORLD, Remote("rank:3/cuda:1")) == (3, torch.device("cuda", 1))
        assert function(dist.group.WORLD, Remote("cpu")) == (None, torch.device("cpu"))
    assert ours.parse_and_validate_remote_device(None, Remote("rank:3/cpu")) == (3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (None, "no placement"),
        (Remote("rank:4/cpu"), r"rank 4, which is not in the process group of the ranks \[0, 1, 2, 3\]"),
        (Remote("trainer/cpu"), "trainer"),
    ],
)
def test_placements_that_are_none(placement, message):
    with pytest.raises((ShardingError, RuntimeError), match=message):
        ours.parse_and_validate_remote_device(dist.group.WORLD, placement)


def test_a_tensor_to_gather_into_is_given_where_it_is_needed():
    size, place = torch.Size((2, 3)), torch.zeros(2, 3)
    for check in (ours.validate_output_tensor_for_gather, stock._validate_output_tensor_for_gather):
        check(0, 0, size, place)
        check(1, 0, size, None)
        with pytest.raises(ValueError, match="dst_tensor"):
            check(0, 0, size, None)
        with pytest.raises(ValueError, match=r"\[3, 2\]|\(3, 2\)"):
            check(0, 0, size, torch.zeros(3, 2))
    with pytest.raises(ShardingError, match=r"rank 1 was given a dst_tensor of size .2, 3., but rank 0 gathers"):
        ours.validate_output_tensor_for_gather(1, 0, size, place)
    with pytest.raises(RuntimeError, match="Boolean value"):  # torch asks for the truth of a tensor
        stock._validate_output_tensor_for_gather(1, 0, size, place)


def test_a_zero_is_a_tensor_to_gather_into():
    zero = torch.zeros(1)
    stock._validate_output_tensor_for_gather(1, 0, torch.Size((1,)), zero)  # which torch lets pass
    with pytest.raises(ShardingError, match="rank 0 gathers"):
        ours.validate_output_tensor_for_gather(1, 0, torch.Size((1,)), zero)


@pytest.mark.parametrize("size", [(2, 3), ((2, 3),), ([2, 3],), (torch.Size((2, 3)),), (), ((),), (4,)])
def test_sizes_as_arguments_or_in_one(size):
    assert ours.flatten_tensor_size(*size) == stock._flatten_tensor_size(size)


@pytest.mark.parametrize("size", [(2, 3.0), (("2", 3),), ("23",), (2, None), (True, 2)])
def test_sizes_are_ints(size):
    with pytest.raises(TypeError, match="a size is a sequence of ints"):
        ours.flatten_tensor_size(*size)


def test_sizes_are_not_negative():
    with pytest.raises(ShardingError, match="-1"):
        ours.flatten_tensor_size(2, -1)


def test_what_differs_is_named_with_both_values():
    ours.raise_if_mismatch(3, 3, "size", 0)
    with pytest.raises(ShardingError, match=r"rank 2 differ in dtype: one has torch.float32, one torch.int8"):
        ours.raise_if_mismatch(torch.float32, torch.int8, "dtype", 2)
    with pytest.raises(ShardingError, match=r"pin_memory: True on rank 0, False on rank 3"):
        ours.raise_if_mismatch(True, False, "pin_memory", [0, 3], is_local=False)


def test_local_shards_have_metadata():
    shards = [shard_at((0, 2), (4, 1)), shard_at((0, 3), (4, 2))]
    found = ours.build_metadata_from_local_shards(shards, (4, 5), 1, dist.group.WORLD)
    assert found == stock.build_metadata_from_local_shards(shards, torch.Size((4, 5)), 1, dist.group.WORLD)
    found.shards_metadata[0].shard_offsets[0] = 3
    assert shards[0].metadata.shard_offsets == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.clear(), "rank 1 has no local shards"),
        (lambda s: s.append(shard_at((2, 0), (1, 2), rank=0)), "shard 1 of rank 1, at .2, 0., is placed on rank 0"),
        (lambda s: s.append(shard_at((2, 0), (1, 2), rank=7)), "names rank 7, which is not in the process group"),
        (
            lambda s: s.append(shard_at((2, 0), (1, 2), dtype=torch.int8)),
            "dtype: one has torch.float32, one torch.int8",
        ),
        (lambda s: s.append(shard_at((2, 0), (1, 2), requires_grad=True)), "requires_grad: one has False, one True"),
        (lambda s: s.append(shard_at((2, 1), (1, 2))), "at .2, 1. of size .1, 2. .* is not within .* .3, 2."),
        (lambda s: s.append(shard_at((2,), (1,))), "is not within"),
        (lambda s: setattr(s[0].metadata, "shard_sizes", [2, 1]), "has the size .2, 2., and .2, 1. by its metadata"),
        (lambda s: setattr(s[0].metadata, "placement", Remote("rank:1/cuda:0")), "lies on cpu, and on cuda:0"),
        (lambda s: setattr(s[0].metadata, "placement", None), "no placement"),
        (lambda s: setattr(s[0], "tensor", torch.zeros(2, 2).to_sparse()), "torch.sparse_coo"),
        (lambda s: setattr(s[0], "tensor", torch.zeros(2, 3)[:, :2]), r"not contiguous \(strides \(3, 1\)\)"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)
def test_local_shards_that_do_not_fit(change, message):
    shards = [shard_at((0, 0), (2, 2))]
    change(shards)
    with pytest.raises(ShardingError, match=message):
        ours.build_metadata_from_local_shards(shards, (3, 2), 1, dist.group.WORLD)


@given(tilings(), st.integers(1, 5))
def test_ranks_make_up_a_tensor(tiling, ranks):
    size, boxes = tiling
    gathered = dealt(boxes, size, ranks)
    before = copy.deepcopy(gathered)
    found = ours.build_global_metadata(gathered)
    assert gathered == before
    assert found.size == torch.Size(size)
    told = {(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in found.shards_metadata}
    assert told == {(*box, number % ranks) for number, box in enumerate(boxes)}
    if all(box.numel for box in boxes):  # torch takes an empty block for an overlap, or for one too many
        assert found == stock.build_global_metadata(gathered)


@given(tilings(), st.data())
def test_one_planted_fault_is_refused_and_named(tiling, data):
    size, boxes = tiling
    gathered = dealt(boxes, size)
    present = [rank for rank, metadata in enumerate(gathered) if metadata is not None]
    rank = data.draw(st.sampled_from(present))
    shards = gathered[rank].shards_metadata
    shard = data.draw(st.sampled_from(shards))
    place = re.escape(f"{shard.shard_offsets} of size {shard.shard_sizes}")
    kind = data.draw(st.sampled_from(["overlap", "gap", "wrong size", "wrong rank", "wrong dtype", "beyond"]))
    if kind in ("overlap", "gap") and 0 in shard.shard_sizes:
        return
    if kind == "overlap":
        shards.append(copy.deepcopy(shard))
        message = f"at {place} on rank:{rank}/cpu and the shard at {place} on rank:{rank}/cpu overlap"
    elif kind == "gap":
        shards.remove(shard)
        message = "no shard has element .*the first that is missing|none of the 4"
        if not shards:
            gathered[rank] = None
    elif kind == "beyond":
        if not size:
            return
        shard.shard_sizes[data.draw(st.integers(0, len(size) - 1))] += max(size) + 1
        message = re.escape(f"{shard.shard_offsets} of size {shard.shard_sizes}") + ".* is not within a tensor of size"
    elif len(present) < 2:
        return
    elif kind == "wrong size":
        gathered[rank].size = torch.Size((*size, 2))
        message = rf"global_size: .* on rank {present[0]}, .* on rank"
    elif kind == "wrong dtype":
        gathered[rank].tensor_properties.dtype = torch.int8
        message = rf"dtype: .* on rank {present[0]}, .* on rank"
    else:
        other = data.draw(st.sampled_from([one for one in present if one != rank]))
        shard.placement = Remote(f"rank:{other}/cpu")
        message = f"on rank:{other}/cpu|lists shards on the ranks"
    with pytest.raises(ShardingError, match=message):
        ours.build_global_metadata(gathered)


def test_nobody_has_anything():
    for build in (ours.build_global_metadata, stock.build_global_metadata):
        with pytest.raises(ValueError, match=r"no tensor|no local shards"):
            build([None, None])


def test_a_gap_is_told_by_its_first_element():
    boxes = [shard_at((0, 0), (2, 3)), shard_at((2, 1), (1, 2))]
    whole = ShardedTensorMetadata([b.metadata for b in boxes], torch.Size((3, 3)), TensorProperties())
    with pytest.raises(ShardingError, match=r"no shard has element \[2, 0\] of a tensor of size \[3, 3\]"):
        ours.validate_tiling(whole)


def rows(*sizes_and_ranks, width=2):
    shards = [ShardMetadata([0, 9], [size, width], f"rank:{rank}/cpu") for size, rank in sizes_and_ranks]
    return ShardedTensorMetadata(shards, torch.Size((0, 0)), TensorProperties())


def offsets_of(metadata):
    return [shard.shard_offsets for shard in metadata.shards_metadata]


def test_offsets_are_found_again():
    found, theirs = rows((3, 0), (2, 1), (4, 2)), rows((3, 0), (2, 1), (4, 2))
    ours.recalc_global_sharded_tensor_metadata(found, 0)
    stock.recalc_global_sharded_tensor_metadata(theirs, 0)
    assert found == theirs
    assert (offsets_of(found), found.size) == ([[0, 0], [3, 0], [5, 0]], torch.Size((9, 2)))


def test_offsets_go_by_rank_in_whatever_order_shards_are_listed():
    found, theirs = rows((4, 2), (3, 0), (2, 1)), rows((4, 2), (3, 0), (2, 1))
    ours.recalc_global_sharded_tensor_metadata(found, 0)
    assert offsets_of(found) == [[5, 0], [0, 0], [3, 0]]
    ours.validate_tiling(found)
    stock.recalc_global_sharded_tensor_metadata(theirs, 0)  # sorts the sizes, and gives them out by place in the list
    with pytest.raises(ValueError, match="overlap"):
        stock.build_global_metadata([theirs])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=8), st.integers(0, 2))
def test_recalculated_offsets_tile(sizes_and_ranks, dim):
    shards = []
    for size, rank in sizes_and_ranks:
        sizes = [2, 3, 1]
        sizes[dim] = size
        shards.append(ShardMetadata([7, 7, 7], sizes, f"rank:{rank}/cpu"))
    found = ShardedTensorMetadata(shards, torch.Size(()), TensorProperties())
    ours.recalc_global_sharded_tensor_metadata(found, dim - 3 if dim else dim)
    assert found.size[dim] == sum(size for size, _ in sizes_and_ranks)
    ours.validate_tiling(found)
    by_place = sorted(range(len(shards)), key=lambda number: (sizes_and_ranks[number][1], number))
    assert [shards[n].shard_offsets[dim] for n in by_place] == sorted(s.shard_offsets[dim] for s in shards)


def test_ranks_that_do_not_know_the_size_of_the_whole():
    boxes = [rows((3, 0)), rows((2, 1)), rows((4, 2))]
    found = ours.build_global_metadata(boxes, recalc_metadata=True)
    assert (offsets_of(found), found.size) == ([[0, 0], [3, 0], [5, 0]], torch.Size((9, 2)))
    assert offsets_of(boxes[1]) == [[0, 9]]


@pytest.mark.parametrize(
    ("metadata", "dim", "message"),
    [
        (rows(), 0, "no shards"),
        (rows((3, 0)), 2, "has 2 dimension.s., and no dimension 2"),
        (rows((3, 0)), -3, "no dimension -3"),
        (ShardedTensorMetadata([ShardMetadata([0], [1])], torch.Size((1,)), TensorProperties()), 0, "is on no rank"),
        (
            ShardedTensorMetadata(
                [ShardMetadata([0, 0], [1, 2], "rank:0/cpu"), ShardMetadata([1, 0], [1, 3], "rank:1/cpu")],
                torch.Size((2, 2)),
                TensorProperties(),
            ),
            0,
            r"size \[1, 2\] on rank:0/cpu and .* size \[1, 3\] on rank:1/cpu differ beside dimension 0",
        ),
    ],
)
def test_what_cannot_be_recalculated(metadata, dim, message):
    with pytest.raises(ShardingError, match=message):
        ours.recalc_global_sharded_tensor_metadata(metadata, dim)
