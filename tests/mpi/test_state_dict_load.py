"""State dicts loaded into sharded models."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import communicator_for
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.sharded_tensors import create_sharded_tensor, local_blocks
from hpcfsdp.state.load import load_model
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import parity
from tests.mpi.models import ORIGINAL, Block, adamw, make_net, train_plain, train_sharded
from tests.mpi.parity import WIDTH, Recipe, build
from tests.mpi.state_dict_cases import (
    CARRIERS,
    FULL,
    LOCAL,
    SHARDED,
    STRATEGIES,
    loaded,
    memory,
    same,
    saved,
    train_a_little,
    unchanged,
)

pytestmark = pytest.mark.ranks(2, 1, 3)

# Loading


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_what_was_saved_is_loaded_in_place_of_other_values(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)

    def trained(seed):
        model = engine.shard(build(parity.Normed, seed=seed), strategy=strategy, use_orig_params=original)
        train_a_little(engine, model)
        return model

    model = trained(seed=0)
    expected, states = saved(engine, model), {kind: saved(engine, model, kind) for kind in (FULL, SHARDED)}
    others = [trained(seed=1) for _ in range(3)]
    reports = [loaded(engine, other, state, kind) for other, (kind, state) in zip(others, states.items(), strict=False)]
    reports.append(loaded(engine, others[2], saved(engine, model, LOCAL), LOCAL))
    assert reports == [([], [])] * 3
    assert str(reports[0]) == "<All keys matched successfully>"
    for other in others:
        same(saved(engine, other), expected)
        torch.testing.assert_close(engine.whole(other), engine.whole(model), rtol=0, atol=0)
    losses = [engine.train(each, Recipe("sgd", steps=2)).losses for each in (model, *others)]
    assert losses[1:] == [losses[0]] * 3


@ORIGINAL
@CARRIERS
def test_any_number_of_ranks_loads_what_any_number_saved(engines, world, shared_path, carrier, original):
    """Through a file and a plain module, and training goes on as if nothing had happened."""
    if engines[carrier] is None:
        pytest.skip("no such carrier for one rank")
    plain = make_net()
    train_plain(plain, adamw(plain), range(2))
    expected = train_plain(plain, adamw(plain), range(2, 4))
    everyone = engines[carrier].group()
    over = dict.fromkeys(range(1, world.size + 1))
    if carrier != "gloo":
        everyone = communicator_for(everyone, required=True)
        for size in over:
            over[size] = everyone.subgroup(range(size)) if world.rank < size else None
    else:
        over = {world.size: communicator_for(everyone, required=True)}
    policy = ModuleWrapPolicy({Block})
    for size, comm in over.items():
        if comm is not None:
            model = FullyShardedDataParallel(make_net(), comm, auto_wrap_policy=policy, use_orig_params=original)
            train_sharded(model, adamw(model), range(2), comm)
            with FullyShardedDataParallel.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
                state = model.state_dict()
            if world.rank == 0:
                torch.save(state, shared_path / f"{size}.pt")
    world.comm.Barrier()
    for saved_by in over:
        state = torch.load(shared_path / f"{saved_by}.pt", weights_only=True)
        restored = make_net(seed=7)
        restored.load_state_dict(state)
        torch.testing.assert_close(train_plain(restored, adamw(restored), range(2, 4)), expected, rtol=1e-5, atol=0)
        for comm in over.values():
            if comm is not None:
                model = FullyShardedDataParallel(
                    make_net(seed=8), comm, auto_wrap_policy=policy, use_orig_params=original
                )
                model.load_state_dict(state)
                got = train_sharded(model, adamw(model), range(2, 4), comm)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@ORIGINAL
def test_a_local_state_dict_is_loaded_by_another_number_of_ranks(engine, world, original):
    """If it has been put on these: parameters lie at the same places of a flat one, however many ranks cut it."""
    model = engine.shard(build(parity.Nested), use_orig_params=original)
    state = saved(engine, model, LOCAL)
    sizes = {key: value.metadata().size[0] for key, value in state.items() if isinstance(value, ShardedTensor)}
    pieces = {key: [block for _, block in local_blocks(state[key])] for key in sizes}
    for key in sizes:
        pieces[key] = torch.cat([block for rank in world.comm.allgather(pieces[key]) for block in rank])
    fewer = range(max(1, world.size - 1))
    if world.rank not in fewer:
        return
    comm = communicator_for(None, required=True).subgroup(fewer)
    other = FullyShardedDataParallel(
        build(parity.Nested, seed=1),
        comm,
        auto_wrap_policy=ModuleWrapPolicy(parity.Nested.units),
        use_orig_params=original,
    )
    for key, size in sizes.items():  # cut at other places than this model is
        middle = size // 3
        boxes = {0: Box((0,), (middle,)), comm.size - 1: Box((middle,), (size - middle,))}
        if comm.size == 1:
            boxes = {0: Box((0,), (size,))}
        box = boxes.get(comm.rank)
        mine = None if box is None else pieces[key][box.offsets[0] : box.offsets[0] + box.sizes[0]].clone()
        group = other._unit.mesh.process_group()
        state[key] = create_sharded_tensor(mine, (size,), torch.float64, torch.device("cpu"), group, boxes)
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(state)
    same(other.state_dict(), build(parity.Nested).state_dict())


@ORIGINAL
@pytest.mark.parametrize("model_type", [parity.Nested, parity.Frozen, parity.WithScalars, parity.MixedDtypes])
def test_unusual_parameters_come_back(engine, model_type, original):
    """Tied ones, frozen ones, without dimensions, of two dtypes: the last three are beyond torch."""
    model = engine.shard(build(model_type), use_orig_params=original)
    for kind in (FULL, SHARDED, LOCAL):
        other = engine.shard(build(model_type, seed=1), use_orig_params=original)
        loaded(engine, other, saved(engine, model, kind), kind)
        same(saved(engine, other), build(model_type).state_dict())
        flags = [parameter.requires_grad for parameter in other.parameters()]
        assert flags == [parameter.requires_grad for parameter in model.parameters()]


class TiedLate(parity.Around):
    """A module whose second parameter is the first of the model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.again = self.first.weight


@ORIGINAL
def test_names_are_in_the_order_of_the_plain_model(engine, original):
    model = engine.shard(build(TiedLate), use_orig_params=original)
    same(saved(engine, model), build(TiedLate).state_dict())


def test_tied_names_have_one_tensor_and_the_last_one_counts(engine):
    model = engine.shard(build(parity.Nested))
    whole = saved(engine, model)
    assert whole["first.weight"].data_ptr() == whole["last.weight"].data_ptr()
    sharded = saved(engine, model, SHARDED)
    assert sharded["first.weight"] is sharded["last.weight"]
    state = dict(whole)
    state["last.weight"] = torch.full_like(state["last.weight"], 3.0)
    model.load_state_dict(state)
    plain = build(parity.Nested)
    plain.load_state_dict(state)
    same(saved(engine, model), plain.state_dict())


def test_values_of_other_dtypes_are_converted_and_left_alone(engine):
    model = engine.shard(build(parity.Normed))
    plain = build(parity.Normed, seed=1).float()
    state = plain.state_dict(keep_vars=True)  # parameters, which want gradients
    state["last.bias"] = torch.tensor([1, 2, 3])
    frozen = state["first.weight"].requires_grad_(False)
    model.load_state_dict(state)
    assert not frozen.requires_grad
    assert state["first.bias"].requires_grad
    found = saved(engine, model)
    assert found["last.bias"].tolist() == [1, 2, 3]
    assert torch.equal(found["first.weight"], plain.first.weight.double())
    assert {value.dtype for value in found.values()} == {torch.float64, torch.int64}


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
def test_a_few_names_are_loaded_if_that_is_allowed(engine, kind):
    model = engine.shard(build(parity.Around))
    other = engine.shard(build(parity.Around, seed=1))
    state = {key: value for key, value in saved(engine, other, kind).items() if key.startswith("unit.a")}
    state["surplus"] = torch.ones(2)
    report = model.load_state_dict(state, strict=False)
    plain = build(parity.Around)
    expected = plain.load_state_dict({**build(parity.Around, seed=1).state_dict(), "surplus": 1}, strict=False)
    assert report.unexpected_keys == expected.unexpected_keys == ["surplus"]
    assert report.missing_keys == [key for key in plain.state_dict() if not key.startswith("unit.a")]
    found, before, after = saved(engine, model), *(build(parity.Around, seed=seed).state_dict() for seed in (0, 1))
    for key, value in found.items():
        assert torch.equal(value, (after if key.startswith("unit.a") else before)[key]), key
    with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "first\.weight"') as caught:
        model.load_state_dict(state)
    assert 'Unexpected key(s) in state_dict: "surplus"' in str(caught.value)


def test_names_may_carry_what_wrappers_add(engine):
    model = engine.shard(build(parity.Nested))
    names = build(parity.Nested, seed=1).state_dict()
    state = {
        f"_fsdp_wrapped_module.{key.replace('blocks.0.', 'blocks.0._fsdp_wrapped_module.')}": names[key]
        for key in names
    }
    assert model.load_state_dict(state) == ([], [])
    same(saved(engine, model), names)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_loading_does_not_depend_on_how_torch_exchanges_tensors(engine, around, swap):
    model = engine.shard(build(parity.Normed), use_orig_params=True)
    root = nn.Sequential(model) if around else model
    held = list(model.parameters())
    state = {("0." if around else "") + key: value for key, value in build(parity.Normed, seed=1).state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        root.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    same(saved(engine, model), build(parity.Normed, seed=1).state_dict())


@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_one_rank_gives_all_of_it_to_the_others(engines, strategy):
    engine = engines["hpcfsdp"]
    model = engine.shard(build(parity.Normed), strategy=strategy)
    state = build(parity.Normed, seed=1).state_dict()
    state["norm.running_mean"] += 3
    given = state if engine.comm.rank == 0 else None
    assert load_model(model, given, from_rank0=True) == ([], [])
    same(saved(engine, model), state)
    before = memory(model)
    unreadable = {**state, "last.bias": state["last.bias"].to("meta")}
    for wrong, message in (
        ({**state, "surplus": 1}, "surplus"),
        ([], "mapping"),
        ({}, "Missing"),
        (unreadable, r"'last\.bias' is on the meta device"),
    ):
        with pytest.raises((StateDictError, TypeError), match=message):
            load_model(model, wrong if engine.comm.rank == 0 else None, from_rank0=True)
        unchanged(model, before)
