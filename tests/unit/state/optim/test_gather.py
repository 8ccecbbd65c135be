import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.state.optim.compare import RankState, StateInfo, allgather_state_info, convert_all_state_info
from hpcfsdp.state.optim.keys import get_param_to_fqns
from hpcfsdp.state.optim.save import _copied, unflatten_param_groups
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.settings import StateDictFormat
from tests.unit.state.optim.examples import (
    NO_SHARD,
    SHAPES,
    Net,
    Odd,
    gathered,
    make_info,
    run_of,
    shard,
    shard_of,
    values_of,
)

FORMS = pytest.mark.parametrize(
    "form", [StateDictFormat(), StateDictFormat(rank0_only=True), StateDictFormat(offload_to_cpu=True)], ids=str
)


@FORMS
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("strategy", [None, NO_SHARD])
def test_the_state_of_a_flat_parameter(run_ranks, size, form, strategy):
    whole = {
        "avg": values_of(SHAPES),
        "big": values_of(SHAPES, torch.float64, 2),
        "seen": values_of(SHAPES, torch.int8),
    }
    step, nested = torch.tensor(3.0, requires_grad=True), {"a": [1]}

    def body(comm):
        info = make_info(comm, strategy=strategy)
        own = {name: shard_of(info, values) for name, values in whole.items()}
        return gathered(info, {"a": {**own, "step": step, "nested": nested, "nothing": None}}, {}, form)

    first, *others = run_ranks(size, body)
    assert list(first) == list(SHAPES)
    for name, state in first.items():
        assert list(state) == ["avg", "big", "seen", "step", "nested", "nothing"]
        expected = {key: values[name] for key, values in whole.items()}
        assert same(state, {**expected, "step": torch.tensor(3.0), "nested": nested, "nothing": None})
    assert all(same(found, {} if form.rank0_only else first) for found in others)
    first["a"]["step"] += 1  # each parameter has its own
    first["a"]["nested"]["a"].append(2)
    assert (first["b"]["step"].item(), step.item(), first["b"]["nested"], nested) == (3.0, 3.0, {"a": [1]}, {"a": [1]})


@FORMS
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_states_of_parameters_that_are_stepped_one_by_one(run_ranks, size, form):
    """Each has state of its own, also of another dtype, or none."""
    whole = {
        "a": {"avg": values_of(SHAPES)["a"], "kind": "mean", "step": torch.tensor(1.0)},
        "scalar": {"avg": values_of(SHAPES, torch.float64)["scalar"], "step": torch.tensor(2)},
        "none": {"avg": values_of(SHAPES)["none"]},
        "one": {"max": values_of(SHAPES)["one"], "key": Odd(3)},
    }

    def body(comm):
        info = make_info(comm, original=True)
        empty = {name for name in SHAPES if info.is_empty_on(name, comm.rank)}
        own = {
            name: {
                key: run_of(info, name, value) if key in ("avg", "max") else value for key, value in whole[name].items()
            }
            for name in whole
            if name not in empty
        }
        message = RankState([], {name: StateInfo.of(state) for name, state in own.items()}, empty)
        return gathered(info, own, convert_all_state_info(allgather_state_info(comm, message)), form)

    first, *others = run_ranks(size, body)
    assert list(first) == list(whole)
    assert list(first["a"]) == ["avg", "step", "kind"]
    assert same(first, whole)
    assert all(same(found, {} if form.rank0_only else first) for found in others)


def test_state_is_that_of_a_rank_which_holds_something_of_the_parameter(run_ranks):
    """No rank compares what the others have, which may be from before their last step."""

    def body(comm):
        info = make_info(comm, {"p": (4,)}, original=True)
        is_empty = info.is_empty_on("p", comm.rank)
        own = {"p": {"step": torch.tensor(1.0 if is_empty else 3.0), "count": 1 if is_empty else 3}}
        message = RankState([], {"p": StateInfo.of(own["p"])}, {"p"} if is_empty else set())
        merged = convert_all_state_info(allgather_state_info(comm, message))
        found = gathered(info, own, merged)["p"]
        return found["step"].item(), found["count"]

    assert run_ranks(3, body) == [(3.0, 3)] * 3


def test_whole_parameters_keep_state_of_any_shape_as_new_memory():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    own = {"a": {"row": torch.ones(5), "cube": torch.ones(2, 2, 2, dtype=torch.int8), "avg": torch.ones(5, 3)}}
    found = gathered(info, own, {"a": StateInfo.of(own["a"])}, StateDictFormat(sharded=True))
    assert same(found, own)
    assert all(value.data_ptr() != own["a"][name].data_ptr() for name, value in found["a"].items())


def test_parameters_without_state_are_left_out():
    info = make_info(original=True)
    states = {"b": {"avg": torch.ones(7)}, "one": {}}
    assert same(gathered(info, states, {"b": StateInfo.of(states["b"])}), {"b": states["b"]})
    assert gathered(info, {}, {}) == {}
    assert gathered(make_info(), {}, {}) == {}


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
    found = _copied(state, StateDictFormat(offload_to_cpu=True))
    assert list(found) == ["avg", "list", "none", "step"]
    assert same(found, {key: value.detach() if key == "avg" else value for key, value in state.items()})
    found["avg"].zero_()
    found["step"].zero_()
    found["list"].clear()
    assert torch.equal(state["avg"], torch.ones(2))
    assert (state["step"], state["list"]) == (torch.tensor(3.0), [1])
