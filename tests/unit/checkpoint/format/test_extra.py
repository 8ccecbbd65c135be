import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.extra import join_arrays, split_arrays

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


@pytest.mark.parametrize("key", [1, 2.5, True, None, "__array__", "__items__"])
def test_a_key_that_json_would_change_or_take_for_its_own_comes_back_as_it_was(key):
    value = {"a": {key: 1, "b": np.arange(2)}}
    plain, arrays = split_arrays(value)
    back = join_arrays(schema.from_json(schema.to_json(plain)), arrays)
    assert list(back["a"]) == [key, "b"]
    assert type(next(iter(back["a"]))) is type(key)
    assert back["a"]["b"].tolist() == [0, 1]
