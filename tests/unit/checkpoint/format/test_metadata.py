"""The bytes of a file around those of its tensors are what HDF5 would have written."""

import io
import itertools
import struct
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import metadata as module, schema
from hpcfsdp.checkpoint.format.metadata import VirtualSource, build_metadata_image
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.content import Content, root_attributes
from hpcfsdp.checkpoint.saving.subfiles import SubfilesWriter

pytestmark = pytest.mark.hdf5

DTYPES = ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"]
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def file_of(path, specs, values, **small):
    """Put a file together as a writer does: regions, tensors, footer."""
    rows = np.zeros(len(specs), schema.EXTENT_DTYPE)
    metadata_image = build_metadata_image(specs, [], len(rows), {"step": np.int64(4)}, small)
    rows["tensor"], rows["checksum"] = np.arange(len(specs)), 7
    regions, footer = metadata_image.with_footer(rows)
    content = bytearray(metadata_image.nbytes)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    for spec, offset in zip(specs, metadata_image.offsets, strict=True):
        assert content[offset : offset + spec.nbytes] == bytes(spec.nbytes), "a tensor lies on something else"
        content[offset : offset + spec.nbytes] = values[spec.path]
    packed = footer.pack()
    content[len(content) - len(packed) :] = packed
    assert len(content) == footer.file_bytes == metadata_image.nbytes
    path.write_bytes(content)
    return metadata_image, regions, rows


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=5), st.binary(max_size=50))
@settings(max_examples=60)
def test_hdf5_reads_what_was_put_together(tmp_path_factory, kinds, note):
    specs = [TensorSpec(f"model/a.{index}", shape, dtype) for index, (shape, dtype) in enumerate(kinds)]
    values = {spec.path: np.random.default_rng(3).bytes(spec.nbytes) for spec in specs}
    path = tmp_path_factory.mktemp("metadata_image") / "a.h5"
    metadata_image, regions, rows = file_of(path, specs, values, note=np.frombuffer(note, np.uint8))
    spans = [(begin, begin + len(data)) for begin, data in regions]
    spans += [(at, at + spec.nbytes) for at, spec in zip(metadata_image.offsets, specs, strict=True) if spec.nbytes]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    with h5py.File(path) as file:
        assert (file.attrs["format"], file.attrs["step"], file.attrs["committed"]) == (b"hpcfsdp", 4, 1)
        assert file["note"][()].tobytes() == note
        np.testing.assert_array_equal(file[schema.EXTENTS][...], rows)
        for spec, offset in zip(specs, metadata_image.offsets, strict=True):
            dataset = file[spec.path]
            assert (dataset.shape, dataset.id.get_type()) == (spec.shape, schema.hdf5_type(spec.dtype))
            mark = spec.dtype.encode() if schema.needs_mark(spec.dtype) else None
            assert schema.attribute(dataset, schema.DTYPE_ATTRIBUTE) == mark
            assert offset == (dataset.id.get_offset() or 0)


SMALL = st.dictionaries(
    st.sampled_from(["extra/values", "extra/arrays/0", "meta/config", "metrics/loss/value", "optim/scalars", "new"]),
    st.binary(min_size=1, max_size=3000).map(lambda data: np.frombuffer(data, np.uint8)),
)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=30), SMALL, st.booleans())
@settings(max_examples=60)
def test_small_values_move_no_tensor(kinds, small, in_optim):
    paths = (f"{'optim/state' if in_optim and n % 2 else 'model'}/a.{n}" for n in itertools.count())
    specs = [TensorSpec(path, shape, dtype) for path, (shape, dtype) in zip(paths, kinds, strict=False)]
    attributes = {"step": np.int64(1), "date": "2026-01-01T00:00:00+00:00"}
    without = build_metadata_image(specs, [], 7, attributes, {})
    other = {"step": np.int64(1 << 40), "date": "2027-02-02T11:11:11+00:00"}
    found = build_metadata_image(specs, [], 7, other, small)
    assert (found.offsets, found.table) == (without.offsets, without.table)
    for begin, data in found.regions:
        for spec, offset in zip(specs, found.offsets, strict=True):
            assert begin >= offset + spec.nbytes or begin + len(data) <= offset
    image = bytearray(found.data_end)
    for begin, data in found.regions:
        image[begin : begin + len(data)] = data
    with h5py.File(io.BytesIO(image)) as file:
        assert {path: file[path][()].tobytes() for path in small} == {path: v.tobytes() for path, v in small.items()}
        if "metrics/loss/value" in small:
            assert file["metrics/loss"].attrs["NX_class"] == b"NXdata"


def test_tensors_that_are_laid_out_take_next_to_no_memory():
    specs = [TensorSpec(f"model/{n}", (512, 512), "float32") for n in range(300)]
    tracemalloc.start()
    build_metadata_image(specs, [], 300, {}, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300 * 16384


def test_what_hdf5_knows_of_tensors_lies_in_front_of_them(tmp_path):
    specs = [TensorSpec(f"model/{n}", (300,), "float32") for n in range(400)]
    metadata_image, regions, _ = file_of(tmp_path / "a.h5", specs, {spec.path: bytes(1200) for spec in specs})
    assert max(begin + len(data) for begin, data in regions) <= min(metadata_image.offsets)
    assert metadata_image.data_end - min(metadata_image.offsets) < 400 * 1200 + 8 * 400  # small tensors lie together


def test_large_tensors_start_at_a_page_without_larger_gaps_and_take_no_memory():
    specs = [TensorSpec(f"model/{n}", ((1 << 30) + 1,), "float32") for n in range(64)]
    metadata_image = build_metadata_image(specs, [], 64, {}, {})
    assert all(offset % 4096 == 0 for offset in metadata_image.offsets)
    assert 0 <= metadata_image.data_end - (64 * specs[0].nbytes) < 64 * 4096 + (1 << 17)
    assert sum(len(data) for _, data in metadata_image.regions) < 1 << 20


def test_a_further_name_is_the_same_dataset(tmp_path):
    spec = TensorSpec("model/w", (3,), "float32")
    metadata_image = build_metadata_image([spec], [("model/tied/w", "model/w")], 1, {}, {})
    regions, footer = metadata_image.with_footer(np.zeros(1, schema.EXTENT_DTYPE))
    content = bytearray(footer.file_bytes)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    (tmp_path / "a.h5").write_bytes(content)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["model/tied/w"] == file["model/w"]
        assert file[schema.LINKS][0].tolist() == (b"model/tied/w", 0)


SPECS = [
    [],
    [TensorSpec("model/w", (300, 2), "float32"), TensorSpec("model/b", (), "bfloat16")],
    [TensorSpec("model/w", (300, 2), "float32"), TensorSpec("model/b", (0,), "bfloat16")],
    [TensorSpec("model/w", (1 << 20,), "int64"), TensorSpec("model/in.w", (1 << 18,), "float32")],
]
ATTRIBUTES = st.fixed_dictionaries(
    {"step": st.integers(0, 1 << 40).map(np.int64), "date": st.sampled_from(["", "2026-01-01", "2027-02-02", "now"])},
    optional={"lr": st.floats(allow_nan=False), **{f"more.{n}": st.just(n) for n in range(12)}},
)
SAVES = st.lists(
    st.tuples(st.sampled_from(SPECS), st.booleans(), st.integers(0, 3), ATTRIBUTES, SMALL),
    min_size=2,
    max_size=5,
)


def fresh(*args):
    """What is made where no base is kept."""
    module._base_of.cache_clear()
    return build_metadata_image(*args)


def image_of(metadata_image):
    content = bytearray(metadata_image.data_end)
    for begin, data in metadata_image.regions:
        content[begin : begin + len(data)] = data
    return content


@given(SAVES)
@settings(max_examples=60, deadline=None)
def test_a_kept_base_gives_the_bytes_of_a_new_one(saves):
    calls = []
    for specs, tied, num_extents, attributes, small in saves:
        links = [("model/tied", "model/w")] if tied and specs else []
        calls.append((specs, links, num_extents, attributes, small))
    module._base_of.cache_clear()
    found = [build_metadata_image(*args) for args in calls]
    assert found == [fresh(*args) for args in calls]
    for metadata_image, (*_, attributes, small) in zip(found, calls, strict=True):
        with h5py.File(io.BytesIO(image_of(metadata_image))) as file:
            assert {name: file.attrs[name] for name in attributes} == {
                name: value.encode() if isinstance(value, str) else value for name, value in attributes.items()
            }
            for path, value in small.items():
                assert file[path][()].tobytes() == value.tobytes()


def test_a_base_serves_many_saves_and_none_changes_it(monkeypatch):
    module._base_of.cache_clear()
    bases, real = [], module._base_of

    def noted(*args):
        bases.append(real(*args))
        return bases[-1]

    monkeypatch.setattr(module, "_base_of", noted)
    specs = [TensorSpec(f"model/{n}", (300, n), "float32") for n in range(90)]
    made, pages = [], []
    for step, nbytes in enumerate([10, 5000, 1, 300_000, 10]):
        attributes = {"step": np.int64(step % 4), "date": f"2026-01-0{step % 4}"}
        small = {"extra/values": b"x" * nbytes, "metrics/loss/value": np.arange(nbytes, dtype=np.float64)}
        made.append(build_metadata_image(list(specs), (), 90, attributes, small))
        image = bases[-1].image
        pages.append((image.nbytes, list(image.written(0, image.nbytes))))
        if not step:
            time.sleep(1.1)  # HDF5 can note the second at which something was made
    assert all(base is bases[0] for base in bases)
    assert all(found == pages[0] for found in pages)
    monkeypatch.undo()
    attributes = {"step": np.int64(0), "date": "2026-01-00"}
    small = {"extra/values": b"x" * 10, "metrics/loss/value": np.arange(10.0)}
    assert fresh(specs, (), 90, attributes, small) == made[0]
    assert made[0].offsets == made[4].offsets


def header_of_root(metadata_image):
    """The flags of the root group's object header, and its messages: (type, data)."""
    begin, data = metadata_image.regions[0]
    assert begin == 0
    (at,) = struct.unpack_from("<Q", data, 36)  # in HDF5's superblock of version 2 and 3
    assert data[at : at + 5] == b"OHDR\x02"
    flags = data[at + 5]
    at += 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    end = at + width + int.from_bytes(data[at : at + width], "little")
    at += width
    messages = []
    while at + 4 <= end:
        kind, nbytes = struct.unpack_from("<BH", data, at)
        at += 4 + (2 if flags & 4 else 0)
        messages.append((kind, data[at : at + nbytes]))
        at += nbytes
    return flags, messages


@pytest.mark.parametrize("count", [1, 500])
@pytest.mark.parametrize("is_part", [False, True], ids=["file", "part"])
def test_attributes_are_in_the_header_of_the_root_as_hdf5_has_them_by_default(count, is_part):
    specs = [TensorSpec(f"model/a.tensor.with.a.name.of.its.own.{n}", (3,), "float32") for n in range(count)]
    content = Content(SimpleNamespace(specs=specs), root_attributes(3, 2), {})
    if is_part:
        writer = SimpleNamespace(_content=content, _temporary=SimpleNamespace(path=Path("a.h5")))
        part = SimpleNamespace(plan=content.plan, blocks=range(count), node=0)
        metadata_image = SubfilesWriter._metadata_image_of(writer, part)
    else:
        metadata_image = build_metadata_image(specs, [], count, content.attributes, {})
    flags, messages = header_of_root(metadata_image)
    assert not flags & 0x10  # no numbers of its own for when attributes go into an index
    infos = [data for kind, data in messages if kind == 0x15]
    assert all(data[2 + 2 * (data[1] & 1) :][:8] == b"\xff" * 8 for data in infos)  # there is no index
    assert any(kind == 0xC and b"format\0" in data for kind, data in messages)


def test_values_behind_the_tensors_take_little_more_than_their_bytes():
    specs = [TensorSpec(f"model/{n}", (300,), "float32") for n in range(400)]
    small = {f"{group}/values": b"x" * 100 for group in ("extra", "meta", "optim", "metrics/loss")}
    attributes = {"step": np.int64(1)}
    without = build_metadata_image(specs, [], 400, attributes, {}).data_end
    assert build_metadata_image(specs, [], 400, attributes, small).data_end < without + 400 + 6144


def test_a_base_that_names_other_files_is_not_kept():
    module._base_of.cache_clear()
    specs = [TensorSpec("model/w", (6,), "float32")]
    for token in "abab":
        names = [f"x.{token}.h5"]
        sources = {0: [VirtualSource(names[0], ((0, 6),))]}
        found = build_metadata_image(specs, [], 1, {}, {"new": b"x"}, sources=sources, file_names=names)
        assert names[0].encode() in image_of(found)
        assert found.files
    assert module._base_of.cache_info().currsize == 0
