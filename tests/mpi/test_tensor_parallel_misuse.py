"""What is refused of models that are parallel over tensors: on all ranks, with the hint, and with nothing lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from hpcfsdp import checkpoint
from hpcfsdp.errors import (
    CheckpointMismatchError,
    DisagreementError,
    EngineError,
    LaunchError,
    ShardingError,
    StateDictError,
)
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from tests.mpi import mesh_cases
from tests.mpi.mesh_cases import (
    MIXED_SHAPE,
    SIZE,
    Mlp,
    Primes,
    Recipe,
    Tied,
    build,
    close,
    each_mesh,
    expected,
    named,
    place,
    shard,
    train,
    whole,
    wrap,
)
from tests.mpi.models import ORIGINAL
from tests.mpi.state_dict_cases import FULL, SHARDED

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.meshes]

ALONG_TENSOR = (1, 1, SIZE)
ONE_STEP = Recipe("sgd", steps=1)


@pytest.fixture(autouse=True)
def still_usable(world):
    """After what a test has done wrong all ranks talk to each other."""
    yield
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [SIZE] * 3
    assert world.comm.allgather(world.rank) == list(range(SIZE))


def refused(world, kind, words, call, *args, **options):
    """Collective over all ranks. All of them raise an error of this kind that has these words."""
    with pytest.raises(kind, match=words):
        call(*args, **options)
    assert world.comm.allgather(True) == [True] * SIZE


def with_dtensor(placements, mesh, shape=(4, 8)):
    """A layer with a weight of these placements."""
    layer = nn.Linear(shape[1], shape[0])
    local = torch.ones(shape)
    stride = layer.weight.stride()
    value = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    layer.weight = nn.Parameter(value)
    return nn.Sequential(layer, nn.Linear(4, 2))


def in_another_way(model, at):
    """Like ``Mlp.parallelize``, with rows and columns exchanged."""
    plan = {"blocks.*.up": RowwiseParallel(), "blocks.*.down": ColwiseParallel()}
    return parallelize_module(model, at.tensor, plan)


# Meshes


@pytest.mark.parametrize("tensor", [SIZE + 1, 2 * SIZE])
def test_a_mesh_that_does_not_multiply_to_the_world(world, tensor):
    words = rf"{tensor} does not divide the {SIZE} rank"
    refused(world, LaunchError, words, world.mesh, shard=None, tensor=tensor)
    words = rf"{2 * tensor} does not equal the {SIZE} rank"
    refused(world, LaunchError, words, world.mesh, shard=2, tensor=tensor)


def test_a_placement_along_a_dimension_that_is_not_there(world):
    at = place(ALONG_TENSOR)
    model = with_dtensor([Shard(2)], at.tensor)
    words = r"'0\.weight': a tensor of shape \[4, 8\] has no dimension 2 to shard along"
    refused(world, ShardingError, words, wrap, model, at, "whole")
    close(train(shard(build(Mlp), at), at), expected(Mlp))


def test_a_dimension_may_be_counted_from_the_last_one(world):
    torch.manual_seed(0)
    at = place(ALONG_TENSOR)
    model, plain = nn.Sequential(nn.Linear(12, 3)), nn.Linear(12, 3)
    value = distribute_tensor(plain.weight.detach(), at.tensor, [Shard(1)])
    local = DTensor.from_local(
        value.to_local(), at.tensor, [Shard(-1)], run_check=False, shape=value.shape, stride=(12, 1)
    )
    model[0].weight = nn.Parameter(local)
    sharded = wrap(model, at, "whole")
    assert torch.equal(sharded.state_dict()["0.weight"], plain.weight)


def test_sums_to_come_are_no_parameters(world):
    at = place(ALONG_TENSOR)
    words = r"'0\.weight': a DTensor with the placements \[Partial\(sum\)\] is not made of blocks"
    refused(world, ShardingError, words, wrap, with_dtensor([Partial()], at.tensor), at, "whole")


def test_parameters_on_two_meshes(several, world):
    """Which are not nested: one over all ranks, one over each of them alone."""
    at, alone = place(ALONG_TENSOR), place((1, SIZE, 1))
    model = build(Mlp).parallelize(at.tensor)
    parallelize_module(model, alone.tensor, {"last": ColwiseParallel()})
    words = r"is on the ranks.*parallelize the whole model over one mesh"
    refused(world, ShardingError, words, wrap, model, at, "whole")


def test_units_on_two_meshes(several, world):
    at, alone = place(ALONG_TENSOR), place((1, SIZE, 1))
    model = build(Mlp).parallelize(at.tensor)
    model.blocks[0] = wrap(model.blocks[0], at, "whole")
    parallelize_module(model, alone.tensor, {"last": ColwiseParallel()})
    refused(world, ShardingError, "parallelize the whole model over one mesh", wrap, model, at, "whole")


def test_a_mesh_that_some_ranks_are_not_on(several, world):
    first = DeviceMesh("cpu", [0], mesh_dim_names=("tensor",))
    model = nn.Sequential(nn.Linear(4, 4))
    value = model[0].weight.detach()
    local = value if world.rank == 0 else value.new_empty(0)
    dtensor = DTensor.from_local(local, first, [Replicate()], run_check=False, shape=value.shape, stride=value.stride())
    model[0].weight = nn.Parameter(dtensor)
    words = r"'0\.weight' is a DTensor on the ranks \[0\].*, and this rank is not one of them"
    refused(world, ShardingError, words, FSDP, model)


# Two engines, or the wrong order


@ORIGINAL
def test_without_the_mesh_tensors_would_be_cut_twice_over_the_same_ranks(several, world, original):
    at = place(MIXED_SHAPE)
    words = r"parallel over the ranks.*parallelize over mesh\['tensor'\], and pass device_mesh=mesh\['shard'\]"
    model = build(Mlp).parallelize(at.tensor)
    refused(world, ShardingError, words, FSDP, model, use_orig_params=original)
    # The model is as it was: with the mesh it is sharded.
    close(train(wrap(model, at, use_orig_params=original), at), expected(Mlp))


def test_the_tensors_mesh_is_not_one_to_shard_over(several, world):
    at = place(MIXED_SHAPE)
    model = build(Mlp).parallelize(at.tensor)
    refused(world, ShardingError, "make one mesh", FSDP, model, device_mesh=at.tensor)


def test_a_model_that_fully_shard_has_taken(several, world):
    at = place((1, SIZE, 1))
    model = build(Mlp)
    fully_shard(model, mesh=at.mesh["shard"])
    refused(world, ValueError, "already sharded with torch's fully_shard: shard a model with either", wrap, model, at)


def test_a_model_that_is_parallel_and_that_fully_shard_has_taken(several, world):
    """Rows that are cut by tensor parallelism first and by fully_shard then are no blocks."""
    at = place(MIXED_SHAPE)
    model = build(Mlp).parallelize(at.tensor)
    if at.shape[0] > 1:
        fully_shard(model, mesh=at.mesh["replicate", "shard"])
    else:
        fully_shard(model, mesh=at.mesh["shard"])
    refused(world, ValueError, "already sharded with torch's fully_shard: shard a model with either", wrap, model, at)


@ORIGINAL
@pytest.mark.parametrize("part", ["", "blocks.1"], ids=["whole", "submodule"])
def test_a_model_that_is_parallelized_after_it_has_been_wrapped(world, original, part):
    at = place(MIXED_SHAPE)
    sharded = wrap(build(Primes), at, use_orig_params=original)
    inside = sharded.module.get_submodule("blocks.1").module
    plan = {"norm": SequenceParallel()} if part else {"first": SequenceParallel(), "last": SequenceParallel()}
    with pytest.raises(Exception) as caught:
        parallelize_module(inside if part else sharded.module, at.tensor, plan)
        mesh_cases.model_loss(sharded, at, 0)
    assert caught.type is EngineError
    assert "parallelize_module was called with" in str(caught.value)
    assert "call parallelize_module first, and wrap its result" in str(caught.value)
    if part:
        assert "'norm.weight' of the unit Block" in str(caught.value)


@ORIGINAL
def test_tied_parameters_that_units_would_tear_apart(world, original):
    at = place(MIXED_SHAPE)
    model = build(Tied).parallelize(at.tensor)
    model.embed = wrap(model.embed, at, "whole", use_orig_params=original)
    words = r"'head\.weight' is tied to 'weight', which belongs to a unit.*wrap the smallest module that holds both"
    refused(world, ValueError, words, wrap, model, at, "whole", use_orig_params=original)


# Ranks that differ


def test_some_ranks_forget_to_parallelize(several, world):
    """All that are parallel with each other do the same, which other lines do not."""
    at = place((1, SIZE, 1))
    model = build(Mlp)
    if world.rank == SIZE - 1:
        model.parallelize(at.tensor)
    words = rf"rank 0 has blocks\.0\.up\.weight.*rank {SIZE - 1} has blocks\.0\.up\.weight.*placed as \[Shard"
    refused(world, DisagreementError, words, wrap, model, at, "whole")


def test_lines_cut_the_same_parameters_in_other_ways(several, world):
    at = place(MIXED_SHAPE if MIXED_SHAPE[1] > 1 else (1, SIZE, 1))
    model = build(Mlp)
    if at.data_rank == at.data_size - 1:
        in_another_way(model, at)
    else:
        model.parallelize(at.tensor)
    refused(world, DisagreementError, r"blocks\.0\.up.*Shard\(dim=0\).*Shard\(dim=1\)", wrap, model, at, "whole")


@each_mesh
def test_one_rank_has_another_model(several, world, shape):
    """Wherever it is, and whoever shards with it or is parallel over tensors with it."""
    at = place(shape)
    model = build(Mlp).parallelize(at.tensor)
    if world.rank == SIZE - 1:
        model.last = nn.Linear(8, 6).double()
    refused(world, DisagreementError, rf"rank {SIZE - 1} has last\.weight \(6, 8\)", wrap, model, at, "whole")


@each_mesh
def test_one_rank_trains_what_is_frozen_elsewhere(several, world, shape):
    at = place(shape)
    model = build(Mlp).parallelize(at.tensor)
    if world.rank == SIZE - 1:
        model.last.weight.requires_grad_(False)
    refused(world, DisagreementError, rf"has last\.weight .*, rank {SIZE - 1} has last\.bias", wrap, model, at, "whole")


# States


def broken(state, how):
    """A state dict with something wrong in it."""
    state = dict(state)
    if how == "shape":
        state["blocks.0.up.weight"] = torch.zeros(3, 3)
    elif how == "missing":
        del state["blocks.0.up.weight"]
    elif how == "unexpected":
        state["blocks.0.up.gain"] = torch.zeros(3)
    elif how == "type":
        state["blocks.0.up.weight"] = [1.0]
    return state


@pytest.mark.parametrize(("on", "original"), [("all", False), ("one", True)], ids=["all-flat", "one-original"])
@pytest.mark.parametrize("how", ["shape", "missing", "unexpected", "type"])
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
def test_state_dicts_of_another_model(world, kind, how, on, original):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Primes), at, use_orig_params=original)
    with FSDP.state_dict_type(sharded, kind):
        state = sharded.state_dict()
        if on == "all" or world.rank == SIZE - 1:
            state = broken(state, how)
        before = whole(sharded)
        with torch.no_grad():
            state = {key: value * 2 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        word = r"blocks\.0\.up\.gain" if how == "unexpected" else r"blocks\.0\.up\.weight"
        refused(world, StateDictError, word, sharded.load_state_dict, state)
    torch.testing.assert_close(whole(sharded), before, rtol=0, atol=0)
    mesh_cases.model_loss(sharded, at, 0).backward()


def test_optimizer_state_of_other_shapes(world):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Mlp), at)
    optimizer = torch.optim.AdamW(sharded.parameters())
    train(sharded, at, ONE_STEP, optimizer, look=False)
    found = FSDP.optim_state_dict(sharded, optimizer)
    if world.rank == SIZE - 1:
        found["state"]["blocks.0.up.weight"]["exp_avg"] = torch.zeros(2, 2)
    words = r"'exp_avg' of 'blocks\.0\.up\.weight' has shape \(2, 2\), and the parameter \(12, 8\)"
    refused(world, StateDictError, words, FSDP.optim_state_dict_to_load, sharded, optimizer, found)


def test_a_checkpoint_of_another_model(world, shared_path):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Mlp), at)
    checkpoint.save(shared_path / "x.h5", model=sharded)
    other = shard(build(Primes), at)
    before = whole(other)
    refused(
        world,
        CheckpointMismatchError,
        r"first\.weight is \[8, 8\].*\[7, 7\]",
        checkpoint.load,
        shared_path / "x.h5",
        model=other,
    )
    torch.testing.assert_close(whole(other), before, rtol=0, atol=0)


# The moment


def test_whole_parameters_are_not_for_computing(world):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Mlp), at)
    with FSDP.summon_full_params(sharded), pytest.raises(EngineError, match="summon_full_params"):
        mesh_cases.model_loss(sharded, at, 0)
    close(train(sharded, at), expected(Mlp))


def test_an_error_while_parameters_are_whole_leaves_blocks(world):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Mlp), at)
    with pytest.raises(ZeroDivisionError), FSDP.summon_full_params(sharded, writeback=False):
        raise ZeroDivisionError
    assert not any(isinstance(param, DTensor) for _, param in named(sharded))
    close(train(sharded, at), expected(Mlp))
