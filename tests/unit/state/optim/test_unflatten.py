import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.state.optim.compare import StateInfo
from hpcfsdp.state.optim.gather import ConsolidatedOptimState
from hpcfsdp.state.optim.keys import get_param_to_fqns
from hpcfsdp.state.optim.unflatten import (
    convert_state_with_flat_params,
    convert_state_with_orig_params,
    copied,
    unflatten_communicated_optim_state,
    unflatten_optim_state,
    unflatten_orig_param_states,
    unflatten_param_groups,
)
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.transfer import StateDictFormat
from tests.unit.state.optim.examples import SHAPES, Net, make_info, run_of, shard, shard_of, values_of

FORMS = pytest.mark.parametrize(
    "form", [StateDictFormat(), StateDictFormat(rank0_only=True, offload_to_cpu=True)], ids=["all", "rank 0"]
)


def whole():
    """The state of each parameter of ``SHAPES``."""
    averages, counts, step = values_of(SHAPES), values_of(SHAPES, torch.uint8), torch.tensor(3.0)
    return {name: {"avg": averages[name], "seen": counts[name], "step": step, "nested": {"a": [1]}} for name in SHAPES}


def as_one(info):
    """This rank's state of the flat parameter, to which all belong."""
    states = whole()
    own = {key: shard_of(info, {name: states[name][key] for name in SHAPES}) for key in ("avg", "seen")}
    return {**own, "step": torch.tensor(3.0), "nested": {"a": [1]}}


def told():
    """What all ranks have said of ``one_by_one``: on each a state is a run, also of a parameter without dimensions."""
    return {
        name: StateInfo.of({key: v.reshape(-1) if key in ("avg", "seen") else v for key, v in state.items()})
        for name, state in whole().items()
    }


def one_by_one(info):
    """This rank's state of each parameter, where it holds something of it."""
    return {
        name: {key: run_of(info, name, value) if key in ("avg", "seen") else value for key, value in state.items()}
        for name, state in whole().items()
        if not info.is_empty_on(name, info.comm.rank)
    }


@FORMS
@pytest.mark.parametrize("size", [1, 3])
def test_a_flat_parameter_becomes_its_parameters(run_ranks, size, form):
    def body(comm):
        info = make_info(comm)
        own = as_one(info)
        found = unflatten_optim_state(info, own, form)
        merged = {"a": StateInfo.of(own)}
        assert same(convert_state_with_flat_params(info, {"a": own}, merged, form), found)
        assert convert_state_with_flat_params(info, {}, {"other": StateInfo()}, form) == {}
        return found

    first, *others = run_ranks(size, body)
    assert list(first) == list(SHAPES)
    assert list(first["a"]) == ["avg", "seen", "step", "nested"]
    assert same(first, whole())
    assert all(same(found, {} if form.rank0_only else first) for found in others)


@FORMS
@pytest.mark.parametrize("size", [1, 3])
def test_parameters_that_are_stepped_one_by_one(run_ranks, size, form):
    def body(comm):
        info = make_info(comm, original=True)
        return convert_state_with_orig_params(info, one_by_one(info), told(), form)

    first, *others = run_ranks(size, body)
    assert same(first, whole())
    assert all(same(found, {} if form.rank0_only else first) for found in others)


def test_parameters_without_state_are_left_out():
    info = make_info(original=True)
    states = {"b": {"avg": torch.ones(7)}, "one": {}}
    merged = {name: StateInfo.of(state) for name, state in states.items()}
    assert same(convert_state_with_orig_params(info, states, merged, StateDictFormat()), {"b": states["b"], "one": {}})
    assert convert_state_with_orig_params(info, {}, {}, StateDictFormat()) == {}


def test_each_parameter_has_a_scalar_of_its_own():
    info = make_info(shapes={"a": (2,), "b": (1,)})
    given = {"step": torch.tensor(1.0), "list": [1]}
    state = ConsolidatedOptimState({"avg": [torch.ones(2), torch.ones(1)]}, {"step": given["step"]}, given)
    state.non_tensor_state = {"list": given["list"]}
    first, second = unflatten_communicated_optim_state(info, state)
    first["step"] += 1
    first["list"].append(2)
    assert second == {"avg": torch.ones(1), "step": torch.tensor(1.0), "list": [1]}
    assert given == {"step": torch.tensor(1.0), "list": [1]}


def test_states_of_single_parameters_are_in_the_order_of_names():
    given = [1]
    state = ConsolidatedOptimState({"sum": ["s"], "avg": ["a"]}, {"z": 1, "b": 2}, {"list": given})
    found = unflatten_orig_param_states({"p": state, "q": ConsolidatedOptimState()})
    assert found == {"p": {"avg": "a", "sum": "s", "b": 2, "z": 1, "list": [1]}, "q": {}}
    assert list(found["p"]) == ["avg", "sum", "b", "z", "list"]
    assert found["p"]["list"] is not given


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("names", [False, True])
def test_groups_go_by_the_names_of_the_model(original, names):
    model = shard(Net(), FakeCommunicator(0, 2), original=original)
    params = dict(model.named_parameters()) if names else dict(enumerate(model.parameters()))
    first, *rest = params
    betas = [0.9, 0.5]
    groups = [{"params": rest, "lr": 0.5, "betas": betas, "own": None}, {"lr": torch.tensor(0.1), "params": [first]}]
    groups.append({"params": []})
    fqns = get_param_to_fqns(model)
    found = unflatten_param_groups(groups, params, fqns)
    assert [group["params"] for group in found] == [
        [fqn for key in rest for fqn in fqns[params[key]]],
        fqns[params[first]],
        [],
    ]
    if not original:
        of_block = [name for name in found[0]["params"] if name.startswith("block.")]
        assert of_block[:2] == ["block.weight", "block.none"]
    hyper = [{key: value for key, value in group.items() if key != "params"} for group in found]
    assert hyper == [{"lr": 0.5, "betas": betas, "own": None}, {"lr": torch.tensor(0.1)}, {}]
    assert found[0]["betas"] is not betas
    assert found[1]["lr"] is not groups[1]["lr"]
    assert groups[0]["params"] is rest


def test_state_that_is_not_sharded_is_copied():
    state = {"step": torch.tensor(3.0), "avg": torch.ones(2, requires_grad=True), "list": [1], "none": None}
    found = copied(state, StateDictFormat(offload_to_cpu=True))
    assert list(found) == ["avg", "list", "none", "step"]
    assert same(found, {key: value.detach() if key == "avg" else value for key, value in state.items()})
    found["avg"].zero_()
    found["step"].zero_()
    found["list"].clear()
    assert torch.equal(state["avg"], torch.ones(2))
    assert (state["step"], state["list"]) == (torch.tensor(3.0), [1])
