"""The state of ``WholeTensors`` is that of the optimizer on the plain model, in state dicts and files of every kind."""

import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as stock
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

import hpcfsdp
import hpcfsdp.state_dict as ours
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.optim import WholeTensors
from tests.mpi import mesh_cases, models, row_cases
from tests.mpi.optim_cases import plain_osd
from tests.mpi.whole_cases import OPTIMIZERS, class_and_options

pytestmark = pytest.mark.ranks(2, 3, 4)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
FORMS = {
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()),
    "rank 0": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=True),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
}
NAMES = list(OPTIMIZERS)


def whole(model, name, **options):
    kind, kwargs = class_and_options(name)
    return WholeTensors(model, model.parameters(), kind, **kwargs, **options)


def trained(comm, name, steps=2, **options):
    """A sharded model, and its optimizer after some steps."""
    model = models.shard(models.make_net().double(), use_orig_params=True, **options)
    optimizer = whole(model, name)
    models.train_sharded(model, optimizer, range(steps), comm)
    return model, optimizer


def plain_trained(name, steps=2):
    model = models.make_net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    models.train_plain(model, optimizer, range(steps))
    return model, optimizer


def close_osd(got, expected):
    """Both by name; sharded tensors made whole."""
    assert got["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert got["state"][name].keys() == state.keys(), name
        for key, value in state.items():
            found = got["state"][name][key]
            if isinstance(value, torch.Tensor):
                found = found.full_tensor() if isinstance(found, DTensor) else found
                assert found.shape == value.shape, (name, key)
                torch.testing.assert_close(found, value, msg=lambda text, at=(name, key): f"{at}: {text}", **TIGHT)
            else:
                assert found == value, (name, key)


def keeps_on(comm, model, optimizer, name, steps=range(2, 4)):
    """Whether further steps are those of the plain model."""
    plain, its = plain_trained(name)
    expected = models.train_plain(plain, its, steps)
    assert models.train_sharded(model, optimizer, steps, comm) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["full", "rank 0"])
def test_full_state_dicts_are_those_of_the_plain_optimizer(comm, name, form):
    model, optimizer = trained(comm, name)
    plain, its = plain_trained(name)
    with FullyShardedDataParallel.state_dict_type(model, *FORMS[form]):
        found = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if form == "full" or comm.rank == 0:
        close_osd(found, plain_osd(plain, its))
    else:
        assert not found
    again = FullyShardedDataParallel.rekey_optim_state_dict(
        plain_osd(plain, its), OptimStateKeyType.PARAM_ID, model, optim=optimizer
    )
    assert set(again["state"]) == set(its.state_dict()["state"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", list(FORMS))
def test_state_dicts_are_loaded_by_a_new_optimizer(comm, name, form):
    model, optimizer = trained(comm, name)
    with FullyShardedDataParallel.state_dict_type(model, *FORMS[form]):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    other = models.shard(models.make_net(seed=3).double(), use_orig_params=True)
    new = whole(other, name)
    with FullyShardedDataParallel.state_dict_type(other, *FORMS[form]):
        if form != "rank 0":
            other.load_state_dict(weights)
        else:
            ours.set_model_state_dict(
                other, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
        given = state if form != "rank 0" or comm.rank == 0 else None
        new.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, new, given))
    keeps_on(comm, other, new, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_the_plain_optimizer_is_loaded(comm, name):
    plain, its = plain_trained(name)
    model = models.shard(copy.deepcopy(plain), use_orig_params=True)
    optimizer = whole(model, name)
    given = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, plain_osd(plain, its))
    optimizer.load_state_dict(given)
    keeps_on(comm, model, optimizer, name)
    model = models.shard(copy.deepcopy(plain), use_orig_params=True)
    optimizer = whole(model, name)
    optimizer.load_state_dict(its.state_dict())  # by number, with whole tensors on all ranks
    keeps_on(comm, model, optimizer, name)


@pytest.mark.parametrize("name", NAMES)
def test_its_own_state_dict_is_that_of_the_shards(comm, name):
    model, optimizer = trained(comm, name)
    new = whole(model, name)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    keeps_on(comm, model, new, name)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_those_of_the_plain_optimizer(comm, name, shared_path):
    plain, its = plain_trained(name)
    model, optimizer = trained(comm, name)
    hpcfsdp.checkpoint.save(shared_path / "sharded.h5", model=model, optimizer=optimizer, step=2)
    # From the file of the sharded one into the plain one
    bare = models.make_net(seed=5).double()
    loaded = OPTIMIZERS[name](bare.parameters())
    hpcfsdp.checkpoint.load(shared_path / "sharded.h5", model=bare, optimizer=loaded)
    close_osd(plain_osd(bare, loaded), plain_osd(plain, its))
    # and back
    hpcfsdp.checkpoint.save(shared_path / "plain.h5", model=plain, optimizer=its, step=2)
    for path in ("sharded.h5", "plain.h5"):
        other = models.shard(models.make_net(seed=3).double(), use_orig_params=True)
        new = whole(other, name)
        hpcfsdp.checkpoint.load(shared_path / path, model=other, optimizer=new)
        keeps_on(comm, other, new, name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_the_functions_of_torch_distributed_checkpoint(comm, name, full):
    options = StateDictOptions(full_state_dict=full)
    model, optimizer = trained(comm, name)
    weights, state = ours.get_state_dict(model, optimizer, options=options)
    if full:
        close_osd(state, plain_osd(*plain_trained(name)))
    other = models.shard(models.make_net(seed=3).double(), use_orig_params=True)
    new = whole(other, name)
    ours.get_optimizer_state_dict(other, new, options=options)  # which gives it some state
    ours.set_state_dict(other, new, model_state_dict=weights, optim_state_dict=state, options=options)
    keeps_on(comm, other, new, name)


def train_rows(model, optimizer, steps):
    for ids in row_cases.batches(torch.distributed.get_rank(), 4)[steps]:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def rows(name, steps=slice(0, 2), seed=0):
    torch.manual_seed(seed)
    model = row_cases.Net().double()
    for block in model.blocks:
        hpcfsdp.fully_shard(block)
    hpcfsdp.fully_shard(model)
    optimizer = whole(model, name)
    train_rows(model, optimizer, steps)
    return model, optimizer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["file", "full", "sharded", "own", "plain"])
def test_state_of_fully_shard(world, shared_path, name, way):
    first = rows(name)
    other = rows(name, slice(0, 0), seed=3)
    if way == "file":
        hpcfsdp.checkpoint.save(shared_path / "rows.h5", model=first[0], optimizer=first[1], step=2)
        hpcfsdp.checkpoint.load(shared_path / "rows.h5", model=other[0], optimizer=other[1])
    elif way == "own":
        other[0].load_state_dict(first[0].state_dict())
        other[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    elif way == "plain":
        options = StateDictOptions(full_state_dict=True)
        weights, state = copy.deepcopy(stock.get_state_dict(*first, options=options))
        stock.set_model_state_dict(other[0], weights, options=options)
        plain = row_cases.Net().double()
        its = OPTIMIZERS[name](plain.parameters())
        stock.set_optimizer_state_dict(plain, its, state)
        other[1].load_state_dict(its.state_dict())
    else:
        options = StateDictOptions(full_state_dict=way == "full")
        weights, state = copy.deepcopy(stock.get_state_dict(*first, options=options))
        stock.set_state_dict(*other, model_state_dict=weights, optim_state_dict=state, options=options)
    for model, optimizer in (first, other):
        train_rows(model, optimizer, slice(2, 4))
    for one, two in zip(first[0].parameters(), other[0].parameters(), strict=True):
        torch.testing.assert_close(row_cases.whole(two), row_cases.whole(one), **TIGHT)


@pytest.mark.ranks(4, 2)
@pytest.mark.meshes
@pytest.mark.parametrize("name", ["muon", "adafactor", "soap"])
@mesh_cases.each_mesh
def test_state_of_tensor_parallel_models(shape, name, shared_path):
    at = mesh_cases.place(shape)
    plain = mesh_cases.build(mesh_cases.Gpt)
    its = OPTIMIZERS[name](plain.parameters())
    mesh_cases.train_plain(plain, optimizer=its)
    model = mesh_cases.shard(mesh_cases.build(mesh_cases.Gpt), at, use_orig_params=True)
    optimizer = whole(model, name)
    mesh_cases.train(model, at, optimizer=optimizer)
    with FullyShardedDataParallel.state_dict_type(model, *FORMS["full"]):
        close_osd(FullyShardedDataParallel.optim_state_dict(model, optimizer), plain_osd(plain, its))
    with FullyShardedDataParallel.state_dict_type(model, *FORMS["sharded"]):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    hpcfsdp.checkpoint.save(shared_path / "mesh.h5", model=model, optimizer=optimizer, step=3)
    bare = mesh_cases.build(mesh_cases.Gpt, seed=3)
    loaded = OPTIMIZERS[name](bare.parameters())
    hpcfsdp.checkpoint.load(shared_path / "mesh.h5", model=bare, optimizer=loaded)
    close_osd(plain_osd(bare, loaded), plain_osd(plain, its))
    other = mesh_cases.shard(mesh_cases.build(mesh_cases.Gpt, seed=3), at, use_orig_params=True)
    new = whole(other, name)
    hpcfsdp.checkpoint.load(shared_path / "mesh.h5", model=other, optimizer=new)
    recipe = mesh_cases.Recipe(first=3)
    expected = mesh_cases.train_plain(plain, recipe, its)
    mesh_cases.close(mesh_cases.train(other, at, recipe, new), expected)
    with FullyShardedDataParallel.state_dict_type(model, *FORMS["sharded"]):
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
    mesh_cases.close(mesh_cases.train(model, at, recipe, optimizer), expected)


def test_copies_of_a_state_dict_are_loaded(comm):
    model, optimizer = trained(comm, "adafactor")
    found = optimizer.state_dict()
    copied = {
        key: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for key, state in found["state"].items()
    }
    new = whole(model, "adafactor")
    new.load_state_dict({**found, "state": copied})
    keeps_on(comm, model, new, "adafactor")


def test_the_state_of_other_ranks_is_refused_and_nothing_changes(comm):
    model, optimizer = trained(comm, "adamw")
    wrong = copy.deepcopy(optimizer.state_dict())
    for state in wrong["state"].values():
        for name, value in state.items():
            if value.dim():
                state[name] = value.new_zeros(value.numel() + 1)
    with pytest.raises(StateDictError, match="a state dict of other ranks goes through optim_state_dict"):
        optimizer.load_state_dict(wrong)
    keeps_on(comm, model, optimizer, "adamw")
