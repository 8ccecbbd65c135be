"""What is known of DTensors beside torch's own functions, where these are right, and by itself where they are not.

One rank of a process group that only seems to be there; what takes messages is in tests/mpi/test_tensor_extensions.py.
"""

import contextlib
import inspect
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import _common_utils  # before the next one: by itself that cannot be imported
from torch.distributed.fsdp._fsdp_extensions import FSDPExtensions
from torch.distributed.remote_device import _remote_device as Remote
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import fsdp as stock
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp._compat import ChunkShardingSpec, ShardedTensor
from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard import dtensor_extensions as ours
from hpcfsdp.reshard.shard_metadata import validate_tiling
from hpcfsdp.reshard.sharded_tensors import all_boxes, create_sharded_tensor, local_blocks

SIZE = 4
MESHES = {(4,): "t", (2, 2): "st", (4, 1): "st", (1, 2, 2): "rst"}
EVEN = [((8, 3), Shard(0)), ((3, 8), Shard(1)), ((2, 4, 3), Shard(-2)), ((5,), Replicate()), ((), Replicate())]

pytestmark = [
    pytest.mark.filterwarnings("ignore:._get_pg_default_device. will be deprecated"),  # which torch itself calls
    pytest.mark.filterwarnings("ignore:Multiple backends are registered"),  # and those are several ones
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(params=range(SIZE), ids="rank{}".format)
def rank(request):
    """One of four ranks of torch's default process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=SIZE)
    yield request.param
    dist.destroy_process_group()


@pytest.fixture
def first():
    """The first of 24 ranks, for what is the same on all."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=24)
    yield
    dist.destroy_process_group()


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(MESHES[shape]))


def numbers(shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def cut(whole, mesh_shape, place, placements):
    """The block of one place of a mesh, by cutting the tensor along one dimension of the mesh after the other."""
    for size, at, placement in zip(mesh_shape, place, placements, strict=True):
        if placement.is_shard():
            chunks = whole.chunk(size, placement.dim)
            whole = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def dtensor_of(whole, mesh, *placements):
    """A tensor that all ranks know, on a mesh."""
    place = mesh.get_coordinate()
    local = cut(whole, tuple(mesh.mesh.shape), place, placements).clone() if place is not None else whole[:0]
    shape = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **shape)


def as_told(metadata):
    return [(tuple(s.shard_offsets), tuple(s.shard_sizes)) for s in metadata.shards_metadata]


# Names and arguments


@pytest.mark.parametrize("name", [name for name in vars(stock.DTensorExtensions) if not name.startswith("_")])
def test_methods_take_what_those_of_torch_take(name):
    theirs = inspect.signature(getattr(stock.DTensorExtensions, name)).parameters.values()
    own = inspect.signature(getattr(ours.DTensorExtensions, name)).parameters.values()
    facts = ([(p.name, p.kind, p.default) for p in params if p.name != "self"] for params in (own, theirs))
    assert next(facts) == next(facts)


def test_every_method_that_an_engine_of_torch_calls_is_there():
    assert FSDPExtensions.__abstractmethods__ <= set(dir(ours.DTensorExtensions))


FUNCTIONS = """chunk_tensor chunk_dtensor pre_load_state_dict all_gather_dtensor get_box get_box_for get_local_box
create_shard_md_from_dt create_sharded_tensor_md_from_dt get_dt_pg rewrite_spec_if_needed""".split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_those_of_torch_take(name):
    theirs = list(inspect.signature(getattr(stock, f"_{name}")).parameters.values())
    own = list(inspect.signature(getattr(ours, name)).parameters.values())
    assert [p.name for p in own[: len(theirs)]] == [p.name for p in theirs]
    assert all(p.default is None for p in own[len(theirs) :])


# Boxes


@pytest.mark.parametrize(("shape", "placement"), EVEN, ids=str)
def test_boxes_where_ranks_divide_the_tensor(rank, shape, placement):
    made = dtensor_of(numbers(shape), mesh_of(4), placement)
    assert ours.get_box(made) == stock._get_box(made)
    assert ours.get_local_box(made) == stock._get_local_box(made)
    for place in range(SIZE):
        assert ours.get_box_for(made, place) == stock._get_box_for(made, place)
    found, theirs = ours.create_shard_md_from_dt(made, 3), stock._create_shard_md_from_dt(made, 3)
    assert found == theirs
    group = ours.get_dt_pg(made)
    assert group is stock._get_dt_pg(made)
    found, theirs = (
        ours.create_sharded_tensor_md_from_dt(made, group),
        stock._create_sharded_tensor_md_from_dt(made, group),
    )
    assert as_told(found) == as_told(theirs)
    assert (found.size, found.tensor_properties) == (theirs.size, theirs.tensor_properties)
    assert [s.placement.device() for s in found.shards_metadata] == [
        s.placement.device() for s in theirs.shards_metadata
    ]


def test_shards_are_placed_on_who_has_them(rank):
    made = dtensor_of(numbers((8, 3)), mesh_of(4), Shard(0))
    found = ours.create_sharded_tensor_md_from_dt(made, dist.group.WORLD)
    assert [s.placement for s in found.shards_metadata] == [Remote(f"rank:{at}/cpu") for at in range(SIZE)]
    validate_tiling(found)
    theirs = stock._create_sharded_tensor_md_from_dt(made, dist.group.WORLD)  # the first one here, all others elsewhere
    elsewhere = 0 if rank else 1
    assert [s.placement.rank() for s in theirs.shards_metadata] == [rank] + [elsewhere] * 3


UNEVEN = [((7, 3), Shard(0)), ((2, 5), Shard(1)), ((3, 2), Shard(0)), ((1,), Shard(0)), ((0, 2), Shard(0))]


@pytest.mark.parametrize(("shape", "placement"), UNEVEN, ids=str)
def test_boxes_where_ranks_do_not_divide_the_tensor(rank, shape, placement):
    """Torch goes on by the size of the tensor divided by that of the mesh, rounded down, which is no chunk's."""
    whole = numbers(shape)
    made = dtensor_of(whole, mesh_of(4), placement)
    wrong = 0
    for place in range(SIZE):
        offsets, sizes = ours.get_box_for(made, place)
        block = cut(whole, (4,), (place,), (placement,))
        assert torch.equal(whole[Box(offsets, sizes).slices], block)
        theirs = Box(*stock._get_box_for(made, place))
        wrong += not torch.equal(whole[theirs.slices], block)
    assert wrong or not whole.numel()
    offsets, sizes = ours.get_local_box(made)
    assert torch.equal(whole[Box(offsets, sizes).slices], made.to_local())
    step, mine = ours.get_box(made)
    assert mine == sizes == made.to_local().shape
    cut_dim = placement.dim
    assert step[cut_dim] == cut(whole, (4,), (0,), (placement,)).shape[cut_dim]
    metadata = ours.create_sharded_tensor_md_from_dt(made, dist.group.WORLD)
    validate_tiling(metadata)
    assert all(math.prod(s.shard_sizes) for s in metadata.shards_metadata) or not whole.numel()
    theirs = stock._create_sharded_tensor_md_from_dt(made, dist.group.WORLD)
    with pytest.raises(ShardingError) if whole.numel() else contextlib.nullcontext():
        validate_tiling(theirs)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    mesh_shape=st.sampled_from([(4,), (24,), (2, 3), (3, 2), (2, 3, 4), (1, 5)]),
    data=st.data(),
)
def test_boxes_on_meshes_of_any_dimensions(first, shape, mesh_shape, data):
    kinds = st.one_of(st.just(Replicate()), st.integers(-len(shape), len(shape) - 1).map(Shard))
    placements = data.draw(st.tuples(*[kinds] * len(mesh_shape)))
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape), _init_backend=False)
    whole = numbers(shape)
    made = DTensor.from_local(
        torch.empty([0] * len(shape)), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    for idx in range(mesh.size()):
        place = [int(at) for at in torch.unravel_index(torch.tensor(idx), mesh_shape)]
        offsets, sizes = ours.get_box_for(made, idx)
        assert torch.equal(whole[Box(offsets, sizes).slices], cut(whole, mesh_shape, place, placements))
    assert ours.get_local_box(made) == ours.get_box_for(made, 0)
    if len(mesh_shape) > 1:
        for function in (stock._get_box, stock._get_dt_pg):
            with pytest.raises(AssertionError, match="Only 1D"):
                function(made)


def test_a_block_of_several_ranks_is_described_once(rank):
    mesh = mesh_of(2, 2)
    made = dtensor_of(numbers((5, 3)), mesh, Replicate(), Shard(0))
    group = ours.get_dt_pg(made)
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    metadata = ours.create_sharded_tensor_md_from_dt(made, group)
    validate_tiling(metadata)
    assert as_told(metadata) == [((0, 0), (3, 3)), ((3, 0), (2, 3))]
    owners = [s.placement.rank() for s in metadata.shards_metadata]
    assert owners == {0: [0, 1], 1: [0, 1], 2: [2, 1], 3: [0, 3]}[rank]
    mine = ours.create_shard_md_from_dt(made, rank)
    assert mine in metadata.shards_metadata


def test_meshes_of_some_ranks_are_known_by_their_global_ones(rank):
    mesh = mesh_of(2, 2)["t"]
    made = dtensor_of(numbers((3, 2)), mesh, Shard(0))
    begin = rank // 2 * 2
    metadata = ours.create_sharded_tensor_md_from_dt(made, mesh.get_group())
    assert [s.placement.rank() for s in metadata.shards_metadata] == [begin, begin + 1]
    with pytest.raises(ShardingError, match=rf"is on the ranks \[{begin}, {begin + 1}\], and .* \[0, 1, 2, 3\]"):
        ours.create_sharded_tensor_md_from_dt(made, dist.group.WORLD)


@pytest.mark.parametrize("idx", [-1, 4])
def test_places_that_a_mesh_does_not_have(rank, idx):
    with pytest.raises(ShardingError, match=f"no place {idx} in a mesh of 4"):
        ours.get_box_for(dtensor_of(numbers((8,)), mesh_of(4), Shard(0)), idx)


def test_a_rank_that_is_not_in_the_mesh_has_no_block(rank):
    others = [other for other in range(SIZE) if other != rank]
    made = dtensor_of(numbers((8,)), DeviceMesh("cpu", others, _init_backend=False), Shard(0))
    assert ours.get_box_for(made, 1) == (torch.Size([3]), torch.Size([3]))
    for function in (ours.get_local_box, ours.get_box, lambda dt: ours.create_shard_md_from_dt(dt, rank)):
        with pytest.raises(ShardingError, match=rf"rank {rank} has no block of a DTensor on the ranks \[.*\]"):
            function(made)


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (Partial(), r"\[Partial\(sum\)\] is not made of blocks"),
        (_StridedShard(0, split_factor=2), "_StridedShard.* is not made of blocks"),
        (Shard(2), r"shape \[8, 2\] has no dimension 2 to shard along"),
    ],
)
def test_placements_that_are_no_blocks(first, placement, why):
    mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False)
    made = DTensor.from_local(torch.empty(2, 2), mesh, [placement], run_check=False, shape=(8, 2), stride=(2, 1))
    for function in (ours.get_box, ours.get_local_box, lambda dt: ours.get_box_for(dt, 0)):
        with pytest.raises(ShardingError, match=why):
            function(made)
    with pytest.raises(ShardingError, match=why):
        ours.create_sharded_tensor_md_from_dt(made, dist.new_group(range(4)))


# Specs


def test_a_spec_follows_the_device_of_the_tensor(rank):
    spec = ChunkShardingSpec(1, [f"rank:{at}/cuda:{at}" for at in range(SIZE)])
    tensor = torch.zeros(2)
    found, theirs = (
        rewrite(spec, tensor, rank) for rewrite in (ours.rewrite_spec_if_needed, stock._rewrite_spec_if_needed)
    )
    assert found == theirs
    assert found.placements[rank] == Remote(f"rank:{rank}/cpu")
    assert spec.placements[rank] == Remote(f"rank:{rank}/cuda:{rank}")


def test_a_spec_that_fits_is_returned_itself(rank):
    spec = ChunkShardingSpec(0, [f"rank:{at}/cpu" for at in range(SIZE)])
    for rewrite in (ours.rewrite_spec_if_needed, stock._rewrite_spec_if_needed):
        assert rewrite(spec, torch.zeros(2), rank) is spec
        assert rewrite("another spec", torch.zeros(2), rank) == "another spec"


# From DTensors to blocks, and back


class Handle:
    """The module of a device with streams, which are names; notes on which one something is done."""

    def __init__(self):
        self.current = "current"

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture(params=[True, False], ids=["handle", "no handle"])
def extensions(request):
    return ours.DTensorExtensions(Handle() if request.param else None)


@pytest.mark.parametrize(("shape", "placement"), [*EVEN, *UNEVEN], ids=str)
@pytest.mark.parametrize("requires_grad", [True, False], ids=["trained", "frozen"])
def test_blocks_go_out_and_come_back(rank, extensions, shape, placement, requires_grad):
    whole = dtensor_of(numbers(shape), mesh_of(4), placement).requires_grad_(requires_grad)
    block, placed = extensions.pre_flatten_transform(whole)
    assert type(block) is torch.Tensor
    assert (block.data_ptr(), block.requires_grad) == (whole._local_tensor.data_ptr(), requires_grad)
    assert not whole._local_tensor.requires_grad
    back = extensions.post_unflatten_transform(block, placed)
    assert (back.device_mesh, back.placements) == (whole.device_mesh, whole.placements)
    assert (back.shape, back.stride(), back.requires_grad) == (whole.shape, whole.stride(), requires_grad)
    assert back._local_tensor.data_ptr() == block.data_ptr()
    if requires_grad:
        back.backward(whole.detach() * 2)
        assert torch.equal(block.grad, whole.detach().to_local() * 2)


def test_torch_has_blocks_of_frozen_tensors_trained(rank):
    whole = dtensor_of(numbers((8,)), mesh_of(4), Shard(0))
    stock.DTensorExtensions(Handle()).pre_flatten_transform(whole)
    assert whole._local_tensor.requires_grad
    whole = dtensor_of(numbers((8,), torch.int64), mesh_of(4), Shard(0))
    with pytest.raises(RuntimeError, match="floating point"):
        stock.DTensorExtensions(Handle()).pre_flatten_transform(whole)
    block, _ = ours.DTensorExtensions().pre_flatten_transform(whole)
    assert block.tolist() == [2 * rank, 2 * rank + 1]


def test_strides_of_the_whole_are_kept(rank):
    whole = DTensor.from_local(
        torch.arange(6.0).view(2, 3).t(), mesh_of(4), [Shard(1)], run_check=False, shape=(3, 8), stride=(1, 3)
    )
    extensions = ours.DTensorExtensions()
    back = extensions.post_unflatten_transform(*extensions.pre_flatten_transform(whole))
    assert (back.stride(), back._local_tensor.stride()) == ((1, 3), (1, 3))
    assert torch.equal(back._local_tensor, whole._local_tensor)


def test_plain_tensors_stay_as_they_are(rank, extensions):
    tensor = torch.ones(2)
    assert extensions.pre_flatten_transform(tensor) == (tensor, None)
    assert extensions.post_unflatten_transform(tensor, None) is tensor


def test_an_engine_of_torch_does_not_flatten_it_again(rank):
    extensions = ours.DTensorExtensions()
    block, placed = extensions.pre_flatten_transform(dtensor_of(numbers((8,)), mesh_of(4), Shard(0)))
    assert _common_utils._is_fsdp_flattened(extensions.post_unflatten_transform(block, placed))
    assert not _common_utils._is_fsdp_flattened(block)


@pytest.mark.parametrize("stream", [None, "compute"])
def test_dtensors_are_made_on_the_compute_stream(rank, monkeypatch, stream):
    handle, used = Handle(), []
    extensions = ours.DTensorExtensions(handle)
    assert extensions.compute_stream is None
    extensions.compute_stream = stream  # as torch's FSDP does
    from_local = DTensor.from_local
    monkeypatch.setattr(DTensor, "from_local", lambda *a, **k: used.append(handle.current) or from_local(*a, **k))
    block, placed = extensions.pre_flatten_transform(from_local(torch.ones(2), mesh_of(4), [Shard(0)]))
    extensions.post_unflatten_transform(block, placed)
    assert used == [stream or "current"]
    assert handle.current == "current"


@pytest.mark.parametrize("stream", [None, "compute"])
def test_gradients_are_there_before_the_engine_has_them(rank, monkeypatch, stream):
    """Autograd may bring one that a collective is still to fill; it is waited for on the compute stream."""
    handle, waits = Handle(), []
    extensions = ours.DTensorExtensions(handle)
    extensions.compute_stream = stream
    whole = dtensor_of(numbers((3,)), mesh_of(4), Replicate()).requires_grad_()
    block, placed = extensions.pre_flatten_transform(whole)
    back = extensions.post_unflatten_transform(block, placed)
    wait = AsyncCollectiveTensor.wait
    monkeypatch.setattr(AsyncCollectiveTensor, "wait", lambda grad: waits.append(handle.current) or wait(grad))
    grad = DTensor.from_local(torch.ones(3), back.device_mesh, [Partial()], run_check=False)
    back.backward(grad.redistribute(placements=[Replicate()], async_op=True))
    assert type(block.grad) is torch.Tensor
    assert waits == [stream or "current"]


# Chunks over a process group


def check_same(found, theirs):
    assert type(found) is type(theirs) is ShardedTensor
    assert found.metadata() == theirs.metadata()
    assert found._process_group is theirs._process_group
    for one, other in zip(found.local_shards(), theirs.local_shards(), strict=True):
        assert one.metadata == other.metadata
        if isinstance(other.tensor, ShardedTensor):
            check_same(one.tensor, other.tensor)
        else:
            assert torch.equal(one.tensor, other.tensor)
            assert (one.tensor.dtype, one.tensor.stride()) == (other.tensor.dtype, other.tensor.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (2, 3, 2), (1,), (5, 0), (9,)], ids=str)
def test_chunks_are_those_of_torch(rank, shape, dtype):
    whole = numbers(shape, dtype)
    found = ours.DTensorExtensions().chunk_tensor(whole, rank, SIZE, 8, dist.group.WORLD)
    check_same(found, stock.DTensorExtensions(Handle()).chunk_tensor(whole, rank, SIZE, 8, dist.group.WORLD))
    for block in (shard.tensor for shard in found.local_shards()):
        assert block.untyped_storage().nbytes() == block.numel() * block.element_size()
    inner, shards = ours.pre_load_state_dict(found)
    assert inner is found
    assert shards == found.local_shards()
    assert ours.DTensorExtensions().pre_load_state_dict_transform(found)[0] is found


def test_chunks_of_trained_and_of_transposed_tensors(rank):
    """Which torch refuses: the properties, or the layout in memory, of its chunks are not those that it notes."""
    for whole in (numbers((8, 3)).requires_grad_(), numbers((3, 8)).t()):
        found = ours.chunk_tensor(whole, rank, SIZE, 1, dist.group.WORLD)
        [(box, block)] = local_blocks(found)
        assert block.is_contiguous()
        assert not block.requires_grad
        assert torch.equal(block, whole.detach()[box.slices])
        with pytest.raises(ValueError, match=r"requires_grad|contiguous"):
            stock._chunk_tensor(whole, rank, SIZE, 1, dist.group.WORLD)


def test_chunks_over_some_of_the_ranks(rank):
    group = mesh_of(2, 2)["s"].get_group()  # ranks 0 and 2, or 1 and 3
    place, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    whole = numbers((5, 2))
    found = ours.chunk_tensor(whole, place, 2, 1, group)
    assert all_boxes(found) == {ranks[0]: [Box((0, 0), (3, 2))], ranks[1]: [Box((3, 0), (2, 2))]}
    [(box, block)] = local_blocks(found)
    assert torch.equal(block, whole[box.slices])
    [shard] = found.local_shards()
    assert shard.metadata.placement.rank() == rank
    [shard] = stock._chunk_tensor(whole, place, 2, 1, group).local_shards()
    assert shard.metadata.placement.rank() == place  # torch takes the place in the group for a rank


def test_chunks_lie_where_they_are_to(rank):
    found = ours.chunk_tensor(torch.ones(4, device="meta"), rank, SIZE, 1, dist.group.WORLD, torch.device("meta"))
    assert found.local_shards()[0].tensor.is_meta
    extensions = ours.DTensorExtensions()
    found = extensions.chunk_tensor(torch.ones(4), rank, SIZE, 1, dist.group.WORLD, device=torch.device("meta"))
    assert found.local_shards()[0].tensor.is_meta


@pytest.mark.parametrize(("there", "size"), [(1, 0), (0, 1), (0, -1)])
def test_a_rank_that_is_another_one_in_the_group(rank, there, size):
    with pytest.raises(
        ShardingError, match=f"rank {rank + there} of {SIZE + size} was given, and this is rank {rank} of 4"
    ):
        ours.chunk_tensor(torch.ones(4), rank + there, SIZE + size, 1, dist.group.WORLD)


def test_what_has_no_rows_cannot_be_chunked(rank):
    with pytest.raises(ShardingError, match="without dimensions"):
        ours.chunk_tensor(torch.tensor(1.0), rank, SIZE, 1, dist.group.WORLD)
    mesh = mesh_of(2, 2)
    with pytest.raises(ShardingError, match="without dimensions"):
        ours.chunk_dtensor(torch.tensor(1.0), mesh["s"].get_local_rank(), mesh["s"])


def nested(rank):
    """A matrix, of which each pair of ranks has half of the columns, chunked over the pairs."""
    boxes = {at: Box((0, at % 2 * 2), (5, 2)) for at in (rank // 2 * 2, rank // 2 * 2 + 1)}
    mesh = mesh_of(2, 2)
    block = numbers((5, 4))[boxes[rank].slices].clone()
    return (
        mesh,
        block,
        create_sharded_tensor(block, (5, 4), block.dtype, torch.device("cpu"), mesh["t"].get_group(), boxes),
    )


def test_the_shard_of_a_sharded_tensor_is_chunked(rank):
    mesh, block, whole = nested(rank)
    place, over = mesh["s"].get_local_rank(), mesh["s"].get_group()
    found = ours.chunk_tensor(whole, place, 2, 1, over)
    assert found.metadata() == whole.metadata()
    assert found.metadata() is not whole.metadata()
    assert found._process_group is whole._process_group
    [shard] = found.local_shards()
    inner, shards = ours.pre_load_state_dict(found)
    assert inner is shard.tensor
    assert inner._process_group is over
    [(box, mine)] = local_blocks(inner)
    assert torch.equal(mine, block[box.slices])
    assert shards == inner.local_shards()
    found.metadata().shards_metadata[0].shard_sizes[0] = 77
    assert whole.metadata().shards_metadata[0].shard_sizes[0] == 5
    theirs = stock._chunk_tensor(whole, place, 2, 1, over)
    assert theirs.metadata() == whole.metadata()
    assert torch.equal(theirs.local_shards()[0].tensor.local_shards()[0].tensor, mine)
    assert stock._pre_load_state_dict(found) == (inner, shards)


def test_several_shards_or_none_cannot_be_chunked(rank):
    boxes = {0: Box((0,), (3,)), 1: Box((3,), (3,))}
    whole = create_sharded_tensor(
        torch.ones(3) if rank in boxes else None, (6,), torch.float32, torch.device("cpu"), dist.group.WORLD, boxes
    )
    if rank in boxes:
        ours.chunk_tensor(whole, rank, SIZE, 1, dist.group.WORLD)
        return
    with pytest.raises(ShardingError, match="with 0 shards on this rank"):
        ours.chunk_tensor(whole, rank, SIZE, 1, dist.group.WORLD)
    assert ours.pre_load_state_dict(whole) == (whole, [])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 1)], ids=str)
def test_the_block_of_a_dtensor_is_chunked(rank, shape, placement):
    mesh, whole = mesh_of(2, 2), numbers(shape)
    made = dtensor_of(whole, mesh["t"], placement).requires_grad_()
    place, over = mesh["s"].get_local_rank(), mesh["s"].get_group()
    found = ours.chunk_tensor(made, place, 2, 1, over)
    assert found._process_group is mesh["t"].get_group()
    metadata = found.metadata()
    validate_tiling(metadata)
    assert (metadata.size, metadata.tensor_properties.requires_grad) == (whole.shape, False)
    block = made.detach().to_local()
    if not block.numel():
        assert found.local_shards() == []
        return
    [shard] = found.local_shards()
    assert shard.metadata in metadata.shards_metadata
    assert torch.equal(whole[Box(shard.metadata.shard_offsets, shard.metadata.shard_sizes).slices], block)
    inner, shards = ours.pre_load_state_dict(found)
    assert inner is shard.tensor
    for shard in shards:
        assert torch.equal(block[Box(shard.metadata.shard_offsets, shard.metadata.shard_sizes).slices], shard.tensor)
    assert [s.tensor.shape for s in shards] == [c.shape for c in block.chunk(2)[place : place + 1]]
    if rank > 1:  # torch takes the rank in the mesh for one in the world
        with pytest.raises(ValueError, match=rf"Global rank {rank - 2} does not exist"):
            stock._chunk_tensor(made, place, 2, 1, over)
    elif placement.is_shard() and shape[placement.dim] % 2:
        with pytest.raises(ValueError, match=r"overlap|Total volume"):
            stock._chunk_tensor(made, place, 2, 1, over)
    elif rank == 0 or placement.is_replicate():
        theirs = stock._chunk_tensor(made.detach(), place, 2, 1, over)
        assert as_told(theirs.metadata()) == as_told(metadata)
        assert theirs.local_shards()[0].metadata == found.local_shards()[0].metadata
        assert [
            torch.equal(a.tensor, b.tensor) for a, b in zip(stock._pre_load_state_dict(theirs)[1], shards, strict=True)
        ]


def test_the_block_of_a_dtensor_on_several_dimensions_is_chunked(rank):
    mesh, whole = mesh_of(1, 2, 2), numbers((5, 3))
    made = dtensor_of(whole, mesh["s", "t"], Shard(0), Shard(1))
    over = mesh["r"].get_group()
    found = ours.chunk_tensor(made, 0, 1, 1, over)
    validate_tiling(found.metadata())
    assert dist.get_process_group_ranks(found._process_group) == [0, 1, 2, 3]
    [shard] = ours.pre_load_state_dict(found)[1]
    assert torch.equal(shard.tensor, made.to_local())
    with pytest.raises(AssertionError, match="Only 1D"):
        stock._chunk_tensor(made, 0, 1, 1, over)


# Chunks over a mesh; here of plain tensors, which takes no messages


@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (1, 2), (5,), (0, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1)], ids=str)
def test_plain_tensors_on_a_mesh_are_chunked_as_by_torch(rank, mesh_shape, shape):
    mesh, whole = mesh_of(*mesh_shape), numbers(shape)
    part = mesh["s"]
    found = ours.DTensorExtensions().chunk_dtensor(whole, part.get_local_rank(), part)
    theirs = stock.DTensorExtensions(Handle()).chunk_dtensor(whole, part.get_local_rank(), part)
    assert type(found) is DTensor
    assert (found.device_mesh, found.placements) == (theirs.device_mesh, theirs.placements)
    assert (found.shape, found.stride(), found.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert torch.equal(found.to_local(), theirs.to_local())
    assert found.to_local().stride() == theirs.to_local().stride()


@pytest.mark.parametrize("of", ["trained", "transposed", "whole"])
def test_chunks_on_a_mesh_are_new_memory(rank, of):
    mesh = mesh_of(1, 2, 2) if of == "whole" else mesh_of(2, 2)
    part = mesh["r"] if of == "whole" else mesh["s"]
    whole = numbers((3, 5)).t() if of == "transposed" else numbers((5, 3))
    whole = whole.requires_grad_(of == "trained")
    before = whole.detach().clone()
    found = ours.chunk_dtensor(whole, part.get_local_rank(), part)
    assert not found.requires_grad
    assert found.stride() == whole.stride()
    box = Box(*ours.get_local_box(found))
    assert torch.equal(found.to_local(), before[box.slices])
    assert found.to_local().untyped_storage().nbytes() == 4 * math.prod(box.sizes)
    found.to_local().zero_()
    assert torch.equal(whole.detach(), before)


def test_a_mesh_of_three_dimensions_is_cut_where_it_is_asked_for(rank):
    """Torch cuts plain tensors along the first dimension of any mesh, which is that of replicas."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("r", "s", "t"))
    whole, place = numbers((5, 3)), mesh["s"].get_local_rank()
    for part in (mesh["r", "s"], mesh["s"]):
        found = ours.chunk_dtensor(whole, place, part)
        assert found.placements == (Replicate(), Shard(0), Replicate())
        assert torch.equal(found.to_local(), whole.chunk(2)[place])
    assert stock._chunk_dtensor(whole, place, mesh["r", "s"]).placements == (Shard(0), Replicate(), Replicate())


@pytest.mark.parametrize("dim", [1, None], ids=["columns", "replicated"])
def test_dtensors_that_are_not_cut_in_rows_are_chunked_without_messages(rank, dim):
    mesh, whole = mesh_of(2, 2), numbers((5, 3))
    placement = Replicate() if dim is None else Shard(dim)
    found = ours.chunk_dtensor(dtensor_of(whole, mesh["t"], placement), mesh["s"].get_local_rank(), mesh["s"])
    assert (found.device_mesh, found.placements) == (mesh, (Shard(0), placement))
    assert torch.equal(found.to_local(), cut(whole, (2, 2), mesh.get_coordinate(), (Shard(0), placement)))


def test_meshes_to_chunk_over_are_parts_of_larger_ones(rank):
    mesh = mesh_of(2, 2)
    for other in (mesh, mesh_of(4), mesh["s", "t"], mesh["s", "t"]._flatten("all"), None):
        with pytest.raises(
            ShardingError, match=r"not a part of a larger mesh.*take it from a mesh with named dimensions"
        ):
            ours.chunk_dtensor(torch.ones(4), rank, other)


def test_a_rank_that_is_another_one_in_the_mesh(rank):
    part = mesh_of(2, 2)["s"]
    place = part.get_local_rank()
    with pytest.raises(ShardingError, match=rf"rank {1 - place} was given, and this rank is {place} in the last dimen"):
        ours.chunk_dtensor(torch.ones(4), 1 - place, part)


@pytest.mark.parametrize("on", ["the same dimension", "all", "another mesh", "flattened"])
def test_dtensors_to_chunk_lie_on_other_dimensions(rank, on):
    mesh = mesh_of(2, 2)
    lies_on = {
        "the same dimension": lambda: mesh["s"],
        "all": lambda: mesh,
        "another mesh": lambda: init_device_mesh("cpu", (SIZE,), mesh_dim_names=("t",)),
        "flattened": lambda: mesh["s", "t"]._flatten("all"),
    }[on]()
    made = dtensor_of(numbers((8, 3)), lies_on, *[Replicate()] * lies_on.ndim)
    with pytest.raises(
        ShardingError, match=r"the DTensor is on .*: to be chunked along \('s',\), it must be on \['t'\] of"
    ):
        ours.chunk_dtensor(made, mesh["s"].get_local_rank(), mesh["s"])


def test_an_equal_mesh_is_as_good(rank):
    """Torch's operators remember meshes, and may give a tensor an equal one that is a part of another."""
    mesh, other = mesh_of(2, 2), mesh_of(1, 2, 2)
    assert mesh["t"] == other["t"]
    made = dtensor_of(numbers((5, 3)), mesh["t"], Shard(1))
    found = ours.chunk_dtensor(made, other["s"].get_local_rank(), other["s"])
    assert (found.device_mesh, found.placements) == (other, (Replicate(), Shard(0), Shard(1)))


def test_only_the_mesh_of_the_tensor_gathers_it(rank):
    mesh = mesh_of(2, 2)
    made = dtensor_of(numbers((8, 3)), mesh, Replicate(), Shard(0))
    for other in (mesh["t"], mesh_of(4), None):
        with pytest.raises(ShardingError, match=r"is on DeviceMesh.*should be gathered on "):
            ours.all_gather_dtensor(made, other)
    for gather in (ours.DTensorExtensions().all_gather_dtensor, stock._all_gather_dtensor):
        assert gather(made, mesh).data_ptr() == made.to_local().data_ptr()  # nothing to gather
