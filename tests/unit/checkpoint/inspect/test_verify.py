"""Every kind of damage is found and said. A file whose digests are right is damaged by writing it anew with them."""

import errno
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint import save
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.footer import make_footer, read_footer
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.schema import checksum
from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.errors import CheckpointError, CheckpointReplacedError
from tests.disks import using

GOLDEN = Path(__file__).parents[3] / "golden"
TENSORS = {
    "model/a": torch.arange(40.0).view(5, 8),
    "model/b": torch.tensor([True, False, True]),
    "model/c": torch.arange(7).to(torch.bfloat16),
    "model/empty": torch.zeros(0, 3),
    "model/last": torch.tensor(3, dtype=torch.int32),
}


@pytest.fixture
def good(write):
    """Of `model/a` the elements 8 to 16 have a checksum, and those around them others."""
    return write(TENSORS, block_bytes=32, links=[("model/twin", "model/a")], extra={"x": np.arange(3)})


def faults_of(path):
    report = verify_file(path)
    assert report.path == path
    assert report.sound == (not report.faults)
    return [(fault.where, fault.what) for fault in report.faults]


def test_a_sound_file(good):
    steps = []
    report = verify_file(good, steps.append)
    assert (report.faults, report.tensors) == ((), 5)
    assert report.nbytes == good.stat().st_size
    assert sum(steps) == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.h5")), ids=lambda path: path.stem)
def test_files_of_every_version_are_sound(path):
    report = verify_file(path)
    assert report.sound
    assert report.tensors == 16


def test_a_checkpoint_of_a_model_with_its_optimizer_is_sound(tmp_path, make_model, train_steps):
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 1)
    assert faults_of(save(tmp_path / "a.h5", model=model, optimizer=optimizer, metrics={"loss": ([1], [2.0])})) == []


def test_all_damaged_runs_of_all_tensors_are_reported(good, flip):
    rows = open_index(good).rows_of("model/a")
    flip(good, int(rows["byte_offset"][1]))
    flip(good, int(rows["byte_offset"][3]) + 31, 7)
    flip(good, int(open_index(good).rows_of("model/c")["byte_offset"][0]))
    (one, two, three) = faults_of(good)
    assert [where for where, _ in (one, two, three)] == ["model/a", "model/a", "model/c"]
    assert one[1].startswith("damaged: elements 8 to 16 of model/a (written by rank 0, bytes from ")
    assert two[1].startswith("damaged: elements 24 to 32 of model/a ")
    assert three[1].startswith("damaged: elements 0 to 7 of model/c ")


def test_every_bit_of_every_tensor_counts(good, flip):
    index = open_index(good)
    for path in index.tensors:
        for row in index.rows_of(path):
            byte = int(row["byte_offset"]) + int(row["numel"]) * index.tensors[path].itemsize - 1
            flip(good, byte, 6)
            assert [where for where, _ in faults_of(good)] == [path]
            flip(good, byte, 6)
    assert faults_of(good) == []


def test_damage_in_tables_values_and_attributes(good, flip):
    data = good.read_bytes()
    footer = read_footer(len(data), lambda begin, nbytes: data[begin : begin + nbytes])
    places = {
        "an attribute": data.index(b"software_version"),
        "a table": data.index(b"model/twin"),
        "a value": data.index(b'{"x":'),
        "the table of extents": footer.regions[-1][0],
        "the first byte": 0,
    }
    for what, byte in places.items():
        flip(good, byte)
        assert faults_of(good) == [("", "damaged: its tables or small values do not have their checksum")], what
        flip(good, byte)
    assert faults_of(good) == []


def test_damage_of_the_footer(good, flip):
    size = good.stat().st_size
    flip(good, size - 20)
    assert faults_of(good) == [("", "damaged: its last bytes do not have their checksum")]
    flip(good, size - 20)
    flip(good, size - 1)
    assert len(faults_of(good)) == 1


def gaps(path):
    """Bytes that are neither of a region nor of an element nor of the footer."""
    data, index = path.read_bytes(), open_index(path)
    taken = np.zeros(len(data), bool)
    for begin, nbytes in index.footer.regions:
        taken[begin : begin + nbytes] = True
    for name, spec in index.tensors.items():
        for row in index.rows_of(name):
            begin = int(row["byte_offset"])
            taken[begin : begin + int(row["numel"]) * spec.itemsize] = True
    taken[len(data) - len(index.footer.pack()) :] = True
    return np.flatnonzero(~taken).tolist()


@pytest.fixture
def gappy(write):
    """Large tensors begin at multiples of 4 KiB, and there is something behind the last of them."""
    tensors = {f"model/{n}": torch.ones(20_000 + 1000 * n) for n in range(5)} | {"model/last": torch.zeros(1)}
    return write(tensors)


def test_a_bit_in_any_gap_is_found(gappy, flip):
    found = gaps(gappy)
    assert len(found) > 1 << 12
    assert faults_of(gappy) == []
    edges = [byte for byte, more in zip(found, [*found[1:], 0], strict=True) if byte + 1 != more]
    starts = [byte for byte, less in zip(found, [0, *found], strict=False) if byte - 1 != less]
    for byte in [*edges, *starts, *found[:: len(found) // 10]]:
        flip(gappy, byte, 3)
        assert faults_of(gappy) == [("", f"byte {byte} belongs to nothing, and is 8 instead of 0")]
        flip(gappy, byte, 3)


def sealed(data, footer):
    """A file with the digests that it has to have; regions as they were."""
    regions = [(begin, data[begin : begin + nbytes]) for begin, nbytes in footer.regions]
    end = footer.file_bytes - len(footer.pack())
    return data[:end] + make_footer(regions, end).pack()


def resealed(path, change):
    """Change a file by HDF5, and give it the digests that it then has to have."""
    data = path.read_bytes()
    footer = read_footer(len(data), lambda begin, nbytes: data[begin : begin + nbytes])
    end = footer.file_bytes - len(footer.pack())
    path.write_bytes(data[:end])
    with h5py.File(path, "r+", libver=("v108", "v110")) as file:
        change(file)
    changed = path.read_bytes()
    index = np.zeros(max(len(changed), end), bool)
    index[: footer.regions[0][0] + footer.regions[0][1]] = True
    for begin, nbytes in footer.regions:
        index[begin : begin + nbytes] = True
    index[end:] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[False], index, [False]]).astype(np.int8))).reshape(-1, 2)
    regions = [(int(begin), changed[begin:stop]) for begin, stop in edges if begin < len(changed)]
    path.write_bytes(changed + make_footer(regions, len(changed)).pack())


def unmark(file):
    del file["model/b"].attrs["torch_dtype"]


def another_type(file):
    data = file["model/last"][()]
    del file["model/last"]
    file["model/last"] = np.float64(data)


def another_shape(file):
    del file["model/a"], file["model/twin"]
    file["model/a"] = file["model/twin"] = np.zeros((8, 5), np.float32)


def untie(file):
    del file["model/twin"]
    file["model/twin"] = np.zeros((5, 8), np.float32)


def link_softly(file):
    file.move("model/last", "aside")
    file["model/last"] = h5py.SoftLink("/aside")


def link_outside(file):
    file["model/more"] = h5py.ExternalLink("/dev/null", "/x")


def chunked(file):
    del file["model/c"]
    file.create_dataset("model/c", (7,), "<f4", chunks=(7,))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (link_softly, [("model/last", "is a link to something else")]),
        (link_outside, [("model/more", "is a link to something else")]),
        (lambda file: file.attrs.modify("committed", np.uint8(0)), [("", "not marked as committed")]),
        (lambda file: file.pop("model/last"), [("model/last", "there is no such dataset")]),
        (lambda file: file.create_dataset("model/more", data=np.zeros(2)), [("model/more", "not in the table")]),
        (
            lambda file: file.move("model/last", "model/other"),
            [("model/last", "no such"), ("model/other", "not in the table")],
        ),
        (unmark, [("model/b", "is marked as None in HDF5, and bool")]),
        (another_type, [("model/last", "another type in HDF5 than int32")]),
        (
            another_shape,
            [("model/a", "has shape (8, 5) in HDF5, and (5, 8)"), ("model/twin", "an alias of model/a")],
        ),
        (untie, [("model/twin", "an alias of model/a")]),
        (chunked, [("model/c", "marked as None"), ("model/c", "another type"), ("model/c", "chunked")]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_hdf5_reads_is_compared_with_the_tables(good, change, expected):
    resealed(good, change)
    found = faults_of(good)
    for path, words in expected:  # HDF5 may have written over elements, which is found too
        assert any(where == path and words in what for where, what in found), found


def test_hdf5_and_the_table_of_extents_have_to_see_a_tensor_at_one_place(gappy):
    data, index = bytearray(gappy.read_bytes()), open_index(gappy)
    row = index.extents[-1:].copy()
    begin = data.index(row.tobytes())
    row["byte_offset"] = place = gaps(gappy)[-1] - 3
    row["checksum"] = checksum(data[place : place + 4])
    data[begin : begin + row.nbytes] = row.tobytes()
    gappy.write_bytes(sealed(bytes(data), index.footer))
    ((where, what),) = [fault for fault in faults_of(gappy) if fault[0]]
    assert where == "model/last"
    assert what.endswith(f"for HDF5, and at {place} in the table of extents")


def test_a_file_that_was_only_sealed_anew_is_sound(good):
    resealed(good, lambda file: None)
    assert faults_of(good) == []


def test_a_truncated_file_and_one_with_more_bytes(good, tmp_path):
    data = good.read_bytes()
    for changed in (data[:-1], data[: len(data) // 2], data[:100], b"", data + b"\0"):
        path = tmp_path / "cut.h5"
        path.write_bytes(changed)
        assert len(faults_of(path)) == 1


def test_what_cannot_be_looked_at_is_an_error(tmp_path, good):
    with pytest.raises(CheckpointError, match="No such file"):
        verify_file(tmp_path / "none.h5")
    with pytest.raises(CheckpointError, match="is a directory"):
        verify_file(tmp_path)

    class Broken(System):
        def preadv(self, fd, buffers, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointError, match="Input/output error"), using(Broken()):
        verify_file(good)


@pytest.mark.parametrize("short", [False, True], ids=["an error", "the end of the file"])
def test_a_disk_that_fails_in_any_read_is_an_error_and_no_traceback(gappy, short):
    class Failing(System):
        reads = 0

        def preadv(self, fd, buffers, offset):
            self.reads += 1
            if self.reads == turn:
                if short:
                    return 0
                raise OSError(errno.EIO, "")
            return os.preadv(fd, buffers, offset)

    ends = []
    for turn in range(1, 100):
        system = Failing()
        try:
            with using(system):
                ends.append(bool(verify_file(gappy).faults))
        except CheckpointReplacedError:  # a footer that is not there is another one
            assert short
        except CheckpointError as error:
            ends.append(True)
            assert not short
            assert "Input/output error" in str(error)
        if system.reads < turn:
            break
    assert len(ends) > 10
    assert ends == [True] * (len(ends) - 1) + [False]


def test_a_file_that_is_replaced_meanwhile_is_looked_at_anew(good, write):
    other = write({"model/a": torch.ones(3)}, name="b.h5")

    class Replacing(System):
        opened = 0

        def open(self, path, flags, *mode):
            self.opened += 1
            if self.opened == 2:
                os.replace(other, good)
            return os.open(path, flags, *mode)

    with using(Replacing()):
        report = verify_file(good)
    assert (report.faults, report.tensors) == ((), 1)


def test_a_file_that_is_replaced_all_the_time_is_an_error(good, write):
    copies = iter([write({"model/a": torch.full((3,), n)}, name=f"{n}.h5") for n in range(20)])

    class Replacing(System):
        def open(self, path, flags, *mode):
            os.replace(next(copies), good)
            return os.open(path, flags, *mode)

    with pytest.raises(CheckpointReplacedError, match="has been replaced"), using(Replacing()):
        verify_file(good)
