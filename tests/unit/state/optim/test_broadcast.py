import enum
import pickle
import threading
from collections import OrderedDict, namedtuple

import pytest
import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.load import broadcast_processed_state, broadcast_state
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.tensors import Rank0Tensor
from tests.unit.state.optim.examples import Odd, raised

CPU = torch.device("cpu")
Betas = namedtuple("Betas", "one two")
BIG, EMPTY = torch.arange(6.0).view(2, 3), torch.ones(0, 2, dtype=torch.int8)
SCALAR = torch.tensor(3.0)
GIVEN = {
    "state": OrderedDict({"a.weight": {"avg": BIG, "step": SCALAR, "none": None}, "b": {"avg": EMPTY, "kind": "x"}}),
    "param_groups": [{"params": ["a.weight", "b"], "lr": SCALAR, "betas": (0.9, SCALAR), "own": Odd(2)}],
}


class Counting:
    """Counts the bytes of objects that are sent."""

    def __init__(self, comm):
        self.rank, self.size, self.nbytes, self._comm = comm.rank, comm.size, 0, comm

    def broadcast_object(self, value, src=0):
        self.nbytes += len(pickle.dumps(value))
        return self._comm.broadcast_object(value, src)

    def all_gather_object(self, value):
        self.nbytes += len(pickle.dumps(value))
        return self._comm.all_gather_object(value)


@pytest.mark.parametrize("size", [1, 3])
def test_what_the_first_rank_has_is_described_without_tensors(run_ranks, size):
    def body(comm):
        return broadcast_processed_state(comm, GIVEN if comm.rank == 0 else {"state": "ignored"})

    for rank, found in enumerate(run_ranks(size, body)):
        state = found["state"]
        assert list(state) == ["a.weight", "b"]
        for fqn, value in (("a.weight", BIG), ("b", EMPTY)):
            stand_in = state[fqn]["avg"]
            assert type(stand_in) is Rank0Tensor
            assert (stand_in.shape, stand_in.dtype) == (value.shape, value.dtype)
            assert (stand_in.tensor is None) is (rank > 0)
            if rank == 0:
                assert stand_in.tensor.data_ptr() == value.data_ptr()
        assert same({**state["a.weight"], "avg": 0}, {"avg": 0, "step": SCALAR, "none": None})
        assert state["b"]["kind"] == "x"
        assert same(found["param_groups"], GIVEN["param_groups"])


def test_containers_keep_their_kind(run_ranks):
    group = {"params": [], "list": [SCALAR, (1, 2)], "tuple": (1.5, [SCALAR]), "named": Betas(0.5, 0.9)}
    given = {"state": {"p": {key: value for key, value in group.items() if key != "params"}}, "param_groups": [group]}

    def body(comm):
        return broadcast_processed_state(comm, given if comm.rank == 0 else None)

    for found in run_ranks(2, body):
        assert same(found, given)
        for holder in (found["state"]["p"], found["param_groups"][0]):
            assert [type(holder[key]) for key in ("list", "tuple", "named")] == [list, tuple, Betas]


def test_large_tensors_are_not_sent_with_the_description(run_ranks):
    def body(comm):
        ranks = Counting(comm)
        broadcast_processed_state(ranks, {"state": {"p": {"avg": torch.ones(10**6)}}})
        return ranks.nbytes

    assert run_ranks(2, body)[0] < 1000


def test_nothing_but_state_and_groups_is_sent(run_ranks):
    """What a script has put beside them may be large, or anything."""
    given = {**GIVEN, "ema": {"w": torch.ones(10**6)}, "schedule": lambda step: 1.0}

    def body(comm):
        ranks = Counting(comm)
        found = broadcast_processed_state(ranks, given if comm.rank == 0 else None)
        return list(found), ranks.nbytes

    for keys, nbytes in run_ranks(2, body):
        assert keys == ["state", "param_groups"]
        assert nbytes < 10_000


class Locked:
    """Cannot be pickled."""

    def __reduce__(self):
        raise RuntimeError("it is locked")


class Closed(Exception):
    """Can be pickled, and not be made again: ``Exception`` remembers other arguments than it takes."""

    def __init__(self, one, two):
        super().__init__(one)


def local_enum():
    class Mode(enum.IntEnum):
        ON = 1

    return Mode.ON


HINT = "leave it out, make it of tensors and plain data, or pass the whole state dict on every rank"


@pytest.mark.parametrize("where", ["state", "group"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Locked(), "'own' of {} is a Locked that cannot be pickled and unpickled (it is locked)"),
        ([1, Locked()], "1 of 'own' of {} is a Locked that cannot be pickled"),
        (local_enum(), "'own' of {} is a Mode that cannot be pickled"),
        (Closed(1, 2), "missing 1 required positional argument: 'two'"),
    ],
    ids=["alone", "in a list", "int of a local class", "exception"],
)
def test_what_cannot_be_sent_is_named_on_all_ranks(run_ranks, value, problem, where):
    given = {"state": {"p": {"own": value}}} if where == "state" else {"state": {}, "param_groups": [{"own": value}]}

    def body(comm):
        return broadcast_processed_state(comm, given if comm.rank == 0 else None)

    first, other = raised(run_ranks(2, body), StateDictError)
    assert problem.format("'p' of 'state'" if where == "state" else "0 of 'param_groups'") in first
    assert first.endswith(f", so it cannot be sent to other ranks: {HINT}")
    assert other == f"rank 0: {first}"


def test_keys_that_cannot_be_sent_are_an_error_on_all_ranks(run_ranks):
    def body(comm):
        return broadcast_processed_state(comm, {"state": {Locked(): {"step": 1}}} if comm.rank == 0 else None)

    first, other = raised(run_ranks(2, body), StateDictError)
    assert first.startswith("'state' is a dict that cannot be pickled and unpickled (it is locked)")
    assert other == f"rank 0: {first}"


here = threading.local()


def import_on_rank_0():
    if here.rank != 0:
        raise ImportError("no module named 'mine'")


class Mine:
    """Of a class that rank 0 alone can import."""

    def __reduce__(self):
        return import_on_rank_0, ()


def test_what_another_rank_cannot_read_is_an_error_on_all_ranks(run_ranks):
    def body(comm):
        here.rank = comm.rank
        return broadcast_processed_state(comm, {"state": {"p": {"own": Mine()}}} if comm.rank == 0 else None)

    message = (
        "a value in the state dict of rank 0 cannot be unpickled here (ImportError: no module named 'mine'): make the "
        f"same classes importable on this rank, {HINT}"
    )
    first, *others = raised(run_ranks(3, body), StateDictError)
    assert first == f"rank 1: {message}"
    assert others == [message, message]


@pytest.mark.parametrize("tensor", [BIG, EMPTY, BIG.bfloat16(), BIG.t(), BIG > 2], ids=str)
def test_a_tensor_goes_to_all_ranks(run_ranks, tensor):
    def body(comm):
        given = Rank0Tensor(tensor.shape, tensor.dtype, tensor if comm.rank == 0 else None)
        return broadcast_state(comm, given, CPU)

    for found in run_ranks(3, body):
        assert same(found, tensor)
        assert found.is_contiguous()
        assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_what_is_on_all_ranks_is_not_sent():
    for value in (BIG, 3, None, [BIG]):
        assert broadcast_state(None, value, CPU) is value
