"""Models that are parallel over tensors, where something is unlike in most of them."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcfsdp import checkpoint
from hpcfsdp._compat import local_of
from hpcfsdp.errors import EngineError, ShardingError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.state.model import communicator_of, model_tensors
from hpcfsdp.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_state_dict
from hpcfsdp.wrap import CustomPolicy
from tests.mpi.mesh_cases import (
    CASES,
    MIXED_SHAPE,
    SIZE,
    Mlp,
    Recipe,
    Tied,
    build,
    close,
    each_mesh,
    expected,
    place,
    shard,
    train,
    whole,
    wrap,
)
from tests.mpi.models import ORIGINAL
from tests.mpi.state_dict_cases import FULL, SHARDED

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.meshes]

WHOLE, FROM_RANK0 = (
    StateDictOptions(full_state_dict=True),
    StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
)


def state_of(model, kind=FULL, *configs):
    with FSDP.state_dict_type(model, kind, *configs):
        return model.state_dict()


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            equal(found[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)
        else:
            assert found[key] == value


def copies(tree):
    """The same, none of it memory of a model."""
    return copy.deepcopy(tree)


# DTensors that no unit owns


class Mixed(Mlp):
    """With buffers, and a block that no unit is to have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cut", torch.arange(7.0))
        self.register_buffer("same", torch.arange(3.0))


def mixed(at, seed, original, **options):
    """Collective over all ranks. Its optimizer steps DTensors, too."""
    model = build(Mixed, seed)
    model.cut, model.same = model.cut + seed, model.same + seed
    model.parallelize(at.tensor)
    for name, placement in (("cut", Shard(0)), ("same", Replicate())):
        setattr(model, name, distribute_tensor(getattr(model, name), at.tensor, [placement]))
    model = wrap(model, at, ignored_modules=[model.blocks[1]], use_orig_params=original, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def step(model, optimizer):
    """Collective over all ranks, with the same batch: gradients outside of units are not averaged."""
    inputs, targets = Mlp.batch(0)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@ORIGINAL
@each_mesh
def test_what_no_unit_owns_is_whole_in_full_states_and_loads_again(world, shape, original):
    at = place(shape)
    model, optimizer = mixed(at, 0, original)
    step(model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    assert not any(isinstance(value, DTensor) for value in weights.values())
    assert not any(isinstance(value, DTensor) for one in state["state"].values() for value in one.values())
    assert weights["blocks.1.up.weight"].shape == state["state"]["blocks.1.up.weight"]["exp_avg"].shape == (12, 8)
    assert torch.equal(weights["cut"], torch.arange(7.0, dtype=torch.float64))
    other, its_optimizer = mixed(at, 1, original)
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    assert isinstance(other.cut, DTensor)
    again = get_state_dict(other, its_optimizer, options=WHOLE)
    equal(dict(again[0]), dict(weights))
    equal(again[1]["state"], state["state"])
    first = mixed(at, 2, original)
    mine = (weights, state) if world.rank == 0 else ({}, {})
    set_state_dict(*first, model_state_dict=mine[0], optim_state_dict=mine[1], options=FROM_RANK0)
    equal(get_state_dict(*first, options=WHOLE)[1]["state"], state["state"])


@ORIGINAL
@pytest.mark.parametrize("kind", ["sharded", "hdf5"])
def test_what_no_unit_owns_comes_back_from_parts_and_files(world, shared_path, kind, original):
    at = place(MIXED_SHAPE)
    model, optimizer = mixed(at, 0, original)
    step(model, optimizer)
    other, its_optimizer = mixed(at, 1, original)
    if kind == "sharded":
        weights, state = copies(get_state_dict(model, optimizer))
        assert weights["cut"].placements == (Shard(0),)
        set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        checkpoint.save(shared_path / "mixed.h5", model=model, optimizer=optimizer)
        checkpoint.load(shared_path / "mixed.h5", model=other, optimizer=its_optimizer)
    wanted, found = (get_state_dict(*each, options=WHOLE) for each in ((model, optimizer), (other, its_optimizer)))
    for one, theirs in zip(found, wanted, strict=True):
        equal(dict(one), dict(theirs))
    assert step(other, its_optimizer) == step(model, optimizer)


@each_mesh
def test_one_rank_knows_the_copies_once_all_are_connected(world, shape):
    at = place(shape)
    model = shard(build(Mlp), at)
    ranks = communicator_of(model)
    assert ranks.size == SIZE
    if world.rank == 0:
        holders = [rank for tensor in model_tensors(model) for rank in tensor.runs.ranks.ravel().tolist()]
        assert set(holders) <= set(range(SIZE))


def test_the_first_rank_gets_a_tensor_across_replicas(several, world):
    mesh = world.mesh(replicate=SIZE, shard=1)
    model = nn.Linear(4, 4)
    model.register_buffer("across", distribute_tensor(torch.arange(8.0), mesh["replicate"], [Shard(0)]))
    model = FSDP(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    found = state_of(model, FULL, FullStateDictConfig(rank0_only=True))
    assert list(found) == (["weight", "bias", "across"] if world.rank == 0 else [])
    if world.rank == 0:
        assert torch.equal(found["across"], torch.arange(8.0))


def test_parameters_without_elements_under_replicas(several, world):
    model = nn.Linear(4, 4)
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    mesh = world.mesh(replicate=SIZE, shard=1)
    model = FSDP(model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with FSDP.state_dict_type(model, SHARDED):
        assert model.load_state_dict(copies(model.state_dict())) == ([], [])


# Blocks that some ranks have nothing of


class Narrow(Mlp):
    """One hidden unit, which one rank has."""

    hidden = 1

    @classmethod
    def plan(cls):
        return {"blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel()}

    def parallelize(self, mesh):
        return super().parallelize(mesh) if mesh.size() > 1 else self  # torch cannot cut one column over one rank


@ORIGINAL
@each_mesh
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_some_ranks_have_nothing_of_a_block(world, shared_path, shape, original, strategy):
    at = place(shape)
    if shape[0] > 1:
        strategy = {"FULL_SHARD": "HYBRID_SHARD", "NO_SHARD": "_HYBRID_SHARD_ZERO2"}[strategy]
    options = {"use_orig_params": original, "sharding_strategy": ShardingStrategy[strategy]}
    model = shard(build(Narrow), at, **options)
    optimizer = Recipe().make_optimizer(model.parameters())
    close(train(model, at, optimizer=optimizer), expected(Narrow))
    state = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    assert state["blocks.0.up.weight"]["exp_avg"].shape == (1, 8)
    checkpoint.save(shared_path / "narrow.h5", model=model, optimizer=optimizer)
    other = shard(build(Narrow, 1), at, **options)
    its_optimizer = Recipe().make_optimizer(other.parameters())
    get_optimizer_state_dict(other, its_optimizer)  # gives it state, on ranks that hold nothing, too
    checkpoint.load(shared_path / "narrow.h5", model=other, optimizer=its_optimizer)
    equal(get_optimizer_state_dict(other, its_optimizer, options=WHOLE)["state"], state)
    weights, parts = copies(get_state_dict(model, optimizer))
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=parts)
    equal(get_optimizer_state_dict(other, its_optimizer, options=WHOLE)["state"], state)


# Units


def test_units_with_strategies_of_their_own(world):
    at = place((1, SIZE, 1) if SIZE in (1, 3) else (1, SIZE // 2, 2))
    model = build(Mlp).parallelize(at.tensor)
    kinds = iter([ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD])
    chosen = {block: {"sharding_strategy": next(kinds)} for block in model.blocks}
    policy = CustomPolicy(lambda module: chosen.get(module, False))
    model = FSDP(model, auto_wrap_policy=policy, device_mesh=at.mesh["shard"])
    close(train(model, at), expected(Mlp))


@ORIGINAL
def test_units_that_no_other_one_holds(world, shared_path, original):
    at = place(MIXED_SHAPE)

    def make(seed):
        model = build(Mlp, seed).parallelize(at.tensor)
        for name in ("first", "last"):  # which have nothing that is parallel
            setattr(model, name, FSDP(getattr(model, name), **at.sharding, use_orig_params=original))
        for place_, block in enumerate(model.blocks):
            model.blocks[place_] = FSDP(block, **at.sharding, use_orig_params=original)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = make(0)
    inputs, targets = map(at.part, Mlp.batch(0))
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer, options=WHOLE)
    assert weights.keys() == build(Mlp).state_dict().keys()
    checkpoint.save(shared_path / "alone.h5", model=model, optimizer=optimizer)
    other, its_optimizer = make(1)
    checkpoint.load(shared_path / "alone.h5", model=other, optimizer=its_optimizer)
    again = get_state_dict(other, its_optimizer, options=WHOLE)
    equal(dict(again[0]), dict(weights))
    equal(again[1]["state"], state["state"])


@pytest.mark.parametrize("wrapping", ["policy", "by hand"])
def test_all_ranks_take_the_values_of_the_first_however_they_are_wrapped(world, wrapping):
    at = place(MIXED_SHAPE)
    seed = 10 * world.rank
    model = build(Mlp, 0)
    for name, param in model.named_parameters():  # what is cut has been given out by torch
        if "up" not in name and "down.weight" not in name:
            torch.manual_seed(seed)
            nn.init.normal_(param)
    model = shard(model, at, wrapping, sync_module_states=True)
    values = torch.cat([value.flatten() for value in whole(model).values()])
    assert all(torch.equal(values, other) for other in world.comm.allgather(values))


def test_an_inner_unit_over_ranks_that_are_parallel_with_each_other(several, world):
    at = place((1, 1, SIZE))
    model = build(Mlp).parallelize(at.tensor)
    model.first = FSDP(model.first)
    with pytest.raises(ShardingError, match=r"the unit around Linear is tensor-parallel over.*make one mesh"):
        wrap(model, at, "whole")


@pytest.mark.ranks(4)
def test_operators_may_have_given_dtensors_an_equal_mesh(world):
    """Torch remembers what an operator has returned, with the mesh that it lay on the first time."""
    if SIZE < 4:
        pytest.skip("two meshes with a dimension of several ranks in common take 4 ranks")
    two, three = world.mesh(shard=None, tensor=2), world.mesh(replicate=1, shard=None, tensor=2)
    for mesh in (two, three):
        model = parallelize_module(nn.Sequential(nn.Linear(4, 8)), mesh["tensor"], {"0": ColwiseParallel()}).double()
    model = FSDP(model, device_mesh=mesh["shard"])
    found = state_of(model, SHARDED)["0.weight"]
    assert found.device_mesh.mesh_dim_names == ("shard", "tensor")


@pytest.mark.parametrize("shape", [shape for shape in CASES if shape[0] == 1], ids=str)
def test_the_state_of_fully_shards_model_loads_at_the_same_mesh(world, shape):
    at = place(shape)
    theirs = build(Mlp, 3).parallelize(at.tensor)
    wanted = build(Mlp, 3).state_dict()
    for block in theirs.blocks:
        fully_shard(block, mesh=at.mesh["shard"])
    fully_shard(theirs, mesh=at.mesh["shard"])
    model = shard(build(Mlp), at)
    with FSDP.state_dict_type(model, SHARDED):
        model.load_state_dict(theirs.state_dict())
    equal(dict(state_of(model)), dict(wanted))


# Optimizers, and whole parameters


@ORIGINAL
@pytest.mark.parametrize("when", ["before wrapping", "while they are whole"])
def test_an_optimizer_of_dtensors_that_a_unit_has_taken(world, when, original):
    at = place(MIXED_SHAPE)
    model = build(Mlp).parallelize(at.tensor)
    if when == "before wrapping":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = wrap(model, at, use_orig_params=original)
    if when == "while they are whole":
        with FSDP.summon_full_params(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(EngineError, match=r"build the optimizer from model\.parameters\(\) after wrapping the model"):
        train(model, at, optimizer=optimizer, look=False)


@ORIGINAL
def test_a_tied_dtensor_is_replaced_in_one_of_its_places(world, original):
    at = place(MIXED_SHAPE)
    model = shard(build(Tied), at, "whole", use_orig_params=original)
    with FSDP.summon_full_params(model):
        now = model.module.embed.weight
        value = distribute_tensor(torch.full(now.shape, 0.25, dtype=now.dtype), now.device_mesh, now.placements)
        model.module.embed.weight = nn.Parameter(value)
    for name in ("embed.weight", "head.weight"):
        assert (whole(model)[name] == 0.25).all()


def test_freezing_and_copying_while_parameters_are_whole(world):
    at = place(MIXED_SHAPE)
    model = shard(build(Mlp), at, use_orig_params=True)
    with FSDP.summon_full_params(model):
        model.module.blocks[0].module.up.weight.requires_grad_(False)
        twin = copy.deepcopy(model.module.blocks[0].module)
        pairs = zip(twin.parameters(), model.module.blocks[0].module.parameters(), strict=True)
        assert all(torch.equal(local_of(one), local_of(other)) for one, other in pairs)
    train(model, at, Recipe("sgd", steps=1, clip=None), look=False)
    trained = {name: param.grad is not None for name, param in model.named_parameters() if param.numel()}
    assert not any(has for name, has in trained.items() if "blocks.0" in name and "up.weight" in name)


def test_gradients_of_another_dtype_are_shown(world):
    at = place(MIXED_SHAPE)
    low = torch.bfloat16
    mixed_precision = MixedPrecision(param_dtype=low, buffer_dtype=low, keep_low_precision_grads=True)
    model = shard(build(Mlp).float(), at, mixed_precision=mixed_precision)
    train(model, at, Recipe("sgd", steps=1, clip=None), look=False)
    before = [param.grad.clone() for param in model.parameters()]
    with FSDP.summon_full_params(model, with_grads=True):
        for param in model.parameters():
            assert param.grad.dtype == torch.bfloat16
            assert param.grad.isfinite().all()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))


def test_hooks_of_dtensors_are_missed(world):
    at = place(MIXED_SHAPE)
    model = build(Mlp).parallelize(at.tensor)
    model.blocks[0].up.weight.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match=r"hooks of the DTensor 'up\.weight' will not be called"):
        wrap(model, at)


def test_units_without_elements_on_a_rank(several, world):
    at = place((1, 1, SIZE))
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 5)).double()
    plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
    parallelize_module(model, at.tensor, plan)
    model[0] = FSDP(model[0], device_mesh=at.mesh["shard"])
    model = FSDP(model, device_mesh=at.mesh["shard"])
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0
