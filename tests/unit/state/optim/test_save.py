import enum
import logging
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    LocalOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DisagreementError, EngineError, HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.optim.compare import StateInfo
from hpcfsdp.state.optim.keys import check_is_state_dict, get_param_to_fqns
from hpcfsdp.state.optim.save import FlatParamState, check_state_shapes, optim_state_dict, with_keys_of
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.settings import StateDictFormat, optim_format_of
from hpcfsdp.state.wrappers import clean_fqn
from tests.unit.state.optim.examples import NO_SHARD, Block, Net, copied, give, make_info, raised, shard, whole_states

KINDS = StateDictType
ALL, FIRST = StateDictFormat(), StateDictFormat(rank0_only=True, offload_to_cpu=True)
ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


class Named(torch.optim.SGD):
    """An optimizer whose state dict goes by the names that it was given."""

    def __init__(self, params):
        super().__init__([{"params": list(params.values()), "own": None}], lr=0.1)
        self.params = dict(params)

    def state_dict(self):
        names = {param: name for name, param in self.params.items()}
        groups = [{**group, "params": [names[p] for p in group["params"]]} for group in self.param_groups]
        return {
            "state": {names.get(param, param): state for param, state in self.state.items()},
            "param_groups": groups,
        }


def make(comm, original, states, *, groups=None, **options):
    """A sharded ``Net``, and an optimizer that holds this rank's part of whole states."""
    model = shard(Net(), comm, original=original, **options)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(groups(params) if groups else params, lr=0.1)
    give(model, optimizer, states)
    return model, optimizer


def save(model, optimizer, form=ALL, **options):
    return optim_state_dict(model, optimizer, optimizer.state_dict(), form, **options)


def two_groups(params):
    return [{"params": params[1::2], "own": ["x", 2.5], "lr": torch.tensor(0.5)}, {"params": params[::2], "own": None}]


# What is gathered


@SIZES
@ORIGINAL
@pytest.mark.parametrize("form", [ALL, FIRST], ids=["all", "rank 0"])
@pytest.mark.parametrize("strategy", [None, NO_SHARD], ids=["sharded", "NO_SHARD"])
def test_each_parameter_has_the_state_that_it_would_have_in_one_process(run_ranks, size, original, form, strategy):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states, sharding_strategy=strategy)
        names = get_param_to_fqns(model)
        order = [name for param in optimizer.param_groups[0]["params"] for name in names[param]]
        return save(model, optimizer, form), order

    for rank, (found, order) in enumerate(run_ranks(size, body)):
        if form is FIRST and rank:
            assert found == {}
            continue
        assert same(found["state"], states)
        assert list(found["state"]) == [name for name in order if name in states]
        [group] = found["param_groups"]
        assert group["params"] == order
        assert set(order) == {name for name, _ in Net().named_parameters()}
        assert group["lr"] == 0.1


@ORIGINAL
def test_groups_keep_all_that_is_in_them(run_ranks, original):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states, groups=two_groups)
        found, names = save(model, optimizer), get_param_to_fqns(model)
        expected = [
            {**group, "params": [name for param in group["params"] for name in names[param]]}
            for group in optimizer.param_groups
        ]
        assert same(found["param_groups"], expected)
        assert same(found["state"], states)
        return found["param_groups"][0]["own"] is not optimizer.param_groups[0]["own"]

    assert run_ranks(2, body) == [True, True]


@ORIGINAL
def test_what_is_shown_is_new_memory(run_ranks, original):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states)
        before = copied(optimizer.state_dict())
        found = save(model, optimizer)
        for state in found["state"].values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        return same(optimizer.state_dict(), before)

    assert run_ranks(2, body) == [True, True]
    assert run_ranks(1, body) == [True]


@ORIGINAL
def test_an_optimizer_that_has_not_stepped_has_no_state(original):
    model, optimizer = make(None, original, {})
    found = save(model, optimizer)
    assert found["state"] == {}
    assert len(found["param_groups"][0]["params"]) == len(list(Net().parameters()))
    without = optim_state_dict(model, optimizer, {"state": {}}, ALL)
    assert without == {"state": {}}


@SIZES
def test_parameters_may_have_state_of_their_own(run_ranks, size):
    """With original parameters: one was never stepped, another has other state, a third was stepped more often."""
    states = whole_states(Net())
    del states["head.bias"]
    states["embed.weight"] = {"momentum_buffer": None}
    states["block.weight"]["step"] = torch.tensor(9.0)
    found = run_ranks(size, lambda comm: save(*make(comm, True, states))["state"])
    assert all(same(state, states) for state in found)


def test_one_dtype_for_each_parameter_of_one_state(run_ranks):
    states = whole_states(Net())
    states["head.bias"]["mean"] = states["head.bias"]["mean"].double()
    found = run_ranks(2, lambda comm: save(*make(comm, True, states))["state"])
    assert all(same(state, states) for state in found)


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan"))], ids=["float", "tensor"])
@ORIGINAL
def test_what_is_no_number_is_the_same_on_all_ranks(run_ranks, value, original):
    states = {name: {**state, "rate": value} for name, state in whole_states(Net()).items()}
    for found in run_ranks(2, lambda comm: save(*make(comm, original, states))["state"]):
        assert {
            name: state["rate"].isnan() if isinstance(value, torch.Tensor) else state["rate"] != state["rate"]
            for name, state in found.items()
        } == dict.fromkeys(states, True)


@ORIGINAL
def test_state_that_cannot_be_sent_or_compared(run_ranks, original):
    states = whole_states(Net())
    for state in states.values():
        state["call"] = print  # copied as it is
        state["local"] = lambda: 3
    for found in run_ranks(2, lambda comm: save(*make(comm, original, states))["state"]):
        assert all(state["call"] is print and state["local"]() == 3 for state in found.values())


# Keys


@ORIGINAL
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("names_from", ["optimizer", "model"])
def test_optimizers_that_go_by_names(run_ranks, original, prefixes, names_from):
    states = whole_states(Net())

    def body(comm):
        model = shard(Net(), comm, original=original)
        params = {name if prefixes else clean_fqn(name): param for name, param in model.named_parameters()}
        if names_from == "optimizer":
            optimizer = Named(params)
            give(model, optimizer, states)
            return save(model, optimizer)
        optimizer = torch.optim.SGD(params.values(), lr=0.1)
        give(model, optimizer, states)
        names = {param: name for name, param in params.items()}
        groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
        given = {"state": {names[param]: state for param, state in optimizer.state.items()}, "param_groups": groups}
        return optim_state_dict(model, optimizer, given, ALL)

    for found in run_ranks(2, body):
        assert same(found["state"], states)
        assert set(found["param_groups"][0]["params"]) == {name for name, _ in Net().named_parameters()}


def test_keys_of_an_optimizer_with_names_whether_wrappers_are_in_them_or_not():
    given = {
        "state": {"a._orig_mod.w": 1, "_fsdp_wrapped_module.b": 2, "c": 3, 7: 4},
        "param_groups": [{"params": ["_fsdp_wrapped_module.a.w", "b"], "lr": 1}, {"params": ["c"]}],
    }
    params = dict.fromkeys(["a.w", "_fsdp_wrapped_module.b"])
    assert with_keys_of(params, given) == {
        "state": {"a.w": 1, "_fsdp_wrapped_module.b": 2, "c": 3, 7: 4},
        "param_groups": [{"params": ["a.w", "_fsdp_wrapped_module.b"], "lr": 1}, {"params": ["c"]}],
    }
    assert with_keys_of(params, {"state": {}}) == {"state": {}}


@pytest.mark.parametrize(
    "form", [list, iter, tuple, lambda params: [{"params": params[:1]}, {"params": iter(params[1:])}]]
)
def test_what_the_optimizer_was_built_from_is_enough(run_ranks, form):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, True, states)
        given, params = optimizer.state_dict(), list(model.parameters())
        found = optim_state_dict(model, None, given, ALL, optim_input=form(params))
        assert same(found, save(model, optimizer, optim_input=form(params)))
        return found["state"]

    assert all(same(found, states) for found in run_ranks(2, body))


def test_a_group_of_one_tensor():
    model = shard(Block(), original=True)
    optimizer = torch.optim.SGD([{"params": model.weight}], lr=0.1)
    optimizer.state[model.weight] = {"count": 3}
    found = optim_state_dict(model, None, optimizer.state_dict(), ALL, optim_input=[{"params": model.weight}])
    assert found["state"] == {"weight": {"count": 3}}


def test_entries_that_belong_to_no_parameter(run_ranks):
    """Also when they stand before all others, as those do that an optimizer makes before its first step."""
    states, history = whole_states(Net()), [1, 2]

    def body(comm):
        model, optimizer = make(comm, True, {})
        optimizer.state["history"] = history
        give(model, optimizer, states)
        optimizer.state["rank"] = torch.tensor(float(comm.rank))
        found = save(model, optimizer)["state"]
        assert same({name: found[name] for name in states}, states)
        assert found["history"] == history
        assert found["history"] is not history
        return set(found) - set(states), found["rank"].item()

    with pytest.warns(UserWarning, match="optimizer state '(history|rank)' belongs to no parameter") as warned:
        found = run_ranks(1, body)  # what is warned of in threads may be lost
    assert found == [({"history", "rank"}, 0.0)]
    assert len(warned) == 2
    assert "this rank's value is copied unchanged" in str(warned[0].message)


# How it is shown


@pytest.mark.parametrize(
    ("kind", "config", "form"),
    [
        (KINDS.FULL_STATE_DICT, None, StateDictFormat(offload_to_cpu=True)),
        (KINDS.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False), StateDictFormat()),
        (
            KINDS.FULL_STATE_DICT,
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
            StateDictFormat(rank0_only=True),
        ),
        (KINDS.SHARDED_STATE_DICT, None, StateDictFormat(sharded=True, offload_to_cpu=True)),
        (KINDS.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(offload_to_cpu=False), StateDictFormat(sharded=True)),
        (KINDS.LOCAL_STATE_DICT, LocalOptimStateDictConfig(offload_to_cpu=False), StateDictFormat(sharded=True)),
    ],
)
def test_the_form_that_settings_ask_for(kind, config, form):
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=FakeCommunicator(0, 2))
    FullyShardedDataParallel.set_state_dict_type(model, kind, optim_state_dict_config=config)
    assert optim_format_of(model) == form


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "an optimizer's state dict is a dict, not a NoneType (None)"),
        ([1], "an optimizer's state dict is a dict, not a list ([1])"),
        ("x" * 100, "an optimizer's state dict is a dict, not a str"),
        (
            {"model": 1, 3: 2},
            "an optimizer's state dict has the key 'state', this one has ['3', 'model']: pass what optim_state_dict, "
            "or the state_dict of an optimizer, returned",
        ),
        ({"state": [1]}, "'state' of an optimizer's state dict is a dict, not a list ([1])"),
        (
            {"state": {}, "param_groups": {}},
            "'param_groups' of an optimizer's state dict is a list of dicts with the key 'params', not a dict ({})",
        ),
        (
            {"state": {}, "param_groups": [{"lr": 1}]},
            "'param_groups' of an optimizer's state dict is a list of dicts with the key 'params', not a list "
            "([{'lr': 1}])",
        ),
    ],
)
def test_what_is_no_state_dict(given, message):
    with pytest.raises(StateDictError) as caught:
        check_is_state_dict(given)
    assert str(caught.value) == message
    with pytest.raises(StateDictError) as caught:
        optim_state_dict(shard(Block()), None, given, ALL)
    assert str(caught.value) == message


def test_what_is_a_state_dict():
    for given in ({"state": {}}, {"state": {0: {}}, "param_groups": ({"params": []},), "more": 1}):
        check_is_state_dict(given)


def test_a_model_without_units():
    model = nn.Linear(2, 2)
    with pytest.raises(StateDictError, match=r"^there is no FullyShardedDataParallel in this Linear: wrap the model"):
        save(model, torch.optim.SGD(model.parameters(), lr=0.1))


def refused(run_ranks, original, change, *, size=2, form=ALL, states=None):
    """The messages of all ranks after `change` (model, optimizer, rank) has made what they save unfit."""
    states = whole_states(Net()) if states is None else states

    def body(comm):
        model, optimizer = make(comm, original, states, groups=two_groups)
        given = optimizer.state_dict()
        given = change(model, optimizer, given, comm.rank) or given
        before = copied(given)
        try:
            return optim_state_dict(model, optimizer, given, form)
        finally:
            assert same(given, before)

    return raised(run_ranks(size, body), StateDictError)


def one_of(model, name):
    """The parameter that stands for `name` in the optimizer."""
    return next(param for param, names in get_param_to_fqns(model).items() if name in names)


@ORIGINAL
def test_a_parameter_of_another_optimizer(run_ranks, original):
    def change(model, optimizer, given, rank):
        return {"state": {99: {}}, "param_groups": []} if rank else None

    first, second = refused(run_ranks, original, change)
    assert second == (
        f"the optimizer's state dict holds parameter 99, but the optimizer has only {9 if original else 6} "
        "parameter(s): pass the state dict of this optimizer"
    )
    assert first == f"rank 1: {second}"


def test_groups_of_another_optimizer(run_ranks):
    def change(model, optimizer, given, rank):
        return {"state": {}, "param_groups": [{"params": [0, 77]}]}

    for message in refused(run_ranks, True, change):
        assert message.startswith("the optimizer's state dict holds parameter 77, but the optimizer has only")


@ORIGINAL
def test_state_that_is_no_dict(run_ranks, original):
    def change(model, optimizer, given, rank):
        given["state"][next(iter(given["state"]))] = [1, 2]

    for message in refused(run_ranks, original, change):
        assert message.startswith("the optimizer's state of ")
        assert message.endswith(" is a dict of names and values, not a list ([1, 2])")


@ORIGINAL
def test_a_tensor_that_is_no_state_of_the_shard(run_ranks, original):
    def change(model, optimizer, given, rank):
        if rank:
            optimizer.state[one_of(model, "block.weight")]["mean"] = torch.ones(5, 3)
            return optimizer.state_dict()

    first, second = refused(run_ranks, original, change)
    assert second.startswith(
        "optimizer state 'mean' of 'block.weight' has shape (5, 3), but must be a scalar or have the shape of"
    )
    assert first == f"rank 1: {second}"


@ORIGINAL
def test_ranks_that_have_stepped_a_different_number_of_times(run_ranks, original):
    def change(model, optimizer, given, rank):
        if rank == 1:
            optimizer.state[one_of(model, "block.weight")]["step"] = torch.tensor(8.0)
            return optimizer.state_dict()

    assert set(refused(run_ranks, original, change)) == {
        "optimizer state 'step' of 'block.weight' differs between ranks: rank 0 has a scalar torch.float32 3.0, rank 1 "
        "has a scalar torch.float32 8.0"
    }


@ORIGINAL
def test_a_rank_that_has_not_stepped_a_parameter(run_ranks, original):
    def change(model, optimizer, given, rank):
        if rank == 0:
            optimizer.state.pop(one_of(model, "block.weight"))
            return optimizer.state_dict()

    messages = refused(run_ranks, original, change)
    assert messages[0] == (
        "rank 0 has no optimizer state of 'block.weight', and rank 1 has: all ranks must step the same parameters"
    )
    assert messages == messages[:1] * 2


@ORIGINAL
def test_a_rank_with_other_groups(run_ranks, original):
    def change(model, optimizer, given, rank):
        if rank == 1:
            optimizer.param_groups[0]["own"] = "y"
            return optimizer.state_dict()

    for message in refused(run_ranks, original, change, form=FIRST):
        assert message.startswith("'own' in parameter group 0 of rank 1's optimizer is 'y', of rank 0's ['x', 2.5]")


def test_a_unit_with_state_that_the_first_rank_cannot_get(run_ranks):
    """It is sharded over the same ranks in another order."""
    turned = threading.Barrier(2), {}

    def body(comm):
        inner = shard(Block(), type(comm)(1 - comm.rank, 2, *turned), original=True)
        model = nn.Sequential(inner, nn.Linear(2, 2))
        model = FullyShardedDataParallel(model, process_group=comm, use_orig_params=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        give(model, optimizer, states)
        assert same(save(model, optimizer)["state"], states)
        return save(model, optimizer, FIRST)

    states = whole_states(nn.Sequential(Block(), nn.Linear(2, 2)))
    first, second = raised(run_ranks(2, body), StateDictError)
    assert first == (
        "rank 0 is not the first of the ranks that '0.weight' is sharded over, and cannot get its state alone: use "
        "rank0_only=False, or a sharded state dict"
    )
    assert second == f"rank 0: {first}"


# Replicas


@ORIGINAL
@pytest.mark.parametrize("form", [ALL, FIRST], ids=["all", "rank 0"])
def test_a_pair_of_groups(run_ranks, original, form):
    """Two replicas of two shards that make up no world: nobody knows all four ranks."""
    states = whole_states(Net())
    pairs = {name: [(threading.Barrier(2), {}) for _ in range(2)] for name in ("shard", "replicate")}

    def body(comm):
        replica, part = divmod(comm.rank, 2)
        group = type(comm)(part, 2, *pairs["shard"][replica]), type(comm)(replica, 2, *pairs["replicate"][part])
        return save(*make(group, original, states, sharding_strategy=ShardingStrategy.HYBRID_SHARD), form)

    first, *others = run_ranks(4, body)
    assert same(first["state"], states)
    assert all(same(found, {} if form is FIRST else first) for found in others)


def test_ranks_that_are_not_those_of_the_model():
    model, optimizer = make(None, True, whole_states(Net()))
    assert same(save(model, optimizer, group=FakeCommunicator()), save(model, optimizer))


# Ranks that do not do the same


def test_ranks_that_want_different_kinds_raise(run_ranks):
    def body(comm):
        model, optimizer = make(comm, False, whole_states(Net()))
        return save(model, optimizer, FIRST if comm.rank else ALL)

    for error in run_ranks(2, body):
        assert isinstance(error, DisagreementError)
        assert "rank0_only=True" in str(error)
        assert "rank0_only=False" in str(error)


@ORIGINAL
def test_what_cannot_be_copied_is_an_error_on_all_ranks(run_ranks, original):
    """Not between the collectives of two units, on the rank that shows something."""

    def body(comm):
        states = whole_states(Net())
        if comm.rank == 0:
            states["block.weight"]["lock"] = threading.Lock()
        model, optimizer = make(comm, original, {name: dict(state) for name, state in states.items()})
        return save(model, optimizer, FIRST)

    for message in raised(run_ranks(2, body), StateDictError):
        assert "'lock' of 'block.weight' is a lock, which cannot be copied" in message


@ORIGINAL
def test_a_hyper_parameter_that_cannot_be_copied_is_an_error_on_all_ranks(run_ranks, original):
    """Torch refuses to copy a tensor that was computed from one with a gradient."""

    def body(comm):
        model, optimizer = make(comm, original, {})
        optimizer.param_groups[0]["own"] = torch.ones(1, requires_grad=True) * 2 if comm.rank else torch.tensor([2.0])
        return save(model, optimizer)

    for message in raised(run_ranks(2, body), StateDictError):
        assert "optimizer state 'own' of a parameter group is a Tensor, which cannot be copied" in message


ODD_TENSORS = {
    "meta": (lambda tensor: tensor.to("meta"), "is on the meta device"),
    "sparse": (lambda tensor: tensor.to_sparse(), "is sparse_coo"),
}


@pytest.mark.parametrize("odd", ODD_TENSORS.values(), ids=list(ODD_TENSORS))
@pytest.mark.parametrize("key", ["mean", "step"])
@pytest.mark.parametrize("name", ["block.weight", "loose.bias"], ids=["sharded", "loose"])
@ORIGINAL
def test_a_tensor_without_values_on_one_rank_is_an_error_on_all(run_ranks, original, name, key, odd):
    """Before the ranks that have values wait for it."""
    (make_odd, said), states = odd, whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states)
        if comm.rank:
            state = optimizer.state[one_of(model, name)]
            state[key] = make_odd(state[key])
        return save(model, optimizer)

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second.startswith(f"'{name}/{key}' {said}")
    assert first == f"rank 1: {second}"


@ORIGINAL
def test_a_tensor_without_values_of_no_parameter_is_an_error_on_all_ranks(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, {})
        if comm.rank:
            optimizer.state["history"] = torch.ones(2, device="meta")
        return save(model, optimizer, FIRST)

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second.startswith("'history' is on the meta device")
    assert first == f"rank 1: {second}"


@ORIGINAL
def test_sparse_tensors_in_lists_are_shown_as_they_are(run_ranks, original):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states)
        for state in optimizer.state.values():
            state["masks"] = [torch.eye(2).to_sparse()]
        optimizer.param_groups[0]["mask"] = torch.eye(3).to_sparse()
        return save(model, optimizer)

    for found in run_ranks(2, body):
        assert same([state["masks"] for state in found["state"].values()], [[torch.eye(2).to_sparse()]] * len(states))
        assert same(found["param_groups"][0]["mask"], torch.eye(3).to_sparse())


@ORIGINAL
def test_sparse_tensors_in_lists_that_differ_between_ranks(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, {})
        optimizer.param_groups[0]["masks"] = [torch.eye(2).to_sparse() * comm.rank]
        return save(model, optimizer)

    for message in raised(run_ranks(2, body), StateDictError):
        assert message.startswith("'masks' in parameter group 0 of rank 1's optimizer is [tensor(indices=")


@ORIGINAL
def test_arrays_that_differ_in_what_their_text_does_not_show(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, {})
        array = np.zeros(2000)
        array[1000] = comm.rank
        optimizer.param_groups[0]["table"] = array
        return save(model, optimizer)

    for message in raised(run_ranks(2, body), StateDictError):
        assert message.startswith("'table' in parameter group 0 of rank 1's optimizer is array(")


class Local:
    """Has an enumeration that cannot be pickled, as one is that a function defines."""

    class Mode(enum.IntEnum):
        ONE = 1

    Mode.__qualname__ = "make.<locals>.Mode"


@ORIGINAL
def test_numbers_of_a_class_that_cannot_be_pickled(run_ranks, original):
    states = whole_states(Net())

    def body(comm, everywhere):
        model, optimizer = make(comm, original, states)
        if comm.rank or everywhere:
            optimizer.param_groups[0]["mode"] = Local.Mode.ONE
        return save(model, optimizer)

    for found in run_ranks(2, lambda comm: body(comm, True)):
        assert found["param_groups"][0]["mode"] is Local.Mode.ONE
    for message in raised(run_ranks(2, lambda comm: body(comm, False)), StateDictError):
        assert message.startswith(
            "'mode' in parameter group 0 of rank 1's optimizer is '<make.<locals>.Mode, which cannot be pickled>', of "
            "rank 0's missing"
        )


def test_state_of_a_class_that_cannot_be_pickled_where_a_rank_holds_nothing(run_ranks):
    def body(comm):
        model, optimizer = make(comm, True, whole_states(Net()))
        for param, state in optimizer.state.items():
            if param.numel():  # others are not stepped
                state["mode"] = Local.Mode.ONE
        return save(model, optimizer)

    for message in raised(run_ranks(2, body), StateDictError):
        assert "'mode' of" in message
        assert "<make.<locals>.Mode, which cannot be pickled>, but rank" in message


class OfOneRank:
    """An object of a class that one rank alone can import."""

    here = threading.local()

    def __init__(self, rank):
        self.rank = rank

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _import_and_make, (self.rank,)


def _import_and_make(rank):
    if rank != OfOneRank.here.rank:
        raise ImportError(f"of rank {rank}")
    return OfOneRank(rank)


@ORIGINAL
@pytest.mark.parametrize("where", ["state", "group", "loose"])
def test_what_another_rank_cannot_unpickle_is_an_error_on_all(run_ranks, original, where):
    states = whole_states(Net())

    def body(comm):
        OfOneRank.here.rank = comm.rank
        model, optimizer = make(comm, original, states)
        names = {"state": "block.weight", "loose": "loose.bias"}
        if where == "group":
            optimizer.param_groups[0]["own"] = OfOneRank(comm.rank) if comm.rank else 1
        else:
            optimizer.state[one_of(model, names[where])]["own"] = OfOneRank(comm.rank) if comm.rank else 1
        return save(model, optimizer)

    first, second = raised(run_ranks(2, body), StateDictError)
    assert first == (
        "the optimizer's state or groups of rank 1 cannot be unpickled: ImportError: of rank 1: all "
        "ranks must be able to import the modules that define its classes"
    )
    # The rank itself sees what it has and the other one has not, where that matters.
    assert second == f"rank 0: {first}" if where == "loose" else "'own' " in second


# What is taken from the optimizer and the model itself


@ORIGINAL
@pytest.mark.parametrize("kind", [KINDS.FULL_STATE_DICT, KINDS.SHARDED_STATE_DICT])
def test_form_and_state_dict_are_those_that_are_set_and_held(run_ranks, original, kind):
    states = whole_states(Net())

    def body(comm):
        # Under NO_SHARD tensors are whole in any form: a thread has no ranks for others.
        model, optimizer = make(comm, original, states, sharding_strategy=NO_SHARD)
        FullyShardedDataParallel.set_state_dict_type(model, kind)
        return optim_state_dict(model, optimizer)

    assert all(same(found["state"], states) for found in run_ranks(2, body))


@ORIGINAL
def test_the_form_is_that_which_is_set(run_ranks, original):
    states = whole_states(Net())

    def body(comm):
        model, optimizer = make(comm, original, states)
        config = FullOptimStateDictConfig(rank0_only=True)
        FullyShardedDataParallel.set_state_dict_type(model, KINDS.FULL_STATE_DICT, None, config)
        return optim_state_dict(model, optimizer)

    first, second = run_ranks(2, body)
    assert same(first["state"], states)
    assert second == {}


@ORIGINAL
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, whole_states(Net()))

        def hook(_optimizer):
            if comm.rank == 1:
                raise KeyError("no such file")

        optimizer.register_state_dict_pre_hook(hook)
        return optim_state_dict(model, optimizer, form=ALL)

    first, second = run_ranks(2, body)
    assert type(first) is HpcfsdpError
    assert str(first) == "rank 1: KeyError: 'no such file'"
    assert type(second) is KeyError


@ORIGINAL
def test_units_that_are_set_differently_on_one_rank_are_an_error_on_all(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, whole_states(Net()))
        if comm.rank:
            FullyShardedDataParallel.set_state_dict_type(model.block, KINDS.SHARDED_STATE_DICT)
        return optim_state_dict(model, optimizer)

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second.startswith("units of one model have different state_dict_type settings")
    assert first == f"rank 1: {second}"


@ORIGINAL
def test_state_without_anything_in_it_is_none(run_ranks, original):
    """To look at the state of a parameter gives it an entry."""

    def body(comm):
        model, optimizer = make(comm, original, {})
        if comm.rank:
            for param in model.parameters():
                assert optimizer.state[param] == {}
        return save(model, optimizer)["state"]

    assert run_ranks(2, body) == [{}, {}]


def test_state_that_is_not_sharded_may_differ_with_a_warning(run_ranks, caplog):
    states = whole_states(Net())

    def body(comm):
        own = {name: {**state, "count": comm.rank} if "loose" in name else state for name, state in states.items()}
        return save(*make(comm, False, own))["state"]["loose.weight"]["count"]

    with caplog.at_level(logging.WARNING, "hpcfsdp.optim"):
        assert run_ranks(2, body) == [0, 1]
    [record] = caplog.records
    assert "'loose.bias' on rank 0 and rank 1" in record.getMessage()


@ORIGINAL
def test_names_that_an_optimizer_remembers_are_those_of_the_whole_model(run_ranks, original):
    def body(comm):
        model = shard(Net(), comm, original=original)
        [group] = save(model, torch.optim.SGD(model.named_parameters(), lr=0.1))["param_groups"]
        assert group["param_names"] == group["params"]
        return set(group["params"])

    assert run_ranks(2, body) == [{name for name, _ in Net().named_parameters()}] * 2


@ORIGINAL
def test_a_model_that_is_summoned_has_no_state_dict(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, {})
        with FullyShardedDataParallel.summon_full_params(model):
            return save(model, optimizer)

    for error in run_ranks(2, body):
        assert isinstance(error, EngineError)
        assert "summon_full_params" in str(error)


# Shapes of this rank's state


@pytest.mark.parametrize(
    ("original", "name", "shape"),
    [(False, "a", (12,)), (True, "a", (3,)), (True, "scalar", (1,)), (True, "none", (0,)), (True, "one", (0,))],
)
def test_state_has_one_value_or_one_for_each_element_that_is_stepped(original, name, shape):
    info = make_info(FakeCommunicator(1, 3), original=original)
    check_state_shapes(info, name, {"step": torch.tensor(1.0), "sum": torch.ones(shape), "kind": [1, 2]})
    for wrong in ((shape[0] + 1,), (2, 3), (1, *shape)):
        with pytest.raises(StateDictError) as caught:
            check_state_shapes(info, name, {"step": torch.tensor(1.0), "sum": torch.ones(wrong)})
        assert str(caught.value) == (
            f"optimizer state 'sum' of {name!r} has shape {wrong}, but must be a scalar or have the "
            f"shape of the parameter that the optimizer steps, {shape}"
        )


def test_state_of_a_whole_parameter_may_have_any_shape():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    check_state_shapes(info, "a", {"row": torch.ones(5), "column": torch.ones(3), "more": torch.ones(2, 2, 2)})
    with pytest.raises(StateDictError, match=r"has shape \(5,\), but must be"):
        check_state_shapes(make_info(FakeCommunicator(1, 3), strategy=NO_SHARD), "a", {"row": torch.ones(5)})


# What this rank has of a flat parameter's state


def test_a_flat_parameter_has_one_shard_for_all_of_its_parameters():
    info = make_info(FakeCommunicator(1, 3))
    shard, step = torch.ones(info.layout.shard_numel), torch.tensor(1.0)
    found = FlatParamState.of(info, {"a": {"avg": shard, "step": step, "kind": "mean"}}, {})
    [(kind, parts)] = found.shards.items()
    assert kind == ("avg", torch.float32)
    assert parts.whole_shard
    assert parts.present == [0, 1, 2, 3, 4]
    assert all(tensor.data_ptr() == shard.data_ptr() for tensor in parts.tensors)
    assert found.scalars == {fqn: {"step": step} for fqn in info.param_indices}
    assert found.others == {fqn: {"kind": "mean"} for fqn in info.param_indices}
    assert found.whole == {}


def test_of_what_this_rank_holds_nothing_of_it_has_what_others_have_without_elements():
    info = make_info(FakeCommunicator(1, 3), original=True)
    assert info.is_empty_on("one", 1)
    known = {"one": StateInfo.of({"max": torch.ones(1, dtype=torch.float64), "step": torch.tensor(2.0), "n": 1})}
    found = FlatParamState.of(info, {"one": {"step": torch.tensor(1.0), "n": 5, "old": torch.ones(0)}}, known)
    [(kind, parts)] = found.shards.items()
    assert kind == ("max", torch.float64)
    assert (parts.present, parts.tensors[4].numel()) == ([4], 0)
    assert (found.scalars, found.others) == ({"one": {"step": torch.tensor(2.0)}}, {"one": {"n": 1}})
    assert FlatParamState.of(info, {}, {}) == FlatParamState()


def test_a_whole_parameter_may_have_state_of_other_shapes():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    row = torch.ones(5)
    found = FlatParamState.of(info, {"a": {"row": row, "avg": torch.ones(5, 3)}}, {})
    assert found.whole == {"a": {"row": row}}
    assert [(key, parts.present) for key, parts in found.shards.items()] == [(("avg", torch.float32), [0])]
