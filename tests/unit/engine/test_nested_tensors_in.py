import dataclasses
import gc
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from hpcfsdp.engine.nested import tensors_in

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Output:
    """What a model may return."""

    logits: torch.Tensor
    further: Any = None
    loss: torch.Tensor | None = None


class Unknown:
    """Holds a tensor in a way of its own."""

    def __init__(self):
        self.tensor = A


def found(value):
    return [id(tensor) for tensor in tensors_in(value)]


@pytest.mark.parametrize(
    "value",
    [
        (A, B, C),
        [A, [B, (C,)]],
        {"a": A, "b": {"c": [B, C]}},
        OrderedDict(a=A, b=B, c=C),
        defaultdict(list, a=[A, B], c=C),
        UserDict({"a": A, "b": (B, C)}),
        Point(A, Point(B, C)),
        Output(A, [B], C),
        Output(A, Output(B, None, C)),
        [None, A, 1, "text", B, 2.5, C, torch.float32, torch.Size([3])],
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_in_order_in_nested_containers(value):
    assert found(value) == [id(A), id(B), id(C)]


def test_a_tensor_is_found_by_itself():
    assert found(A) == [id(A)]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_tensors_in_sets_are_found(kind):
    assert sorted(found(kind([A, B]))) == sorted([id(A), id(B)])


def test_the_data_of_a_packed_sequence_is_found():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert found([packed]) == [id(packed.data)]


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, 1j, True, "text", b"bytes", torch.float32, torch.device("cpu"), torch.Size([1]), [], {}]
)
def test_plain_values_hold_no_tensors(value):
    assert found(value) == []


def test_objects_of_other_types_are_passed_over():
    assert found([A, Unknown(), B]) == [id(A), id(B)]


def test_a_dataclass_type_is_not_an_instance_of_it():
    assert found(Output) == []


class Registered:
    """A type that is registered with pytree."""

    def __init__(self, *tensors):
        self.tensors = tensors


def test_types_that_pytree_knows_are_followed():
    _pytree.register_pytree_node(
        Registered, lambda node: (list(node.tensors), None), lambda children, _: Registered(*children)
    )
    assert found([Registered(A, B)]) == [id(A), id(B)]


def test_found_tensors_are_let_go_without_a_garbage_collection():
    gc.disable()
    try:
        tensor = torch.zeros(1)
        gone = weakref.ref(tensor)
        assert tensors_in([(tensor,)]) == [tensor]
        del tensor
        assert gone() is None
    finally:
        gc.enable()
