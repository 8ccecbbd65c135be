import logging
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, ShardingStrategy, StateDictType

from hpcfsdp.errors import DifferentValuesWarning, DisagreementError, HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.optim import load
from hpcfsdp.state.optim.keys import get_param_to_fqns
from hpcfsdp.state.optim.load import broadcast_state, optim_state_dict_to_load
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.tensors import Rank0Tensor
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.unit.state.optim.examples import (
    NO_SHARD,
    Block,
    Net,
    Uncopyable,
    copied,
    give,
    raised,
    shard,
    values_of,
    whole_states,
)

ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
SIZES = pytest.mark.parametrize("size", [1, 2, 3])
FIRST = pytest.mark.parametrize("first", [False, True], ids=["all have it", "rank 0 has it"])
NAMES = [name for name, _ in Net().named_parameters()]


def whole(states=None, groups=None):
    """A state dict of the whole model; by default with one group of all parameters, in no order of theirs."""
    groups = [{"params": sorted(NAMES), "lr": 0.5, "own": ["x"]}] if groups is None else groups
    return {"state": whole_states(Net()) if states is None else states, "param_groups": groups}


def make(comm, original, model=None, *, groups=None, **options):
    """A sharded model and its optimizer."""
    model = shard(model or Net(), comm, original=original, **options)
    params = list(model.parameters())
    return model, torch.optim.SGD(groups(params) if groups else params, lr=0.1)


def expected_state(model, optimizer, states):
    """What the optimizer is to load, cut by hand."""
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    give(model, own, states)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {number: own.state[param] for number, param in enumerate(params) if param in own.state}


def to_load(model, optimizer, given, **options):
    """Collective. What is loaded; that nothing is changed by it is checked."""
    before = copied(given), copied(optimizer.state_dict())
    try:
        return optim_state_dict_to_load(model, optimizer, given, **options)
    finally:
        assert same((given, optimizer.state_dict()), before)


# What is loaded


@SIZES
@ORIGINAL
@FIRST
@pytest.mark.parametrize("strategy", [None, NO_SHARD], ids=["sharded", "NO_SHARD"])
def test_each_rank_loads_its_part(run_ranks, size, original, first, strategy):
    given = whole()

    def body(comm):
        model, optimizer = make(comm, original, sharding_strategy=strategy)
        found = to_load(model, optimizer, given if comm.rank == 0 or not first else None, rank0_only=first)
        assert same(found["state"], expected_state(model, optimizer, given["state"]))
        assert list(found["state"]) == sorted(found["state"])
        numbers = list(range(len(optimizer.param_groups[0]["params"])))
        own = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}  # what is not given
        assert same(found["param_groups"], [{**own, "params": numbers, "lr": 0.5, "own": ["x"]}])
        optimizer.load_state_dict(found)
        assert optimizer.param_groups[0]["lr"] == 0.5
        for state in found["state"].values():  # new memory
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        return True

    assert run_ranks(size, body) == [True] * size
    assert same(given, whole())


@ORIGINAL
@FIRST
def test_a_pair_of_groups(run_ranks, original, first):
    """Two replicas of two shards that make up no world: nobody knows all four ranks."""
    given = whole()
    pairs = {name: [(threading.Barrier(2), {}) for _ in range(2)] for name in ("shard", "replicate")}

    def body(comm):
        replica, part = divmod(comm.rank, 2)
        group = type(comm)(part, 2, *pairs["shard"][replica]), type(comm)(replica, 2, *pairs["replicate"][part])
        model, optimizer = make(group, original, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        found = to_load(model, optimizer, given if comm.rank == 0 or not first else None, rank0_only=first)
        return same(found["state"], expected_state(model, optimizer, given["state"]))

    assert run_ranks(4, body) == [True] * 4


def check_a_model_around(run_ranks, unit, original, first):
    """Two ranks load the state of a model with a unit in it that has other groups, which `unit` makes on each."""
    states = whole_states(nn.Sequential(Block(), nn.Linear(2, 2)))

    def body(comm):
        model = nn.Sequential(unit(comm), nn.Linear(2, 2))
        model = FullyShardedDataParallel(model, process_group=comm, use_orig_params=original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"state": states} if comm.rank == 0 or not first else None
        found = to_load(model, optimizer, given, rank0_only=first)
        return same(found["state"], expected_state(model, optimizer, states))

    assert run_ranks(2, body) == [True, True]


@ORIGINAL
@FIRST
def test_a_unit_that_is_sharded_over_the_ranks_in_another_order(run_ranks, original, first):
    turned = threading.Barrier(2), {}

    def unit(comm):
        return shard(Block(), type(comm)(1 - comm.rank, 2, *turned), original=original)

    check_a_model_around(run_ranks, unit, original, first)


@FIRST
def test_a_unit_on_one_of_the_ranks(run_ranks, first):
    """Each rank has a unit of its own within the model of all."""
    check_a_model_around(run_ranks, lambda _comm: shard(Block(), original=True), True, first)


@FIRST
def test_whole_parameters_have_state_of_any_shape(run_ranks, first):
    states = whole_states(Net())
    states["block.weight"] = {"row": torch.ones(5), "column": torch.ones(1, 3).double(), "step": torch.tensor(2.0)}

    def body(comm):
        model, optimizer = make(comm, True, sharding_strategy=NO_SHARD)
        given = whole(states) if comm.rank == 0 or not first else None
        found = to_load(model, optimizer, given, rank0_only=first)["state"]
        [weight] = [place for place, name in enumerate(names_of(model)) if name == "block.weight"]
        return found[weight]

    for found in run_ranks(2, body):
        assert same(found, states["block.weight"])


def names_of(model):
    return [clean_fqn(name) for name, _ in model.named_parameters()]


@SIZES
@FIRST
def test_parameters_may_have_state_of_their_own(run_ranks, size, first):
    states = whole_states(Net())
    del states["head.bias"]
    states["embed.weight"] = {"other": values_of({"w": (6, 3)}, torch.bfloat16)["w"], "step": 4}

    def body(comm):
        model, optimizer = make(comm, True)
        given = whole(states) if comm.rank == 0 or not first else None
        found = to_load(model, optimizer, given, rank0_only=first)["state"]
        expected = expected_state(model, optimizer, states)
        place = names_of(model).index("embed.weight")
        run = found.pop(place)
        expected.pop(place)
        assert same(found, expected)
        return run

    runs = run_ranks(size, body)
    assert all(run["step"] == 4 for run in runs)
    assert same(torch.cat([run["other"] for run in runs]).view(6, 3), states["embed.weight"]["other"])


@ORIGINAL
@FIRST
@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan"))], ids=["float", "tensor"])
def test_what_is_no_number_is_the_same_on_all_ranks(run_ranks, original, first, value):
    states = {name: {**state, "rate": value} for name, state in whole_states(Net()).items()}

    def body(comm):
        model, optimizer = make(comm, original)
        given = whole(states) if comm.rank == 0 or not first else None
        found = to_load(model, optimizer, given, rank0_only=first)["state"]
        return [state["rate"] != state["rate"] for state in found.values()]

    for found in run_ranks(2, body):
        assert len(found) > 3
        assert all(found)


@ORIGINAL
@FIRST
def test_values_with_tensors_in_them(run_ranks, original, first):
    """As some optimizers keep a history in a list."""
    states = {
        name: {**state, "list": [torch.ones(2), 3], "dict": {"a": torch.tensor(2.0)}}
        for name, state in whole_states(Net()).items()
    }

    def body(comm):
        model, optimizer = make(comm, original)
        given = whole(states) if comm.rank == 0 or not first else None
        return to_load(model, optimizer, given, rank0_only=first)["state"]

    for found in run_ranks(2, body):
        for state in found.values():
            assert same((state["list"], state["dict"]), ([torch.ones(2), 3], {"a": torch.tensor(2.0)}))


@ORIGINAL
@FIRST
def test_hyper_parameters_that_are_tensors(run_ranks, original, first):
    group = {"params": NAMES, "lr": torch.tensor(0.25), "scales": torch.ones(3), "betas": (torch.tensor(0.5), 0.9)}

    def body(comm):
        model, optimizer = make(comm, original)
        given = whole(groups=[group]) if comm.rank == 0 or not first else None
        [found] = to_load(model, optimizer, given, rank0_only=first)["param_groups"]
        return found

    for found in run_ranks(2, body):
        assert same({key: value for key, value in found.items() if key in group} | {"params": NAMES}, group)
        assert found["scales"].data_ptr() != group["scales"].data_ptr()


@ORIGINAL
@FIRST
def test_optimizers_of_ranks_may_have_parameters_in_another_order(run_ranks, original, first):
    """Those that no unit owns, too, which have other shapes."""
    given = whole()

    def body(comm):
        turn = (lambda params: params[::-1]) if comm.rank % 2 else None
        model, optimizer = make(comm, original, groups=turn)
        found = to_load(model, optimizer, given if comm.rank == 0 or not first else None, rank0_only=first)
        return same(found["state"], expected_state(model, optimizer, given["state"]))

    assert run_ranks(2, body) == [True, True]


# Names


@ORIGINAL
def test_names_may_be_those_of_wrappers_and_of_tied_parameters(run_ranks, original):
    states = whole_states(Net())
    other = {"_fsdp_wrapped_module." + name.replace("block.", "block._orig_mod."): s for name, s in states.items()}
    other["head.weight"] = other.pop("_fsdp_wrapped_module.embed.weight")
    both = {"head.weight": {"step": "that of the first name counts"}, **states}

    def body(comm):
        model, optimizer = make(comm, original)
        expected = expected_state(model, optimizer, states)
        for named in (other, both):
            names = [*named, "block.fixed"]
            found = to_load(model, optimizer, {"state": named, "param_groups": [{"params": names}]})
            assert same(found["state"], expected)
            assert len(found["param_groups"][0]["params"]) == len(optimizer.param_groups[0]["params"])
        return True

    assert run_ranks(2, body) == [True, True]


class Named(torch.optim.SGD):
    """An optimizer with names of its own."""

    def __init__(self, params):
        super().__init__(list(params.values()), lr=0.1)
        self.params = dict(params)


@ORIGINAL
@pytest.mark.parametrize("kind", [Named, lambda params: torch.optim.SGD(params.values(), lr=0.1)])
def test_optimizers_that_go_by_names(run_ranks, original, kind):
    states = whole_states(Net())

    def body(comm):
        model = shard(Net(), comm, original=original)
        params = dict(model.named_parameters())
        optimizer = kind(params)
        found = to_load(model, optimizer, whole(), is_named_optimizer=True)
        assert list(found["param_groups"][0]["params"]) == list(params)
        numbered = expected_state(model, optimizer, states)
        expected = {name: numbered[place] for place, name in enumerate(params) if place in numbered}
        return same(found["state"], expected)

    assert run_ranks(2, body) == [True, True]


INPUTS = {
    "nothing": lambda params: None,
    "list": list,
    "generator": iter,
    "groups": lambda params: [{"params": params[:2]}, {"params": params[2:]}],
    "generator of groups": lambda params: iter([{"params": params[:2]}, {"params": params[2:]}]),
    "groups of generators": lambda params: [{"params": iter(params[:2])}, {"params": iter(params[2:])}],
    "group of one tensor": lambda params: [{"params": params[0]}, {"params": params[1:]}],
}


@ORIGINAL
@pytest.mark.parametrize("form", INPUTS)
def test_what_the_optimizer_was_built_from_is_enough(run_ranks, original, form):
    def body(comm):
        model, optimizer = make(comm, original)
        params, names = list(model.parameters()), get_param_to_fqns(model)
        cut = {"groups": 2, "generator of groups": 2, "groups of generators": 2, "group of one tensor": 1}.get(form)
        parts = [params] if cut is None else [params[:cut], params[cut:]]
        groups = [
            {"params": [n for param in part for n in names[param]], "lr": place} for place, part in enumerate(parts)
        ]
        found = optim_state_dict_to_load(model, None, whole(groups=groups[::-1]), optim_input=INPUTS[form](params))
        assert same(found["state"], expected_state(model, optimizer, whole_states(Net())))
        numbers = iter(range(len(params)))
        expected = [{"params": [next(numbers) for _ in part], "lr": place} for place, part in enumerate(parts)]
        return same(found["param_groups"], expected)

    assert run_ranks(2, body) == [True, True]


@ORIGINAL
def test_groups_are_found_by_their_parameters(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original, groups=lambda p: [{"params": p[2:]}, {"params": p[:2]}, {"params": []}])
        names = get_param_to_fqns(model)
        of_group = [[n for param in group["params"] for n in names[param]] for group in optimizer.param_groups]
        own = [1]
        groups = [
            {"params": of_group[1][::-1], "lr": 1, "own": own},
            {"params": [], "lr": 2},
            {"params": of_group[0], "lr": 0, "initial_lr": None},
        ]
        found = to_load(model, optimizer, whole(groups=groups))["param_groups"]
        assert [group["lr"] for group in found] == [0, 1, 2]
        assert [group["params"] for group in found] == optimizer_numbers(optimizer)
        assert found[0]["initial_lr"] is None
        assert found[1]["own"] == own
        return found[1]["own"] is not own

    assert run_ranks(2, body) == [True, True]


def optimizer_numbers(optimizer):
    return [group["params"] for group in optimizer.state_dict()["param_groups"]]


# Entries of no parameter


@FIRST
def test_entries_that_belong_to_no_parameter(run_ranks, first):
    history, total = [1, 2], torch.arange(3.0)
    states = {"history": history, **whole_states(Net()), "total": total, "step": torch.tensor(3.0)}

    def body(comm):
        model, optimizer = make(comm, True)
        given = {"state": states} if comm.rank == 0 or not first else None
        found = to_load(model, optimizer, given, rank0_only=first)["state"]
        assert found["history"] is not history
        assert found["total"].data_ptr() != total.data_ptr()
        return {key: value for key, value in found.items() if isinstance(key, str)}

    with pytest.warns(UserWarning, match="belongs to no parameter of the model: it is copied") as warned:
        results = run_ranks(1, body)
    assert [str(warning.message).split("'")[1] for warning in warned] == ["history", "total", "step"]
    assert same(results, [{"history": [1, 2], "total": torch.arange(3.0), "step": torch.tensor(3.0)}])


@ORIGINAL
def test_state_without_groups_and_groups_without_state(run_ranks, original):
    def body(comm):
        model, optimizer = make(comm, original)
        found = to_load(model, optimizer, {"state": whole_states(Net())})
        assert list(found) == ["state"]
        assert same(found["state"], expected_state(model, optimizer, whole_states(Net())))
        found = to_load(model, optimizer, whole({}))  # as of an optimizer that has never stepped
        assert found["state"] == {}
        give(model, optimizer, whole_states(Net()))
        with pytest.raises(StateDictError, match=r"no state of '\w+.*, but the optimizer has some"):
            to_load(model, optimizer, whole({}))
        assert to_load(model, optimizer, whole({}), strict=False)["state"] == {}
        return [group["lr"] for group in found["param_groups"]]

    assert run_ranks(2, body) == [[0.5]] * 2


# What is refused


def refused(run_ranks, original, given_of, *, size=2, prepare=None, groups=None, kind=StateDictError, **options):
    """The messages of all ranks when each is given ``given_of(rank)``."""

    def body(comm):
        model, optimizer = make(comm, original, groups=groups)
        if prepare is not None:
            prepare(model, optimizer, comm.rank)
        return to_load(model, optimizer, given_of(comm.rank), **options)

    return raised(run_ranks(size, body), kind)


def changed(change, states=None):
    """A whole state dict after ``change(its states)``."""
    given = whole(states)
    change(given["state"])
    return given


@ORIGINAL
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "an optimizer's state dict is a dict, not a NoneType (None)"),
        ({"state": 3}, "'state' of an optimizer's state dict is a dict, not a int (3)"),
        (
            {},
            "an optimizer's state dict has the key 'state', this one has []: pass what optim_state_dict, or the "
            "state_dict of an optimizer, returned",
        ),
    ],
    ids=["None", "no dict", "no state"],
)
def test_one_rank_has_no_state_dict(run_ranks, original, given, message):
    assert refused(run_ranks, original, lambda rank: given if rank else whole()) == [f"rank 1: {message}", message]
    first = refused(run_ranks, original, lambda rank: whole() if rank else given, rank0_only=True)
    assert first == [message, f"rank 0: {message}"]


@ORIGINAL
@FIRST
def test_names_of_another_model(run_ranks, original, first):
    given = changed(lambda states: states.update({"block.wieght": states.pop("block.weight")}))
    messages = refused(run_ranks, original, lambda rank: given, rank0_only=first)
    assert set(messages) == {
        "the optimizer's state dict holds 'block.wieght', which the model does not have; did you mean 'block.weight'?"
    }


@ORIGINAL
def test_numbers(run_ranks, original):
    [message, _] = refused(run_ranks, original, lambda rank: {"state": {0: {"step": 1}}})
    assert message.startswith(
        "the optimizer's state dict identifies parameters by number (0), not by name: turn numbers"
    )


@ORIGINAL
def test_state_that_is_no_dict(run_ranks, original):
    messages = refused(run_ranks, original, lambda rank: changed(lambda s: s.update({"block.weight": 3})))
    assert set(messages) == {"the state of 'block.weight' is a dict of names and values, not a int"}


@ORIGINAL
@FIRST
def test_a_tensor_of_another_shape(run_ranks, original, first):
    given = changed(lambda states: states["block.weight"].update(mean=torch.ones(3, 5)))
    assert set(refused(run_ranks, original, lambda rank: given, rank0_only=first)) == {
        "state 'mean' of 'block.weight' has shape (3, 5), and the parameter (5, 3): a sharded parameter needs state "
        "with one value for each of its elements"
    }


@FIRST
def test_a_flat_parameter_of_which_a_part_has_state(run_ranks, first):
    given = changed(lambda states: states.pop("block.none"))
    messages = refused(run_ranks, False, lambda rank: given, rank0_only=first)
    assert messages[0].startswith("there is state of 'block.weight' (")
    assert "and none of 'block.none', which share one flat parameter here" in messages[0]
    assert messages == messages[:1] * 2


@ORIGINAL
def test_state_of_a_parameter_that_the_optimizer_does_not_step(run_ranks, original):
    def without_loose(params):
        return [param for param in params if tuple(param.shape) not in ((4, 2), (4,)) or not param.requires_grad]

    given = {"state": whole_states(Net())}
    [message, again] = refused(run_ranks, original, lambda rank: given, groups=without_loose)
    assert message == again
    assert message == (
        "the state dict holds state of 'loose.weight' and 1 other parameter(s), which the optimizer does not step: "
        "leave it out, or add the parameter to the optimizer"
    )


@ORIGINAL
def test_a_parameter_that_would_lose_its_state(run_ranks, original):
    def prepare(model, optimizer, rank):
        give(model, optimizer, whole_states(Net()))

    given = changed(lambda states: states.pop("block.wide"))
    messages = refused(run_ranks, original, lambda rank: given, prepare=prepare)
    assert set(messages) == {
        "the state dict holds no state of 'block.wide', but the optimizer has some (count, kind, mean, nothing, "
        "on, rate, seen, step): this parameter would start without state while the others continue"
    }


@ORIGINAL
def test_a_parameter_without_state_that_has_none_yet(run_ranks, original, caplog):
    given = changed(lambda states: states.pop("block.wide"))

    def body(comm):
        model, optimizer = make(comm, original)
        found = to_load(model, optimizer, given)
        assert same(found["state"], expected_state(model, optimizer, given["state"]))
        give(model, optimizer, given["state"])
        optimizer.state.update({param: None for param in model.parameters() if param not in optimizer.state})
        assert same(to_load(model, optimizer, given), found)  # None is no state either
        give(model, optimizer, whole_states(Net()))
        return same(to_load(model, optimizer, given, strict=False), found)

    with caplog.at_level(logging.INFO, "hpcfsdp.optim"):
        assert run_ranks(2, body) == [True, True]
    message = "the state dict holds no state of 'block.wide': the optimizer will create it at its next step"
    assert message in caplog.messages


def test_frozen_parameters_may_lose_their_state(run_ranks):
    """They are not stepped any more; without state they are as they would be in a new optimizer."""

    def body(comm):
        model, optimizer = make(comm, True)
        give(model, optimizer, {**whole_states(Net()), "block.fixed": {"step": 3}})
        return len(to_load(model, optimizer, whole())["state"])

    assert run_ranks(2, body) == [len(whole_states(Net()))] * 2


@ORIGINAL
def test_groups_of_other_parameters(run_ranks, original):
    groups = [{"params": [name for name in NAMES if not name.startswith("block.")]}, {"params": ["block.weight"]}]
    given = whole(groups=groups)
    messages = refused(run_ranks, original, lambda rank: given)
    assert set(messages) == {
        "parameter group 0 of the optimizer has 9 parameter(s), and no group of the state dict has these; in the "
        "optimizer only: block.fixed, block.none, block.weight and 1 more: build the optimizer with the groups that "
        "were saved"
    }


def test_groups_that_the_optimizer_does_not_have(run_ranks):
    given = whole(groups=[{"params": NAMES}, {"params": ["scale", "block.none"]}])
    assert set(refused(run_ranks, True, lambda rank: given)) == {
        "the state dict has 2 parameter groups, the optimizer 1: there is no group with 'block.none', 'scale'"
    }
    given = whole(groups=[{"params": NAMES}, {"params": []}])
    assert set(refused(run_ranks, True, lambda rank: given)) == {
        "the state dict has 2 parameter groups, the optimizer 1: there is no group with no parameters"
    }


def test_groups_with_names_of_another_model(run_ranks):
    given = whole(groups=[{"params": [*NAMES, "block.wieght"]}])
    assert set(refused(run_ranks, True, lambda rank: given)) == {
        "param_groups holds 'block.wieght', which the model does not have; did you mean 'block.weight'?"
    }


@ORIGINAL
def test_ranks_that_are_given_different_scalars(run_ranks, original):
    def given_of(rank):
        return whole(whole_states(Net(), steps=3 + rank))

    [message, again] = refused(run_ranks, original, given_of)
    assert message == again
    assert "'count' of " in message
    assert message.endswith(" differs between ranks: rank 0 has a int 3, rank 1 has a int 4")


@ORIGINAL
def test_ranks_that_are_given_state_of_different_parameters(run_ranks, original):
    def given_of(rank):
        return changed(lambda states: states.pop("block.wide") if rank else None)

    assert set(refused(run_ranks, original, given_of)) == {
        "rank 1 has no optimizer state of 'block.wide', and rank 0 has: all ranks must step the same parameters"
    }


@ORIGINAL
def test_ranks_that_are_given_different_groups(run_ranks, original):
    def given_of(rank):
        return whole(groups=[{"params": NAMES, "lr": rank}])

    for message in refused(run_ranks, original, given_of):
        assert message.startswith("'lr' in parameter group 0 of rank 1's optimizer is 1, of rank 0's 0 (the group of ")


@ORIGINAL
def test_ranks_that_are_given_tensors_of_different_dtypes(run_ranks, original):
    def given_of(rank):
        return changed(
            lambda s: s["block.wide"].update(mean=s["block.wide"]["mean"].to([torch.float64, torch.float32][rank]))
        )

    assert set(refused(run_ranks, original, given_of)) == {
        "optimizer state 'mean' of 'block.wide' differs between ranks: rank 0 has a tensor torch.float64 Tensor of "
        "shape (3,), rank 1 has a tensor torch.float32 Tensor of shape (3,)"
    }


def test_an_optimizer_and_what_another_one_was_built_from(run_ranks):
    def body(comm):
        model, optimizer = make(comm, True)
        return to_load(model, optimizer, whole(), optim_input=list(model.parameters())[::-1])

    for message in raised(run_ranks(2, body), StateDictError):
        assert message.startswith("optim (9 parameter(s)) was not built from optim_input (9 parameter(s)), or in")


def test_a_model_without_units():
    model = nn.Linear(2, 2)
    with pytest.raises(StateDictError, match=r"^there is no FullyShardedDataParallel in this Linear: wrap the model"):
        optim_state_dict_to_load(model, torch.optim.SGD(model.parameters(), lr=0.1), {"state": {}})


def test_ranks_that_disagree_which_has_the_state_dict_raise(run_ranks):
    def body(comm):
        return to_load(*make(comm, False), whole(), rank0_only=comm.rank == 0)

    for error in run_ranks(2, body):
        assert isinstance(error, DisagreementError)
        assert "rank0_only" in str(error)


@pytest.mark.parametrize("where", ["state", "group"])
def test_what_rank_0_cannot_send_is_an_error_on_all_ranks(run_ranks, where):
    def body(comm):
        given = whole()
        (given["state"]["scale"] if where == "state" else given["param_groups"][0])["call"] = lambda: 3
        return optim_state_dict_to_load(*make(comm, False), given, rank0_only=True)

    for message in raised(run_ranks(2, body), StateDictError):
        assert "'call' of" in message
        assert "cannot be pickled" in message


@FIRST
def test_entries_of_no_parameter_may_hold_tensors(run_ranks, first):
    """An average of the weights that an optimizer keeps, say."""
    entry = {"avg": torch.arange(6.0).view(2, 3), "updates": 3, "small": torch.tensor(2.0)}

    def body(comm):
        given = whole()
        given["state"]["__ema__"] = copied(entry)
        given = given if comm.rank == 0 or not first else None
        return optim_state_dict_to_load(*make(comm, False), given, rank0_only=first)["state"]["__ema__"]

    with pytest.warns(UserWarning, match="__ema__"):
        found = run_ranks(2, body)
    assert same(found, [entry, entry])


@ORIGINAL
def test_what_a_group_lacks_stays_as_it_is(run_ranks, original):
    """As of an optimizer of an older version, which had fewer hyper-parameters."""

    def body(comm):
        model, optimizer = make(comm, original)
        optimizer.param_groups[0]["own"] = None
        [group] = to_load(model, optimizer, whole(groups=[{"params": NAMES, "lr": 3.0}]))["param_groups"]
        return group["lr"], group["momentum"], group["own"]

    assert run_ranks(2, body) == [(3.0, 0, None)] * 2


@ORIGINAL
def test_an_optimizer_that_remembers_names_keeps_its_own(run_ranks, original):
    def body(comm):
        model = shard(Net(), comm, original=original)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        given = whole(groups=[{"params": NAMES, "lr": 3.0, "param_names": NAMES}])
        [group] = to_load(model, optimizer, given)["param_groups"]
        return group["param_names"] == optimizer.param_groups[0]["param_names"]

    assert run_ranks(2, body) == [True, True]


def test_tensors_that_rank_0_sends_whole_are_held_one_unit_at_a_time(run_ranks, monkeypatch):
    """Under NO_SHARD, where each rank loads all of them; what it loads are copies."""
    sent, most = [], []

    def noting(ranks, value, device):
        result = broadcast_state(ranks, value, device)
        if isinstance(value, Rank0Tensor):
            sent.append(weakref.ref(result))
            most.append(sum(tensor() is not None for tensor in sent))
        return result

    monkeypatch.setattr(load, "broadcast_state", noting)
    plain = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6)))
    states = {name: {"mean": torch.zeros(3, 3)} for name, _ in plain.named_parameters()}

    def body(comm):
        model = FullyShardedDataParallel(
            nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(6))),
            process_group=comm,
            sharding_strategy=NO_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"state": states} if comm.rank == 0 else None
        return len(optim_state_dict_to_load(model, optimizer, given, rank0_only=True)["state"])

    assert run_ranks(2, body) == [6, 6]
    assert len(sent) == 12
    assert max(most) <= 4  # of two ranks, that are one process here


@FIRST
@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_values_are_refused(run_ranks, first, kind):
    """As ``torch.load(map_location="meta")`` gives them: no rank finds out when it is too late."""
    value = torch.zeros(5, 3)

    def body(comm):
        given = whole()
        given["state"]["block.weight"]["mean"] = value.to("meta") if kind == "meta" else value.to_sparse()
        given = given if comm.rank == 0 or not first else None
        return optim_state_dict_to_load(*make(comm, False), given, rank0_only=first)

    for message in raised(run_ranks(2, body), StateDictError):
        assert "block.weight/mean" in message


@FIRST
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("given", [(5, 5), (2, 4, 1), ()], ids=str)
def test_state_of_whole_parameters_has_the_shape_that_the_optimizer_knows(run_ranks, first, strict, given):
    """Of a parameter that no unit owns, and of one that is whole on each rank: the next step would fail."""
    states = whole_states(Net())
    message = ": the state belongs to another model or another optimizer"
    for name, shape, strategy in (("loose.weight", (4, 2), None), ("block.weight", (5, 3), NO_SHARD)):
        other = copied(states)
        other[name]["mean"] = torch.ones(given)

        def body(comm, other=other, strategy=strategy):
            model, optimizer = make(comm, True, sharding_strategy=strategy)
            give(model, optimizer, states)
            given = whole(other) if comm.rank == 0 or not first else None
            return to_load(model, optimizer, given, rank0_only=first, strict=strict)

        assert set(raised(run_ranks(2, body), StateDictError)) == {
            f"state 'mean' of {name!r} has shape {given}, and that of the optimizer {shape}{message}"
        }


def test_state_that_is_a_tensor_for_one_and_a_number_for_the_other_is_loaded(run_ranks):
    """As the count of steps of torch's older optimizers."""
    states = copied(whole_states(Net()))
    states["loose.weight"]["step"] = 7

    def body(comm):
        model, optimizer = make(comm, True)
        give(model, optimizer, whole_states(Net()))
        return to_load(model, optimizer, whole(states))["state"][names_of(model).index("loose.weight")]["step"]

    assert run_ranks(2, body) == [7, 7]


@ORIGINAL
@pytest.mark.filterwarnings("ignore:optimizer state 'history' belongs to no parameter")
@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("block.weight", "'call' of 'block.weight'"),
        ("loose.weight", "'call' of 'loose.weight'"),
        ("history", "'call' of 'history'"),
    ],
)
def test_what_one_rank_cannot_copy_is_an_error_on_all_ranks(run_ranks, original, key, what):
    def given_of(rank):
        given = whole()
        names = ["block.weight", "block.wide", "block.none"] if key == "block.weight" else [key]
        for name in names:  # those that may share a flat parameter
            given["state"].setdefault(name, {})["call"] = Uncopyable() if rank else 1
        return given

    def body(comm):
        model, optimizer = make(comm, original)
        return optim_state_dict_to_load(model, optimizer, given_of(comm.rank))

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second == f"optimizer state {what} is a Uncopyable, which cannot be copied: there is one"
    assert first == f"rank 1: {second}"


def test_what_a_group_cannot_copy_is_an_error_on_all_ranks(run_ranks):
    def given_of(rank):
        return whole(groups=[{"params": NAMES, "call": Uncopyable() if rank else 1}])

    def body(comm):
        return optim_state_dict_to_load(*make(comm, True), given_of(comm.rank))

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second == "optimizer state 'call' of a parameter group is a Uncopyable, which cannot be copied: there is one"
    assert first == f"rank 1: {second}"


@FIRST
def test_names_that_have_no_order_are_an_error_on_all_ranks(run_ranks, first):
    def body(comm):
        given = whole()
        given["state"]["loose.weight"][3] = 4
        given = given if comm.rank == 0 or not first else None
        return optim_state_dict_to_load(*make(comm, True), given, rank0_only=first)

    assert [type(error) for error in run_ranks(2, body)] == [TypeError, TypeError]


def test_warnings_that_are_errors_are_raised_on_all_ranks(run_ranks):
    """Of an entry that one rank alone has."""

    def body(comm):
        given = whole()
        if comm.rank:
            given["state"]["history"] = 3
        return optim_state_dict_to_load(*make(comm, False), given)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DifferentValuesWarning)  # threads draw from one generator
        first, second = run_ranks(2, body)
    assert type(first) is HpcfsdpError
    assert str(first) == f"rank 1: UserWarning: {second}"
    assert isinstance(second, UserWarning)


@pytest.mark.parametrize("first", [True, False])
def test_the_settings_of_the_model_decide_which_rank_has_the_state_dict(run_ranks, first):
    def body(comm):
        model, optimizer = make(comm, False)
        config = FullOptimStateDictConfig(rank0_only=first)
        model.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=config)
        given = whole() if comm.rank == 0 or not first else {"state": {}}
        found = to_load(model, optimizer, given, rank0_only=None)
        return same(found["state"], expected_state(model, optimizer, whole()["state"]))

    assert run_ranks(2, body) == [True, True]


def test_settings_that_differ_on_one_rank_are_an_error_on_all_ranks(run_ranks):
    def body(comm):
        model, optimizer = make(comm, False)
        if comm.rank == 1:
            model.set_state_dict_type(model.module.block, StateDictType.SHARDED_STATE_DICT)
        return to_load(model, optimizer, whole(), rank0_only=None)

    first, second = raised(run_ranks(2, body), StateDictError)
    assert second.startswith("units of one model have different state_dict_type settings: ")
    assert first == f"rank 1: {second}"
