import itertools
import json
import struct

import pytest
import safetensors
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.convert import safetensors as own
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointError

SPECS = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda name: name != "__metadata__"),
        st.builds(
            TensorSpec,
            st.just("x"),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            st.sampled_from(sorted(own._CODES)),
        ),
    ),
    max_size=6,
    unique_by=lambda item: item[0],
)


def whole(tensors, metadata):
    head, entries = own.pack(tensors, metadata)
    return head + bytes(range(256)) * 8, head, entries


def parse(data):
    return own.parse(len(data), lambda begin, nbytes: data[begin : begin + nbytes])


@given(
    SPECS,
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"]))
    ),
)
def test_what_is_packed_is_parsed_and_the_library_reads_it(tensors, metadata):
    data, head, entries = whole(tensors, metadata)
    data = data[: len(head) + sum(entry.nbytes for entry in entries)]
    found, described = parse(data)
    assert sorted(found, key=lambda entry: entry.name) == sorted(entries, key=lambda entry: entry.name)
    assert described == metadata
    read = dict(safetensors.deserialize(data))
    assert set(read) == {name for name, _ in tensors}
    for entry in entries:
        assert read[entry.name]["dtype"] == own._CODES[entry.dtype]
        assert read[entry.name]["shape"] == list(entry.shape)
        assert bytes(read[entry.name]["data"]) == data[entry.begin : entry.begin + entry.nbytes]


@given(SPECS)
def test_every_tensor_begins_at_a_multiple_of_its_elements_size(tensors):
    _, head, entries = whole(tensors, {})
    assert len(head) % 8 == 0
    assert all(entry.begin % TensorSpec("x", (1,), entry.dtype).itemsize == 0 for entry in entries)


def test_a_dtype_that_the_format_lacks_is_named():
    with pytest.raises(
        CheckpointError, match=r"'w' has dtype complex128, which safetensors does not support: .*--names"
    ):
        own.pack([("w", TensorSpec("model/w", (1,), "complex128"))], {})


def test_a_tensor_cannot_be_called_as_the_metadata_are():
    with pytest.raises(CheckpointError, match="'__metadata__' cannot be the name"):
        own.pack([("__metadata__", TensorSpec("x", (1,), "int8"))], {})


def test_a_header_that_no_reader_takes_is_refused(monkeypatch):
    monkeypatch.setattr(own, "MAX_HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match=r"the header would have .* use --shard-bytes"):
        own.pack([("w", TensorSpec("x", (1,), "int8"))], {})


W = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file(header, data=b"12345678", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short"),
        (file({"w": W}, length=1 << 40), "its header would have"),
        (file(b"\xff\xfe"), "decode"),
        (file(b"["), "Expecting"),
        (file(b"[" * 100_000), "nested too deeply"),
        (file([]), "no JSON object"),
        (file({"__metadata__": {"a": 1}}), "not strings"),
        (file({"w": {"dtype": "F32"}}), "not described"),
        (file({"w": {**W, "shape": [-2]}}), "has the shape"),
        (file({"w": {**W, "shape": [True, 2]}}), "has the shape"),
        (file({"w": {**W, "shape": [1.0, 2]}}), "has the shape"),
        (file({"w": {**W, "shape": [1 << 63]}}), "has the shape"),
        (file({"w": {**W, "shape": [1 << 62, 1 << 62]}}), "has 8 bytes"),
        (file({"w": {**W, "data_offsets": [0, 4]}}), "has 4 bytes"),
        (file({"w": {**W, "data_offsets": [8, 0]}}), "has -8 bytes"),
        (file({"w": {**W, "data_offsets": [1, 9]}}, b"123456789"), "gap or an overlap before 'w'"),
        (file({"w": W, "v": W}), "gap or an overlap"),
        (file({"w": W}, b"1234567"), "end at byte"),
        (file({"w": W}, b"123456789"), "end at byte"),
        (file(b'{"w": 1, "w": 2}'), "one name twice"),
    ],
)
def test_a_damaged_header_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        parse(data)


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F64X", ["F32"]])
def test_a_dtype_that_checkpoints_do_not_hold_is_named(code):
    with pytest.raises((CheckpointError, ValueError), match=r"'w' (has dtype|has the shape)"):
        parse(file({"w": {**W, "dtype": code}}))


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 60))
def test_shards_hold_what_fits_in_order(sizes, shard_bytes):
    tensors = [(str(place), TensorSpec("x", (size,), "int8")) for place, size in enumerate(sizes)]
    shards = [[int(name) for name, _ in shard] for shard in own.split(tensors, shard_bytes)]
    assert [place for shard in shards for place in shard] == list(range(len(sizes)))
    for shard in shards:
        assert len(shard) == 1 or sum(sizes[place] for place in shard) <= shard_bytes
    for before, after in itertools.pairwise(shards):
        assert sum(sizes[place] for place in before) + sizes[after[0]] > shard_bytes
