import warnings

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.optim.keys import (
    OptimStateKey,
    check_known,
    check_missing_keys_on_rank,
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
    resolve_param_keys,
    sorted_items,
)
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
        f"optim_input[{place}] must be a group, a dict with the key 'params', like all others, not {kind}"
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
    for given in (optimizer, None), (None, FORMS[form](params)), (optimizer, FORMS[form](params)), (None, None):
        assert one_to_one(resolve_param_keys(model, *given), expected)
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
