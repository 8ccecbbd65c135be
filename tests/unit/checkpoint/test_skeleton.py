"""The bytes of a file around those of its tensors are what HDF5 would have written."""

import io
import itertools
import tracemalloc

import h5py
import numpy as np
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.skeleton import build_skeleton

DTYPES = ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"]
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def file_of(path, specs, values, **small):
    """Put a file together as a writer does: regions, tensors, seal."""
    rows = np.zeros(len(specs), schema.EXTENT_DTYPE)
    skeleton = build_skeleton(specs, [], len(rows), {"step": np.int64(4)}, small)
    rows["tensor"], rows["checksum"] = np.arange(len(specs)), 7
    regions, seal = skeleton.sealed(rows)
    content = bytearray(skeleton.nbytes)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    for spec, offset in zip(specs, skeleton.offsets, strict=True):
        assert content[offset : offset + spec.nbytes] == bytes(spec.nbytes), "a tensor lies on something else"
        content[offset : offset + spec.nbytes] = values[spec.path]
    packed = seal.pack()
    content[len(content) - len(packed) :] = packed
    assert len(content) == seal.file_bytes == skeleton.nbytes
    path.write_bytes(content)
    return skeleton, regions, rows


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5), st.binary(max_size=50))
@settings(max_examples=60)
def test_hdf5_reads_what_was_put_together(tmp_path_factory, kinds, note):
    specs = [TensorSpec(f"model/a.{index}", shape, dtype) for index, (shape, dtype) in enumerate(kinds)]
    values = {spec.path: np.random.default_rng(3).bytes(spec.nbytes) for spec in specs}
    path = tmp_path_factory.mktemp("skeleton") / "a.h5"
    skeleton, regions, rows = file_of(path, specs, values, note=np.frombuffer(note, np.uint8))
    spans = [(begin, begin + len(data)) for begin, data in regions]
    spans += [(at, at + spec.nbytes) for at, spec in zip(skeleton.offsets, specs, strict=True) if spec.nbytes]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    with h5py.File(path) as file:
        assert (file.attrs["format"], file.attrs["step"], file.attrs["committed"]) == (b"hpcfsdp", 4, 1)
        assert file["note"][()].tobytes() == note
        np.testing.assert_array_equal(file[schema.EXTENTS][...], rows)
        for spec, offset in zip(specs, skeleton.offsets, strict=True):
            dataset = file[spec.path]
            assert (dataset.shape, schema.torch_dtype(dataset)) == (spec.shape, spec.dtype)
            assert offset == (dataset.id.get_offset() or 0)


SMALL = st.dictionaries(
    st.sampled_from(["extra/values", "extra/arrays/0", "meta/config", "metrics/loss/value", "optim/scalars", "new"]),
    st.binary(min_size=1, max_size=3000).map(lambda data: np.frombuffer(data, np.uint8)),
)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=30), SMALL, st.booleans())
@settings(max_examples=60)
def test_values_that_come_late_move_no_tensor(kinds, late, in_optim):
    paths = (f"{'optim/state' if in_optim and n % 2 else 'model'}/a.{n}" for n in itertools.count())
    specs = [TensorSpec(path, shape, dtype) for path, (shape, dtype) in zip(paths, kinds, strict=False)]
    attributes = {"step": np.int64(1), "date": "2026-01-01T00:00:00+00:00"}
    without = build_skeleton(specs, [], 7, attributes, {})
    other = {"step": np.int64(1 << 40), "date": "2027-02-02T11:11:11+00:00"}
    found = build_skeleton(specs, [], 7, other, {}, late=late)
    assert (found.offsets, found.table) == (without.offsets, without.table)
    for begin, data in found.regions:
        for spec, offset in zip(specs, found.offsets, strict=True):
            assert begin >= offset + spec.nbytes or begin + len(data) <= offset
    image = bytearray(found.data_end)
    for begin, data in found.regions:
        image[begin : begin + len(data)] = data
    with h5py.File(io.BytesIO(image)) as file:
        assert {path: file[path][()].tobytes() for path in late} == {path: v.tobytes() for path, v in late.items()}
        if "metrics/loss/value" in late:
            assert file["metrics/loss"].attrs["NX_class"] == b"NXdata"


def test_tensors_that_are_laid_out_take_next_to_no_memory():
    specs = [TensorSpec(f"model/{n}", (512, 512), "float32") for n in range(300)]
    tracemalloc.start()
    build_skeleton(specs, [], 300, {}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * 16384


def test_what_is_no_tensor_lies_in_front_of_tensors(tmp_path):
    specs = [TensorSpec(f"model/{n}", (300,), "float32") for n in range(400)]
    skeleton, regions, _ = file_of(tmp_path / "a.h5", specs, {spec.path: bytes(1200) for spec in specs})
    assert max(begin + len(data) for begin, data in regions) <= min(skeleton.offsets)
    assert skeleton.data_end - min(skeleton.offsets) < 400 * 1200 + 8 * 400  # small tensors lie together


def test_large_tensors_start_at_a_multiple_of_a_mebibyte_and_take_no_memory():
    specs = [TensorSpec(f"model/{n}", (1 << 30,), "float32") for n in range(64)]
    skeleton = build_skeleton(specs, [], 64, {}, {})
    assert all(offset % schema.ALIGNMENT_BYTES == 0 for offset in skeleton.offsets)
    assert skeleton.data_end >= 64 << 32
    assert sum(len(data) for _, data in skeleton.regions) < 1 << 20


def test_a_further_name_is_the_same_dataset(tmp_path):
    spec = TensorSpec("model/w", (3,), "float32")
    skeleton = build_skeleton([spec], [("model/tied/w", "model/w")], 1, {}, {})
    regions, seal = skeleton.sealed(np.zeros(1, schema.EXTENT_DTYPE))
    content = bytearray(seal.file_bytes)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    (tmp_path / "a.h5").write_bytes(content)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["model/tied/w"] == file["model/w"]
        assert file[schema.LINKS][0].tolist() == (b"model/tied/w", 0)
