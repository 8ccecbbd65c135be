import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.compare import (
    RankState,
    StateInfo,
    allgather_state_info,
    convert_all_state_info,
    same,
)
from hpcfsdp.state.optim.load import flatten_optim_state
from hpcfsdp.state.optim.load_plan import (
    StatePlan,
    elementwise_names,
    flatten_non_tensor_optim_state,
    flatten_zero_dim_tensor_optim_state,
    plan_flat_state,
    plan_orig_state,
)
from hpcfsdp.state.tensors import Rank0Tensor, TensorInfo
from tests.unit.state.optim.examples import (
    NO_SHARD,
    SHAPES,
    Incomparable,
    Odd,
    Uncopyable,
    gathered,
    make_info,
    run_of,
    shard_of,
    values_of,
)

NAN = float("nan")
TWO = {"p.w": (2, 3), "p.b": (3,)}


def states_of(shapes=TWO, **others):
    """State of each parameter: a value for each element, and `others`."""
    values = values_of(shapes)
    return {name: {"avg": values[name], **others} for name in shapes}


def flat_plan(states, shapes=TWO):
    return plan_flat_state(make_info(FakeCommunicator(0, 2), shapes), states, elementwise_names(states, shapes))


# What has a value for each element


@pytest.mark.parametrize(
    ("states", "names"),
    [
        ({"a": {"avg": torch.ones(5, 3), "step": torch.tensor(1.0)}}, {"avg"}),
        ({"a": {"avg": Rank0Tensor(torch.Size((5, 3)), torch.float32)}}, {"avg"}),
        ({"scalar": {"avg": torch.tensor(1.0), "step": torch.tensor(1.0)}}, {"avg"}),
        ({"scalar": {"avg": torch.tensor(1.0), "step": torch.tensor(1.0), "mu": torch.tensor(1.0)}}, {"avg"}),
        ({"scalar": {"total": torch.tensor(1.0)}, "a": {"total": torch.tensor(1.0)}}, set()),
        ({"scalar": {"total": torch.tensor(1.0)}, "a": {"total": torch.ones(5, 3)}}, {"total"}),
        ({"elsewhere": {"total": torch.ones(5, 3)}}, {"total"}),
        ({"a": "no dict", "scalar": None}, set()),
        ({}, set()),
    ],
)
def test_which_states_have_a_value_for_each_element(states, names):
    assert elementwise_names(states, SHAPES) == names


# What a flat parameter will have


def test_the_plan_of_a_flat_parameter():
    count = [1, 2]
    states = states_of(step=torch.tensor(3.0), rate=NAN, kind="mean", nothing=None, on=True, count=count, odd=Odd(1))
    plan = flat_plan(states)
    assert list(plan.tensors) == ["avg"]
    assert [value is states[name]["avg"] for name, value in zip(TWO, plan.tensors["avg"], strict=True)] == [True, True]
    expected = {"step": torch.tensor(3.0), "rate": NAN, "kind": "mean", "nothing": None, "on": True}
    assert same(plan.others, {**dict(sorted(expected.items())), "count": [1, 2], "odd": Odd(1)})
    assert plan.others["count"] is not count
    assert plan.others["step"] is not states["p.w"]["step"]


@pytest.mark.parametrize("states", [{}, {"p.w": {}, "p.b": {}}, {"other": {"avg": torch.ones(1)}}])
def test_a_flat_parameter_without_state(states):
    assert flat_plan(states) is None


def test_parameters_without_dimensions_and_without_elements_have_a_plan():
    states = states_of(SHAPES, step=torch.tensor(1.0))
    plan = flat_plan(states, SHAPES)
    assert [tuple(value.shape) for value in plan.tensors["avg"]] == list(SHAPES.values())
    assert list(plan.others) == ["step"]
    alone = flat_plan(states_of({"s": ()}, step=torch.tensor(1.0)), {"s": ()})
    assert (list(alone.tensors), list(alone.others)) == (["avg"], ["step"])


SHARE = "which share one flat parameter here"
MEND = "wrap them in different units, or pass use_orig_params=True"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("p.b"),
            f"there is state of 'p.w' (avg, kind, step) and none of 'p.b', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.w"].clear(),
            f"there is state of 'p.b' (avg, kind, step) and none of 'p.w', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].pop("step"),
            f"there is state 'step' of 'p.w' and none of 'p.b', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].update(extra=1),
            f"there is state 'extra' of 'p.b' and none of 'p.w', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].update(step=torch.tensor(4.0)),
            f"state 'step' is 3.0 (torch.float32) for 'p.w' and 4.0 (torch.float32) for 'p.b', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].update(step=torch.tensor(3)),
            f"state 'step' is 3.0 (torch.float32) for 'p.w' and 3 (torch.int64) for 'p.b', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].update(kind="max"),
            f"state 'kind' is 'mean' for 'p.w' and 'max' for 'p.b', {SHARE}: {MEND}",
        ),
        (
            lambda s: s["p.b"].update(step=3.0),
            f"state 'step' of 'p.w' is a torch.float32 tensor of shape (), of 'p.b' a float (3.0), {SHARE}",
        ),
        (
            lambda s: s["p.b"].update(avg=torch.tensor(3.0)),
            f"state 'avg' of 'p.w' is a torch.float32 tensor of shape (2, 3), of 'p.b' a torch.float32 tensor of shape "
            f"(), {SHARE}",
        ),
        (
            lambda s: s["p.b"].update(avg=torch.ones(3, dtype=torch.float64)),
            f"state 'avg' of 'p.w' is a torch.float32 tensor of shape (2, 3), of 'p.b' a torch.float64 tensor of shape "
            f"(3,), {SHARE}",
        ),
        (
            lambda s: s["p.b"].update(avg=torch.ones(3, 1)),
            "state 'avg' of 'p.b' has shape (3, 1), and the parameter (3,): a sharded parameter needs state with one "
            "value for each of its elements",
        ),
        (
            lambda s: s["p.w"].update(avg=torch.ones(2)),
            "state 'avg' of 'p.w' has shape (2,), and the parameter (2, 3): a sharded parameter needs state with one "
            "value for each of its elements",
        ),
    ],
)
def test_parameters_that_do_not_fit_together(change, message):
    states = states_of(step=torch.tensor(3.0), kind="mean")
    change(states)
    with pytest.raises(StateDictError) as caught:
        flat_plan(states)
    assert str(caught.value) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_one_scalar_of_all_parameters_as_a_new_tensor(dtype):
    given = [torch.tensor(1, dtype=dtype) for _ in range(3)]
    found = flatten_zero_dim_tensor_optim_state("step", given, "abc")
    assert found == given[0]
    assert found.dtype is dtype
    assert all(found is not scalar for scalar in given)


def test_a_scalar_that_is_no_number_equals_itself():
    given = [torch.tensor(NAN), torch.tensor(NAN)]
    assert flatten_zero_dim_tensor_optim_state("rate", given, "ab").isnan()
    with pytest.raises(StateDictError, match=r"is nan .* for 'a' and 1\.0 .* for 'c'"):
        flatten_zero_dim_tensor_optim_state("rate", [*given, torch.tensor(1.0)], "abc")


@pytest.mark.parametrize("value", [NAN, [1, NAN], "x", None, True, Odd(2), Incomparable(2), {"a": torch.ones(2)}])
def test_one_value_of_all_parameters(value):
    found = flatten_non_tensor_optim_state("own", [value, value], "ab")
    assert same(found, value)
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (None, 0), (Odd(1), Odd(2)), (Incomparable(1), Incomparable(2)), ([1], (1,))],
)
def test_values_that_are_not_the_same(one, other):
    with pytest.raises(StateDictError) as caught:
        flatten_non_tensor_optim_state("own", [one, one, other], "abc")
    assert str(caught.value) == f"state 'own' is {one!r} for 'a' and {other!r} for 'c', {SHARE}: {MEND}"


# What a parameter will have that is stepped by itself


def test_the_plan_of_one_parameter():
    info = make_info(FakeCommunicator(0, 2), original=True)
    state = {"step": torch.tensor(2.0), "avg": torch.ones(5, 3), "list": [1]}
    plan = plan_orig_state(info, "a", state, {"avg"})
    assert plan == StatePlan({"avg": [state["avg"]]}, {"step": torch.tensor(2.0), "list": [1]})
    assert plan.others["step"] is not state["step"]
    assert plan.others["list"] is not state["list"]
    assert plan_orig_state(info, "a", {}, {"avg"}) is None
    single = plan_orig_state(info, "scalar", {"avg": torch.tensor(1.0), "step": torch.tensor(2.0)}, {"avg"})
    assert (list(single.tensors), list(single.others)) == (["avg"], ["step"])


def test_the_plan_of_one_parameter_of_another_shape():
    info = make_info(FakeCommunicator(0, 2), original=True)
    with pytest.raises(StateDictError) as caught:
        plan_orig_state(info, "a", {"row": torch.ones(5)}, {"row"})
    assert str(caught.value) == (
        "state 'row' of 'a' has shape (5,), and the parameter (5, 3): a sharded parameter needs state with one value "
        "for each of its elements"
    )
    whole = make_info(FakeCommunicator(0, 2), original=True, strategy=NO_SHARD)
    assert list(plan_orig_state(whole, "a", {"row": torch.ones(5)}, {"row"}).tensors) == ["row"]


def test_scalars_of_which_the_values_come_later():
    step, states = TensorInfo((), torch.float32), states_of(step=TensorInfo((), torch.float32))
    plan = flat_plan(states)
    assert (list(plan.tensors), plan.others, plan.unread) == (["avg"], {}, {"step": [step, step]})
    info = make_info(FakeCommunicator(0, 2), TWO, original=True)
    assert plan_orig_state(info, "p.w", states["p.w"], {"avg"}).unread == {"step": [step]}


def test_the_plan_of_one_parameter_is_new_memory():
    value, nested = torch.tensor(1.0, requires_grad=True), {"a": [torch.ones(1)]}
    info = make_info(FakeCommunicator(0, 2), TWO, original=True)
    found = plan_orig_state(info, "p.w", {"step": value, "nested": nested}, set()).others
    assert torch.equal(found["step"], value)
    assert found["step"].data_ptr() != value.data_ptr()
    assert not found["step"].requires_grad
    found["nested"]["a"][0].zero_()
    assert nested["a"][0] == 1


def test_what_cannot_be_copied_is_named():
    states = states_of(call=Uncopyable())
    one_by_one = make_info(FakeCommunicator(0, 2), TWO, original=True)
    for plan in (lambda: flat_plan(states), lambda: plan_orig_state(one_by_one, "p.w", states["p.w"], {"avg"})):
        with pytest.raises(StateDictError) as caught:
            plan()
        assert str(caught.value) == (
            "optimizer state 'call' of 'p.w' is a Uncopyable, which cannot be copied: there is one"
        )


# Filling


SIZES = pytest.mark.parametrize("size", [1, 2, 4])


def on_first(comm, value):
    return Rank0Tensor(value.shape, value.dtype, value if comm.rank == 0 else None)


@SIZES
@pytest.mark.parametrize("first", [False, True])
def test_the_shard_of_a_state(run_ranks, size, first):
    values = values_of(SHAPES, torch.float64)

    def body(comm):
        info = make_info(comm, dtype=torch.bfloat16)
        given = [on_first(comm, value) if first else value for value in values.values()]
        found = flatten_optim_state(info, {"a": StatePlan({"avg": given})})
        return found["a"]["avg"], shard_of(info, values), info.layout.shard_numel

    for found, expected, numel in run_ranks(size, body):
        assert same(found, expected)  # in the dtype of the state, zero where no parameter is
        assert found.shape == (numel,)


def test_the_state_of_a_flat_parameter_is_new_memory():
    info = make_info(shapes=TWO)
    states = states_of(step=torch.tensor(3.0))
    plan = plan_flat_state(info, states, {"avg"})
    found = flatten_optim_state(info, {"p.w": plan})["p.w"]
    assert sorted(found) == ["avg", "step"]
    found["avg"].zero_()
    found["step"].zero_()
    assert same(states, states_of(step=torch.tensor(3.0)))


@SIZES
@pytest.mark.parametrize("first", [False, True])
def test_runs_of_parameters_that_are_stepped_one_by_one(run_ranks, size, first):
    """Each with state of its own: several dtypes, some without a state that others have."""
    values, wide = values_of(SHAPES), values_of(SHAPES, torch.float64)
    whole = {"a": {"avg": wide["a"]}, "b": {"avg": values["b"], "max": values["b"]}, "none": {"avg": values["none"]}}
    whole["scalar"] = {"max": values["scalar"]}

    def body(comm):
        info = make_info(comm, original=True)
        plans = {
            name: StatePlan({key: [on_first(comm, v) if first else v] for key, v in state.items()}, {"step": name})
            for name, state in whole.items()
        }
        expected = {
            name: {"step": name, **{key: run_of(info, name, value) for key, value in state.items()}}
            for name, state in whole.items()
        }
        return flatten_optim_state(info, plans), expected

    for found, expected in run_ranks(size, body):
        assert same(found, expected)


def test_whole_parameters_have_state_of_any_shape_as_new_memory():
    info = make_info(FakeCommunicator(1, 2), original=True, strategy=NO_SHARD)
    row = torch.ones(5, dtype=torch.float64)
    found = flatten_optim_state(info, {"a": StatePlan({"row": [row], "avg": [torch.ones(5, 3)]}, {"n": 1})})
    assert same(found, {"a": {"row": row, "avg": torch.ones(5, 3), "n": 1}})
    assert found["a"]["row"].data_ptr() != row.data_ptr()
    assert flatten_optim_state(info, {}) == {}


# There and back


shapes = st.lists(
    st.one_of(st.just(()), st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), min_size=1, max_size=3).map(tuple)),
    min_size=1,
    max_size=4,
).map(lambda found: {f"p{place}": shape for place, shape in enumerate(found)})
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
others = st.fixed_dictionaries(
    {},
    optional={
        "step": st.sampled_from([torch.tensor(3.0), torch.tensor(7), torch.tensor(NAN)]),
        "kind": st.sampled_from(["mean", None, True, 2.5, NAN, (1, 2)]),
    },
)
state_dtypes = st.dictionaries(st.sampled_from(["avg", "max", "seen"]), dtypes, min_size=1, max_size=3)
check = settings(max_examples=40, deadline=None)


def whole_state(shapes, state_dtypes, others):
    tensors = {name: values_of(shapes, dtype, place) for place, (name, dtype) in enumerate(state_dtypes.items())}
    return {fqn: {**{name: values[fqn] for name, values in tensors.items()}, **others} for fqn in shapes}


@given(st.integers(1, 4), shapes, dtypes, state_dtypes, others, st.booleans())
@check
def test_state_of_a_flat_parameter_comes_back(run_ranks, size, shapes, dtype, state_dtypes, others, first):
    states = whole_state(shapes, state_dtypes, others)

    def body(comm):
        info = make_info(comm, shapes, dtype=dtype, frozen=[] if dtype.is_floating_point else shapes)
        plan = plan_flat_state(info, states, set(state_dtypes))
        if first:
            plan.tensors = {name: [on_first(comm, v) for v in values] for name, values in plan.tensors.items()}
        return gathered(info, flatten_optim_state(info, {"p0": plan}), {})

    for found in run_ranks(size, body):
        assert same(found, states), found


@given(st.integers(1, 4), shapes, dtypes, state_dtypes, others, st.booleans(), st.integers(0, 15))
@check
def test_state_of_parameters_that_are_stepped_one_by_one_comes_back(
    run_ranks, size, shapes, dtype, state_dtypes, others, first, without
):
    states = whole_state(shapes, state_dtypes, others)
    states = {name: state for place, (name, state) in enumerate(states.items()) if not without & 1 << place}

    def body(comm):
        info = make_info(comm, shapes, dtype=dtype, original=True, frozen=[] if dtype.is_floating_point else shapes)
        plans = {name: plan_orig_state(info, name, state, set(state_dtypes)) for name, state in states.items()}
        for plan in plans.values() if first else ():
            plan.tensors = {name: [on_first(comm, value)] for name, [value] in plan.tensors.items()}
        own = flatten_optim_state(info, plans)
        empty = {name for name in shapes if info.is_empty_on(name, comm.rank)}
        message = RankState([], {name: StateInfo.of(state) for name, state in own.items()}, empty)
        merged = convert_all_state_info(allgather_state_info(comm, message))
        return gathered(info, own, merged)

    for found in run_ranks(size, body):
        assert same(found, states), found
