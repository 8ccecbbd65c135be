import copy
import warnings

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.optim.keys import (
    OptimStateKey,
    check_known,
    check_missing_keys_on_rank,
    check_numbers,
    get_aliases,
    get_flat_param_to_fqn,
    get_fqn_to_fsdp_param_info,
    get_param_id_to_param_from_optim_input,
    get_param_key_to_param,
    get_param_to_fqns,
    get_param_to_param_id_from_optim_input,
    get_param_to_param_key,
    is_named_optimizer,
    map_param_key_to_optim_keys,
    rekey_optim_state_dict,
    rekey_sharded_optim_state_dict,
    resolve_param_keys,
    sorted_items,
)
from hpcfsdp.state.optim.values import same
from tests.unit.state.optim.examples import NO_SHARD, SHAPES, Block, Net, make_info, shard

SHARDED = ["scale", "embed.weight", "head.bias", "block.weight", "block.none", "block.fixed", "block.wide"]
LOOSE = ["loose.weight", "loose.bias"]


class Keyed(torch.optim.SGD):
    """An optimizer with names as TorchRec's has them: of tensors that need not be parameters."""

    def __init__(self, params):
        super().__init__(list(params.values()), lr=0.1)
        self.params = {**params, "step": 3}


def named(params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch imports there itself
        from torch.distributed.optim import _NamedOptimizer
    return _NamedOptimizer(params, torch.optim.SGD, lr=0.1)


def one_to_one(found, expected):
    """Whether two mappings from or to parameters hold the same objects in the same order."""
    return len(found) == len(expected) and all(
        a is b or (isinstance(a, (int, str)) and a == b)
        for pair in zip(found.items(), expected.items(), strict=True)
        for a, b in zip(*pair, strict=True)
    )


# Flat parameters


def test_items_come_in_the_order_of_their_keys():
    assert list(sorted_items({"step": 1, "exp_avg": 2, "amsgrad": 3})) == [("amsgrad", 3), ("exp_avg", 2), ("step", 1)]
    assert list(sorted_items({})) == []


def test_a_flat_parameter_knows_the_places_and_the_ranks_of_its_parameters():
    info = make_info(FakeCommunicator(1, 3))
    assert info.param_indices == {name: place for place, name in enumerate(SHAPES)}
    assert info.comm is info.mesh.shard
    # Of twelve elements on each rank, those of "a" are 0 to 14; what follows begins at multiples of four.
    empty = {name: {rank for rank in range(3) if info.is_empty_on(name, rank)} for name in SHAPES}
    assert empty == {
        "a": {2},
        "scalar": {0, 2},
        "none": set(),  # of which no rank has anything
        "b": {0},
        "one": {0, 1},
    }


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("strategy", [None, NO_SHARD])
def test_only_original_parameters_that_are_not_sharded_are_stepped_whole(strategy, original):
    info = make_info(FakeCommunicator(0, 2), strategy=strategy, original=original)
    assert info.keeps_shapes is info.shows_whole("a") is (original and strategy is NO_SHARD)


@pytest.mark.parametrize("original", [False, True])
def test_each_sharded_parameter_is_in_a_flat_one_under_its_first_name(original):
    model = shard(Net(), original=original)
    infos = get_fqn_to_fsdp_param_info(model)
    assert list(infos) == SHARDED
    sharded_params = {}
    for name, info in infos.items():
        sharded_params.setdefault(info.flat, []).append(name)
        assert list(info.param_indices).index(name) == info.param_indices[name]
    # Dtypes, and frozen parameters, have flat parameters of their own.
    assert list(sharded_params.values()) == [
        SHARDED[:3],
        ["block.weight", "block.none"],
        ["block.fixed"],
        ["block.wide"],
    ]
    assert len({id(info) for info in infos.values()}) == len(sharded_params)
    assert infos["block.wide"].layout.dtype is torch.float64
    assert all(info.mesh is model._unit.mesh for info in infos.values())


def test_a_unit_within_a_plain_model_has_the_names_of_the_whole_model():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "rest": nn.Sequential(shard(Block()))})
    assert list(get_fqn_to_fsdp_param_info(model)) == [f"rest.0.{n}" for n in ("weight", "none", "fixed", "wide")]
    assert get_fqn_to_fsdp_param_info(nn.Linear(2, 2)) == {}


def test_what_parameters_stand_for():
    model = shard(Net())
    names = list(get_param_to_fqns(model).values())
    assert sorted(names) == sorted([SHARDED[:3], SHARDED[3:5], SHARDED[5:6], SHARDED[6:], LOOSE[:1], LOOSE[1:]])
    assert [*get_param_to_fqns(model)] == [*model.parameters()]
    model = shard(Net(), original=True)
    found = get_param_to_fqns(model)
    assert [*found] == [*model.parameters()]
    assert sorted(found.values()) == sorted([name] for name in SHARDED + LOOSE)
    assert found == get_param_to_fqns(model, get_fqn_to_fsdp_param_info(model))
    plain = Net()
    assert get_param_to_fqns(plain) == {param: [name] for name, param in plain.named_parameters()}


def test_names_of_flat_parameters_themselves():
    model = shard(Net())
    found = get_flat_param_to_fqn(model)
    assert found == {
        param: name.replace("_fsdp_wrapped_module.", "")
        for name, param in model.named_parameters()
        if "loose" not in name
    }
    assert {name.rpartition(".")[0] for name in found.values()} == {"", "block"}
    assert len(found) == 4
    assert get_flat_param_to_fqn(shard(Net(), original=True)) == {}
    assert get_flat_param_to_fqn(Net()) == {}


@pytest.mark.parametrize("wrap", [lambda m: m, shard, lambda m: shard(m, original=True)], ids=["plain", "flat", "orig"])
def test_further_names_of_tied_parameters(wrap):
    model = Net()
    model.loose.also = model.loose.bias
    assert get_aliases(wrap(model)) == {"head.weight": "embed.weight", "loose.also": "loose.bias"}


def test_a_unit_in_two_places_has_the_names_of_both():
    unit = shard(Block())
    model = nn.ModuleDict({"one": unit, "two": unit})
    names = "weight", "none", "fixed", "wide"
    assert list(get_fqn_to_fsdp_param_info(model)) == [f"one.{name}" for name in names]
    found = {other: name for other, name in get_aliases(model).items() if "_flat_param" not in other}
    assert found == {f"two.{name}": f"one.{name}" for name in names}


# What an optimizer was built from


FORMS = {
    "list": lambda params: params,
    "generator": iter,
    "tuple": tuple,
    "groups": lambda params: [{"params": params[:2]}, {"params": params[2:], "lr": 3.0}],
    "generator of groups": lambda params: ({"params": [param]} for param in params),
    "group of a generator": lambda params: [{"params": iter(params)}],
    "group of one tensor": lambda params: [{"params": params[0]}, {"params": tuple(params[1:])}],
    "group without parameters": lambda params: [{"params": params}, {"params": []}],
    "nothing given": lambda params: None,
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_what_an_optimizer_was_built_from(form):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    params = list(model.parameters())
    found = get_param_id_to_param_from_optim_input(model, FORMS[form](params))
    assert one_to_one(found, dict(enumerate(params)))
    turned = get_param_to_param_id_from_optim_input(model, FORMS[form](params))
    assert turned == {param: number for number, param in found.items()}


@pytest.mark.parametrize(
    "given", ["weight", b"weight", torch.ones(3), {"params": []}, 3], ids=lambda g: type(g).__name__
)
def test_what_no_optimizer_is_built_from(given):
    with pytest.raises(TypeError) as caught:
        get_param_id_to_param_from_optim_input(nn.Linear(1, 1), given)
    assert str(caught.value) == f"optim_input must be parameters, or a list of groups, not {type(given).__name__}"


def test_an_input_without_anything():
    with pytest.raises(ValueError, match=r"^optim_input is empty: pass what the optimizer was built from$"):
        get_param_id_to_param_from_optim_input(nn.Linear(1, 1), [])


@pytest.mark.parametrize(
    ("given", "place", "kind"),
    [
        ([{"params": []}, nn.Parameter(torch.ones(1))], 1, "Parameter"),
        ([nn.Parameter(torch.ones(1)), {"params": []}], 0, "Parameter"),
        ([{"params": []}, {"lr": 0.1}], 1, "dict"),
        ([("weight", nn.Parameter(torch.ones(1)))], 0, "tuple"),
    ],
)
def test_inputs_of_which_a_part_is_no_group(given, place, kind):
    with pytest.raises(TypeError) as caught:
        get_param_id_to_param_from_optim_input(nn.Linear(1, 1), given)
    assert str(caught.value) == (
        f"optim_input[{place}] must be a group, a dict with 'params' as all others, not {kind}"
    )


# Keys of an optimizer's parameters


@pytest.mark.parametrize(
    ("state_dict", "named"),
    [
        ({"state": {"a": {}}, "param_groups": [{"params": ["a"]}]}, True),
        ({"state": {0: {}}, "param_groups": [{"params": [0]}]}, False),
        ({"state": {}, "param_groups": [{"params": []}, {"params": ["a"]}]}, True),
        ({"state": {}, "param_groups": [{"params": [0]}]}, False),
        ({"state": {"a": {}}}, True),
        ({"state": {}}, False),
        ({}, False),
        # An entry of no parameter, which the optimizer had before its first step, tells nothing of the others.
        ({"state": {"global_step": 3, 0: {}}, "param_groups": [{"params": [0]}]}, False),
        ({"state": {"global_step": 3}, "param_groups": [{"params": [0]}]}, False),
    ],
)
def test_whether_keys_are_names(state_dict, named):
    assert is_named_optimizer(state_dict) is named


def groups_of(model):
    params = list(model.parameters())
    return [{"params": params[2:]}, {"params": params[:2]}]


@pytest.mark.parametrize("original", [False, True])
def test_keys_are_numbers_in_the_order_of_the_groups(original):
    model = shard(Net(), original=original)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
    found = get_param_key_to_param(optimizer, model)
    params = list(model.parameters())
    assert one_to_one(found, dict(enumerate(params[2:] + params[:2])))
    assert get_param_to_param_key(optimizer) == {param: number for number, param in found.items()}
    assert optimizer.state_dict()["param_groups"][1]["params"] == [found_of(found, param) for param in params[:2]]


def found_of(found, param):
    return next(key for key, value in found.items() if value is param)


@pytest.mark.parametrize("prefix", ["", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("make", [Keyed, named])
def test_keys_are_the_names_that_an_optimizer_was_given(make, prefix):
    model = shard(Net(), original=True)
    names = {param: name.replace("_fsdp_wrapped_module.", prefix) for name, param in model.named_parameters()}
    given = {name: param for param, name in reversed(names.items())}
    optimizer = make(given)
    found = get_param_key_to_param(optimizer, model, is_named_optimizer=True)
    assert one_to_one(found, given)
    assert get_param_to_param_key(optimizer, None, is_named_optimizer=True) == names
    assert set(get_param_key_to_param(optimizer, model)) == set(range(len(given)))


def test_an_optimizer_without_names_takes_those_of_the_model():
    model = shard(Net(), original=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = get_param_key_to_param(optimizer, model, is_named_optimizer=True)
    assert one_to_one(found, dict(model.named_parameters()))


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1)], ids=["no model", "another model"])
def test_a_parameter_without_a_name(model):
    optimizer = Keyed({"a": nn.Parameter(torch.ones(2))})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
    with pytest.raises(StateDictError) as caught:
        get_param_key_to_param(optimizer, model, is_named_optimizer=True)
    assert str(caught.value) == (
        "parameter 1 of the optimizer, of shape (3, 4), has no name in the optimizer or the model: build the "
        "optimizer from model.named_parameters() after wrapping the model"
    )


@pytest.mark.parametrize("form", ["groups", "list", "generator", "group of a generator"])
def test_keys_from_the_optimizer_or_from_what_it_was_built_from(form):
    model = shard(Net(), original=True)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(FORMS[form](params), lr=0.1)
    expected = dict(enumerate(params))
    for chosen in (optimizer, None), (None, FORMS[form](params)), (optimizer, FORMS[form](params)), (None, None):
        assert one_to_one(resolve_param_keys(model, *chosen), expected)
    names = resolve_param_keys(model, optimizer, None, is_named_optimizer=True)
    assert one_to_one(names, dict(model.named_parameters()))


@pytest.mark.parametrize("change", [lambda params: params[::-1], lambda params: params[:-1]], ids=["order", "number"])
def test_an_optimizer_and_what_another_one_was_built_from(change):
    model = shard(Net(), original=True)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    given = change(params)
    with pytest.raises(StateDictError) as caught:
        resolve_param_keys(model, optimizer, given)
    assert str(caught.value) == (
        f"optim ({len(params)} parameter(s)) was not built from optim_input ({len(given)} parameter(s)), or in "
        "another order: pass optim alone"
    )


# Keys that all ranks share


def test_what_all_ranks_call_the_parameters_of_an_optimizer():
    model = shard(Net())
    infos, fqns = get_fqn_to_fsdp_param_info(model), get_param_to_fqns(model)
    params = list(model.parameters())[::-1]
    found = map_param_key_to_optim_keys(dict(enumerate(params)), fqns, infos)
    assert list(found.values()) == list(range(len(params)))
    assert list(found) == [
        OptimStateKey(tuple(fqns[param]), not fqns[param][0].startswith("loose")) for param in params
    ]
    assert OptimStateKey(tuple(SHARDED[:3]), True) in found
    assert OptimStateKey(("loose.bias",), False) in found
    named = map_param_key_to_optim_keys({"x": params[0], "y": params[1]}, fqns, infos)
    assert list(named.values()) == ["x", "y"]


@pytest.mark.parametrize("key", [0, "a.weight"])
def test_a_parameter_that_the_model_does_not_have(key):
    module = nn.Linear(2, 3)
    before = module.weight
    model = FullyShardedDataParallel(module, process_group=FakeCommunicator())
    with pytest.raises(StateDictError) as caught:
        map_param_key_to_optim_keys({key: before}, get_param_to_fqns(model), get_fqn_to_fsdp_param_info(model))
    assert str(caught.value) == (
        f"parameter {key!r} of the optimizer, of shape (3, 2), does not belong to the model: build the optimizer from "
        "model.parameters() after wrapping the model"
    )


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (["a", "b", "c", "d"], None),
        (["a", "c"], "rank 3 has no optimizer state of 'b', and rank 1 has: all ranks must step the same parameters"),
        (
            [],
            "rank 3 has no optimizer state of 'a' and 2 other parameter(s), and rank 0 has: all ranks must step the "
            "same parameters",
        ),
    ],
)
def test_a_rank_that_lacks_what_others_have(present, message):
    expected = {"a": 0, "b": 1, "c": 0}
    if message is None:
        check_missing_keys_on_rank(3, present, expected)
        return
    with pytest.raises(StateDictError) as caught:
        check_missing_keys_on_rank(3, iter(present), expected)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.0.weight"], None),
        ([], None),
        (["layer.0.weight"], "holds 'layer.0.weight', which the model does not have; did you mean 'layers.0.weight'?"),
        (["zzz", "yyy", "layers.0.bias"], "holds 'zzz' and 1 other name(s), which the model does not have"),
        ([7, "zzz"], "holds 7 and 1 other name(s), which the model does not have"),
        (
            ["layers.0.weight", 7, 8],
            "identifies parameters by number (7), not by name: turn numbers into names with FullyShardedDataParallel."
            "rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model, optim=optim)",
        ),
    ],
)
def test_names_that_the_model_does_not_have(names, message):
    known = iter(["layers.0.weight", "layers.0.bias"])
    if message is None:
        check_known(names, known, "the state dict")
        return
    with pytest.raises(StateDictError) as caught:
        check_known(iter(names), known, "the state dict")
    assert str(caught.value) == f"the state dict {message}"


NAME, ID = OptimStateKeyType.PARAM_NAME, OptimStateKeyType.PARAM_ID


def small():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def stepped(model, groups, momentum=0.9):
    """An optimizer of some groups, given as names of parameters, after one step; some have state."""
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(
        [{"params": [params[name] for name in names], "tag": place} for place, names in enumerate(groups)],
        lr=0.1,
        momentum=momentum,
    )
    for place, param in enumerate(params.values()):
        param.grad = torch.full_like(param, place + 1)
    optimizer.step()
    return optimizer


def test_numbers_become_names_and_names_numbers():
    model = small()
    optimizer = stepped(model, [["1.bias", "0.weight"], ["0.bias"]])
    given = optimizer.state_dict()
    before = copy.deepcopy(given)
    named = rekey_optim_state_dict(given, NAME, model, optim=optimizer)
    assert list(named["state"]) == ["1.bias", "0.weight", "0.bias"]
    assert [group["params"] for group in named["param_groups"]] == [["1.bias", "0.weight"], ["0.bias"]]
    assert [group["tag"] for group in named["param_groups"]] == [0, 1]
    assert named["state"]["0.bias"] is given["state"][2]  # nothing is copied
    assert same(rekey_optim_state_dict(named, ID, model, optim=optimizer), before)
    assert same(given, before)
    assert named["param_groups"][0] is not given["param_groups"][0]


def test_groups_and_parameters_come_in_the_order_of_the_optimizer():
    """By it alone ``Optimizer.load_state_dict`` goes."""
    model, other = small(), small()
    named = rekey_optim_state_dict(
        (one := stepped(model, [["1.bias", "0.weight"], ["0.bias", "1.weight"]])).state_dict(), NAME, model, optim=one
    )
    two = stepped(other, [["1.weight", "0.bias"], ["0.weight", "1.bias"]])
    numbered = rekey_optim_state_dict(named, ID, other, optim=two)
    assert [(group["params"], group["tag"]) for group in numbered["param_groups"]] == [([0, 1], 1), ([2, 3], 0)]
    two.load_state_dict(numbered)
    for name, param in other.named_parameters():
        expected = one.state[dict(model.named_parameters())[name]]
        assert same(two.state[param], expected)
    assert [group["tag"] for group in two.param_groups] == [1, 0]


@pytest.mark.parametrize("key_type", [NAME, ID])
def test_keys_that_are_of_that_kind_already(key_type):
    model = small()
    optimizer = stepped(model, [["0.weight"]])
    given = optimizer.state_dict()
    if key_type is NAME:
        given = rekey_optim_state_dict(given, NAME, model, optim=optimizer)
    assert rekey_optim_state_dict(given, key_type, model, optim=optimizer) is given
    nothing = {"state": {}, "param_groups": []}
    assert rekey_optim_state_dict(nothing, key_type, model) is nothing


@pytest.mark.parametrize(
    "form", [lambda params: None, list, iter, lambda params: [{"params": params[:1]}, {"params": params[1:]}]]
)
def test_what_the_optimizer_was_built_from_is_enough(form):
    model = small()
    optimizer = stepped(model, [["0.weight", "0.bias", "1.weight", "1.bias"]])
    named = rekey_optim_state_dict(optimizer.state_dict(), NAME, model, form(list(model.parameters())))
    assert list(named["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    again = rekey_optim_state_dict(named, ID, model, form(list(model.parameters())))
    assert same(again, optimizer.state_dict())


def test_without_groups_there_are_none():
    model = small()
    named = rekey_optim_state_dict({"state": {1: {"step": 3}}}, NAME, model)
    assert named == {"state": {"0.bias": {"step": 3}}}
    assert rekey_optim_state_dict(named, ID, model) == {"state": {1: {"step": 3}}}


def test_groups_without_parameters_stay_where_they_are():
    model = small()
    groups = [{"params": [], "lr": 1}, {"params": [3, 1], "lr": 2}]
    named = rekey_optim_state_dict({"state": {}, "param_groups": groups}, NAME, model)
    assert named["param_groups"] == [{"params": [], "lr": 1}, {"params": ["1.bias", "0.bias"], "lr": 2}]
    numbered = rekey_optim_state_dict(named, ID, model)
    assert numbered["param_groups"] == [{"params": [], "lr": 1}, {"params": [1, 3], "lr": 2}]


@pytest.mark.parametrize(
    "wrap", [lambda model: model, lambda model: shard(model, original=True)], ids=["plain", "orig"]
)
def test_tied_parameters_are_known_by_each_of_their_names(wrap):
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = list(range(len(list(model.parameters()))))
    given = {"state": {number: {"step": number} for number in numbers}, "param_groups": [{"params": numbers}]}
    named = rekey_optim_state_dict(given, NAME, model, optim=optimizer)
    names = list(named["state"])
    assert names == named["param_groups"][0]["params"]
    assert set(names) == {name for name, _ in Net().named_parameters()}
    other = {name.replace("embed.weight", "head.weight"): state for name, state in named["state"].items()}
    assert set(other) != set(names)
    groups = [{"params": list(other)}]
    assert rekey_optim_state_dict({"state": other, "param_groups": groups}, ID, model, optim=optimizer) == given


def twins():
    """Two modules with one weight."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("names", [["0.weight", "1.weight"], ["1.weight", "0.weight"]], ids=str)
def test_each_name_of_tied_parameters_at_once_is_one_number(names):
    """As a state dict has them of a model in which they were not tied; the state of the first name counts."""
    model = twins()
    optimizer = stepped(model, [["0.weight", "2.weight"]])
    named = rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=optimizer)
    first, other = named["state"]["0.weight"], {"momentum_buffer": torch.zeros(2, 2)}
    state = {name: first if name == "0.weight" else other for name in names}
    [group] = named["param_groups"]
    group = {**group, "params": [*names, "2.weight"], "param_names": [*names, "2.weight"]}
    given = {"state": {**state, "2.weight": named["state"]["2.weight"]}, "param_groups": [group]}
    numbered = rekey_optim_state_dict(given, ID, model, optim=optimizer)
    assert numbered["param_groups"][0]["params"] == [0, 1]
    assert numbered["param_groups"][0]["param_names"] == ["0.weight", "2.weight"]
    assert numbered["state"][0] is first
    assert list(numbered["state"]) == [0, 1]
    optimizer.load_state_dict(numbered)


def test_names_of_tied_parameters_in_two_groups_are_refused():
    groups = [{"params": ["0.weight"]}, {"params": ["2.weight", "1.weight"]}]
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict({"state": {}, "param_groups": groups}, ID, twins())
    assert str(caught.value) == (
        "'0.weight', or another parameter that is tied to it, is in the parameter groups 0 and 1 of the state dict: "
        "leave it in one"
    )


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
partitions = st.tuples(st.permutations(NAMES), st.sets(st.integers(1, 3)), st.integers(0, 1)).map(
    lambda drawn: [
        list(drawn[0][begin:end])
        for begin, end in zip([drawn[2], *sorted(drawn[1])], [*sorted(drawn[1]), 4], strict=True)
        if begin < end
    ]
)


@given(partitions, partitions)
@settings(deadline=None)
def test_there_and_back_is_the_identity(groups, others):
    """Also when another optimizer, of the same groups in another order, has had it in between."""
    model = small()
    optimizer = stepped(model, groups)
    named = rekey_optim_state_dict(optimizer.state_dict(), NAME, model, optim=optimizer)
    assert same(rekey_optim_state_dict(named, ID, model, optim=optimizer), optimizer.state_dict())
    order = [name for group in others for name in group]
    turned = [sorted(group, key=lambda name: order.index(name) if name in order else -1) for group in groups]
    turned.sort(key=lambda group: order.index(group[0]) if group[0] in order else -1)
    second_model = small()
    second = stepped(second_model, turned, momentum=0.5)
    second.load_state_dict(rekey_optim_state_dict(named, ID, second_model, optim=second))
    again = rekey_optim_state_dict(second.state_dict(), NAME, second_model, optim=second)
    assert again["state"].keys() == named["state"].keys()
    assert same({name: again["state"][name] for name in named["state"]}, named["state"])

    def in_order(groups):
        return sorted(({**group, "params": sorted(group["params"])} for group in groups), key=lambda g: g["params"])

    assert same(in_order(again["param_groups"]), in_order(named["param_groups"]))


@pytest.mark.parametrize("key_type", [None, "param_name", 1])
def test_no_kind_of_keys(key_type):
    with pytest.raises(TypeError) as caught:
        rekey_optim_state_dict({"state": {}}, key_type, small())
    assert str(caught.value) == f"optim_state_key_type must be an OptimStateKeyType, not {key_type!r}"


@pytest.mark.parametrize("key_type", [NAME, ID])
@pytest.mark.parametrize(
    ("state", "params", "kinds"),
    [
        ({0: {}, "1.bias": {}}, [0], ["int", "str"]),
        ({0: {}}, ["0.weight"], ["int", "str"]),
        ({(0, 1): {}}, [], ["tuple"]),
        ({True: {}}, [], ["bool"]),
    ],
)
def test_keys_of_several_kinds(key_type, state, params, kinds):
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict({"state": state, "param_groups": [{"params": params}]}, key_type, small())
    assert str(caught.value) == (f"the keys of the state dict are {kinds}: pass all names or all numbers")


@pytest.mark.parametrize("given", [{"state": {4: {}}}, {"state": {}, "param_groups": [{"params": [4, 5]}]}])
def test_a_number_that_the_optimizer_does_not_have(given):
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict(given, NAME, small())
    message = (
        "the state dict holds parameter 4, but the optimizer has only 4 parameter(s): pass the model and the "
        "optimizer that the state dict is of"
    )
    assert str(caught.value) == message
    check_numbers([0, 3], dict(enumerate("abcd")))
    check_numbers([], {})
    with pytest.raises(StateDictError) as caught:
        check_numbers([0, 4, 5], dict(enumerate("abcd")))
    assert str(caught.value) == message


def test_a_name_that_the_model_does_not_have():
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict({"state": {"0.weight": {}, "0.wieght": {}}}, ID, small())
    assert str(caught.value) == (
        "the state dict holds '0.wieght', which the model does not have; did you mean '0.weight'?"
    )


def test_a_name_of_a_parameter_that_the_optimizer_does_not_step():
    model = small()
    optimizer = stepped(model, [["0.weight"]])
    with pytest.raises(StateDictError, match=r"'1\.bias'.*optimizer"):
        rekey_optim_state_dict({"state": {"1.bias": {}}}, ID, model, optim=optimizer)


def test_an_optimizer_of_another_model():
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict({"state": {0: {}}}, NAME, small(), optim=stepped(small(), [["0.weight"]]))
    assert str(caught.value) == (
        "parameter 0 of the optimizer, of shape (3, 2), does not belong to the model: "
        "pass the model whose parameters it steps"
    )


def test_a_flat_parameter_that_stands_for_several():
    model = shard(Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateDictError) as caught:
        rekey_optim_state_dict({"state": {0: {}}}, NAME, model, optim=optimizer)
    assert str(caught.value) == (
        "parameter 0 of the optimizer is a flat parameter that stands for 'weight', 'none' and others: names "
        "match numbers only in a plain model, or with use_orig_params=True"
    )


def test_state_by_the_keys_of_this_rank_in_its_order():
    a, b, c = (OptimStateKey((name,), True) for name in "abc")
    found = rekey_sharded_optim_state_dict({"c": {"step": 3}, "a": {"step": 1}}, {b: 0, a: "x", c: 1})
    assert list(found.items()) == [("x", {"step": 1}), (1, {"step": 3})]


def test_groups_of_other_parameters_than_the_optimizer_has_are_refused():
    """``load_state_dict`` goes by position: state would come to other parameters, of the same shape perhaps."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
    params = list(model.parameters())
    saved = torch.optim.SGD([{"params": params[::2]}, {"params": params[1::2]}], lr=0.1)
    named = rekey_optim_state_dict(saved.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=saved)
    other = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    with pytest.raises(StateDictError, match=r"'1\.weight' is in parameter group 0 of the optimizer, but not"):
        rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim=other)
    with pytest.raises(StateDictError, match="the state dict has 2 parameter groups, and the optimizer 1"):
        rekey_optim_state_dict(
            named, OptimStateKeyType.PARAM_ID, model, optim=torch.optim.SGD(model.parameters(), lr=0.1)
        )


def test_names_that_an_optimizer_remembers_come_in_its_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = torch.optim.SGD(list(model.named_parameters())[::-1], lr=0.1)
    named = rekey_optim_state_dict(saved.state_dict(), OptimStateKeyType.PARAM_NAME, model, optim=saved)
    [group] = named["param_groups"]
    assert group["param_names"] == group["params"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    other = torch.optim.SGD(model.named_parameters(), lr=0.1)
    [group] = rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, model, optim=other)["param_groups"]
    assert group["params"] == [0, 1, 2, 3]
    assert group["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
