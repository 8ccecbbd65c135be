import collections
import datetime
import enum
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.plain_values import fits, from_plain, join_arrays, split_arrays, to_plain
from hpcfsdp.errors import CheckpointError
from tests.unit.checkpoint.examples import equal

LACKING = [getattr(torch, name) for name in sorted(schema._NUMPY_DTYPES) if schema.needs_mark(name) and name != "bool"]
"""Dtypes that numpy lacks."""
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.binary().map(bytearray)
OTHERS = [
    np.arange(3),
    np.array(1.5, ">f8"),
    torch.arange(4.0),
    torch.tensor(True),
    torch.ones(2, dtype=torch.complex64).conj(),
    *(torch.tensor([1.0, 2.0]).to(dtype) for dtype in LACKING),
    torch.tensor(1.5, dtype=torch.bfloat16),
    *(np.dtype(name).type(3) for name in ("bool", "int8", "uint64", "float16", "float32", "float64")),
    np.float32("nan"),
]


def containers(inner):
    dicts = st.dictionaries(st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False), inner)
    counted = st.dictionaries(st.integers(), st.integers()).map(collections.Counter)
    default = dicts.map(lambda found: collections.defaultdict(list, found))
    return st.lists(inner) | st.lists(inner).map(tuple) | dicts | dicts.map(collections.OrderedDict) | counted | default


VALUES = st.recursive(SIMPLE | st.sampled_from(OTHERS), containers, max_leaves=12)


@given(VALUES)
def test_values_come_back_through_json_as_they_were(value):
    plain, types = to_plain("x", value)
    values, arrays = split_arrays(plain)
    back = join_arrays(schema.from_json(schema.to_json(values)), arrays)
    types = schema.from_json(schema.to_json(types))
    assert equal(from_plain(back, types), value)
    assert all(fits(kind, at(plain, place)) for place, kind in types)


def at(value, place):
    for position in place:
        value = list(value.values())[position] if isinstance(value, dict) else value[position]
    return value


@pytest.mark.parametrize("factory", [None, int, float, str, list, dict, set])
def test_a_defaultdict_keeps_its_factory(factory):
    back = from_plain(*to_plain("x", collections.defaultdict(factory, a=1)))
    assert (type(back), back.default_factory, back) == (collections.defaultdict, factory, {"a": 1})


@pytest.mark.parametrize("dtype", LACKING, ids=str)
def test_every_bit_of_a_dtype_that_numpy_lacks_is_kept(dtype):
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16) if dtype.itemsize == 2 else torch.arange(256)
    bits = words if dtype.itemsize == 2 else words.to(torch.uint8)
    back = from_plain(*to_plain("x", bits.view(dtype)))
    assert back.dtype == dtype
    assert torch.equal(back.view(bits.dtype).to(torch.int32), words.to(torch.int32))


def test_a_tensor_is_copied_and_can_be_resized_afterwards():
    tensor = torch.ones(2)
    plain, _ = to_plain("x", [tensor])
    tensor.zero_().resize_(5)
    assert plain[0].tolist() == [1, 1]


class Word(str):
    """Not a plain string."""


class Level(enum.IntEnum):
    HIGH = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        (object(), "object", "keep numbers, strings,"),
        (Word("a"), "Word", "keep str"),
        (Level.HIGH, "Level", "keep int"),
        (Point(1, 2), "Point", "keep tuple"),
        (type("Sub", (dict,), {})(), "Sub", "keep dict"),
        (type("Sub", (list,), {})(), "Sub", "keep list"),
        (collections.defaultdict(lambda: 1), "defaultdict", "keep dict"),
        (np.str_("a"), "str_", "keep str"),
        (np.bytes_(b"a"), "bytes_", "keep bytes"),
        ({1, 2}, "set", "lists"),
        (1j, "complex", "numbers"),
        (np.complex128(1), "complex128", "arrays"),
        (np.longdouble(1), "longdouble", "arrays"),
        (np.datetime64("2026-01-02"), "datetime64", "strings"),
        (datetime.date(2026, 1, 2), "date", "strings"),
        (Path("x"), "PosixPath", "strings"),
        (torch.float32, "dtype", "strings"),
        (np.array(["x"]), "ndarray", "lists"),
        (np.array([None]), "ndarray", "lists"),
        (np.ma.array([1]), "MaskedArray", "arrays"),
    ],
)
@pytest.mark.parametrize(
    ("wrap", "place"),
    [(lambda v: v, ""), (lambda v: [v], "[0]"), (lambda v: (1, {"a": v}), "[1]['a']")],
    ids=["bare", "list", "tuple"],
)
def test_what_would_come_back_as_another_type_is_refused_by_its_place(value, kind, remedy, wrap, place):
    with pytest.raises(CheckpointError) as caught:
        to_plain("the state 'x'", wrap(value))
    message = str(caught.value)
    assert message.startswith(f"the state 'x'{place} is a {kind}, and nothing is pickled into a checkpoint: keep ")
    assert remedy in message


@pytest.mark.parametrize("key", [("a",), Level.HIGH, np.int64(1), Word("a"), b"a"], ids=repr)
def test_a_key_that_would_come_back_as_another_is_refused_by_its_place(key):
    with pytest.raises(CheckpointError) as caught:
        to_plain("extra", {"a": {key: 1}})
    assert str(caught.value) == f"extra['a']: key {key!r} cannot be saved; use strings or numbers as keys"


@pytest.mark.parametrize("tensor", [torch.ones(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_a_tensor_that_no_array_can_hold_is_refused_by_its_place(tensor):
    with pytest.raises(CheckpointError, match=r"extra\['a'\]\[0\] is a tensor of .*save a dense .*float\(\), or leave"):
        to_plain("extra", {"a": [tensor]})


def test_a_value_within_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="extra: lists and dicts are in each other over more than 200 levels"):
        to_plain("extra", value)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("evil", 1),
        ("tuple", {}),
        ("tuple x", []),
        ("Counter", []),
        ("defaultdict", {}),
        ("defaultdict eval", {}),
        ("numpy object", 1),
        ("numpy float32", "1"),
        ("bytes", [1]),
        ("tensor", [1]),
        ("tensor float3", np.zeros(1, np.uint8)),
        ("tensor", np.zeros(1, ">f4")),
    ],
)
def test_a_form_that_a_type_does_not_have_does_not_fit(kind, form):
    assert not fits(kind, form)


def test_values_without_tensors_need_no_torch():
    code = (
        "import sys, collections; from hpcfsdp.checkpoint.format.plain_values import from_plain, to_plain\n"
        "assert from_plain(*to_plain('x', [(1,), collections.Counter('a')])) == [(1,), collections.Counter('a')]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


arrays = st.sampled_from(["bool", "i1", "u2", "i8", "f2", "f4", ">f8", "c16"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, dtype))
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


def same(a, b):
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(values)
@settings(max_examples=100, deadline=None)
def test_nested_values_come_back_through_json(value):
    plain, taken = split_arrays(value)
    assert same(join_arrays(schema.from_json(schema.to_json(plain)), taken), value)


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
