"""States of models that are parallel over tensors: what is saved, that any mesh loads it, and whole parameters."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hpcfsdp.state_dict as ours
from hpcfsdp import checkpoint
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from hpcfsdp.state_dict import StateDictOptions
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import mesh_cases
from tests.mpi.mesh_cases import (
    MODELS,
    SHAPES,
    TIGHT,
    Frozen,
    Gpt,
    Mlp,
    Primes,
    Recipe,
    Sequence,
    Tied,
    build,
    copied,
    each_mesh,
    each_mesh_in_each_mode,
    each_mesh_in_one_mode,
    expected,
    named,
    place,
    plain_name,
    shard,
    train,
    train_plain,
    whole,
    whole_gradients,
)
from tests.mpi.models import ORIGINAL
from tests.mpi.state_dict_cases import FULL, LOCAL, SHARDED

pytestmark = [pytest.mark.ranks(3, 1, 4), pytest.mark.meshes]

RECIPE = Recipe(steps=2)
TO_FIRST = FullStateDictConfig(rank0_only=True, offload_to_cpu=True), FullOptimStateDictConfig(rank0_only=True)


def ids(value):
    return getattr(value, "__name__", None) or "x".join(map(str, value))


def each_model(*models):
    return pytest.mark.parametrize("model", models, ids=ids)


def make(model, shape, *, seed=0, original=False, recipe=RECIPE, **options):
    """Collective over all ranks. A sharded model and its optimizer."""
    sharded = shard(build(model, seed), place(shape), use_orig_params=original, **options)
    return sharded, recipe.make_optimizer(sharded.parameters())


def trained(model, shape, **options):
    """Collective over all ranks. The same after some steps."""
    sharded, optimizer = make(model, shape, **options)
    train(sharded, place(shape), RECIPE, optimizer, look=False)
    return sharded, optimizer


def goes_on(model, optimizer, shape):
    """Collective over all ranks. The losses and norms of the steps that follow."""
    later = train(model, place(shape), Recipe(steps=2, first=2), optimizer, look=False)
    return later.losses + later.norms


@functools.cache
def plain_goes_on(model):
    """The same of one process."""
    plain = build(model)
    optimizer = RECIPE.make_optimizer(plain.parameters())
    train_plain(plain, RECIPE, optimizer)
    later = train_plain(plain, Recipe(steps=2, first=2), optimizer)
    return later.losses + later.norms


def after(shape, places=1):
    """The mesh that comes so many places after another one."""
    return SHAPES[(SHAPES.index(shape) + places) % len(SHAPES)]


def has_more_replicas(shape, other):
    """Each replica takes sharded tensors from its own ranks alone, which do not have all of another mesh's."""
    return shape[0] > other[0]


def save(model, kind, *configs):
    with FSDP.state_dict_type(model, kind, *configs):
        return model.state_dict()


def load(model, kind, state):
    with FSDP.state_dict_type(model, kind):
        return model.load_state_dict(state)


def same(found, wanted):
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(copied(found[key]), copied(value)), key


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_block(tensor, mesh, placements):
    """This rank's part of a whole tensor: cut by one dimension of the mesh after the other."""
    for size, coordinate, where in zip(mesh.mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if where.is_shard():
            chunks = tensor.chunk(size, where.dim)
            tensor = chunks[coordinate] if coordinate < len(chunks) else tensor.narrow(where.dim, 0, 0)
    return tensor


# Of the model


@pytest.mark.ranks(3, 1, 4, 8)
@each_mesh_in_each_mode
@each_model(*MODELS)
def test_full_state_dicts_are_those_of_the_plain_model(world, model, original, shape):
    sharded, _ = make(model, shape, original=original)
    same(save(sharded, FULL), build(model).state_dict())
    alone = save(sharded, FULL, *TO_FIRST)
    if world.rank == 0:
        same(alone, build(model).state_dict())
        assert not any(isinstance(value, DTensor) for value in alone.values())
    else:
        assert alone == {}


@each_mesh
@ORIGINAL
@each_model(Primes, Gpt, Tied)
def test_sharded_state_dicts_are_dtensors_over_all_dimensions(world, model, original, shape):
    at = place(shape)
    sharded, _ = make(model, shape, original=original)
    plain, cut = build(model).state_dict(), {}
    for name, param in named(build(model).parallelize(at.tensor)):
        if isinstance(param, DTensor):
            cut[name] = list(param.placements)
    found = save(sharded, SHARDED)
    assert list(found) == list(plain)
    parameters = {name for name, _ in named(build(model))}
    data = [Replicate()] * (at.mesh.ndim - 2) + [Shard(0)]
    for name, value in found.items():
        if name not in parameters:
            assert torch.equal(value, plain[name]), name
            continue
        assert isinstance(value, DTensor), name
        assert value.device_mesh.mesh.tolist() == at.mesh.mesh.tolist(), name
        assert value.device_mesh.mesh_dim_names == at.mesh.mesh_dim_names, name
        assert list(value.placements) == data + cut.get(name, [Replicate()]), name
        assert value.shape == plain[name].shape, name
        assert torch.equal(value.to_local(), own_block(plain[name], at.mesh, value.placements)), name
        assert torch.equal(value.full_tensor(), plain[name]), name


@each_mesh
@pytest.mark.parametrize(("model", "original"), [(Primes, False), (Tied, True)], ids=["Primes-flat", "Tied-original"])
@pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=["full", "sharded", "local"])
def test_every_kind_loads_again(world, model, kind, original, shape):
    options = place(shape).groups if kind is LOCAL else {}  # which knows nothing of meshes
    sharded, _ = trained(model, shape, original=original, **options)
    again, _ = make(model, shape, seed=1, original=original, **options)
    load(again, kind, save(sharded, kind))
    same(whole(again), whole(sharded))
    same(dict(again.named_buffers()), dict(sharded.named_buffers()))


@each_mesh
@each_model(Primes, Gpt)
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
def test_another_mesh_loads_them(world, model, kind, shape):
    sharded, _ = make(model, shape)
    state = save(sharded, kind)
    for places in range(1, len(SHAPES)):
        other = after(shape, places)
        again, _ = make(model, other, seed=1, original=places % 2 == 1)
        if kind is SHARDED and has_more_replicas(other, shape):
            with pytest.raises(StateDictError, match=r"but the ranks of the model .* do not hold all of it.*gather"):
                load(again, kind, state)
            same(whole(again), dict(named(build(model, seed=1))))
        else:
            load(again, kind, state)
            same(whole(again), dict(named(build(model))))


@each_mesh_in_one_mode
def test_plain_models_and_models_that_are_not_parallel_load_full_ones(world, shape, original):
    sharded, _ = trained(Primes, shape, original=original)
    state = save(sharded, FULL)
    plain = build(Primes, seed=1)
    plain.load_state_dict(state)
    line = FSDP(build(Primes, seed=1), auto_wrap_policy=ModuleWrapPolicy(Primes.units))
    load(line, FULL, state)
    same(whole(line), dict(named(plain)))
    back, _ = make(Primes, shape, seed=2, original=not original)
    load(back, FULL, save(line, FULL))
    same(whole(back), whole(sharded))


def test_without_shards_state_dicts_are_whole(world):
    shape = next(shape for shape in SHAPES if shape[0] == 1)
    sharded, _ = make(Gpt, shape, sharding_strategy=ShardingStrategy.NO_SHARD)
    for kind in (FULL, SHARDED):
        same(save(sharded, kind), build(Gpt).state_dict())


# Of the optimizer


def plain_optim_state(model):
    plain = build(model)
    optimizer = RECIPE.make_optimizer(plain.parameters())
    train_plain(plain, RECIPE, optimizer)
    return {name: optimizer.state[param] for name, param in plain.named_parameters()}


@each_mesh
@pytest.mark.parametrize(
    ("model", "original"),
    [(Primes, False), (Primes, True), (Frozen, False), (Frozen, True), (Sequence, True)],
    ids=["Primes-flat", "Primes-original", "Frozen-flat", "Frozen-original", "Sequence-original"],
)
def test_optimizer_state_is_that_of_one_process(world, model, original, shape):
    sharded, optimizer = trained(model, shape, original=original)
    wanted = plain_optim_state(model)
    for kind, configs in ((FULL, ()), (SHARDED, ()), (FULL, TO_FIRST)):
        with FSDP.state_dict_type(sharded, kind, *configs):
            found = FSDP.optim_state_dict(sharded, optimizer)
        if configs and world.rank:
            assert not found.get("state")
            continue
        stateful = {name for name in wanted if wanted[name]}
        assert {name for name in found["state"] if found["state"][name]} == stateful
        for name in stateful:
            assert found["state"][name].keys() == wanted[name].keys()
            for key, value in wanted[name].items():
                got = found["state"][name][key]
                if kind is SHARDED and value.ndim:
                    assert isinstance(got, DTensor), (name, key)
                    local = own_block(value, got.device_mesh, got.placements)
                    torch.testing.assert_close(got.to_local(), local, **TIGHT)
                    assert got.shape == value.shape
                else:
                    assert not isinstance(got, DTensor), (name, key)
                    torch.testing.assert_close(got, value, **TIGHT)


@each_mesh_in_one_mode
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
def test_a_run_goes_on_bit_by_bit(world, kind, original, shape):
    sharded, optimizer = trained(Primes, shape, original=original)
    with FSDP.state_dict_type(sharded, kind):
        state = sharded.state_dict(), FSDP.optim_state_dict(sharded, optimizer)
    wanted = goes_on(sharded, optimizer, shape)
    again, its_optimizer = make(Primes, shape, seed=1, original=original)
    with FSDP.state_dict_type(again, kind):
        again.load_state_dict(state[0])
        its_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(again, its_optimizer, state[1]))
    assert goes_on(again, its_optimizer, shape) == wanted


@pytest.mark.parametrize(("model", "kind"), [(Primes, SHARDED), (Tied, FULL)], ids=["Primes-sharded", "Tied-full"])
def test_a_run_goes_on_from_mesh_to_mesh(world, model, kind):
    way = sorted(SHAPES, reverse=True)
    assert not any(has_more_replicas(later, earlier) for earlier, later in itertools.pairwise(way))
    sharded, optimizer = trained(model, way[0])
    for places, shape in enumerate([*way[1:], way[-1]]):
        with FSDP.state_dict_type(sharded, kind):
            state = sharded.state_dict(), FSDP.optim_state_dict(sharded, optimizer)
        sharded, optimizer = make(model, shape, seed=1 + places, original=places % 2 == 0)
        with FSDP.state_dict_type(sharded, kind):
            sharded.load_state_dict(state[0])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(sharded, optimizer, state[1]))
    assert goes_on(sharded, optimizer, way[-1]) == pytest.approx(plain_goes_on(model), rel=1e-9)


@each_mesh
def test_groups_of_parameters_keep_what_is_theirs(world, shape):
    def with_groups(seed):
        sharded = shard(build(Mlp, seed), place(shape), use_orig_params=True)
        decayed = [param for name, param in named(sharded) if name.endswith("weight")]
        others = [param for name, param in named(sharded) if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        return sharded, torch.optim.AdamW(groups, lr=1e-2)

    sharded, optimizer = with_groups(0)
    train(sharded, place(shape), RECIPE, optimizer, look=False)
    with FSDP.state_dict_type(sharded, FULL):
        state = sharded.state_dict(), FSDP.optim_state_dict(sharded, optimizer)
    wanted = goes_on(sharded, optimizer, shape)
    sharded, optimizer = with_groups(1)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    with FSDP.state_dict_type(sharded, FULL):
        sharded.load_state_dict(state[0])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(sharded, optimizer, state[1]))
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [(0.3, 1e-2), (0.0, 3e-3)]
    assert goes_on(sharded, optimizer, shape) == wanted


# Under the names of torch.distributed.checkpoint.state_dict


@each_mesh_in_one_mode
def test_rank_0s_state_goes_to_a_model_at_another_mesh(world, shape, original):
    sharded, optimizer = trained(Primes, shape, original=original)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = ours.get_state_dict(sharded, optimizer, options=options)
    assert (weights == {}) == (world.rank > 0)
    if world.rank == 0:
        assert list(weights) == list(build(Primes).state_dict())
        torch.testing.assert_close(
            {name: weights[name] for name, _ in named(build(Primes))}, expected(Primes, RECIPE).parameters, **TIGHT
        )
    again, its_optimizer = make(Primes, after(shape), seed=1, original=not original)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ours.set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    assert goes_on(again, its_optimizer, after(shape)) == pytest.approx(plain_goes_on(Primes), rel=1e-9)


@each_mesh_in_one_mode
def test_whole_states_and_parts_by_these_names(world, shape, original):
    sharded, optimizer = trained(Gpt, shape, original=original)
    weights, state = ours.get_state_dict(sharded, optimizer)
    full = ours.get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    same(weights, full)
    whole_state = ours.get_optimizer_state_dict(sharded, optimizer, options=StateDictOptions(full_state_dict=True))
    for name, values in plain_optim_state(Gpt).items():
        torch.testing.assert_close(whole_state["state"][name], dict(values), **TIGHT)
    part = ours.get_model_state_dict(sharded, submodules={sharded.module.attention})
    same(part, {name: value for name, value in full.items() if name.startswith("attention.")})
    again, its_optimizer = make(Gpt, shape, seed=1, original=original)
    ours.set_model_state_dict(again, weights)
    ours.set_optimizer_state_dict(again, its_optimizer, state)
    assert goes_on(again, its_optimizer, shape) == goes_on(sharded, optimizer, shape)


@each_mesh_in_one_mode
def test_torchs_checkpoints_load_at_another_mesh(world, shared_path, shape, original):
    sharded, optimizer = trained(Primes, shape, original=original)
    weights, state = ours.get_state_dict(sharded, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared_path / "dcp")
    again, its_optimizer = make(Primes, after(shape), seed=1, original=not original)
    weights, state = ours.get_state_dict(again, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared_path / "dcp")
    ours.set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert goes_on(again, its_optimizer, after(shape)) == pytest.approx(plain_goes_on(Primes), rel=1e-9)


# Checkpoints in HDF5


@pytest.mark.ranks(3, 1, 4, 8)
@each_mesh
@pytest.mark.parametrize(("model", "original"), [(Primes, False), (Tied, True)], ids=["Primes-flat", "Tied-original"])
def test_a_checkpoint_loads_at_every_mesh(world, shared_path, model, shape, original):
    sharded, optimizer = trained(model, shape, original=original)
    checkpoint.save(shared_path / "x.h5", model=sharded, optimizer=optimizer, step=2)
    wanted = goes_on(sharded, optimizer, shape)
    assert wanted == pytest.approx(plain_goes_on(model), rel=1e-9)
    for other in SHAPES:
        again, its_optimizer = make(model, other, seed=1, original=original == (other == shape))
        assert checkpoint.load(shared_path / "x.h5", model=again, optimizer=its_optimizer).step == 2
        got = goes_on(again, its_optimizer, other)
        assert got == (wanted if other == shape else pytest.approx(wanted, rel=1e-9))


@each_mesh_in_one_mode
def test_one_process_loads_a_checkpoint_and_writes_the_same(world, shared_path, shape, original):
    sharded, optimizer = trained(Primes, shape, original=original)
    checkpoint.save(shared_path / "x.h5", model=sharded, optimizer=optimizer, step=2)
    plain = build(Primes, seed=1)
    plain_optimizer = RECIPE.make_optimizer(plain.parameters())
    checkpoint.load(shared_path / "x.h5", model=plain, optimizer=plain_optimizer)
    same(dict(named(plain)), whole(sharded))
    later = train_plain(plain, Recipe(steps=2, first=2), plain_optimizer)
    assert later.losses + later.norms == pytest.approx(plain_goes_on(Primes), rel=1e-9)
    # A rank by itself is a sharded model, too.
    alone = FSDP(build(Primes, seed=2), MpiCommunicator(world.comm.Split(world.rank)), use_orig_params=not original)
    checkpoint.load(shared_path / "x.h5", model=alone, optimizer=RECIPE.make_optimizer(alone.parameters()))
    same(whole(alone), whole(sharded))
    if world.rank == 0:
        checkpoint.save(shared_path / "one.h5", model=alone, step=2)
    world.comm.Barrier()
    again, _ = make(Primes, shape, seed=3)
    checkpoint.load(shared_path / "one.h5", model=again)
    same(whole(again), whole(sharded))


def test_from_mesh_to_mesh_to_one_process(world, shared_path):
    """One run that is saved and loaded at each mesh in turn, two steps at each."""
    plain = build(Gpt)
    wanted = train_plain(plain, Recipe(steps=2 * len(SHAPES)))
    losses, path = [], None
    for leg, shape in enumerate(SHAPES):
        model, optimizer = make(Gpt, shape, seed=leg, original=leg % 2 == 1)
        if path is not None:
            checkpoint.load(path, model=model, optimizer=optimizer)
        losses += train(model, place(shape), Recipe(steps=2, first=2 * leg), optimizer, look=False).losses
        path = shared_path / f"{leg}.h5"
        checkpoint.save(path, model=model, optimizer=optimizer, step=2 * leg)
    assert losses == pytest.approx(wanted.losses, rel=1e-9)
    last = build(Gpt, seed=9)
    checkpoint.load(path, model=last)
    torch.testing.assert_close(dict(named(last)), wanted.parameters, **TIGHT)


# Whole parameters


@each_mesh
@ORIGINAL
@each_model(Primes, Tied)
def test_whole_parameters_are_dtensors_and_changes_are_kept(world, model, original, shape):
    sharded, _ = make(model, shape, original=original)
    plain = dict(named(build(model)))
    layer = "blocks.0.up.weight" if model is Primes else "block.up.weight"
    with FSDP.summon_full_params(sharded):
        params = dict(named(sharded))
        assert list(params) == list(plain)
        assert isinstance(params[layer], DTensor)
        assert all(isinstance(param, nn.Parameter) for param in params.values())
        same({name: param.detach() for name, param in params.items()}, plain)
        with torch.no_grad():
            for param in {id(param): param for param in params.values()}.values():
                param.mul_(2)
        module = sharded.get_submodule(dict(zip(plain, _paths(sharded), strict=True))[layer].rpartition(".")[0])
        module.weight = nn.Parameter(plain[layer].detach() * 3)  # whole, and no DTensor
        bias = distribute_tensor(
            plain[layer.replace("weight", "bias")].detach() * 4, place(shape).tensor, [Replicate()]
        )
        module.bias = nn.Parameter(bias)  # placed in another way
    wanted = {name: value * (3 if name == layer else 2) for name, value in plain.items()}
    wanted[layer.replace("weight", "bias")] = plain[layer.replace("weight", "bias")] * 4
    same(whole(sharded), wanted)
    mesh_cases.model_loss(sharded, place(shape), 0).backward()


def _paths(sharded):
    return [name for name, _ in sharded.named_parameters(remove_duplicate=False)]


@each_mesh_in_one_mode
def test_without_writeback_changes_are_lost(world, shape, original):
    sharded, _ = make(Gpt, shape, original=original)
    with FSDP.summon_full_params(sharded, writeback=False), torch.no_grad():
        for param in sharded.parameters():
            param.zero_()
    same(whole(sharded), dict(named(build(Gpt))))


@each_mesh
@ORIGINAL
@pytest.mark.parametrize("offload", [False, True], ids=["stays", "offloaded"])
def test_gradients_can_be_changed_while_they_are_whole(world, shape, original, offload):
    at = place(shape)
    sharded, _ = make(Sequence, shape, original=original)
    mesh_cases.model_loss(sharded, at, 0).backward()
    warned = contextlib.nullcontext()
    if offload and place(shape).data_size > 1:  # a rank whose block nobody else has makes no copy
        warned = pytest.warns(UserWarning, match="offload_to_cpu without rank0_only")
    with warned, FSDP.summon_full_params(sharded, with_grads=True, offload_to_cpu=offload):
        for name, param in named(sharded):
            assert param.grad.shape == param.shape
            if isinstance(param, DTensor):
                assert param.grad.placements == param.placements, name
            if name.endswith("bias"):
                param.grad = param.grad * -2
            else:
                param.grad.mul_(-2)
    recipe = Recipe("sgd", steps=1, clip=None)
    wanted = {name: grad * -2 for name, grad in expected(Sequence, recipe).gradients.items()}
    torch.testing.assert_close(whole_gradients(sharded), wanted, **TIGHT)


@each_mesh
@ORIGINAL
@pytest.mark.parametrize("writeback", [False, True], ids=["read", "written"])
def test_only_the_first_rank_of_those_that_shard_has_them(world, shape, original, writeback):
    """Ranks that are parallel over tensors have different blocks: each of the first ones has its own."""
    at = place(shape)
    sharded, _ = make(Primes, shape, original=original)
    plain, local = dict(named(build(Primes))), dict(named(build(Primes).parallelize(at.tensor)))
    with FSDP.summon_full_params(sharded, rank0_only=True, offload_to_cpu=True, writeback=writeback):
        if at.data_rank == 0:
            for name, param in named(sharded):
                assert param.shape == plain[name].shape, name
                mine, block = (
                    value.to_local() if isinstance(value, DTensor) else value for value in (param, local[name])
                )
                assert torch.equal(mine, block), name
                with torch.no_grad():
                    mine.mul_(3)
    same(whole(sharded), {name: value * 3 if writeback else value for name, value in plain.items()})


@each_mesh
def test_units_one_by_one(world, shape):
    sharded, _ = make(Primes, shape)
    found = {}
    for name, unit in FSDP.walk_full_params(sharded):
        for key, param in unit.named_parameters(remove_duplicate=False):
            if "_fsdp_wrapped_module" not in key:
                found[plain_name(f"{name}.{key}" if name else key).removeprefix("_fsdp_wrapped_module.")] = copied(
                    param
                )
    plain = dict(named(build(Primes)))
    assert found.keys() == plain.keys()
    for name, value in found.items():
        assert torch.equal(value, plain[name]), name


@each_mesh_in_one_mode
def test_apply_sees_whole_parameters(world, shape, original):
    at = place(shape)
    sharded, _ = make(Primes, shape, original=original)

    def fill(module):
        for param in module.parameters(recurse=False):
            value = torch.linspace(-1, 1, param.numel(), dtype=param.dtype).view(param.shape)
            with torch.no_grad():
                if isinstance(param, DTensor):
                    value = distribute_tensor(value, at.tensor, param.placements)
                param.copy_(value)

    sharded.apply(fill)
    plain = build(Primes)
    wanted = {name: torch.linspace(-1, 1, p.numel(), dtype=p.dtype).view(p.shape) for name, p in named(plain)}
    same(whole(sharded), wanted)
