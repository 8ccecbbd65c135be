import copy
import enum
import pickle
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.values import Unpicklable, check_nested, digest, on_host, picklable, same
from tests.unit.state.optim.examples import Incomparable, Odd, Unreadable, values

NAN = float("nan")


# What is equal


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


class Plain:
    """Equal to itself alone, as objects are by default."""

    def __init__(self, value):
        self.value = value


def test_objects_that_have_no_equality_are_the_same_if_their_content_is():
    assert same(Plain(3), Plain(3))
    assert not same(Plain(3), Plain(4))


def test_tensors_in_objects_are_equal_by_their_elements():
    first, second, third = (Plain([torch.tensor([1.0, NAN]), torch.full((2,), value)]) for value in (1.0, 1.0, 2.0))
    assert same(first, second)
    assert digest(first) == digest(pickle.loads(pickle.dumps(first))) == digest(second)
    assert not same(first, third)
    assert digest(first) != digest(third)


def one_differs(place):
    array = np.zeros(2000)
    array[1000] = place
    return array


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (one_differs(0), one_differs(0), True),
        (one_differs(0), one_differs(1), False),  # which their text does not show
        (one_differs(NAN), one_differs(NAN), True),
        (np.ones(4000)[::2], np.ones(2000), True),
        (np.asfortranarray(np.eye(3)), np.eye(3), True),
        (np.ones(2), np.ones(2, np.float32), False),
        (np.ones(1), np.ones((1, 1)), False),
        (np.ones(1), 1.0, False),
        ([one_differs(0)], [one_differs(1)], False),
        (np.array(["a", None]), np.array(["a", None]), True),
        (np.array(["a", None]), np.array(["b", None]), False),
        (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 2.0)], "i4,f8"), True),
        (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8"), False),
    ],
    ids=str,
)
def test_arrays_are_equal_by_their_elements(one, other, equal):
    assert same(one, other) is equal
    assert same(other, one) is equal
    assert (digest(one) == digest(other)) is equal


ODD_TENSORS = [
    torch.eye(2).to_sparse(),
    torch.ones(2, device="meta"),
]


@pytest.mark.parametrize("tensor", ODD_TENSORS, ids=["sparse", "meta"])
def test_tensors_with_unreadable_elements_are_described_and_compared(tensor):
    for value in (tensor, [tensor], {"a": (tensor,)}):
        sent = picklable(value)
        assert not isinstance(sent, Unpicklable)
        received = pickle.loads(pickle.dumps(sent))
        assert same(received, sent)
        assert same(received, value)
        assert digest(value) == digest(copy.deepcopy(value))
    assert not same(tensor, torch.ones(2))
    assert not same(torch.eye(2), tensor)
    assert digest(tensor) != digest(torch.ones(2))
    assert tensor.is_meta or not same(tensor, tensor * 2)


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (1, "1"),
        ([1], (1,)),
        (Level.LOW, 1),
        (Text("a"), "a"),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (torch.ones(1), torch.ones(1, dtype=torch.float64)),
        (torch.ones(1), nn.Parameter(torch.ones(1)).detach() * 2),
        ({1, 2}, {1, 3}),
    ],
    ids=str,
)
def test_different_values_have_different_digests(one, other):
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [2]}, OrderedDict(b=[2], a=1)),
        ({1, 2, 3}, {3, 2, 1}),
        (NAN, float("nan")),
        (torch.tensor([NAN, 1]), torch.tensor([NAN, 1])),
        (Level.LOW, Level.LOW),
        (Odd(3), Odd(3)),
    ],
    ids=str,
)
def test_equal_values_have_one_digest(one, other):
    assert digest(one) == digest(other)


def test_what_cannot_be_pickled_has_no_digest_and_equals_itself_alone():
    one = [Incomparable(threading.Lock())]
    assert same(one, one)
    assert not same(one, [Incomparable(threading.Lock())])
    with pytest.raises(TypeError, match="pickle"):
        digest(one)


@given(values)
@settings(deadline=None, max_examples=50)
def test_everything_equals_a_copy_of_itself(value):
    assert same(value, copy.deepcopy(value))


# What is sent to other ranks


def test_the_description_of_a_value():
    for value in (True, 3, 2.5, "x", None, (1, 2), {"a": [1.5]}, Odd(3)):
        assert picklable(value) is value
    assert picklable(lambda: 3) == "<function, which cannot be pickled>"
    assert picklable([threading.Lock()]) == "<list, which cannot be pickled>"

    class Refuses:
        def __reduce__(self):
            raise KeyError("no")

    assert picklable(Refuses()).endswith("Refuses, which cannot be pickled>")
    assert picklable(Unreadable()) == "<Unreadable, which cannot be pickled>"


@pytest.mark.parametrize("base", [int, float, str])
def test_a_number_or_text_of_a_class_that_cannot_be_pickled_is_not_described(base):
    """As a member of an enumeration that a function defines."""

    class Local(base, enum.Enum):
        ONE = base(1)

    for value in (Local.ONE, [Local.ONE], {"a": Local.ONE}):
        assert isinstance(picklable(value), Unpicklable)
    assert picklable(Level.LOW) is Level.LOW
    text = Text("a")
    assert picklable(text) is text


def test_values_with_large_tensors_in_them_are_refused():
    check_nested("w", {"small": [torch.zeros(100)], "tensor": torch.zeros(1 << 20), "text": "x" * (1 << 20)})
    with pytest.raises(StateDictError, match=r"'old_dirs' of 'w' is a list of tensors with 131072 elements"):
        check_nested("w", {"old_dirs": [torch.zeros(1 << 16), {"more": (torch.zeros(1 << 16),)}]})


def test_tensors_in_a_description_are_in_host_memory():
    sent = picklable({"lr": torch.ones(2, requires_grad=True), "more": [1, (torch.ones(1),)]})
    assert same(sent["more"], [1, (torch.ones(1),)])
    assert same(sent["lr"], torch.ones(2))
    assert not sent["lr"].requires_grad


def test_tensors_without_values_stay_where_they_are():
    [meta, here] = on_host([torch.ones(2, device="meta", requires_grad=True), torch.ones(2)])
    assert meta.is_meta
    assert not meta.requires_grad
    assert same(here, torch.ones(2))
