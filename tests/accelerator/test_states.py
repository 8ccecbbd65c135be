"""State dicts of models and optimizers on the simulated device: saved, loaded with other settings, and trained on."""

import functools

import pytest
import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from hpcfsdp import checkpoint
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state_dict import StateDictOptions, set_state_dict
from tests.accelerator.programs import CPU, EXACT, SIM, SOME_POLICIES, leave_for_later, shard, train, whole
from tests.mpi import optim_cases, parity
from tests.mpi.parity import Recipe, build, close, reference

pytestmark = pytest.mark.ranks(2, 1, 4)

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
FORMS = {
    "full": (FULL, FullStateDictConfig, FullOptimStateDictConfig, {"offload_to_cpu": False}),
    "full offloaded": (FULL, FullStateDictConfig, FullOptimStateDictConfig, {"offload_to_cpu": True}),
    "rank 0": (FULL, FullStateDictConfig, FullOptimStateDictConfig, {"offload_to_cpu": False, "rank0_only": True}),
    "rank 0 offloaded": (
        FULL,
        FullStateDictConfig,
        FullOptimStateDictConfig,
        {"offload_to_cpu": True, "rank0_only": True},
    ),
    "sharded": (SHARDED, ShardedStateDictConfig, ShardedOptimStateDictConfig, {"offload_to_cpu": False}),
    "sharded offloaded": (SHARDED, ShardedStateDictConfig, ShardedOptimStateDictConfig, {"offload_to_cpu": True}),
    "local": (LOCAL, LocalStateDictConfig, LocalOptimStateDictConfig, {}),
}
"""torch keeps the configurations, and writes into them: they are made anew each time."""

PATIENCE_S = 0.2
"""Where rank 0 alone has a state dict, others wait for it."""

BEFORE, ALL = Recipe(steps=2), Recipe(steps=3)
AFTER = Recipe(steps=1)


def form_of(model, form):
    kind, config, optim_config, arguments = FORMS[form]
    return FullyShardedDataParallel.state_dict_type(model, kind, config(**arguments), optim_config(**arguments))


def make(group, device, seed=0, **options):
    model = shard(build(parity.Nested, seed=seed).to(device), group if device == SIM else None, **options)
    return model, BEFORE.make_optimizer(model.parameters())


def save(model, optimizer, form):
    with form_of(model, form):
        return model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)


def load(model, optimizer, states, form):
    if "rank 0" in form:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options)
        return
    with form_of(model, form):
        model.load_state_dict(states[0])
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, states[1]))


@functools.cache
def plain_states(ranks):
    """Of a plain model and its optimizer after the first steps; to be left alone."""
    model, optimizer = optim_cases.make_plain()
    optim_cases.train_plain(model, optimizer, ranks, range(BEFORE.steps))
    return model.state_dict(), optim_cases.plain_osd(model, optimizer)


def devices(tree):
    """Of all tensors of more than one element."""
    if isinstance(tree, dict):
        return set().union(*map(devices, tree.values()))
    return {tree.device.type} if isinstance(tree, torch.Tensor) and tree.numel() > 1 else set()


@pytest.mark.parametrize("policy", SOME_POLICIES)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][0] is FULL])
def test_whole_states_are_those_of_the_plain_model(world, group, streams, form, original, policy):
    model, optimizer = make(group, SIM, original=original)
    leave_for_later(streams, policy, PATIENCE_S)
    train(model, BEFORE, SIM, optimizer)
    values, state = save(model, optimizer, form)
    if world.rank and "rank 0" in form:
        assert not values and not state
        return
    expected_values, expected_state = plain_states(world.size)
    assert devices(values) == devices(state["state"]) == {"cpu" if "offloaded" in form else "sim"}
    close_to = functools.partial(torch.testing.assert_close, check_device=False, **EXACT)
    close_to(values, dict(expected_values))
    close_to(state["state"], expected_state["state"])


@pytest.mark.parametrize(
    ("form", "original", "offload", "to_original", "to_offload", "to_strategy", "policy"),
    [
        *((form, False, False, False, False, "FULL_SHARD", "all") for form in FORMS),
        *((form, True, True, True, True, "FULL_SHARD", "random") for form in FORMS),
        *((form, False, True, True, False, "NO_SHARD", "all") for form in ("full", "sharded offloaded")),
        *((form, True, False, False, True, "SHARD_GRAD_OP", "eager") for form in ("rank 0", "sharded")),
    ],
)
def test_training_goes_on_from_state_dicts(
    world, group, streams, form, original, offload, to_original, to_offload, to_strategy, policy
):
    model, optimizer = make(group, SIM, original=original, offload=offload)
    leave_for_later(streams, policy, PATIENCE_S)
    losses = train(model, BEFORE, SIM, optimizer).losses
    states = save(model, optimizer, form)
    other = make(group, SIM, seed=1, original=to_original, offload=to_offload, strategy=to_strategy)
    load(*other, states, form)
    found = train(other[0], AFTER, SIM, other[1], first=BEFORE.steps)
    close(found._replace(losses=losses + found.losses), reference(parity.Nested, world.size, ALL), **EXACT)


@pytest.mark.parametrize("form", ["full", "full offloaded", "rank 0", "sharded offloaded"])
@pytest.mark.parametrize(("source", "target"), [(CPU, SIM), (SIM, CPU)], ids=str)
def test_state_dicts_of_one_device_are_loaded_on_the_other(world, group, streams, source, target, form):
    model, optimizer = make(group, source)
    leave_for_later(streams, "all", PATIENCE_S)
    train(model, BEFORE, source, optimizer)
    other = make(group, target, seed=1, original=True)
    load(*other, save(model, optimizer, form), form)
    values = whole(model)
    assert all(torch.equal(value, values[name]) for name, value in whole(other[0]).items())
    found = train(other[0], AFTER, target, other[1], first=BEFORE.steps)
    torch.testing.assert_close(found.parameters, reference(parity.Nested, world.size, ALL).parameters, **EXACT)


@pytest.mark.parametrize("form", ["full", "full offloaded", "rank 0", "sharded", "file"])
@pytest.mark.parametrize("capturable", [True, False], ids=["capturable", "not capturable"])
def test_an_optimizer_keeps_its_flags_and_counts_steps_where_they_want_it(group, shared_path, form, capturable):
    def adam(model, *, flag):
        return torch.optim.Adam(model.parameters(), lr=0.01, capturable=flag)

    model, _ = make(group, SIM)
    optimizer = adam(model, flag=not capturable)
    train(model, BEFORE, SIM, optimizer)
    other, _ = make(group, SIM, seed=1)
    its_optimizer = adam(other, flag=capturable)
    if form == "file":
        path = checkpoint.save(shared_path / "a.h5", model=model, optimizer=optimizer)
        checkpoint.load(path, model=other, optimizer=its_optimizer)
    else:
        load(other, its_optimizer, save(model, optimizer, form), form)
    assert its_optimizer.param_groups[0]["capturable"] == capturable
    kinds = {state["step"].device.type for state in its_optimizer.state.values()}
    assert kinds == {"sim" if capturable else "cpu"}
    train(other, AFTER, SIM, its_optimizer, first=BEFORE.steps)
