import math
import struct

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec

pytestmark = pytest.mark.hdf5

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
]
FLOAT8 = [dtype for dtype in DTYPES if dtype.startswith("float8")]


def sample(dtype):
    """Values of a dtype, with its extremes."""
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.tensor([True, False, True])
    if kind.is_complex:
        return torch.tensor([1 - 2j, complex(math.inf, 0.5)], dtype=kind)
    if dtype in FLOAT8:
        return torch.arange(256, dtype=torch.uint8).view(kind)
    info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    values = [info.min, 0, 1, info.max]
    if kind.is_floating_point:
        values += [info.tiny, -0.0, math.inf, math.nan, 1.5]
    return torch.tensor(values, dtype=kind)


def write(path, dtype, bits):
    """A dataset "x" with the bytes `bits`, as checkpoints write it."""
    with h5py.File(path, "w", libver=schema.LIBVER) as file:
        kind = schema.hdf5_type(dtype)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(bits.shape)))
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=kind)
        if schema.needs_mark(dtype):
            dataset.attrs[schema.DTYPE_ATTRIBUTE] = np.bytes_(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_found_again_with_its_values(tmp_path, dtype):
    tensor = sample(dtype)
    bits = tensor.view(torch.uint8).numpy().view(schema.numpy_dtype(dtype))
    write(tmp_path / "x.h5", dtype, bits)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"].id.get_type() == schema.hdf5_type(dtype)
        values = file["x"][...]
    if dtype in FLOAT8:  # no tool knows these: they are shown as their bits, with the mark
        tensor = tensor.view(torch.uint8)
    expected = tensor.float().numpy() if dtype == "bfloat16" else tensor.numpy()
    np.testing.assert_array_equal(values.astype(expected.dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_those_of_torch(dtype):
    assert schema.supported(dtype)
    assert schema.numpy_dtype(dtype).itemsize == getattr(torch, dtype).itemsize
    assert TensorSpec("model/x", (2, 3), dtype).nbytes == 6 * getattr(torch, dtype).itemsize


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_hdf5_reads_every_bfloat16_as_the_value_that_torch_gives_it(words):
    bits = np.array(words, dtype="<u2")
    kind = schema.hdf5_type("bfloat16")
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple(bits.shape)))
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, bits, mtype=kind)
        values = dataset[...].astype(np.float32)
    np.testing.assert_array_equal(values, torch.from_numpy(bits).view(torch.bfloat16).float().numpy())


@pytest.mark.parametrize("dtype", ["complex32", "", "quint8", "float4_e2m1fn_x2", "bits8"])
def test_other_dtypes_are_not_supported(dtype):
    assert not schema.supported(dtype)


def test_a_dtype_needs_a_mark_where_another_has_the_same_hdf5_type():
    """Without one, readers tell dtypes by their types, which thus have to differ."""
    unmarked = [dtype for dtype in DTYPES if not schema.needs_mark(dtype)]
    assert len({schema.numpy_dtype(dtype).str for dtype in unmarked}) == len(unmarked) == 13


def test_a_row_of_the_table_of_extents_has_no_holes():
    assert schema.EXTENT_DTYPE.itemsize == 4 * 4 + 5 * 8
    assert [schema.EXTENT_DTYPE.fields[name][1] for name in schema.EXTENT_DTYPE.names] == [
        0, 4, 8, 12, 16, 24, 32, 40, 48,
    ]  # fmt: skip


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((3, 0), 0), ((2, 3, 4), 24)])
def test_a_spec_counts_its_elements(shape, numel):
    assert TensorSpec("model/x", shape, "float32").numel == numel


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
@settings(max_examples=80, deadline=None)
def test_json_comes_back_as_it_was_in_printable_ascii(value):
    text = schema.to_json(value)
    assert text.isascii()
    assert b"\0" not in text
    assert schema.from_json(text) == value


@given(st.floats(width=64))
@settings(max_examples=80, deadline=None)
def test_floats_come_back_bit_by_bit(value):
    again = schema.from_json(schema.to_json(value))
    assert math.isnan(again) if math.isnan(value) else struct.pack("d", again) == struct.pack("d", value)


def test_nan_and_infinities_are_written_as_pythons_json_does():
    assert schema.to_json([math.nan, math.inf, -math.inf]) == b"[NaN,Infinity,-Infinity]"


def test_what_json_does_not_have_is_refused_by_type():
    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        schema.to_json({"a": object()})


def test_checksum_is_xxh3_64():
    assert schema.checksum(b"") == 0x2D06800538D394C2
    assert schema.checksum(b"hpcfsdp") == schema.checksum(np.frombuffer(b"hpcfsdp", np.uint8))
