"""State dicts of what is around the modules inside of units: wrappers themselves, plain modules with several units."""

import pytest
import torch
from torch import nn

from hpcfsdp.errors import HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import WIDTH, build
from tests.mpi.state_dict_cases import FULL, KINDS, loaded, memory, same, saved, unchanged
from tests.mpi.test_state_dict_modules import WithMemory

pytestmark = pytest.mark.ranks(2)

# Wrappers


@ORIGINAL
@KINDS
def test_what_is_registered_on_a_wrapper_is_saved_and_loaded(engine, kind, original):
    models = [engine.shard(build(parity.Normed, seed=seed), use_orig_params=original) for seed in (0, 1)]
    units = [FullyShardedDataParallel.fsdp_modules(model) for model in models]
    for turn, (root, *inside) in enumerate(units):
        root.register_buffer("steps", torch.tensor([7 - turn]))
        root.register_buffer("scratch", torch.zeros(3), persistent=False)
        inside[0].register_parameter("gate", nn.Parameter(torch.full((2,), 0.5 - turn)))
    around = [nn.Sequential(model) for model in models]
    state = saved(engine, models[0], kind)
    assert {key for key in state if key.endswith(("steps", "scratch", "gate"))} == {"steps", "unit.gate"}
    assert [key.removeprefix("0.") for key in saved(engine, around[0], kind)] == list(state)
    for root, given in zip((models[1], around[1]), (state, saved(engine, around[0], kind)), strict=True):
        units[1][0].steps.zero_()
        loaded(engine, root, given, kind)
        assert (units[1][0].steps.item(), units[1][1].gate.tolist()) == (7, [0.5, 0.5])
    with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "steps"'):
        loaded(engine, models[1], {key: value for key, value in state.items() if key != "steps"}, kind)


# What fails on one rank


def test_extra_states_are_put_back_when_a_load_is_undone(engine):
    model, state = engine.shard(build(WithMemory)), saved(engine, engine.shard(build(WithMemory, seed=1)))
    inner, before = model.module.unit.module, memory(model)
    state["unit._extra_state"] = {"memory": "another"}
    del state["unit.linear.bias"], state["last.bias"]  # a hook forgives the first one, when all is loaded
    with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "last\.bias"'):
        model.load_state_dict(state)
    unchanged(model, before)
    assert inner.memory == "new"
    del before
    state["last.bias"] = torch.ones(3, dtype=torch.float64)
    model.load_state_dict(state)
    assert inner.memory == "another"


def fail(*_):
    raise ZeroDivisionError("no luck")


HOOKS = {
    "before saving": lambda module: module.register_state_dict_pre_hook(fail),
    "after saving": lambda module: module.register_state_dict_post_hook(fail),
    "before loading": lambda module: module.register_load_state_dict_pre_hook(fail),
    "after loading": lambda module: module.register_load_state_dict_post_hook(fail),
}
WHOSE = {
    "root": lambda model: model,
    "wrapped module": lambda model: model.module,
    "inner unit": lambda model: model.module.unit,
    "leaf": lambda model: model.module.unit.module.a,
}


@pytest.mark.parametrize("whose", WHOSE.values(), ids=WHOSE)
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(engine, several, whose, hook):
    """Though the first one has nothing to say of it."""
    model = engine.shard(build(parity.Around))
    state = saved(engine, model)
    if several.rank == 1:
        hook(whose(model))
    with pytest.raises(ZeroDivisionError if several.rank == 1 else HpcfsdpError, match="no luck") as caught:
        saved(engine, model)
        loaded(engine, model, state)
    if several.rank != 1:
        assert str(caught.value).startswith("rank 1: ")


@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
def test_assigning_on_one_rank_is_an_error_on_all(engine, several, around):
    model = engine.shard(build(parity.Around))
    root, before = nn.Sequential(model) if around else model, memory(model)
    state = saved(engine, root)
    with pytest.raises(StateDictError, match=r"assign=True\) is not supported"):
        root.load_state_dict({key: value.clone() for key, value in state.items()}, assign=several.rank == 1)
    unchanged(model, before)


# Units in a plain module


def two_units(engine, original, seed):
    units = [engine.shard(build(kind, seed=seed), use_orig_params=original) for kind in (parity.Normed, parity.Around)]
    return nn.ModuleDict({"first": units[0], "deeper": nn.ModuleDict({"second": units[1]})})


DAMAGE = {
    "shape": lambda state: state.update({"deeper.second.last.bias": torch.ones(9)}),
    "hidden shape": lambda state: state.update({"deeper.second.unit.a.weight": torch.ones(WIDTH, 9)}),
    "no tensor": lambda state: state.update({"deeper.second.last.bias": "?"}),
    "no values": lambda state: state.update({"deeper.second.last.bias": torch.empty(3, device="meta")}),
}


@ORIGINAL
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_units_in_a_plain_module_are_all_loaded_or_none(engine, damage, where, original):
    root, state = two_units(engine, original, 0), saved(engine, two_units(engine, original, 1))
    before, good = memory(root), dict(state)
    if where == "all ranks" or engine.comm.rank == engine.comm.size - 1:
        damage(state)
    with pytest.raises(RuntimeError, match=r"deeper\.second"):
        root.load_state_dict(state)
    unchanged(root, before)
    assert root.load_state_dict(good) == ([], [])
    same(saved(engine, root), good)


@ORIGINAL
def test_names_of_units_in_a_plain_module_are_reported_by_it(engine, original):
    """And hooks of modules around are called when all is loaded."""
    root, state = two_units(engine, original, 0), saved(engine, two_units(engine, original, 1))
    seen = []
    root.register_load_state_dict_post_hook(lambda module, keys: seen.append((saved(engine, module), list(keys[0]))))
    lacking = {key: value for key, value in state.items() if key != "deeper.second.last.bias"}
    assert root.load_state_dict({**lacking, "first.more": torch.ones(1)}, strict=False) == (
        ["deeper.second.last.bias"],
        ["first.more"],
    )
    found, missing = seen.pop()
    assert missing == ["deeper.second.last.bias"]
    same({key: found[key] for key in lacking}, lacking)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "deeper\.second\.last\.bias"'):
        root.load_state_dict(lacking)
    assert nn.Module.load_state_dict(root["first"], saved(engine, root["first"], FULL)) == ([], [])


def test_what_other_modules_refuse_keeps_units_from_loading(engine):
    """On the rank where they do, and so on all."""
    root = nn.Sequential(engine.shard(build(parity.Around)), nn.Linear(2, 2))
    state = nn.Sequential(build(parity.Around, seed=1), nn.Linear(2, 2)).state_dict()
    before = memory(root[0])
    if engine.comm.rank == engine.comm.size - 1:
        state["1.weight"] = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
        root.load_state_dict(state)
    unchanged(root[0], before)
