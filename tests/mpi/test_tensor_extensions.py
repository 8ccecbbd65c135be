"""DTensors in chunks, and back, by the functions that torch's engine calls: on meshes of all ranks, of any shape."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    _init_utils,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, fsdp as stock, parallelize_module

from hpcfsdp import _compat
from hpcfsdp.errors import ShardingError
from hpcfsdp.launch.job import load_mpi
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard import dtensor_extensions as ours
from hpcfsdp.reshard.shard_metadata import build_global_metadata, build_metadata_from_local_shards, validate_tiling
from hpcfsdp.reshard.sharded_tensors import local_blocks

SIZE = load_mpi().COMM_WORLD.size
MESHES = {
    1: [(1, 1), (1, 1, 1)],
    2: [(2, 1), (1, 2), (2, 1, 1)],
    3: [(3, 1), (1, 3), (1, 3, 1)],
    4: [(2, 2), (4, 1), (1, 4), (1, 2, 2), (2, 2, 1), (2, 1, 2)],
    8: [(4, 2), (2, 4), (2, 2, 2)],
}.get(SIZE, [(SIZE, 1), (1, SIZE)])
"""(shard, tensor) or (replicate, shard, tensor), which multiply to the number of ranks."""
SHAPES = [(8, 12), (24, 3), (7, 5), (5, 4), (1, 9), (3, 1), (2, 3, 5), (0, 4)]
PLACEMENTS = [Shard(0), Shard(1), Replicate(), None]
"""Over the ranks that are parallel over tensors; None for a plain tensor."""

pytestmark = [
    pytest.mark.ranks(3, 1, 4),
    pytest.mark.filterwarnings("ignore:.*FSDP.*"),  # of torch, deprecated as a whole
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:When using ..NO_SHARD"),  # which it is on one rank
    pytest.mark.filterwarnings("ignore:._get_pg_default_device. will be deprecated"),
]


@functools.cache
def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor")[-len(shape) :])


@pytest.fixture(params=MESHES, ids=lambda shape: "x".join(map(str, shape)))
def mesh(world, request):
    return mesh_of(request.param)


def numbers(shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def placed(whole, mesh, placement):
    """A tensor that all ranks know, over those that are parallel over tensors. Not collective."""
    if placement is None:
        return whole.clone()
    if placement.is_shard():
        chunks = whole.chunk(mesh.size(), placement.dim)
        at = mesh.get_local_rank()
        whole, of = chunks[at] if at < len(chunks) else whole.narrow(placement.dim, 0, 0), whole
    else:
        of = whole
    # In memory of its own, the dimensions of which are in another order.
    local = whole.transpose(0, -1).contiguous().transpose(0, -1)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=of.shape, stride=of.stride())


def divides(mesh, shape, placement):
    """Whether all blocks, and all chunks of them, are of one size."""
    size, rows = mesh["tensor"].size(), shape[0]
    if placement is not None and placement.is_shard():
        if not shape[placement.dim] or shape[placement.dim] % size:
            return False
        rows //= size if placement.dim == 0 else 1
    return rows > 0 and rows % mesh["shard"].size() == 0


@pytest.mark.meshes
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_over_a_mesh_go_out_and_come_back(mesh, shape, placement):
    whole, part = numbers(shape), mesh["shard"]
    tensor = placed(whole, mesh["tensor"], placement)
    before = _compat.local_of(tensor).clone()
    found = ours.chunk_dtensor(tensor, part.get_local_rank(), part)
    *others, tensor_placement = found.placements
    assert others == [Replicate()] * (mesh.ndim - 2) + [Shard(0)]
    assert tensor_placement == (placement or Replicate())
    assert (found.device_mesh, found.shape, found.stride()) == (mesh, whole.shape, whole.stride())
    chunk = found.to_local()
    assert torch.equal(chunk, whole[Box(*ours.get_local_box(found)).slices])
    assert chunk.untyped_storage().nbytes() == chunk.numel() * chunk.element_size()
    assert torch.equal(found.full_tensor(), whole)
    assert torch.equal(ours.all_gather_dtensor(found, mesh), before)
    chunk.add_(1)
    assert torch.equal(_compat.local_of(tensor), before)
    if divides(mesh, shape, placement) and (mesh.ndim == 2 or placement is not None):
        theirs = stock._chunk_dtensor(placed(whole, mesh["tensor"], placement), part.get_local_rank(), part)
        assert (theirs.placements, theirs.shape) == (found.placements, found.shape)
        assert torch.equal(theirs.to_local() + 1, chunk)
        assert torch.equal(stock._all_gather_dtensor(theirs, mesh), before)


def test_chunks_keep_the_shape_of_what_a_block_was_cut_from(world):
    # torch 2.13 takes each rank's block for one of equal ones: ranks get tensors of different shapes.
    mesh = mesh_of((1, world.size))
    whole = numbers((2, 2 * world.size + 1))  # the last rank has fewer columns
    found = ours.chunk_dtensor(placed(whole, mesh["tensor"], Shard(1)), 0, mesh["shard"])
    assert found.shape == whole.shape


@pytest.mark.meshes
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_gradients_stay_with_what_is_chunked(mesh, placement):
    tensor = placed(numbers((7, 5)), mesh["tensor"], placement).requires_grad_()
    found = ours.chunk_dtensor(tensor * 2, mesh["shard"].get_local_rank(), mesh["shard"])
    assert not found.requires_grad
    assert torch.equal(found.full_tensor(), numbers((7, 5)) * 2)
    if placement.dim == 1:
        for gather in (ours.all_gather_dtensor, stock._all_gather_dtensor):
            found.requires_grad_().grad = None
            gather(found, mesh).sum().backward()
            assert torch.equal(found.grad.full_tensor(), torch.ones(7, 5))
    assert tensor.grad is None


@pytest.mark.meshes
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_chunks_over_a_process_group_go_out_and_come_back(world, mesh, shape, placement):
    """A tensor of chunked tensors: both say who has what, on every rank."""
    whole, group = numbers(shape, torch.float64), mesh["shard"].get_group()
    tensor = placed(whole, mesh["tensor"], placement)
    found = ours.chunk_tensor(tensor, dist.get_rank(group), dist.get_world_size(group), 1, group)
    validate_tiling(found.metadata())
    assert (found.metadata().size, found.metadata().tensor_properties.dtype) == (whole.shape, torch.float64)
    inner, shards = ours.pre_load_state_dict(found)
    outer = found.local_shards()
    pieces = []
    if outer:
        assert inner is outer[0].tensor
        validate_tiling(inner.metadata())
        assert shards == inner.local_shards()
        pieces = [(outer[0].metadata, box, values) for box, values in local_blocks(inner)]
    made = torch.full_like(whole, -1)
    for place, box, values in [piece for pieces in world.comm.allgather(pieces) for piece in pieces]:
        block = made[Box(place.shard_offsets, place.shard_sizes).slices]
        block[box.slices] = values
    assert torch.equal(made, whole)
    tellers = world.comm.allgather((dist.get_process_group_ranks(mesh["tensor"].get_group()), found.metadata()))
    for members, metadata in tellers:  # of cut tensors all ranks of one group say the same
        if world.rank in members and placement.is_shard():
            assert metadata == found.metadata()


@pytest.mark.ranks(4)
def test_chunks_are_placed_on_ranks_not_on_places_in_a_group(world):
    # torch 2.13 takes one for the other: of groups that do not begin with rank 0 it cannot chunk DTensors.
    group = mesh_of((2, 2))["shard"].get_group()
    [shard] = ours.chunk_tensor(numbers((8, 2)), dist.get_rank(group), 2, 1, group).local_shards()
    assert shard.metadata.placement.rank() == world.rank


@pytest.mark.parametrize("rows", [12, 7])
def test_what_ranks_have_makes_up_the_metadata_of_torch(world, rows):
    """Built by each rank, gathered and merged, it is that of a tensor that torch itself makes of the shards."""
    whole = numbers((rows, 3))
    begins = range(0, rows, -(-rows // world.size))
    mine = begins[world.rank : world.rank + 1]
    shards = [
        _compat.Shard.from_tensor_and_offsets(whole[begin : begin + begins.step].clone(), [begin, 0], world.rank)
        for begin in mine
    ]
    theirs = init_from_local_shards(shards, whole.size())
    local = build_metadata_from_local_shards(shards, whole.size(), world.rank, None) if shards else None
    gathered = world.comm.allgather(local)
    assert build_global_metadata(gathered) == theirs.metadata()
    if world.size > 1:
        gathered[0].tensor_properties.dtype = torch.float64
        with pytest.raises(ShardingError, match=r"dtype: torch.float64 on rank 0, torch.float32 on rank 1"):
            build_global_metadata(gathered)


# In the engine of torch, in the place of its own


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def train(mesh, extensions, patch, use_orig_params, strategy=ShardingStrategy.FULL_SHARD):
    """What torch's FSDP makes of a model that is parallel over tensors: losses, and at last its state on this rank."""
    made = []
    patch.setattr(_init_utils, "DTensorExtensions", lambda handle: made.append(extensions(handle)) or made[-1])
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(6, 4))
    plan = {
        f"{at}.{name}": style() for at in "01" for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
    }
    parallelize_module(model, mesh["tensor"], plan)
    model = FullyShardedDataParallel(
        model,
        device_mesh=mesh["shard"] if mesh.ndim == 2 else mesh["replicate", "shard"],
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    assert len(made) == 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        data = torch.randn(24, 6, generator=torch.Generator().manual_seed(step))
        loss = model(data.chunk(mesh["shard"].size())[mesh["shard"].get_local_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert made[0].compute_stream is not None
    configs = ShardedStateDictConfig(_use_dtensor=True), ShardedOptimStateDictConfig(_use_dtensor=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict({name: value.clone() for name, value in state.items()})
        again = model.state_dict()
    return losses, state, optimizer_state, again


def check_same(found, theirs):
    if isinstance(theirs, dict):
        assert list(found) == list(theirs)
        for key, value in theirs.items():
            check_same(found[key], value)
    elif isinstance(theirs, DTensor):
        assert type(found) is DTensor
        assert (found.device_mesh, found.placements) == (theirs.device_mesh, theirs.placements)
        assert (found.shape, found.stride()) == (theirs.shape, theirs.stride())
        assert torch.equal(found.to_local(), theirs.to_local())
    else:
        assert torch.equal(found, theirs)


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@pytest.mark.ranks(4)
def test_the_engine_of_torch_works_the_same_with_them(world, monkeypatch, use_orig_params):
    # torch takes only even cuts, and no dimension of one rank
    mesh = mesh_of((2, 2))
    losses, state, optimizer_state, again = train(mesh, ours.DTensorExtensions, monkeypatch, use_orig_params)
    theirs = train(mesh, stock.DTensorExtensions, monkeypatch, use_orig_params)
    assert losses == theirs[0]
    check_same(state, theirs[1])
    check_same(optimizer_state, theirs[2])
    check_same(again, state)
