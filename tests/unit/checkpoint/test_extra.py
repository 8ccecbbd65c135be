import datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.extra import join_arrays, split_arrays
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.errors import CheckpointError

arrays = st.sampled_from(["bool", "i1", "u2", "i8", "f2", "f4", ">f8", "c16"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, dtype))
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


def equal(a, b):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@given(values)
@settings(max_examples=100, deadline=None)
def test_nested_values_come_back_through_json(value):
    plain, taken = split_arrays(value)
    assert equal(join_arrays(schema.from_json(schema.to_json(plain)), taken), value)


def test_each_array_is_taken_out_under_a_name_of_its_own():
    plain, taken = split_arrays({"a": np.zeros(1), "b": [np.ones(2), {"c": np.ones(3)}]})
    assert plain == {"a": {"__array__": "0"}, "b": [{"__array__": "1"}, {"c": {"__array__": "2"}}]}
    assert [array.size for array in taken.values()] == [1, 2, 3]


def test_tuples_become_lists_and_numpy_numbers_python_numbers():
    plain, taken = split_arrays({"t": (1, (2,)), "n": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True)})
    assert plain == {"t": [1, [2]], "n": 3, "f": 0.5, "b": True}
    assert [type(plain[key]) for key in "nfb"] == [int, float, bool]
    assert taken == {}


def test_a_tensor_becomes_an_array_without_its_graph():
    _, taken = split_arrays([torch.arange(3.0, requires_grad=True)])
    assert taken["0"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        ({"a": [1, {"b": object()}]}, "['a'][1]['b']", "object"),
        ({"a": {1}}, "['a']", "set"),
        ({"a": b"x"}, "['a']", "bytes"),
        ({"a": 1j}, "['a']", "complex"),
        ({"a": np.array(["x"])}, "['a']", "ndarray"),
        ({"a": np.array([None])}, "['a']", "ndarray"),
        ({"when": datetime.date(2026, 1, 2)}, "['when']", "date"),
    ],
)
def test_other_values_are_refused_by_place_and_type(value, place, kind):
    with pytest.raises(CheckpointError) as caught:
        split_arrays(value)
    assert str(caught.value) == (
        f"extra{place} is a {kind}: numbers, strings, lists, dicts, arrays and tensors can be saved"
    )


@pytest.mark.parametrize(
    "value",
    [np.complex128(1), np.datetime64("2026-01-02"), np.longdouble(1), np.bytes_(b"x")],
    ids=lambda v: v.dtype.name,
)
def test_a_numpy_scalar_that_json_does_not_have_is_refused_by_its_place(value):
    with pytest.raises(CheckpointError) as caught:
        split_arrays({"a": [value]})
    assert str(caught.value).startswith("extra['a'][0] ")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
    ],
    ids=["bfloat16", "conjugate", "meta", "sparse"],
)
def test_a_tensor_is_kept_or_refused_by_its_place(tensor):
    try:
        _, taken = split_arrays({"a": [tensor]})
    except CheckpointError as error:
        assert "extra['a'][0]" in str(error)
    else:
        assert taken["0"].tolist() == tensor.tolist()


@pytest.mark.parametrize("key", [1, 2.5, True, None, "__array__", "__items__"])
def test_a_key_that_json_would_change_or_take_for_its_own_comes_back_as_it_was(key):
    value = {"a": {key: 1, "b": np.arange(2)}}
    plain, arrays = split_arrays(value)
    back = join_arrays(schema.from_json(schema.to_json(plain)), arrays)
    assert list(back["a"]) == [key, "b"]
    assert type(next(iter(back["a"]))) is type(key)
    assert back["a"]["b"].tolist() == [0, 1]


def test_a_key_that_is_neither_string_nor_number_is_refused_by_place():
    with pytest.raises(CheckpointError) as caught:
        split_arrays({"a": {("a",): 1}})
    assert str(caught.value) == "extra['a']: key ('a',) cannot be saved; use strings or numbers as keys"
