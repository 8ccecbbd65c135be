import pytest
import torch
from hypothesis import strategies as st

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.compare import (
    RankState,
    StateInfo,
    allgather_state_info,
    convert_all_state_info,
)
from hpcfsdp.state.optim.gather import (
    allgather_orig_param_states,
    check_state_shapes,
    communicate_optim_state,
    gather_all_orig_param_state,
)
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.transfer import StateDictFormat
from tests.unit.state.optim.examples import NO_SHARD, SHAPES, Odd, make_info, run_of, shard_of, values_of

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(width=16), st.text("ab", max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)


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
            f"optimizer state 'sum' of {name!r} has shape {wrong}, neither a scalar nor that of what the optimizer "
            f"steps, {shape}: it cannot be told which part of it belongs to which element"
        )


def test_state_of_a_whole_parameter_may_have_any_shape():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    check_state_shapes(info, "a", {"row": torch.ones(5), "column": torch.ones(3), "more": torch.ones(2, 2, 2)})
    with pytest.raises(StateDictError, match=r"has shape \(5,\), neither"):
        check_state_shapes(make_info(FakeCommunicator(1, 3), strategy=NO_SHARD), "a", {"row": torch.ones(5)})


# Tensors


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

    def body(comm):
        info = make_info(comm, strategy=strategy)
        own = {name: shard_of(info, values) for name, values in whole.items()}
        own.update(step=torch.tensor(3.0, requires_grad=True), kind="mean", nothing=None)
        found = communicate_optim_state(info, own, form)
        assert found.zero_dim_tensor_state["step"] is not own["step"]
        return found, form.is_shown_by(info.mesh)

    results = run_ranks(size, body)
    for found, is_shown in results:
        assert list(found.tensor_state) == ["avg", "big", "seen"]
        for name, values in whole.items():
            for got, expected in zip(found.tensor_state[name], values.values(), strict=True):
                if is_shown:
                    assert got.dtype is expected.dtype
                    assert got.shape == expected.shape
                    assert torch.equal(got, expected)
                else:
                    assert got is None
        assert found.zero_dim_tensor_state == {"step": torch.tensor(3.0)}
        assert found.non_tensor_state == {"kind": "mean", "nothing": None}
    assert sum(is_shown for _, is_shown in results) == (1 if form.rank0_only else size)


@FORMS
@pytest.mark.parametrize("size", [1, 3])
def test_one_state_of_some_parameters(run_ranks, size, form):
    values, chosen = values_of(SHAPES, torch.float64), ["b", "none", "scalar"]

    def body(comm):
        info = make_info(comm, original=True)
        states = {name: {"avg": run_of(info, name, values[name])} for name in chosen}
        states = {name: state for name, state in states.items() if state["avg"].numel()}  # others may be lacking
        return allgather_orig_param_states(info, chosen, "avg", torch.float64, states, form), comm.rank

    for found, rank in run_ranks(size, body):
        assert list(found) == ["scalar", "none", "b"]
        for name, got in found.items():
            if form.rank0_only and rank:
                assert got is None
            else:
                assert same(got, values[name])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_states_of_parameters_that_are_stepped_one_by_one(run_ranks, size):
    """Each has state of its own, also of another dtype, or none."""
    whole = {
        "a": {"avg": values_of(SHAPES)["a"], "step": torch.tensor(1.0), "kind": "mean"},
        "scalar": {"avg": values_of(SHAPES, torch.float64)["scalar"], "step": torch.tensor(2)},
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
        told = RankState([], {name: StateInfo.of(state) for name, state in own.items()}, empty)
        merged = convert_all_state_info(allgather_state_info(comm, told.packed()))
        found = gather_all_orig_param_state(info, own, merged, StateDictFormat())
        return {
            name: {**state.tensor_state, **state.zero_dim_tensor_state, **state.non_tensor_state}
            for name, state in found.items()
        }

    for found in run_ranks(size, body):
        assert list(found) == list(whole)
        for name, state in whole.items():
            expected = {key: [value] if key in ("avg", "max") else value for key, value in state.items()}
            assert same(found[name], expected)


def test_state_is_that_of_a_rank_which_holds_something_of_the_parameter(run_ranks):
    """Nobody compares what the others have, which may be from before their last step."""

    def body(comm):
        info = make_info(comm, {"p": (4,)}, original=True)
        is_empty = info.is_empty_on("p", comm.rank)
        own = {"p": {"step": torch.tensor(1.0 if is_empty else 3.0), "count": 1 if is_empty else 3}}
        told = RankState([], {"p": StateInfo.of(own["p"])}, {"p"} if is_empty else set())
        merged = convert_all_state_info(allgather_state_info(comm, told.packed()))
        found = gather_all_orig_param_state(info, own, merged, StateDictFormat())["p"]
        return found.zero_dim_tensor_state["step"].item(), found.non_tensor_state["count"]

    assert run_ranks(3, body) == [(3.0, 3)] * 3


def test_whole_parameters_keep_state_of_any_shape_as_new_memory():
    info = make_info(FakeCommunicator(1, 3), original=True, strategy=NO_SHARD)
    own = {"a": {"row": torch.ones(5), "cube": torch.ones(2, 2, 2, dtype=torch.int8), "avg": torch.ones(5, 3)}}
    merged = {"a": StateInfo.of(own["a"])}
    found = gather_all_orig_param_state(info, own, merged, StateDictFormat(sharded=True))["a"].tensor_state
    assert same(found, {name: [value] for name, value in own["a"].items()})
    assert all(value.data_ptr() != own["a"][name].data_ptr() for name, [value] in found.items())
