import copy
import pickle
import threading
import zlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.compare import (
    PosDimTensorInfo,
    RankState,
    StateInfo,
    allgather_state_info,
    check_nested,
    check_same_groups,
    convert_all_state_info,
    describe,
    is_zero_dim_tensor,
    same,
    tellable,
)
from hpcfsdp.state.transfer import OnFirst
from tests.unit.state.optim.examples import Incomparable, Odd

NAN = float("nan")


ON_FIRST = OnFirst(torch.Size((4, 2)), torch.bfloat16)


@pytest.fixture
def dtensor():
    """On the second of two ranks that only seem to be there: rows 2 and 3 of three columns."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = DeviceMesh("cpu", torch.arange(2))
    shape = torch.Size((4, 3))
    yield DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))
    dist.destroy_process_group()


# What a state is


@pytest.mark.parametrize(
    ("value", "described", "is_scalar"),
    [
        (torch.ones(2, 3, dtype=torch.uint8), ((2, 3), torch.uint8), False),
        (torch.tensor(3.0), ((), torch.float32), True),
        (torch.ones(0), ((0,), torch.float32), False),
        (torch.ones(1), ((1,), torch.float32), False),
        (ON_FIRST, ((4, 2), torch.bfloat16), False),
        (3.0, None, False),
        (None, None, False),
        (np.float64(3.0), None, False),
        ([torch.ones(2)], None, False),
    ],
    ids=str,
)
def test_what_a_value_is(value, described, is_scalar):
    assert describe(value) == described
    assert is_zero_dim_tensor(value) is is_scalar


def test_a_distributed_tensor_is_what_it_is_as_a_whole(dtensor):
    assert describe(dtensor) == ((4, 3), torch.float32)
    assert not is_zero_dim_tensor(dtensor)
    assert StateInfo.of({"exp_avg": dtensor}).tensors == {"exp_avg": PosDimTensorInfo((4, 3), torch.float32, "DTensor")}


def test_what_is_told_of_a_parameter_in_the_order_of_names():
    lock, step = threading.Lock(), torch.tensor(4.0, requires_grad=True)
    info = StateInfo.of(
        {"sum": torch.ones(2, 3), "first": ON_FIRST, "step": step, "lock": lock, "kind": "mean", "none": None, "n": 7}
    )
    assert list(info.tensors.items()) == [
        ("first", PosDimTensorInfo((4, 2), torch.bfloat16, "OnFirst")),
        ("sum", PosDimTensorInfo((2, 3), torch.float32, "Tensor")),
    ]
    assert list(info.scalar_tensors) == ["step"]
    assert info.scalar_tensors["step"].item() == 4
    assert not info.scalar_tensors["step"].requires_grad
    told = "<lock, which cannot be pickled>"
    assert list(info.non_tensors.items()) == [("kind", "mean"), ("lock", told), ("n", 7), ("none", None)]
    assert StateInfo.of({}) == StateInfo()
    pickle.dumps(info)


def test_shapes_are_compared_where_they_are_asked_for():
    info = StateInfo.of({"sum": torch.ones(2, 3), "step": torch.tensor(4), "kind": "mean", "on": True, "n": None})
    others = {
        "step": ("a scalar", torch.int64, 4),
        "kind": ("a str", "mean"),
        "on": ("a bool", True),
        "n": ("a NoneType", None),
    }
    assert info.kinds(with_shapes=False) == {"sum": ("a tensor", torch.float32), **others}
    assert info.kinds(with_shapes=True) == {
        "sum": ("a tensor", torch.float32, "Tensor", "of shape", (2, 3)),
        **others,
    }


def test_what_other_ranks_are_told_of_a_value():
    for value in (True, 3, 2.5, "x", None, (1, 2), {"a": [1.5]}, Odd(3)):
        assert tellable(value) is value
    assert tellable(lambda: 3) == "<function, which cannot be pickled>"
    assert tellable([threading.Lock()]) == "<list, which cannot be pickled>"

    class Refuses:
        def __reduce__(self):
            raise KeyError("no")

    assert tellable(Refuses()).endswith("Refuses, which cannot be pickled>")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        ("a", "b", False),
        (NAN, NAN, True),
        (NAN, 1.0, False),
        ((1, NAN), [1, NAN], True),
        ([1], [1, 2], False),
        ({"a": [NAN]}, {"a": (NAN,)}, True),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, [1], False),
        (None, None, True),
        (None, 0, False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.tensor(1.0), torch.tensor(2.0), False),
        (torch.tensor(1.0), torch.tensor(1), False),
        (torch.tensor(1.0), 1.0, False),
        (1.0, torch.tensor(1.0), False),
        (torch.ones(2), torch.ones(1, 2), False),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2)), False),
        (torch.tensor(NAN), torch.tensor(NAN), True),
        (torch.tensor([1, NAN]), torch.tensor([1, NAN]), True),
        (torch.tensor([1, NAN]), torch.tensor([NAN, 1]), False),
        ([torch.ones(2), NAN], [torch.ones(2), NAN], True),
        (np.ones(2), np.ones(2), True),
        (np.ones(2), np.zeros(2), False),
        (np.float32(NAN), np.float32(NAN), True),
        (Odd(1), Odd(1), True),
        (Odd(1), Odd(2), False),
        (Incomparable(1), Incomparable(1), True),
        (Incomparable(1), Incomparable(2), False),
        (Incomparable(1), 3, False),
        (torch.bfloat16, torch.bfloat16, True),
    ],
    ids=str,
)
def test_equality(one, other, equal):
    assert bool(same(one, other)) is equal
    assert bool(same(other, one)) is equal


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(width=16), st.text("ab", max_size=2)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)


tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.sampled_from([(), (2,), (0, 3), (2, 1)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1.0, NAN]),
)


state_values = st.dictionaries(st.sampled_from(["step", "exp_avg", "kind"]), st.one_of(values, tensors), max_size=3)


rank_states = st.builds(
    lambda groups, states, empty: RankState(groups, {n: StateInfo.of(state) for n, state in states.items()}, empty),
    st.lists(st.tuples(st.lists(st.sampled_from("pqr"), max_size=2), state_values), max_size=2),
    st.dictionaries(st.sampled_from("pqr"), state_values, max_size=2),
    st.sets(st.sampled_from("pqr"), max_size=2),
)


@given(values)
@settings(deadline=None, max_examples=50)
def test_everything_equals_a_copy_of_itself(value):
    assert same(value, copy.deepcopy(value))


# One hash for what ranks have


def description(rank_state):
    states = {name: info.kinds(with_shapes=True) for name, info in rank_state.states.items()}
    return rank_state.groups, states, sorted(rank_state.empty)


@given(rank_states, rank_states)
@settings(deadline=None, max_examples=50)
def test_equal_digests_are_of_equal_descriptions(one, other):
    if one.digest() == other.digest():
        assert same(description(one), description(other))
    if not same(description(one), description(other)):
        assert one.digest() != other.digest()


@given(rank_states)
@settings(deadline=None, max_examples=50)
def test_equal_descriptions_have_equal_digests(state):
    assert state.digest() == state.digest()
    assert len(state.digest()) == 32
    assert pickle.loads(pickle.dumps(state)).digest() == state.digest()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.groups[0][1].update(lr=0.2),
        lambda s: s.groups[0][0].reverse(),
        lambda s: s.groups.pop(),
        lambda s: s.states.pop("p"),
        lambda s: s.states["p"].scalar_tensors.update(step=torch.tensor(4.0)),
        lambda s: s.states["p"].scalar_tensors.update(step=torch.tensor(3)),
        lambda s: s.states["p"].tensors.update(sum=PosDimTensorInfo((2,), torch.float32)),
        lambda s: s.states["p"].tensors.update(sum=PosDimTensorInfo((3,), torch.float64)),
        lambda s: s.states["p"].tensors.update(sum=PosDimTensorInfo((3,), torch.float32, "DTensor")),
        lambda s: s.states["p"].non_tensors.update(kind="max"),
        lambda s: s.empty.add("p"),
    ],
)
def test_whatever_is_different_shows_in_the_digest(change):
    def make():
        state = {"step": torch.tensor(3.0), "sum": torch.ones(3), "kind": "mean"}
        return RankState([(["p", "q"], {"lr": 0.1})], {"p": StateInfo.of(state)}, {"q"})

    one, other = make(), make()
    assert one.digest() == other.digest()
    change(other)
    assert one.digest() != other.digest()


def test_a_name_that_is_another_object_has_the_same_digest():
    """As on a rank that was told the names, and did not read them from its own model."""
    name = "block.weight"
    own = RankState([([name], {"lr": 0.1})], {name: StateInfo()}, {name})
    told = RankState([([name], {"lr": 0.1})], {"".join(["block", ".weight"]): StateInfo()}, {"block" + name[5:]})
    assert own == told
    assert own.digest() == told.digest()


class Counting:
    """Counts what goes through a communicator."""

    def __init__(self, comm):
        self.rank, self.size, self.sent, self._comm = comm.rank, comm.size, [], comm

    def all_gather_object(self, value):
        self.sent.append(value)
        return self._comm.all_gather_object(value)


def test_ranks_that_have_the_same_send_a_hash_alone(run_ranks):
    def body(comm):
        ranks, mine = Counting(comm), RankState([], {"p": StateInfo.of({"step": torch.tensor(NAN)})})
        return ranks.sent, allgather_state_info(ranks, mine), mine

    for sent, found, mine in run_ranks(3, body):
        assert [whole for whole, _ in sent] == [mine.digest()]
        assert len(found) == 3
        assert all(other is mine for other in found)


def test_ranks_that_differ_send_all_that_they_have(run_ranks):
    def body(comm):
        ranks, mine = Counting(comm), RankState([], {"p": StateInfo.of({"rank": comm.rank // 2})}, {"q"})
        return ranks.sent, allgather_state_info(ranks, mine)

    for sent, found in run_ranks(3, body):
        assert len(sent) == 2
        assert found == [RankState([], {"p": StateInfo(non_tensors={"rank": rank // 2})}, {"q"}) for rank in range(3)]


def test_groups_are_sent_only_if_they_differ(run_ranks):
    """They name all parameters, and original parameters have ranks send what else they have."""

    def body(comm, differing):
        ranks = Counting(comm)
        groups = [(["p", "q"], {"lr": 0.1 + differing * comm.rank})]
        found = allgather_state_info(ranks, RankState(groups, {"p": StateInfo.of({"rank": comm.rank})}))
        assert [one.groups[0][1]["lr"] for one in found] == [0.1 + differing * rank for rank in range(comm.size)]
        return pickle.loads(zlib.decompress(ranks.sent[1])).groups

    assert run_ranks(2, lambda comm: body(comm, 0)) == [[], []]
    assert run_ranks(2, lambda comm: body(comm, 1))[1] == [(["p", "q"], {"lr": 1.1})]


def test_values_with_large_tensors_in_them_are_refused():
    check_nested("w", {"small": [torch.zeros(100)], "tensor": torch.zeros(1 << 20), "text": "x" * (1 << 20)})
    with pytest.raises(StateDictError, match=r"'old_dirs' of 'w' is a list of tensors with 131072 elements"):
        check_nested("w", {"old_dirs": [torch.zeros(1 << 16), {"more": (torch.zeros(1 << 16),)}]})


class Plain:
    """Equal to itself alone, as objects are by default."""

    def __init__(self, value):
        self.value = value


def test_objects_that_have_no_equality_are_the_same_if_their_content_is():
    assert same(Plain(3), Plain(3))
    assert not same(Plain(3), Plain(4))


def test_tensors_in_what_is_told_lie_in_host_memory():
    told = tellable({"lr": torch.ones(2, requires_grad=True), "more": [1, (torch.ones(1),)]})
    assert same(told["more"], [1, (torch.ones(1),)])
    assert same(told["lr"], torch.ones(2))
    assert not told["lr"].requires_grad


# States of all ranks together


def gathered(*states, empty=()):
    """What ranks have told, each of the states of some parameters."""
    empties = [*empty, *[set()] * len(states)]
    return [
        RankState([], {name: StateInfo.of(state) for name, state in of_rank.items()}, set(nothing))
        for of_rank, nothing in zip(states, empties, strict=False)
    ]


def test_states_that_are_the_same_on_all_ranks():
    state = {"p": {"step": torch.tensor(NAN), "rate": NAN, "kind": Incomparable(3), "sum": torch.ones(3)}}
    [one] = gathered(state)
    assert convert_all_state_info([one] * 3) == one.states
    assert convert_all_state_info([one] * 3) is not one.states
    told = gathered(state, state, state)
    assert convert_all_state_info(told)["p"] is told[0].states["p"]


def test_ranks_may_lack_the_state_of_what_they_do_not_hold():
    told = gathered(
        {"q": {"step": torch.tensor(2.0)}},
        {"p": {"step": torch.tensor(1.0), "sum": torch.ones(2)}, "q": {"step": torch.tensor(2.0)}},
        {"p": {"step": torch.tensor(7.0), "sum": torch.ones(0)}, "q": {"step": torch.tensor(2.0)}},
        empty=[{"p"}, set(), {"p"}],
    )
    found = convert_all_state_info(told)
    assert found == {"q": told[0].states["q"], "p": told[1].states["p"]}


@pytest.mark.parametrize(
    ("first", "second", "with_shapes", "said"),
    [
        (torch.tensor(3.0), torch.tensor(5.0), False, ("a scalar torch.float32 3.0", "a scalar torch.float32 5.0")),
        (torch.tensor(3.0), torch.tensor(3), False, ("a scalar torch.float32 3.0", "a scalar torch.int64 3")),
        (torch.tensor(3.0), 3.0, False, ("a scalar torch.float32 3.0", "a float 3.0")),
        (1, True, False, ("a int 1", "a bool True")),
        ("mean", "max", False, ("a str mean", "a str max")),
        (Odd(1), Odd(2), False, ("a Odd Odd(1)", "a Odd Odd(2)")),
        (Incomparable(1), Incomparable(2), False, ("a Incomparable Odd(1)", "a Incomparable Odd(2)")),
        (torch.ones(2), torch.ones(2).double(), False, ("a tensor torch.float32", "a tensor torch.float64")),
        (
            torch.ones(2),
            torch.ones(3, 1),
            True,
            ("a tensor torch.float32 Tensor of shape (2,)", "a tensor torch.float32 Tensor of shape (3, 1)"),
        ),
        (torch.ones(2), None, False, ("a tensor torch.float32", "a NoneType None")),
        (torch.ones(2), torch.ones(3), False, None),
        (torch.tensor(NAN), torch.tensor(NAN), True, None),
        (NAN, NAN, True, None),
    ],
    ids=str,
)
def test_state_that_differs_between_ranks(first, second, with_shapes, said):
    told = gathered(*({"p": {"same": 1}, "q": {"a": 0, "value": value}} for value in (first, first, second)))
    if said is None:
        assert set(convert_all_state_info(told, with_shapes=with_shapes)) == {"p", "q"}
        return
    with pytest.raises(StateDictError) as caught:
        convert_all_state_info(told, with_shapes=with_shapes)
    assert str(caught.value) == (
        f"optimizer state 'value' of 'q' differs between ranks: rank 0 has {said[0]}, rank 2 has {said[1]}"
    )


def test_state_that_one_rank_has_more():
    with pytest.raises(StateDictError) as caught:
        convert_all_state_info(gathered({"q": {}}, {"q": {"value": 3}}))
    assert str(caught.value) == (
        "optimizer state 'value' of 'q' differs between ranks: rank 0 has none, rank 1 has a int 3"
    )


@pytest.mark.parametrize(("states", "lacks", "has"), [([{}, {"p": {}}], 0, 1), ([{"p": {}}, {}], 1, 0)])
def test_a_rank_without_the_state_of_a_parameter(states, lacks, has):
    with pytest.raises(StateDictError) as caught:
        convert_all_state_info(gathered(*states))
    assert str(caught.value) == (
        f"rank {lacks} has no optimizer state of 'p', and rank {has} has: all ranks must step the same parameters"
    )


# Groups of all ranks


def with_groups(*of_ranks):
    return [RankState(groups, {}) for groups in of_ranks]


def test_groups_that_are_the_same():
    def groups():
        hyper = {"lr": torch.tensor(0.1), "betas": (0.9, NAN), "own": Incomparable(2), "none": None}
        return [(["a", "b"], hyper), ([], {})]

    turned = [(["b", "a"], groups()[0][1]), groups()[1]]  # each optimizer has its own order
    check_same_groups(with_groups(groups(), groups(), turned))
    check_same_groups(with_groups([], []))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [(["a"], {"lr": 1})],
            "there are 1 parameter groups of rank 2's optimizer, and 2 of rank 0's",
        ),
        (
            [(["a", "b", "d"], {"lr": 1}), (["c"], {"lr": 2})],
            "'d' is in parameter group 0 of rank 2's optimizer, and not of rank 0's",
        ),
        (
            [(["a", "b"], {"lr": 1}), ([], {"lr": 2})],
            "'c' is in parameter group 1 of rank 0's optimizer, and not of rank 2's",
        ),
        (
            [(["a", "b"], {"lr": 3}), (["c"], {"lr": 2})],
            "'lr' in parameter group 0 of rank 2's optimizer is 3, of rank 0's 1 (the group of 'a')",
        ),
        (
            [(["a", "b"], {"lr": 1}), (["c"], {"lr": 2, "eps": None})],
            "'eps' in parameter group 1 of rank 2's optimizer is None, of rank 0's missing (the group of 'c')",
        ),
        (
            [(["a", "b"], {}), (["c"], {"lr": 2})],
            "'lr' in parameter group 0 of rank 2's optimizer is missing, of rank 0's 1 (the group of 'a')",
        ),
        (
            [(["a", "b"], {"lr": torch.tensor(1)}), (["c"], {"lr": 2})],
            "'lr' in parameter group 0 of rank 2's optimizer is tensor(1), of rank 0's 1 (the group of 'a')",
        ),
    ],
)
def test_groups_that_differ(groups, message):
    first = [(["a", "b"], {"lr": 1}), (["c"], {"lr": 2})]
    with pytest.raises(StateDictError) as caught:
        check_same_groups(with_groups(first, first, groups))
    assert str(caught.value) == message


def test_groups_of_no_sharded_parameter_are_named_by_their_number():
    with pytest.raises(StateDictError) as caught:
        check_same_groups(with_groups([([], {"lr": 1})], [([], {"lr": 2})]))
    assert str(caught.value) == "'lr' in parameter group 0 of rank 1's optimizer is 2, of rank 0's 1"
