"""Torch's distributed tensors made, and read as blocks, on one rank of a process group that only seems to be there."""

import math
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp import _compat
from hpcfsdp._compat import ShardedTensor, at_its_storage, inner_tensors
from hpcfsdp.errors import ShardingError, StateDictError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import chunk_box
from hpcfsdp.reshard.sharded_tensors import (
    all_boxes,
    check_readable,
    create_chunk_dtensor,
    create_chunk_sharded_tensor,
    create_sharded_tensor,
    fill_block,
    full_tensor,
    is_sharded,
    local_blocks,
    properties_of,
)

CPU = torch.device("cpu")
SIZE = 4


@pytest.fixture(params=range(SIZE), ids="rank{}".format)
def rank(request):
    """One of four ranks of torch's default process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def large():
    """The process group of the first of 24 ranks, for what is the same on all."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=24)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield DeviceMesh("cpu", torch.arange(3))
    dist.destroy_process_group()


def dtensor(mesh, local, placement, shape):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


def test_what_is_cut_and_what_is_not(mesh):
    local = torch.arange(2.0)
    assert is_sharded(dtensor(mesh, local, Shard(0), (5,)))
    assert is_sharded(dtensor(mesh, local, Partial(), (2,)))
    same = dtensor(mesh, local, Replicate(), (2,))
    assert not is_sharded(same)
    assert not is_sharded(local)
    assert full_tensor(same).data_ptr() == full_tensor(local).data_ptr() == local.data_ptr()


@pytest.mark.parametrize(("dim", "expected"), [(0, [[2.0, 3.0], [4.0, 5.0]]), (1, [[1.0], [3.0], [5.0]])])
def test_a_block_is_filled_from_the_whole(mesh, dim, expected):
    whole = torch.arange(6.0).view(3, 2)
    if dim == 0:
        whole = torch.arange(10.0).view(5, 2)  # rows 2, 2, 1
        expected = [[4.0, 5.0], [6.0, 7.0]]
    target = dtensor(mesh, torch.zeros(len(expected), len(expected[0])), Shard(dim), whole.shape)
    fill_block(target, whole)
    assert target.to_local().tolist() == expected


def test_a_rank_that_has_nothing_is_not_filled(mesh):
    target = dtensor(mesh, torch.zeros(0, 2), Shard(0), (1, 2))
    fill_block(target, torch.ones(1, 2))
    assert target.to_local().shape == (0, 2)


def test_sums_to_come_are_not_filled(mesh):
    with pytest.raises(ShardingError, match="has no values of its own"):
        fill_block(dtensor(mesh, torch.zeros(2), Partial(), (2,)), torch.ones(2))


def test_plain_tensors_and_replicas_are_filled_whole(mesh):
    for target in (torch.zeros(2), dtensor(mesh, torch.zeros(2), Replicate(), (2,))):
        fill_block(target, torch.ones(2))
        local = target.to_local() if isinstance(target, DTensor) else target
        assert local.tolist() == [1, 1]


def test_tensors_within_others(mesh):
    local = torch.zeros(2)
    assert [part.data_ptr() for part in inner_tensors(dtensor(mesh, local, Shard(0), (5,)))] == [local.data_ptr()]
    assert list(inner_tensors(local)) == [local]


def test_an_alias_begins_at_its_storage():
    memory = torch.arange(6.0)
    part = memory[2:4]
    alias = at_its_storage(part)
    assert alias.storage_offset() == 0
    alias += 1
    assert memory.tolist() == [0, 1, 3, 4, 4, 5]
    assert at_its_storage(memory) is memory


def chunks_of(whole):
    """As torch itself cuts, but for a tensor without rows, of which torch makes equal empty chunks for all ranks."""
    return whole.chunk(SIZE) if len(whole) else [whole]


def rows_of(whole, chunk):
    """A chunk, None where there is none."""
    chunks = chunks_of(whole)
    return chunks[chunk].clone() if chunk < len(chunks) else None


SHAPES = pytest.mark.parametrize("shape", [(8, 3), (5,), (2, 3, 2), (1, 7), (0, 3), (0,), (4, 0)], ids=str)


@SHAPES
def test_a_sharded_tensor_of_chunks(rank, shape):
    whole = torch.randn(shape).bfloat16()
    mine = rows_of(whole, rank)
    made = create_chunk_sharded_tensor(mine, shape, torch.bfloat16, CPU, dist.group.WORLD, range(SIZE))
    assert type(made) is ShardedTensor
    assert properties_of(made) == (shape, torch.bfloat16)
    chunks = [chunk.shape for chunk in chunks_of(whole)]
    assert {at: [box.sizes for box in boxes] for at, boxes in all_boxes(made).items()} == {
        at: [tuple(chunk)] for at, chunk in enumerate(chunks)
    }
    assert [shard.placement.device() for shard in made.metadata().shards_metadata] == [CPU] * len(chunks)
    if mine is None:
        assert local_blocks(made) == []
    else:
        [(box, block)] = local_blocks(made)
        assert box == all_boxes(made)[rank][0] == chunk_box(shape, SIZE, rank)
        assert block is mine
    assert not made.metadata().tensor_properties.requires_grad
    assert pickle.loads(pickle.dumps(made.metadata())) == made.metadata()


@SHAPES
def test_a_dtensor_of_chunks(rank, shape):
    whole = torch.randn(shape, dtype=torch.float64)
    mesh, mine = DeviceMesh("cpu", torch.arange(SIZE)), rows_of(whole, rank)
    made = create_chunk_dtensor(mine, shape, torch.float64, CPU, mesh, [Shard(0)])
    assert type(made) is DTensor
    assert made.placements == (Shard(0),)
    assert properties_of(made) == (shape, torch.float64)
    assert made.stride() == whole.stride()
    assert not made.requires_grad
    expected = torch.empty((0, *shape[1:])) if mine is None else mine
    assert made.to_local().shape == expected.shape
    if whole.numel():
        assert [tuple(block.shape) for _, block in local_blocks(made)] == ([] if mine is None else [tuple(mine.shape)])
        assert sum(box.numel for boxes in all_boxes(made).values() for box in boxes) == whole.numel()
    else:
        assert list(all_boxes(made)) == [0]


def test_a_dtensor_is_replicated_over_the_other_dimensions_of_its_mesh(rank):
    mesh = DeviceMesh("cpu", torch.arange(SIZE).view(2, 2), mesh_dim_names=("replicate", "shard"))
    mine, placements = torch.full((2 - rank % 2, 5), 1.0), [Replicate(), Shard(0)]
    made = create_chunk_dtensor(mine, (3, 5), torch.float32, CPU, mesh, placements)
    assert made.placements == (Replicate(), Shard(0))
    first, second = [Box((0, 0), (2, 5))], [Box((2, 0), (1, 5))]
    assert all_boxes(made) == {0: first, 1: second, 2: first, 3: second}
    [(box, block)] = local_blocks(made)
    assert (box, tuple(block.shape)) == (all_boxes(made)[rank][0], (2 - rank % 2, 5))


def test_a_dtensor_of_blocks_that_are_cut_in_two_dimensions(rank):
    """The last ranks have fewer rows, fewer columns, or both."""
    mesh = DeviceMesh("cpu", torch.arange(SIZE).view(2, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.arange(15.0).view(5, 3)
    mine = whole.chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2].contiguous()
    made = create_chunk_dtensor(mine, (5, 3), torch.float32, CPU, mesh, (Shard(0), Shard(1)))
    assert (made.placements, made.shape, made.stride()) == ((Shard(0), Shard(1)), (5, 3), (3, 1))
    assert made.to_local().data_ptr() == mine.data_ptr()
    [(box, block)] = local_blocks(made)
    assert torch.equal(block, whole[box.slices])
    offsets = [boxes[0].offsets for _, boxes in sorted(all_boxes(made).items())]
    assert offsets == [(0, 0), (0, 2), (3, 0), (3, 2)]


@pytest.mark.parametrize(
    ("shape", "columns"), [((1, 5), [3, 2, 3, 2]), ((1, 1), [1, 0, 1, 0]), ((0, 3), [2, 1, 2, 1])], ids=str
)
def test_a_block_without_elements_has_the_sizes_that_torch_expects(rank, shape, columns):
    """Its own number of columns: in collectives torch takes it for a piece of what others have."""
    mesh = DeviceMesh("cpu", torch.arange(SIZE).view(2, 2), mesh_dim_names=("shard", "tensor"))
    whole = torch.zeros(shape)
    sizes = (shape[0] if rank < 2 else 0, columns[rank])
    mine = torch.ones(sizes) if math.prod(sizes) else None
    made = create_chunk_dtensor(mine, shape, torch.float32, CPU, mesh, [Shard(0), Shard(1)])
    assert made.to_local().shape == sizes
    theirs = distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    assert theirs.to_local().shape == sizes


def test_a_chunk_stays_where_it_is_whatever_the_device_of_the_mesh(rank):
    """As one that was offloaded to host memory does."""
    mesh, mine = DeviceMesh("meta", torch.arange(SIZE), _init_backend=False), torch.ones(2, 3)
    made = create_chunk_dtensor(mine, (8, 3), torch.float32, CPU, mesh, [Shard(0)])
    assert made.to_local().device == CPU
    assert made.to_local().data_ptr() == mine.data_ptr()
    assert made.device_mesh is mesh


def test_blocks_of_ranks_that_are_some_of_all(rank):
    """As the shards of one replica are: their names are those in the world."""
    ranks = (rank // 2 * 2, rank // 2 * 2 + 1)
    made = create_chunk_sharded_tensor(
        torch.full((2,), rank), (4,), torch.int64, CPU, dist.new_group(ranks, use_local_synchronization=True), ranks
    )
    assert all_boxes(made) == {ranks[0]: [Box((0,), (2,))], ranks[1]: [Box((2,), (2,))]}
    assert [box.offsets for box, _ in local_blocks(made)] == [(rank % 2 * 2,)]


def test_a_sharded_tensor_of_any_blocks(rank):
    boxes = {2: Box((0, 0), (3, 2)), 0: Box((0, 2), (3, 4))}
    mine = torch.ones(boxes[rank].sizes) if rank in boxes else None
    made = create_sharded_tensor(mine, (3, 6), torch.float32, CPU, dist.group.WORLD, boxes)
    assert all_boxes(made) == {at: [box] for at, box in boxes.items()}
    assert [box for box, _ in local_blocks(made)] == ([boxes[rank]] if rank in boxes else [])


def test_several_blocks_of_one_rank_are_in_ascending_order(rank):
    metadata = [
        _compat.ShardMetadata([at, 0], [1, 2], f"rank:{owner}/cpu") for at, owner in ((2, 1), (0, 1), (3, 0), (1, 3))
    ]
    mine = [_compat.Shard(torch.full((1, 2), float(m.shard_offsets[0])), m) for m in metadata]
    mine = [shard for shard in mine if shard.metadata.placement.rank() == rank]
    properties = _compat.TensorProperties(dtype=torch.float32)
    whole = _compat.ShardedTensorMetadata(metadata, torch.Size((4, 2)), properties)
    made = _compat.sharded_tensor(mine, whole, dist.group.WORLD)
    assert [box.offsets[0] for box in all_boxes(made)[1]] == [0, 2]
    assert [(box.offsets[0], block[0, 0].item()) for box, block in local_blocks(made)] == {
        0: [(3, 3.0)],
        1: [(0, 0.0), (2, 2.0)],
        2: [],
        3: [(1, 1.0)],
    }[rank]


def dtensor_of(shape, mesh, placements):
    """One whose values are those of no rank: for what is known from its description."""
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.empty([0] * len(shape)), mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), min_size=2, max_size=3).map(tuple),
    mesh_shape=st.sampled_from([(4,), (24,), (2, 3), (3, 2), (2, 3, 4)]),
    data=st.data(),
)
def test_blocks_on_a_mesh_are_its_tensor_cut_along_one_dimension_after_the_other(large, shape, mesh_shape, data):
    kinds = st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(-1)])
    placements = data.draw(st.tuples(*[kinds] * len(mesh_shape)))
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape).flip(0), _init_backend=False)
    numbers, expected = torch.arange(math.prod(shape)).view(shape), {}
    for place in torch.cartesian_prod(*(torch.arange(size) for size in mesh_shape)).view(-1, len(mesh_shape)).tolist():
        block = numbers
        for size, at, placement in zip(mesh_shape, place, placements, strict=True):
            if placement.is_shard():
                chunks = block.chunk(size, placement.dim)
                block = chunks[at] if at < len(chunks) else block.narrow(placement.dim, 0, 0)
        if block.numel():
            expected[int(mesh.mesh[tuple(place)])] = block
    found = all_boxes(dtensor_of(shape, mesh, placements))
    if not numbers.numel():
        assert list(found) == [int(mesh.mesh.flatten()[0])]
        return
    assert list(found) == list(expected)
    for rank, [box] in found.items():
        assert torch.equal(numbers[box.slices], expected[rank])


def test_sums_that_are_pending_are_refused(large):
    made = dtensor_of((8, 2), DeviceMesh("cpu", torch.arange(4), _init_backend=False), [Partial()])
    for read in (all_boxes, local_blocks):
        with pytest.raises(ValueError, match="has no values of its own: redistribute it first"):
            read(made)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_block_in_strides_is_several(large, dim):
    """As ``fully_shard`` cuts what is parallel over tensors: (2, 2) ranks, each stride in the parts of the others."""
    numbers = torch.arange(30).view((10, 3) if dim == 0 else (3, 10))
    shape = numbers.shape
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), _init_backend=False)
    placements = [_StridedShard(dim, split_factor=2), Shard(dim)]
    made = dtensor_of(shape, mesh, placements)
    boxes = all_boxes(made)
    # First by the ranks that are parallel over tensors, (5, 5), then each of these by the others, (3, 2).
    assert {rank: [(b.offsets[dim], b.sizes[dim]) for b in held] for rank, held in boxes.items()} == {
        0: [(0, 3)],
        1: [(5, 3)],
        2: [(3, 2)],
        3: [(8, 2)],
    }
    # Of one dimension of the mesh alone each rank has a part of both strides.
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    local = torch.cat([numbers.narrow(dim, 0, 3), numbers.narrow(dim, 5, 3)], dim)
    made = DTensor.from_local(local, mesh, placements[:1], run_check=False, shape=shape, stride=numbers.stride())
    found = local_blocks(made)
    assert [box for box, _ in found] == all_boxes(made)[0]
    assert [(box.offsets[dim], box.sizes[dim]) for box, _ in found] == [(0, 3), (5, 3)]
    for box, block in found:
        assert torch.equal(block, numbers[box.slices])


def test_what_is_known_of_equal_tensors_is_not_one_dictionary(large):
    mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False)
    all_boxes(dtensor_of((8, 2), mesh, [Shard(0)])).clear()
    all_boxes(dtensor_of((8, 2), mesh, [Shard(0)]))[0].clear()
    found = all_boxes(dtensor_of((8, 2), mesh, [Shard(0)]))
    assert [len(boxes) for boxes in found.values()] == [1] * 4


def without_values(kind):
    """A tensor of four elements that cannot be copied as it is."""
    whole = torch.ones(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that some are about to change, or to go
        return {
            "meta": lambda: whole.to("meta"),
            "sparse": whole.to_sparse,
            "compressed": whole.view(2, 2).to_sparse_csr,
            "mkldnn": whole.to_mkldnn,
            "nested": lambda: torch.nested.nested_tensor([whole]),
            "quantized": lambda: torch.quantize_per_tensor(whole, 1.0, 0, torch.qint8),
        }[kind]()


WORDS = {
    "meta": "on the meta device",
    "sparse": "sparse_coo",
    "compressed": "sparse_csr",
    "mkldnn": "_mkldnn",
    "nested": "nested",
    "quantized": "quantized",
}


@pytest.mark.parametrize("kind", WORDS)
def test_tensors_without_values_beside_each_other_are_reported(kind):
    with pytest.raises(StateDictError, match=f"^'layer.weight' is {WORDS[kind]}"):
        check_readable("layer.weight", without_values(kind))


@pytest.mark.parametrize("kind", ["meta", "sparse", "quantized"])
def test_the_block_of_a_sharded_tensor_has_to_have_values(large, kind):
    """Only this rank's: it is for each rank to tell of its own."""
    made = create_chunk_sharded_tensor(torch.ones(4), (96,), torch.float32, CPU, dist.group.WORLD, range(24))
    check_readable("weight", made)
    made.local_shards()[0].tensor = without_values(kind)
    with pytest.raises(StateDictError, match=f"^'weight' is {WORDS[kind]}"):
        check_readable("weight", made)


def test_the_block_of_a_dtensor_has_to_have_values(large):
    mesh = DeviceMesh("cpu", torch.arange(24))
    check_readable("weight", _compat.dtensor(torch.ones(4), mesh, [Shard(0)], (96,), (1,)))
    with pytest.raises(StateDictError, match=r"^'weight' is on the meta device"):
        check_readable("weight", _compat.dtensor(without_values("meta"), mesh, [Shard(0)], (96,), (1,)))


@pytest.mark.parametrize("value", [torch.ones(2, 3).t(), torch.ones(0), torch.ones(1).expand(5), 3, "a word", None])
def test_what_can_be_copied_passes(value):
    check_readable("weight", value)
