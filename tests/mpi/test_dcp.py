"""State dicts under the names of ``torch.distributed.checkpoint.state_dict``, and torch's checkpoints made of them."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hpcfsdp
import hpcfsdp.state_dict as ours
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from hpcfsdp.reshard.sharded_tensors import full_tensor
from hpcfsdp.state_dict import StateDictOptions
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import parity

pytestmark = pytest.mark.ranks(2, 1, 3)

FULL = StateDictOptions(full_state_dict=True)
TO_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)


def make(seed=0, lr=1e-2, **options):
    """A model whose last layer has fewer rows than there are ranks, and its optimizer without state."""
    module = parity.build(parity.Around, seed=seed)
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({parity.Linears}), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def train(model, optimizer, world, steps=2, first=0):
    losses = []
    for step in range(first, first + steps):
        loss = parity.loss_of(model, parity.inputs(step, world.rank, torch.float64))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal(one, other, path=""):
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}[{place}]")
    elif isinstance(one, DTensor):
        assert one.placements == other.placements, path
        assert_equal(one.to_local(), other.to_local(), path)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, path


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("mesh", [False, True], ids=["no mesh", "mesh"])
def test_torchs_checkpoint_saves_one_way_of_sharding_and_loads_another(world, shared_path, orig, mesh):
    options = {"device_mesh": init_device_mesh("cpu", (world.size,))} if mesh else {}
    model, optimizer = make(use_orig_params=orig, **options)
    train(model, optimizer, world)
    weights, state = ours.get_state_dict(model, optimizer)
    assert all(isinstance(value, DTensor) for value in weights.values())
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared_path / "dcp")
    expected = train(model, optimizer, world, first=2)

    model, optimizer = make(seed=1, lr=7.0, use_orig_params=not orig)
    weights, state = ours.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared_path / "dcp")
    ours.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert train(model, optimizer, world, first=2) == pytest.approx(expected, rel=1e-12)


def test_a_plain_model_has_the_same_whole_state_dicts(world):
    model, optimizer = make()
    train(model, optimizer, world)
    weights, state = ours.get_state_dict(model, optimizer, options=FULL)
    plain = parity.build(parity.Around, seed=1)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=3.0)
    # For a model without units these are torch's own functions.
    ours.set_state_dict(plain, plain_optimizer, model_state_dict=weights, optim_state_dict=state, options=FULL)
    its_weights, its_state = ours.get_state_dict(plain, plain_optimizer, options=FULL)
    assert_equal(its_weights, {name: weights[name] for name in its_weights})
    assert its_weights.keys() == weights.keys()
    assert_equal(its_state["state"], {name: state["state"][name] for name in its_state["state"]})
    assert its_state["state"].keys() == state["state"].keys()
    assert stock.get_model_state_dict(plain).keys() == weights.keys()


@pytest.mark.parametrize("from_rank0", [False, True])
def test_torchs_own_function_loads_whole_tensors_into_original_parameters(world, from_rank0):
    model, _ = make(use_orig_params=True)
    weights, other = (
        parity.build(parity.Around, seed=2).state_dict(),
        torch.nn.Sequential(make(use_orig_params=True)[0]),
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    for root, prefix in ((model, ""), (other, "0.")):
        given = {prefix + name: value for name, value in weights.items()} if world.rank == 0 or not from_rank0 else {}
        stock.set_model_state_dict(root, given, options=options)
        assert_equal(dict(stock.get_model_state_dict(root)), {prefix + name: weights[name] for name in weights})


def test_rank_0_alone_has_whole_ones_that_are_offloaded(world):
    model, optimizer = make()
    train(model, optimizer, world)
    weights, state = ours.get_state_dict(model, optimizer, options=TO_FIRST)
    everywhere = ours.get_state_dict(model, optimizer, options=FULL)
    if world.rank == 0:
        assert_equal((weights, state), everywhere)
    else:
        assert (weights, state) == ({}, {})


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_rank_0_alone_has_what_all_load(world, flatten, strategy):
    model, optimizer = make()
    train(model, optimizer, world)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flatten)
    weights, state = ours.get_state_dict(model, optimizer, options=options)
    expected = train(model, optimizer, world, first=2)

    model, optimizer = make(seed=1, lr=3.0, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    mine = (weights, state) if world.rank == 0 else ({}, {})
    ours.set_state_dict(model, optimizer, model_state_dict=mine[0], optim_state_dict=mine[1], options=options)
    assert train(model, optimizer, world, first=2) == pytest.approx(expected, rel=1e-12)


def test_a_flattened_state_dict_has_one_level(world):
    model, optimizer = make()
    train(model, optimizer, world)
    flat = ours.get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    )
    assert flat["param_groups.unit.a.weight.lr"] == 1e-2
    assert flat["state.unit.a.weight.exp_avg"].shape == (parity.WIDTH, parity.WIDTH)
    nested = ours.get_optimizer_state_dict(model, optimizer, options=FULL)
    assert len(flat) == sum(map(len, nested["state"].values())) + len(nested["state"]) * (
        len(nested["param_groups"][0]) - 1
    )


def test_several_optimizers_share_one_state_dict(world):
    model, _ = make(use_orig_params=True)
    params = dict(model.named_parameters())
    biases = [param for name, param in params.items() if name.endswith("bias")]
    weights = [param for name, param in params.items() if name.endswith("weight")]

    def optimizers(lr):
        return torch.optim.SGD(biases, lr=lr, momentum=0.9), torch.optim.AdamW(weights, lr=lr)

    first = optimizers(1e-2)
    parity.loss_of(model, parity.inputs(0, world.rank, torch.float64)).backward()
    for optimizer in first:
        optimizer.step()
    state = ours.get_optimizer_state_dict(model, first, options=FULL)
    assert len(state["param_groups"]) == 2
    second = optimizers(1.0)
    ours.set_optimizer_state_dict(model, second, state, options=FULL)
    assert_equal(ours.get_optimizer_state_dict(model, second, options=FULL), state)
    assert [optimizer.param_groups[0]["lr"] for optimizer in second] == [1e-2, 1e-2]


def test_an_optimizer_gets_its_state_without_a_change_of_parameters(world):
    for orig in (False, True):
        model, optimizer = make(use_orig_params=orig)
        before = [param.detach().clone() for param in model.parameters()]
        state = ours.get_optimizer_state_dict(model, optimizer)
        assert {name for one in state["state"].values() for name in one} == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.param_groups[0]["lr"] == 1e-2
        for param, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, was)
            assert param.grad is None
        assert not any(optimizer.state.values())
        for values in state["state"].values():  # those that a first step begins with
            assert not any(full_tensor(value).any() for value in values.values())


KEYS = {"swap": True, "tags": ("a", "b"), "none": None, "empty": (), "nested": {"x": [1, (2, 3)]}, "initial_lr": 0.1}
"""Of a user's own, and of schedulers, in each group of an optimizer."""
WRAPS = {"flat": FSDP, "original": lambda module: FSDP(module, use_orig_params=True), "rows": hpcfsdp.fully_shard}


def grouped(wrap, keys=(), kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = WRAPS[wrap](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    params = list(model.parameters())
    groups = [params[:2], params[2:]] if len(params) > 1 else [params]
    optimizer = kind([{"params": each, "lr": 0.1 * n} for n, each in enumerate(groups, 1)], **options)
    for group in optimizer.param_groups:
        group.update(keys)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def hypers(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}]
)
def test_groups_have_the_keys_of_both_sides(world, wrap, flatten, options):
    options = {**options, "flatten_optimizer_state_dict": flatten}
    get = StateDictOptions(**{key: value for key, value in options.items() if key != "broadcast_from_rank0"})
    for saved, held in itertools.product(({}, KEYS), ({}, {**KEYS, "tags": ("z",)})):
        model, optimizer = grouped(wrap, saved)
        step(model, optimizer)
        state = ours.get_optimizer_state_dict(model, optimizer, options=get)
        if world.rank and "broadcast_from_rank0" in options:
            state = {}
        expected = [{**held, **group} for group in hypers(optimizer)]
        model, optimizer = grouped(wrap, held)
        ours.set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(**options))
        assert_equal(
            [dict(sorted(group.items())) for group in hypers(optimizer)], [dict(sorted(g.items())) for g in expected]
        )
        step(model, optimizer)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=["sharded", "full"])
def test_hyper_parameters_that_decide_what_state_there_is_come_with_it(world, wrap, options):
    options = StateDictOptions(**options)
    sgd, adam = torch.optim.SGD, torch.optim.Adam
    for kind, saved, held in (
        (sgd, {"momentum": 0.9}, {}),
        (sgd, {}, {"momentum": 0.9}),
        (sgd, {}, {}),
        (adam, {"amsgrad": True}, {}),
    ):
        made = grouped(wrap, kind=kind, **saved)
        step(*made)
        state = copy.deepcopy(ours.get_optimizer_state_dict(*made, options=options))  # torch's is the optimizer's own
        other = grouped(wrap, kind=kind, **held)
        ours.set_optimizer_state_dict(*other, state, options=options)
        assert hypers(other[1]) == hypers(made[1])
        for model, optimizer in (made, other):
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            step(model, optimizer)
        assert all(
            torch.equal(full_tensor(a), full_tensor(b))
            for a, b in zip(made[0].parameters(), other[0].parameters(), strict=True)
        )


def test_a_failed_load_leaves_groups_and_state_as_they_were(world):
    model, optimizer = grouped("rows", {"own": 1})
    before = hypers(optimizer)
    state = ours.get_optimizer_state_dict(*grouped("rows", KEYS), options=FULL)
    del state["state"]["0.weight"]
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        ours.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    assert hypers(optimizer) == before
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("what", ["both", "weights", "state"])
def test_ranks_without_a_state_dict_get_that_of_rank_0(world, wrap, what):
    model, optimizer = grouped(wrap)
    step(model, optimizer)
    weights, state = ours.get_state_dict(model, optimizer, options=FULL)
    other, its_optimizer = grouped(wrap)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if what == "both":
        given = (weights, state) if world.rank == 0 else ({}, {})
        ours.set_state_dict(other, its_optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options)
    elif what == "weights":
        ours.set_model_state_dict(other, weights if world.rank == 0 else {}, options=options)
    else:
        ours.set_optimizer_state_dict(other, its_optimizer, state if world.rank == 0 else {}, options=options)
    x = torch.ones(2, 4)
    assert torch.equal(other(x), model(x)) == (what != "state")
    assert bool(its_optimizer.state) == (what != "weights")


def test_frozen_parameters_and_submodules_are_left_out_on_demand(world):
    module = parity.build(parity.Around)
    module.unit.a.requires_grad_(False)
    model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({parity.Linears}))
    everything = ours.get_model_state_dict(model)
    trained = ours.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(everything) - set(trained) == {"unit.a.weight", "unit.a.bias"}
    [inner] = [m for m in model.modules() if isinstance(m, parity.Linears)]
    assert set(ours.get_model_state_dict(model, submodules={inner})) == {
        f"unit.{layer}.{kind}" for layer in "ab" for kind in ("weight", "bias")
    }
    short = ours.get_model_state_dict(
        model, submodules={inner}, options=StateDictOptions(keep_submodule_prefixes=False)
    )
    assert set(short) == {f"{layer}.{kind}" for layer in "ab" for kind in ("weight", "bias")}


def test_a_state_dict_without_some_parameters_is_loaded_if_that_is_allowed(world):
    model, optimizer = make(use_orig_params=True)
    train(model, optimizer, world)
    state = ours.get_optimizer_state_dict(model, optimizer, options=FULL)
    del state["state"]["unit.a.weight"]
    with pytest.raises(StateDictError, match=r"unit\.a\.weight"):
        ours.set_optimizer_state_dict(model, optimizer, state, options=FULL)
    lenient = StateDictOptions(full_state_dict=True, strict=False)
    ours.set_optimizer_state_dict(model, optimizer, state, options=lenient)
    assert "unit.a.weight" not in ours.get_optimizer_state_dict(model, optimizer, options=FULL)["state"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, o: ours.get_model_state_dict(m, options=StateDictOptions(broadcast_from_rank0=True)),
            "full_state_dict=True",
        ),
        (lambda m, o: ours.set_optimizer_state_dict(m, o, [1]), "a dict, not a list"),
        (lambda m, o: ours.get_optimizer_state_dict(m, o, submodules={m.module}), "submodules"),
        (
            lambda m, o: ours.get_model_state_dict(
                m,
                submodules={m.module.first, m.module.last},
                options=StateDictOptions(keep_submodule_prefixes=False),
            ),
            "one submodule",
        ),
    ],
)
def test_bad_input(world, call, message):
    with pytest.raises(StateDictError, match=message):
        call(*make())


def test_parents_that_are_not_wrapped(world):
    """A plain module with units in it."""
    units = [make(seed=seed)[0] for seed in (0, 1)]
    model = nn.ModuleList(units)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = ours.get_state_dict(model, optimizer, options=FULL)
    assert {name.partition(".")[0] for name in weights} == {"0", "1"}
    assert weights.keys() == state["state"].keys()
    for unit in units:
        with torch.no_grad():
            for param in unit.parameters():
                param.zero_()
    ours.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FULL)
    assert_equal(ours.get_state_dict(model, optimizer, options=FULL), (weights, state))


def test_ranks_that_hold_nothing_of_a_parameter_do_not_step_it(world):
    """Some divide by the number of elements."""

    class Divides(torch.optim.SGD):
        def step(self):
            assert all(
                param.numel() for group in self.param_groups for param in group["params"] if param.grad is not None
            )
            super().step()

    for begun in (False, True):
        model = FSDP(nn.Linear(5, 1, dtype=torch.float64), use_orig_params=True)
        optimizer = Divides(model.parameters(), momentum=0.9)
        if begun:
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = ours.get_optimizer_state_dict(model, optimizer, options=FULL)["state"]
        assert set(state) == {"weight", "bias"}
        assert {name for one in state.values() for name in one} == {"momentum_buffer"}


def test_an_optimizer_that_has_begun_on_one_rank_has_begun(world):
    model, optimizer = make(use_orig_params=True)
    (first, *_) = model.parameters()
    if world.rank == 0:
        optimizer.state[first] = {"momentum": torch.ones(())}
    with contextlib.suppress(StateDictError):  # ranks have different state
        ours.get_optimizer_state_dict(model, optimizer)
    assert {key for state in optimizer.state.values() for key in state} <= {"momentum"}


def test_both_are_loaded_or_neither(world):
    model, optimizer = make(use_orig_params=True)
    train(model, optimizer, world)
    weights, state = ours.get_state_dict(model, optimizer, options=FULL)
    train(model, optimizer, world)
    before = ours.get_state_dict(model, optimizer, options=FULL)
    del state["state"]["unit.a.weight"]
    with pytest.raises(StateDictError, match=r"unit\.a\.weight"):
        ours.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FULL)
    assert_equal(ours.get_state_dict(model, optimizer, options=FULL), before)


def test_optimizers_may_come_from_a_generator(world):
    model, optimizer = make()
    train(model, optimizer, world)
    weights, state = ours.get_state_dict(model, (one for one in [optimizer]), options=FULL)
    ours.set_state_dict(
        model, (one for one in [optimizer]), model_state_dict=weights, optim_state_dict=state, options=FULL
    )
    assert_equal(ours.get_optimizer_state_dict(model, optimizer, options=FULL), state)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_what_is_compiled_has_the_names_of_what_is_not(world, orig):
    model, optimizer = make(use_orig_params=orig)
    train(model, optimizer, world)
    expected = ours.get_model_state_dict(model, options=FULL)
    compiled = torch.compile(model, backend="eager")
    for options in (None, FULL):
        assert list(ours.get_model_state_dict(compiled, options=options)) == list(expected)
    inner = {compiled._orig_mod.module.last}
    found = ours.get_model_state_dict(
        compiled, submodules=inner, options=StateDictOptions(keep_submodule_prefixes=True)
    )
    assert set(found) == {key for key in expected if key.startswith("last.")}
    other = torch.compile(make(seed=1, use_orig_params=orig)[0], backend="eager")
    ours.set_model_state_dict(other, ours.get_model_state_dict(compiled))
    assert_equal(ours.get_model_state_dict(other, options=FULL), expected)
    beside = nn.Sequential(compiled, nn.Linear(2, 2))
    names = [f"0.{key}" for key in expected] + ["1.weight", "1.bias"]
    assert list(ours.get_model_state_dict(beside)) == names
