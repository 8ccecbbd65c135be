import copy

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.keys import OptimStateKey
from hpcfsdp.state.optim.rekey import check_numbers, rekey_optim_state_dict, rekey_sharded_optim_state_dict
from hpcfsdp.state.optim.values import same
from tests.unit.state.optim.examples import Block, Net, shard

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
    assert str(caught.value) == (
        f"the keys of the state dict are {kinds}: they must be either all names or all numbers"
    )


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
