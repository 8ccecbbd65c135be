import functools
import io
import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.footer import Footer, make_footer
from hpcfsdp.checkpoint.format.index import elements_in, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving import plan as planning
from hpcfsdp.checkpoint.saving.content import Content, root_attributes
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.unit.checkpoint.hostile import READ_ALL

pytestmark = pytest.mark.hdf5


@pytest.fixture(scope="module")
def good(tmp_path_factory, make_model, train_steps):
    """A small checkpoint with one of everything."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 1)
    path = tmp_path_factory.mktemp("good") / "a.h5"
    extra = {"array": np.arange(5), "text": "x", "empty": np.zeros((0, 2))}
    return checkpoint.save(path, model=model, optimizer=optimizer, step=7, extra=extra, config={"lr": 0.5})


GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture
def damaged(good, tmp_path):
    """A copy that may be changed."""
    return shutil.copy(good, tmp_path / "b.h5")


def no_footer(path, version=schema.FORMAT_VERSION):
    """The error that a file without its footer is."""
    return CheckpointCorruptError, f"{path}: damaged: the footer that ends a file of format {version} is missing"


def error_of(path):
    with pytest.raises(CheckpointError) as caught:
        open_index(path)
    return type(caught.value), str(caught.value)


def test_the_index_lists_tensors_in_file_order_with_shape_and_dtype(good, make_model):
    index = open_index(good)
    model = make_model(0)
    names = [path.removeprefix("model/") for path in index.tensors if path.startswith("model/")]
    assert names == [name for name in model.state_dict() if name != "head.weight"]
    for name in names:
        spec, tensor = index.tensors[f"model/{name}"], model.state_dict()[name]
        assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
    assert index.links == {"model/head.weight": "model/embed.weight"}
    assert index.resolve("model/head.weight") is index.tensors["model/embed.weight"]
    assert index.tensors["optim/state/scale/exp_avg"].shape == ()


def test_the_index_holds_the_optimizers_groups_and_the_random_numbers_of_each_rank(good):
    index = open_index(good)
    assert index.param_groups[0]["betas"] == [0.9, 0.999]
    assert sorted(index.param_groups[0]["params"])[:2] == ["embed.weight", "hidden.bias"]
    assert index.scalars == {}
    assert {kind: states.shape[0] for kind, states in index.rng.items()} == {"numpy": 1, "python": 1, "torch_cpu": 1}


def test_a_file_without_an_optimizer_has_no_groups(tmp_path):
    index = open_index(checkpoint.save(tmp_path / "a.h5", model=nn.Linear(1, 1)))
    assert (index.param_groups, index.scalars) == (None, None)


def test_an_unknown_tensor_is_a_key_error(good):
    with pytest.raises(KeyError, match="model/nothing"):
        open_index(good).resolve("model/nothing")


def test_no_such_file(tmp_path):
    path = tmp_path / "a.h5"
    assert error_of(path) == (CheckpointError, f"{path}: No such file or directory")


def test_a_directory(tmp_path):
    assert error_of(tmp_path) == (
        CheckpointError,
        f"{tmp_path}: is a directory, not a checkpoint file (hpcfsdp ls lists those in it)",
    )


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", "empty", "is empty (0 bytes): was the copy complete?"),
        (b"some text\n", "not_hdf5", "not an HDF5 file (10 bytes, begins with b'some tex')"),
        (b"\x89HDF\r\n\x1a\n", "truncated", "truncated: only 8 bytes present; was the copy complete?"),
        (
            b"PK\x03\x04" + bytes(6),
            "not_hdf5",
            "not an HDF5 file (10 bytes, begins with b'PK\\x03\\x04\\x00\\x00\\x00\\x00'): "
            "a zip archive, as torch.save writes: hpcfsdp import --format pt converts it",
        ),
        (bytes(5000), "not_hdf5", f"not an HDF5 file (5.0 kB, begins with {bytes(8)!r})"),
    ],
)
def test_a_file_that_is_not_hdf5(tmp_path, content, kind, message):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError) as raised:
        checkpoint.open_index(path)
    assert (raised.value.kind, str(raised.value)) == (kind, f"{path}: {message}")


def test_a_truncated_file_gives_both_sizes(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.Linear(100, 100))
    data = path.read_bytes()
    end = int.from_bytes(data[28:36], "little")  # of HDF5's part, as its superblock has it
    for present, message in ((20_000, "20.0 of "), (end - 1, f"{end - 1} of {end} bytes")):
        path.write_bytes(data[:present])
        with pytest.raises(CheckpointCorruptError) as raised:
            checkpoint.open_index(path)
        assert raised.value.kind == "truncated"
        assert str(raised.value).startswith(f"{path}: truncated: {message}")
        assert str(raised.value).endswith(" present; was the copy complete?")


@pytest.mark.parametrize("mark", [None, "another", 3, [1, 2]])
def test_a_foreign_hdf5_file(tmp_path, mark):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["model/w"] = np.zeros(3)
        if mark is not None:
            file.attrs["format"] = mark
    assert error_of(path) == (CheckpointCorruptError, f"{path}: an HDF5 file, but not an hpcfsdp checkpoint")


def save_as_version(monkeypatch, path, version):
    with monkeypatch.context() as patch:
        patch.setattr(schema, "FORMAT_VERSION", version)
        return checkpoint.save(path, model=nn.Linear(2, 2), step=5)


def test_a_file_of_a_newer_format(tmp_path, monkeypatch):
    path = save_as_version(monkeypatch, tmp_path / "a.h5", "2.0")
    assert error_of(path) == (
        CheckpointError,
        f"{path}: has format version 2.0, this hpcfsdp reads {schema.FORMAT_VERSION}: use a newer hpcfsdp",
    )


def test_a_newer_file_of_the_same_major_format_is_read(tmp_path, monkeypatch):
    path = save_as_version(monkeypatch, tmp_path / "a.h5", "1.99")
    info = open_index(path).info
    assert (info.format_version, info.step) == ("1.99", 5)


@pytest.mark.parametrize("version", ["0.1", "0.99", "2.0"])
def test_another_version_is_refused(damaged, version):
    with h5py.File(damaged, "r+") as file:
        file.attrs["format_version"] = np.bytes_(version)
    kind, message = error_of(damaged)
    assert kind is CheckpointError
    other = "a newer" if version == "2.0" else "an older"
    assert message == f"{damaged}: has format version {version}, this hpcfsdp reads 1.1: use {other} hpcfsdp"


@pytest.mark.parametrize("version", ["", "x", "1", "1.0.0.0x"])
def test_a_version_that_is_none_is_damage_or_without_a_footer(damaged, version):
    with h5py.File(damaged, "r+") as file:
        file.attrs["format_version"] = np.bytes_(version)
    kind, message = error_of(damaged)
    assert kind is CheckpointCorruptError
    assert message.startswith(f"{damaged}: damaged")


def test_a_file_without_the_commit_mark(damaged):
    with h5py.File(damaged, "r+") as file:
        file.attrs["committed"] = np.uint8(0)
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: was never finished: its writer stopped before the commit mark",
    )


def test_a_file_that_hdf5_opened_to_change_it_has_lost_its_footer(damaged):
    with h5py.File(damaged, "r+"):
        pass
    assert error_of(damaged) == no_footer(damaged)


SMALL = [schema.EXTRA_VALUES, schema.CONFIG, schema.PARAM_GROUPS, schema.EXTENTS, schema.TENSORS]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_value_that_was_changed(good, damaged, name):
    with h5py.File(good) as file:
        offset, nbytes = file[name].id.get_offset(), file[name].nbytes
    flip(damaged, offset + nbytes - 1)
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: damaged: its tables or small values do not have their checksum",
    )


def test_a_small_value_that_was_removed(damaged):
    with h5py.File(damaged, "r+") as file:
        del file[schema.PARAM_GROUPS]
    assert error_of(damaged) == no_footer(damaged)


def flip(path, offset):
    """Change a bit of a byte of a file; negative offsets count from its end."""
    data = bytearray(Path(path).read_bytes())
    data[offset] ^= 1
    Path(path).write_bytes(data)


FOOTER_FIELDS = {"size": -40, "count": -32, "digest": -24, "own digest": -16}


@pytest.mark.parametrize("offset", FOOTER_FIELDS.values(), ids=FOOTER_FIELDS)
def test_a_footer_that_was_changed(damaged, offset):
    flip(damaged, offset)
    kind, message = error_of(damaged)
    assert kind is CheckpointCorruptError
    assert message.startswith(f"{damaged}: damaged: its last bytes ")


def test_a_footer_without_its_magic_is_none(damaged):
    flip(damaged, -1)
    assert error_of(damaged) == no_footer(damaged)


@pytest.mark.parametrize("more", [b"\0", b"x" * 40])
def test_a_file_with_something_behind_its_footer(damaged, more):
    with open(damaged, "ab") as file:
        file.write(more)
    assert error_of(damaged) == no_footer(damaged)


def test_a_footer_at_the_end_of_other_bytes(damaged):
    data = damaged.read_bytes()
    damaged.write_bytes(data + data[-40:])
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: damaged: its last bytes are those of a file of {len(data)} bytes, it has {len(data) + 40}",
    )


@pytest.mark.parametrize("footer", [Footer(400, ((90, 20), (100, 10)), 0), Footer(400, ((0, 1), (399, 2)), 0)])
def test_a_footer_over_regions_that_cannot_be(tmp_path, footer):
    path = tmp_path / "a.h5"
    packed = footer.pack()
    path.write_bytes(bytes(footer.file_bytes - len(packed)) + packed)
    assert error_of(path) == (
        CheckpointCorruptError,
        f"{path}: damaged: the regions that its last bytes name overlap, or are not in the file",
    )


def rewrite(path, change):
    """Have another tool change a tensor."""
    with h5py.File(path, "r+") as file:
        values = file["model/body.weight"][...]
        file.move("model/body.weight", "aside")
        change(file, values)


def sealed_anew(path, change):
    """Have HDF5 change a file, and give it the footer that it then has to have: over all but the tensors."""
    index, data = open_index(path), path.read_bytes()
    begins, ends = elements_in(index.extents, np.array([spec.itemsize for spec in index.tensors.values()]), 0)
    image = io.BytesIO(data[: -len(index.footer.pack())])
    with h5py.File(image, "r+", libver=schema.LIBVER) as file:
        change(file)
    data = image.getvalue()
    edges = [0, *np.stack([begins, ends], 1).reshape(-1).tolist(), len(data)]
    regions = [(begin, data[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    path.write_bytes(data + make_footer(regions, len(data)).pack())


def onto_a_tensor(file):
    """A value whose bytes are those of a tensor."""
    group, kind = file["model"], file["extra/rng"]
    kind["tensor"] = group["hidden.weight"]


def virtual(file):
    layout = h5py.VirtualLayout((8,), "u1")
    layout[:] = h5py.VirtualSource("/dev/zero", "x", (8,))
    file["extra/rng"].create_virtual_dataset("more", layout)


def replaced(name, **options):
    """Another dataset in place of one."""

    def change(file):
        value = file[name][()]
        del file[name]
        file.create_dataset(name, data=value, **options)

    return change


def linked(name, link):
    """A link in place of a dataset or group."""

    def change(file):
        file.move(name, "aside")
        file[name] = link

    return change


ODD = {
    "no storage": (lambda f: f.create_dataset("extra/rng/x", (1 << 31,), "u8"), "extra/rng/x has none of its 17179869"),
    "other file": (
        lambda f: f.create_dataset("extra/rng/x", (8,), "u1", external=[("/dev/zero", 0, 8)]),
        "extra/rng/x has none of its 8 bytes in the file",
    ),
    "virtual": (virtual, "extra/rng/more is chunked, filtered or virtual"),
    "filter": (replaced("extra/arrays/0", chunks=(5,), compression="gzip"), "extra/arrays/0 is chunked, filtered or v"),
    "soft link": (linked("meta/config", h5py.SoftLink("/aside")), "meta/config is reached by a link that is no hard"),
    "soft group": (linked("extra/rng", h5py.SoftLink("/aside")), "extra/rng is reached by a link that is no hard one"),
    "outside": (linked("meta/extents", h5py.ExternalLink("/dev/zero", "x")), "meta/extents is reached by a link that"),
    "text of any length": (
        lambda f: f.create_dataset("extra/rng/x", data=["a"], dtype=h5py.string_dtype()),
        "extra/rng/x is not there, or no array of numbers or text",
    ),
    "group": (lambda f: f.create_group("extra/rng/x"), "extra/rng/x is not there, or no array of numbers or text"),
    "nothing": (lambda f: f.create_dataset("extra/rng/x", data=h5py.Empty("f4")), "extra/rng/x is not there, or no"),
    "a tensor": (onto_a_tensor, "two of its byte ranges overlap"),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_small_value_that_is_not_all_in_the_file_is_not_read(damaged, kind):
    change, message = ODD[kind]
    sealed_anew(damaged, lambda file: None)
    assert open_index(damaged).info.step == 7
    sealed_anew(damaged, change)
    assert error_of(damaged)[0] is CheckpointCorruptError
    assert error_of(damaged)[1].startswith(f"{damaged}: damaged: {message}")


def test_a_compact_value_is_read(damaged):
    def change(file):
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((1, 3))
        h5py.h5d.create(file["extra/rng"].id, b"x", h5py.h5t.STD_U8LE, space, layout)
        file["extra/rng/x"][...] = [[1, 2, 3]]

    sealed_anew(damaged, change)
    assert open_index(damaged).rng["x"].tolist() == [[1, 2, 3]]


REWRITES = {
    "compressed": lambda file, v: file.create_dataset("model/body.weight", data=v, compression="gzip"),
    "moved": lambda file, v: file.create_dataset("model/body.weight", data=0 * v),
    "gone": lambda file, v: None,
    "retyped": lambda file, v: file.create_dataset("model/body.weight", data=v.astype(np.float64)),
    "reshaped": lambda file, v: file.create_dataset("model/body.weight", data=np.zeros((3, 4), np.float32)),
}


@pytest.mark.parametrize("change", REWRITES.values(), ids=REWRITES)
def test_a_tensor_that_was_rewritten(tmp_path, change):
    model = nn.ModuleDict({"body": nn.Linear(3, 3)})
    path = checkpoint.save(tmp_path / "a.h5", model=model)
    rewrite(path, change)
    assert error_of(path) == no_footer(path)


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory, run_ranks):
    """Two tensors that three ranks wrote in blocks of 5 elements at most, and a tied name; path and values."""
    path = tmp_path_factory.mktemp("blocks") / "a.h5"
    values = {"w": torch.arange(91.0).view(7, 13), "v": torch.arange(17.0) - 5}

    def write(comm):
        model = nn.ParameterDict({name: nn.Parameter(tensor.clone()) for name, tensor in values.items()})
        model.register_parameter("tied", model["w"])
        checkpoint.save(path, model=FullyShardedDataParallel(model, process_group=comm))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "hpcfsdp.checkpoint.saving.content.plan_save", functools.partial(planning.plan_save, block_bytes=20)
        )
        assert run_ranks(3, write) == [None] * 3
    return path, values


@given(st.sampled_from(["w", "v", "tied"]), st.data())
@settings(max_examples=150, deadline=None)
def test_reading_any_run_equals_slicing(many_blocks, name, data):
    path, values = many_blocks
    whole = values["w" if name == "tied" else name].flatten().numpy()
    start = data.draw(st.integers(0, whole.size))
    numel = data.draw(st.integers(0, whole.size - start))
    with BlockReader(open_index(path)) as reader:
        read = reader.read(f"model/{name}", start, numel)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, whole[start : start + numel])


def test_blocks_are_the_tensor_run_by_run(many_blocks, monkeypatch):
    path, values = many_blocks
    index = open_index(path)
    monkeypatch.setattr(schema, "BLOCK_BYTES", 20)
    with BlockReader(index) as reader:
        blocks = list(reader.blocks("model/w"))
    assert list(map(len, blocks)) == [5] * 18 + [1]
    np.testing.assert_array_equal(np.concatenate(blocks), values["w"].flatten().numpy())
    assert sorted(set(index.extents["rank"].tolist())) == [0, 1, 2]


def test_a_read_verifies_the_blocks_that_it_touches_and_no_others(many_blocks, tmp_path):
    path = shutil.copy(many_blocks[0], tmp_path / "b.h5")
    index = open_index(path)
    row = index.extents[index.first_rows["model/w"][0] + 2]
    with open(path, "r+b") as file:
        file.seek(int(row["byte_offset"]))
        file.write(b"\xff")
    with BlockReader(index) as reader:
        start, end = int(row["start"]), int(row["start"] + row["numel"])
        reader.read("model/w", 0, start)
        reader.read("model/w", end, 91 - end)
        for touching in (start - 1, end - 1):
            with pytest.raises(CheckpointCorruptError) as caught:
                reader.read("model/w", touching, 2)
            assert str(caught.value) == (
                f"{path}: damaged: elements {start} to {end} of model/w (written by rank {row['rank']}, bytes from "
                f"{row['byte_offset']}) do not have their checksum"
            )


def test_a_file_cut_off_after_it_was_opened_is_reported(many_blocks, tmp_path):
    path = shutil.copy(many_blocks[0], tmp_path / "b.h5")
    index = open_index(path)
    with BlockReader(index) as reader:
        with open(path, "r+b") as file:
            file.truncate(int(index.extents["byte_offset"][index.first_rows["model/v"][0]]) + 1)
        with pytest.raises(CheckpointCorruptError) as caught:
            list(reader.blocks("model/v"))
    assert str(caught.value) == f"{path}: ends in the middle of model/v"


@pytest.fixture(scope="module")
def strided(tmp_path_factory):
    """A matrix of which three ranks have columns, in rows of the table with several runs; path and values."""
    path = tmp_path_factory.mktemp("strided") / "a.h5"
    values = np.arange(7 * 12, dtype=np.int16).reshape(7, 12)
    columns = [(0, 5), (5, 6), (6, 12)]
    blocks = [(0, r, 7, low, high - low, 12) for r, (low, high) in enumerate(columns)]
    save_plan = planning.SavePlan(
        (TensorSpec("model/w", (7, 12), "int16"),), np.array(blocks, planning.BLOCK_DTYPE), (), len(columns)
    )
    parts = [np.ascontiguousarray(values[:, low:high]).reshape(-1).view(np.uint8) for low, high in columns]
    small = {schema.EXTRA_VALUES: b"{}", schema.CONFIG: b"null"}
    content = Content(save_plan, root_attributes(1, len(columns)), small)
    metadata_image, temporary = content.metadata_image(), TemporaryFile(path, "x")
    temporary.create(metadata_image.nbytes)
    with temporary.opened() as fd:
        writer = BlockWriter(fd, save_plan, metadata_image.offsets, parts.__getitem__)
        sums = [writer.write(save_plan.blocks_of(r)).tobytes() for r in range(len(columns))]
    temporary.commit(metadata_image, save_plan.extent_rows(metadata_image.offsets, sums))
    return path, values


@given(st.data(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_reading_rows_of_several_runs_equals_slicing(strided, data, verify):
    path, values = strided
    start = data.draw(st.integers(0, values.size))
    numel = data.draw(st.integers(0, values.size - start))
    with BlockReader(open_index(path), verify=verify) as reader:
        read = reader.read("model/w", start, numel)
    np.testing.assert_array_equal(read, values.reshape(-1)[start : start + numel])


def test_no_more_rows_are_kept_than_a_reader_may(strided, monkeypatch):
    path, values = strided
    index = open_index(path)
    sizes = (index.extents["count"] * index.extents["numel"] * 2).tolist()
    monkeypatch.setattr("hpcfsdp.checkpoint.format.reader._KEPT_BYTES", sizes[0] + sizes[1])
    with BlockReader(index) as reader:
        for _ in range(3):
            for row in range(7):
                np.testing.assert_array_equal(reader.read("model/w", 12 * row, 12), values[row])
                kept = [rows.nbytes for rows in reader._rows.values()]
                assert sum(kept) == reader._kept_bytes
                assert len(kept) == 1 or sum(kept) <= sizes[0] + sizes[1]


def test_hdf5_shows_what_was_written_in_several_runs(strided):
    path, values = strided
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["model/w"][...], values)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 5), (6, 11)])
def test_a_bit_flipped_in_one_of_several_runs_is_found(strided, tmp_path, row, column):
    path = shutil.copy(strided[0], tmp_path / "b.h5")
    index = open_index(path)
    flip(path, int(index.extents["byte_offset"][0]) + 2 * (12 * row + column))
    with BlockReader(index) as reader, pytest.raises(CheckpointCorruptError, match=r"more of as many every 12, of "):
        reader.read("model/w", 12 * row + column, 1)
    with BlockReader(index, verify=False) as reader:
        assert reader.read("model/w", 12 * row + column, 1)[0] == strided[1][row, column] ^ 1


def test_a_file_that_another_one_took_the_place_of_is_reported(damaged):
    index = open_index(damaged)
    checkpoint.save(damaged, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointReplacedError) as caught, BlockReader(index):
        pass
    assert str(caught.value) == f"{damaged}: has been replaced since it was opened: open it again"


def test_an_open_reader_goes_on_reading_the_file_that_was_replaced(many_blocks, tmp_path):
    path = shutil.copy(many_blocks[0], tmp_path / "b.h5")
    with BlockReader(open_index(path)) as reader:
        checkpoint.save(path, model=nn.Linear(1, 1))
        np.testing.assert_array_equal(reader.read("model/v", 0, 17), many_blocks[1]["v"].numpy())


@pytest.mark.parametrize(("start", "numel"), [(-1, 2), (0, 18), (17, 1), (18, 0)])
def test_elements_that_are_not_there_are_a_value_error(many_blocks, start, numel):
    with BlockReader(open_index(many_blocks[0])) as reader, pytest.raises(ValueError, match="has 17 elements, asked"):
        reader.read("model/v", start, numel)


def test_a_file_removed_after_it_was_opened_is_reported(damaged):
    index = open_index(damaged)
    damaged.unlink()
    with pytest.raises(CheckpointError) as caught, BlockReader(index):
        pass
    assert str(caught.value) == f"{damaged}: No such file or directory"


# Reads a file whole, after changing it in one place; prints the changes that went unseen. In a process of its own,
# with little memory and time, so that a crash or a loop in libhdf5 is seen as such.
SWEEP = (
    READ_ALL
    + """
import random, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (90, 90))
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

source, changed, kind = sys.argv[1:]
data = open(source, "rb").read()
expected = everything(source)
if kind == "flip":
    choose = random.Random(20260102)
    places = [(choose.randrange(len(data)), choose.randrange(8)) for _ in range(300)]
    versions = [(place, data[: place[0]] + bytes([data[place[0]] ^ 1 << place[1]]) + data[place[0] + 1 :])
                for place in places]
    allowed = CheckpointError
else:
    lengths = sorted({*range(0, len(data), len(data) // 150), *range(len(data) - 64, len(data))})
    versions = [(length, data[:length]) for length in lengths]
    allowed = CheckpointCorruptError
unseen, seen = [], 0
for place, version in versions:
    with open(changed, "wb") as file:
        file.write(version)
    try:
        if everything(changed) != expected or kind == "cut":
            unseen.append(place)
    except allowed:
        seen += 1
    except Exception as error:
        unseen.append([place, repr(error)])
print(json.dumps([unseen, seen, len(versions)]))
"""
)


def test_a_file_cut_off_at_any_length_is_corrupt(good, tmp_path, run_python):
    unseen, seen, count = json.loads(run_python(SWEEP, good, tmp_path / "b.h5", "cut"))
    assert unseen == []
    assert seen == count >= 200


def test_a_single_flipped_bit_is_noticed_or_changes_nothing(good, tmp_path, run_python):
    unseen, seen, count = json.loads(run_python(SWEEP, good, tmp_path / "b.h5", "flip"))
    assert unseen == []
    assert count == 300
    assert seen > 200
