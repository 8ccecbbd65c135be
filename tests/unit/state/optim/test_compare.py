import pickle
import threading
import zlib
from dataclasses import replace

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
    GatheredState,
    PosDimTensorInfo,
    RankState,
    StateInfo,
    allgather_state_info,
    check_same_groups,
    convert_all_state_info,
    differing_unsharded,
    is_zero_dim_tensor,
)
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from tests.unit.state.optim.examples import Incomparable, Odd, Unreadable, values

NAN = float("nan")


ON_FIRST = Rank0Tensor(torch.Size((4, 2)), torch.bfloat16)


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
    assert shape_and_dtype(value) == described
    assert is_zero_dim_tensor(value) is is_scalar


def test_a_distributed_tensor_is_what_it_is_as_a_whole(dtensor):
    assert shape_and_dtype(dtensor) == ((4, 3), torch.float32)
    assert not is_zero_dim_tensor(dtensor)
    assert StateInfo.of({"exp_avg": dtensor}).tensors == {"exp_avg": PosDimTensorInfo((4, 3), torch.float32, "DTensor")}


def test_the_description_of_a_parameter_is_in_the_order_of_names():
    lock, step = threading.Lock(), torch.tensor(4.0, requires_grad=True)
    info = StateInfo.of(
        {"sum": torch.ones(2, 3), "first": ON_FIRST, "step": step, "lock": lock, "kind": "mean", "none": None, "n": 7}
    )
    assert list(info.tensors.items()) == [
        ("first", PosDimTensorInfo((4, 2), torch.bfloat16, "Rank0Tensor")),
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


tensors = st.builds(
    lambda shape, dtype, fill: torch.full(shape, fill).to(dtype),
    st.sampled_from([(), (2,), (0, 3), (2, 1)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.0, 1.0, NAN]),
)


state_values = st.dictionaries(st.sampled_from(["step", "exp_avg", "kind"]), st.one_of(values, tensors), max_size=3)


rank_states = st.builds(
    lambda groups, states, empty, order: RankState(
        groups, {n: StateInfo.of(state) for n, state in states.items()}, empty, order=order
    ),
    st.lists(st.tuples(st.lists(st.sampled_from("pqr"), max_size=2), state_values), max_size=2),
    st.dictionaries(st.sampled_from("pqr"), state_values, max_size=2),
    st.sets(st.sampled_from("pqr"), max_size=2),
    st.lists(st.tuples(st.permutations("pq"), st.just(["lr"])), max_size=2),
)


# One hash for each part of what ranks have


def digests(rank_state):
    return replace(rank_state).digests  # of what it is now


def description(rank_state):
    """What of it counts, by part."""
    names = sorted({*rank_state.states, *rank_state.empty})
    told = {name: rank_state.states[name] for name in names if name not in rank_state.empty}
    places = {name: place for place, name in enumerate(names)}
    return {
        "groups": rank_state.groups,
        "names": names,
        "states": (len(names), {places[name]: info.kinds(with_shapes=False) for name, info in told.items()}),
        "unsharded": {},
        "order": rank_state.order,
    }


@given(rank_states, rank_states)
@settings(deadline=None, max_examples=50)
def test_equal_digests_are_of_equal_parts(one, other):
    for part, digest in digests(one).items():
        if digest == digests(other)[part]:
            assert same(description(one)[part], description(other)[part])
        if not same(description(one)[part], description(other)[part]):
            assert digest != digests(other)[part]


@given(rank_states)
@settings(deadline=None, max_examples=50)
def test_equal_states_have_equal_digests(state):
    assert digests(state) == digests(state)
    assert digests(pickle.loads(pickle.dumps(state))) == digests(state)
    assert [len(digest) for digest in digests(state).values()] == [16] * 5


def example(**changed):
    state = {"step": torch.tensor(3.0), "sum": torch.ones(3), "kind": "mean"}
    arguments = {"empty": {"q"}, "unsharded": {"u": StateInfo.of(state)}, **changed}
    return RankState([(["p", "q"], {"lr": 0.1})], {"p": StateInfo.of(state)}, **arguments)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("groups", lambda s: s.groups[0][1].update(lr=0.2)),
        ("groups", lambda s: s.groups[0][0].reverse()),
        ("groups", lambda s: s.groups.pop()),
        ("states", lambda s: (s.states.pop("p"), s.empty.add("p"))),
        ("states", lambda s: s.states["p"].scalar_tensors.update(step=torch.tensor(4.0))),
        ("states", lambda s: s.states["p"].scalar_tensors.update(step=torch.tensor(3))),
        ("states", lambda s: s.states["p"].tensors.update(sum=PosDimTensorInfo((3,), torch.float64))),
        ("states", lambda s: s.states["p"].non_tensors.update(kind="max")),
        ("states", lambda s: s.empty.add("p")),
        ("unsharded", lambda s: s.unsharded["u"].tensors.update(sum=PosDimTensorInfo((2,), torch.float32))),
        ("unsharded", lambda s: s.unsharded["u"].tensors.update(sum=PosDimTensorInfo((3,), torch.float32, "DTensor"))),
        ("unsharded", lambda s: s.unsharded.pop("u")),
    ],
)
def test_whatever_is_different_shows_in_the_digest_of_its_part(part, change):
    one, other = example(), example()
    assert digests(one) == digests(other)
    change(other)
    assert {part for part in digests(one) if digests(one)[part] != digests(other)[part]} == {part}


@pytest.mark.parametrize(
    "info", [PosDimTensorInfo((2,), torch.float32), PosDimTensorInfo((3,), torch.float32, "DTensor")]
)
@pytest.mark.parametrize("with_shapes", [False, True])
def test_shapes_of_sharded_state_show_where_they_have_to_be_the_same(info, with_shapes):
    one, other = example(with_shapes=with_shapes), example(with_shapes=with_shapes)
    other.states["p"].tensors.update(sum=info)
    assert (digests(one) == digests(other)) is not with_shapes


def test_state_of_a_parameter_without_elements_on_a_rank_is_not_described():
    one, other = example(), example()
    other.states["q"] = StateInfo.of({"step": torch.tensor(1.0)})
    assert digests(one) == digests(other)
    assert replace(other).infos == [other.states["p"]]


def test_a_name_that_is_another_object_has_the_same_digest():
    """As on a rank that was told the names, and did not read them from its own model."""
    name = "block.weight"
    own = RankState([([name], {"lr": 0.1})], {name: StateInfo()}, {name})
    told = RankState([([name], {"lr": 0.1})], {"".join(["block", ".weight"]): StateInfo()}, {"block" + name[5:]})
    assert own == told
    assert digests(own) == digests(told)


class Counting:
    """Counts what goes through a communicator."""

    def __init__(self, comm):
        self.rank, self.size, self.sent, self._comm = comm.rank, comm.size, [], comm

    def all_gather_object(self, value):
        self.sent.append(value)
        return self._comm.all_gather_object(value)


def test_ranks_that_have_the_same_send_hashes_alone(run_ranks):
    def body(comm):
        ranks, mine = Counting(comm), example(empty=set())
        found = allgather_state_info(ranks, mine)
        assert found.groups == [mine.groups] * 3
        assert all(unsharded is mine.unsharded for unsharded in found.unsharded)
        assert convert_all_state_info(found)["p"] is mine.states["p"]
        return ranks.sent == [digests(mine)]

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("part", ["groups", "names", "states", "unsharded"])
def test_a_part_is_sent_only_if_ranks_have_different_ones(run_ranks, part):
    """Groups name all parameters, and of original parameters no two ranks hold the same."""

    def mine(rank):
        state = example(names=["p", "q", "r"])
        if part == "groups":
            state.groups[0][1]["lr"] = rank
        elif part == "names":
            state.names = ["p", "q", "xyz"[rank]]
        elif part == "states":
            state.states["p"] = StateInfo.of({"rank": rank // 2})
        else:
            state.unsharded["u"] = StateInfo.of({"rank": rank // 2})
        return replace(state)

    def body(comm):
        ranks = Counting(comm)
        return ranks.sent, allgather_state_info(ranks, mine(comm.rank))

    for rank, (sent, found) in enumerate(run_ranks(3, body)):
        assert [*sent[1][1]] == [part]
        assert sent[1][1][part] == zlib.compress(mine(rank).text(part))
        assert found.groups == [mine(rank).groups for rank in range(3)]
        assert found.unsharded == [mine(rank).unsharded for rank in range(3)]
        names, infos, codes = found.states
        assert names == (["p", "q", "r"] if part != "names" else ["p", "q", "x", "y", "z"])
        assert len(infos) == (2 if part == "states" else 1)
        assert codes[:, 0].tolist() == ([0, 0, 1] if part == "states" else [0] * len(codes))
        assert set(codes[:, 1].tolist()) == {-2}
        assert set(codes[:, 2:].flatten().tolist()) == {-1}


def test_the_state_of_many_parameters_is_described_once():
    names = [f"model.layers.{index}.attention.weight" for index in range(10_000)]

    def of(rank, count):
        state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(8)}
        held = names[rank * 100 : rank * 100 + count]
        return RankState([], {name: StateInfo.of(state) for name in held}, set(names) - set(held), names=names)

    few, many = (len(zlib.compress(of(3, count).text("states"))) for count in (1, 5000))
    assert many - few < 100
    found = convert_all_state_info(gathered_of(of(0, 5000), of(50, 5000)))
    assert list(found) == names
    assert len({id(info) for info in found.values()}) == 1


def test_what_a_rank_cannot_unpickle_is_an_error_that_names_the_one_which_has_it():
    odd = StateInfo.of({"own": 3})
    odd.non_tensors["own"] = Unreadable()  # as a class is that other ranks cannot import
    own = RankState([], {"p": StateInfo.of({"own": 3})})
    for part, other in (
        ("states", RankState([], {"p": odd})),
        ("groups", RankState([(["p"], {"own": Unreadable()})], {})),
        ("unsharded", RankState([], {}, unsharded={"p": odd})),
    ):
        found = gathered_of(own, other)
        with pytest.raises(StateDictError, match=r"rank 1 cannot be unpickled: ImportError: no such"):
            getattr(found, part)
    for look in (check_same_groups, convert_all_state_info, differing_unsharded):
        with pytest.raises(StateDictError, match="rank 1"):
            look(gathered_of(own, RankState([(["p"], {"own": Unreadable()})], {"p": odd}, unsharded={"p": odd})))


# States of all ranks together


def gathered_of(*of_ranks):
    """What is known when ranks have told each other, some parts or, as here, all of them."""
    received = [{part: zlib.compress(one.text(part)) for part in one.digests} for one in of_ranks]
    return GatheredState(of_ranks[0], received)


def gathered(*states, empty=(), with_shapes=False):
    """The same, of ranks that have states of some parameters."""
    empties = [*empty, *[set()] * len(states)]
    return gathered_of(
        *(
            RankState(
                [],
                {name: StateInfo.of(state) for name, state in of_rank.items()},
                set(nothing),
                with_shapes=with_shapes,
            )
            for of_rank, nothing in zip(states, empties, strict=False)
        )
    )


def test_states_that_are_the_same_on_all_ranks():
    state = {"p": {"step": torch.tensor(NAN), "rate": NAN, "kind": Incomparable(3), "sum": torch.ones(3)}}
    found = convert_all_state_info(gathered(state, state, state))
    assert list(found) == ["p"]
    assert same(found["p"].kinds(with_shapes=True), StateInfo.of(state["p"]).kinds(with_shapes=True))
    assert convert_all_state_info(gathered({}, {})) == {}


def test_ranks_may_lack_the_state_of_what_they_do_not_hold():
    found = convert_all_state_info(
        gathered(
            {"q": {"step": torch.tensor(2.0)}},
            {"p": {"step": torch.tensor(1.0), "sum": torch.ones(2)}, "q": {"step": torch.tensor(2.0)}},
            {"p": {"step": torch.tensor(7.0), "sum": torch.ones(0)}, "q": {"step": torch.tensor(2.0)}},
            empty=[{"p"}, set(), {"p"}],
        )
    )
    assert list(found) == ["p", "q"]
    assert found["q"] == StateInfo.of({"step": torch.tensor(2.0)})
    assert found["p"] == StateInfo.of({"step": torch.tensor(1.0), "sum": torch.ones(2)})


def test_a_rank_that_does_not_know_a_parameter_lacks_its_state():
    """As where ranks have different models: the names that one of them has are not those of the others."""
    first = RankState([], {"p": StateInfo()}, names=["p", "q"])
    second = RankState([], {}, names=["q"])
    with pytest.raises(StateDictError) as caught:
        convert_all_state_info(gathered_of(first, second, second))
    assert str(caught.value) == (
        "rank 1 has no optimizer state of 'p', and rank 0 has: all ranks must step the same parameters"
    )


def test_values_with_different_digests_are_compared_one_by_one():
    """As numbers of different types do that are equal, in what is nested."""
    first, second = ({"p": {"own": {"x": value}}, "q": {"own": {"x": value}}} for value in (1, 1.0))
    found = convert_all_state_info(gathered(first, second, second))
    assert found == {"p": StateInfo.of(first["p"]), "q": StateInfo.of(first["q"])}


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
    states = ({"p": {"same": 1}, "q": {"a": 0, "value": value}} for value in (first, first, second))
    told = gathered(*states, with_shapes=with_shapes)
    if said is None:
        assert set(convert_all_state_info(told)) == {"p", "q"}
        return
    with pytest.raises(StateDictError) as caught:
        convert_all_state_info(told)
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
    return gathered_of(*(RankState(groups, {}) for groups in of_ranks))


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
            "rank 2's optimizer has 1 parameter groups, rank 0's 2",
        ),
        (
            [(["a", "b", "d"], {"lr": 1}), (["c"], {"lr": 2})],
            "'d' is in parameter group 0 of rank 2's optimizer, but not of rank 0's",
        ),
        (
            [(["a", "b"], {"lr": 1}), ([], {"lr": 2})],
            "'c' is in parameter group 1 of rank 0's optimizer, but not of rank 2's",
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


# State that is not sharded


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"p": {"a": 1}}, {"p": {"a": 1}}, None),
        ({"p": {"a": [1]}}, {"p": {"a": [1.0]}}, None),
        ({"p": {"a": NAN}}, {"p": {"a": NAN}}, None),
        ({"p": {"a": 1}}, {"p": {"a": 2}}, "'p' on rank 0 and rank 2"),
        ({"p": {"a": 1}}, {"p": {"a": 1}, "q": {}}, "'q' on rank 0 and rank 2"),
        ({"p": {"a": torch.ones(2)}}, {"p": {"a": torch.ones(3)}}, "'p' on rank 0 and rank 2"),
    ],
)
def test_where_state_differs_that_is_not_sharded(first, second, said):
    of_ranks = (
        RankState([], {}, unsharded={name: StateInfo.of(state) for name, state in states.items()})
        for states in (first, first, second)
    )
    assert differing_unsharded(gathered_of(*of_ranks)) == said
