"""Whatever happens to the bytes of a file, it is found, or changes nothing; and nothing crashes, or goes on for ever.

Files are changed and read in a process of its own, with little memory and time: what is read has gone through HDF5 in
part, whose damaged files have made it crash and hang.
"""

import json
import os
import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcfsdp.checkpoint.format import metadata as metadata_image, schema
from hpcfsdp.checkpoint.format.footer import make_footer
from hpcfsdp.checkpoint.format.image import SparseImage
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from tests.unit.checkpoint.hostile import READ_ALL

pytestmark = pytest.mark.hdf5

GOLDEN = sorted(Path(__file__).resolve().parents[2].glob("golden/*.h5"))

CHILD = (
    READ_ALL
    + """
import os, random, resource, sys, warnings
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (90, 90))
from pathlib import Path
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

source, every = sys.argv[1], int(sys.argv[2])
data = Path(source).read_bytes()
fd = os.memfd_create("changed")
os.pwrite(fd, data, 0)
path = Path(f"/proc/self/fd/{fd}")

expected = everything(path)
index = open_index(path)
places = range(0)
wrong, counts = [], {}

def look(what, allowed=(CheckpointCorruptError,), harmless=False):
    "Read all; it must be refused, or, where that is harmless, be what it was."
    try:
        if everything(path) == expected and harmless:
            outcome = "the same"
        else:
            outcome = "unseen"
            wrong.append([what, "unseen"])
    except allowed as error:
        outcome = "refused"
        if not str(error).startswith(str(path)):
            wrong.append([what, str(error)])
    except BaseException as error:
        outcome = "other"
        wrong.append([what, repr(error)])
    counts[outcome] = counts.get(outcome, 0) + 1

def flip(bit, **expectation):
    place, mask = bit // 8, 1 << bit % 8
    os.pwrite(fd, bytes([data[place] ^ mask]), place)
    look(f"bit {bit % 8} of byte {place}", **expectation)
    os.pwrite(fd, data[place : place + 1], place)

"""
)


def run(run_python, source, every, code):
    """(what went wrong, how often each outcome came) of ``CHILD`` and `code`."""
    wrong, counts = json.loads(run_python(CHILD + code + "\nprint(json.dumps([wrong[:20], counts]))", source, every))
    assert wrong == []
    return counts


@pytest.fixture(scope="module")
def small(request, tmp_path_factory):
    """A small file of today's format with bytes of every kind: tensors, small values, tables, gaps."""
    specs = [
        TensorSpec("model/w", (13, 13), "float32"),
        TensorSpec("model/v", (3,), "bfloat16"),
        TensorSpec("model/mask", (5,), "bool"),
        TensorSpec("model/empty", (0, 2), "float32"),
        TensorSpec("optim/state/w/exp_avg", (13, 13), "float32"),
        TensorSpec("optim/state/w/step", (), "float32"),
    ]
    dice = np.random.default_rng(0)

    def read(spec, start, numel):
        return (
            dice.integers(0, 2, numel, np.uint8)
            if spec.dtype == "bool"
            else dice.random(numel).astype(schema.numpy_dtype(spec.dtype))
        )

    with pytest.MonkeyPatch.context() as patch:
        for name in ("ALIGNED_FROM_BYTES", "ALIGNMENT_BYTES"):  # that gaps are there, and are small
            patch.setattr(schema, name, 512)
        metadata_image._base_of.cache_clear()  # which knows nothing of these
        request.addfinalizer(metadata_image._base_of.cache_clear)
        return write_alone(
            tmp_path_factory.mktemp("small") / "a.h5",
            specs,
            read,
            links=[("model/tied", "model/w")],
            step=3,
            extra={"table": np.arange(6), "text": "x"},
            config={"lr": 0.5},
            groups=[{"lr": 0.1, "params": ["w"]}],
            scalars={},
        )


SEALED_FLIPS = """
covered = [(begin, begin + size) for begin, size in index.footer.regions]
tensors = sorted(
    (int(row["byte_offset"]), int(row["byte_offset"]) + int(row["numel"]) * index.tensors[name].itemsize)
    for name in index.tensors for row in index.rows_of(name)
)
covered.append((len(data) - len(index.footer.pack()), len(data)))
kinds = ["gap"] * len(data)
for kind, spans in (("covered", covered), ("tensor", tensors)):
    for begin, end in spans:
        kinds[begin:end] = [kind] * (end - begin)
assert set(kinds) == {"covered", "tensor", "gap"}
seen = {"covered": 0, "tensor": 0, "gap": 0}
for bit in range(8 * len(data)):
    kind = kinds[bit // 8]
    if kind == "covered" or bit % every == 0:  # these are found before HDF5 is begun, and take no time
        flip(bit, harmless=kind == "gap")
        seen[kind] += 1
counts.update(seen)
"""


def test_each_single_bit_of_a_small_file_is_found_when_it_flips(small, run_python):
    counts = run(run_python, small, 53, SEALED_FLIPS)
    assert counts["the same"] == counts["gap"] > 0  # what lies between tensors is nothing
    assert counts["refused"] == counts["covered"] + counts["tensor"]
    assert counts["covered"] > 8 * 5000
    assert counts["tensor"] > 100


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("every", [7, 11])
def test_each_single_bit_of_its_tensors_too(small, run_python, every):
    counts = run(run_python, small, every, SEALED_FLIPS)
    assert counts["refused"] == counts["covered"] + counts["tensor"]


VERIFIED = """
from hpcfsdp.checkpoint.inspect.verify import verify_file
assert verify_file(path).sound
found = 0
for bit in range(0, 8 * len(data), every):
    os.pwrite(fd, bytes([data[bit // 8] ^ 1 << bit % 8]), bit // 8)
    report = verify_file(path)
    if report.sound:
        wrong.append([bit, "not found"])
    found += not report.sound
    os.pwrite(fd, data[bit // 8 : bit // 8 + 1], bit // 8)
for length in range(0, len(data), every):
    os.ftruncate(fd, length)
    if verify_file(path).sound:
        wrong.append([length, "not missed"])
counts["found"] = found
"""


def test_verify_finds_any_single_bit_and_any_missing_end(small, run_python):
    assert run(run_python, small, 73, VERIFIED)["found"] > 800


TRUNCATIONS = """
for length in range(len(data) - 1, -1, -1):
    if length % every == 0 or length > len(data) - 200:
        os.ftruncate(fd, length)
        look(f"cut off at {length}")
"""


def test_a_file_that_is_cut_off_at_any_length_is_refused(small, run_python):
    counts = run(run_python, small, 1, TRUNCATIONS)
    assert set(counts) == {"refused"}
    assert counts["refused"] == small.stat().st_size


APPENDED = """
dice = random.Random(0)
for length in [*range(1, 200), 4096, 1 << 16]:
    for more in (bytes(length), dice.randbytes(length), data[-length:]):
        os.ftruncate(fd, len(data))
        os.pwrite(fd, more, len(data))
        look(f"with {length} more")
os.ftruncate(fd, len(data))
os.pwrite(fd, data, len(data))
look("twice")
"""


def test_a_file_with_more_bytes_behind_it_is_refused(small, run_python):
    assert set(run(run_python, small, 1, APPENDED)) == {"refused"}


ZEROED = """
for begin in range(0, len(data), 64):
    for size in (1, 64, 512, 4096):
        for what in (bytes(size), b"\\xff" * size, data[-size:]):
            os.pwrite(fd, data, 0)
            os.pwrite(fd, what[: len(data) - begin], begin)
            if os.pread(fd, len(data), 0) != data:
                look(f"{size} bytes from {begin}", harmless=True)
"""


def test_blocks_that_were_lost_or_overwritten_are_found(small, run_python):
    counts = run(run_python, small, 1, ZEROED)
    assert counts["refused"] > 500
    assert counts.get("the same", 0) < 50  # bytes between tensors alone


SWAPPED = """
rows = [
    (int(row["byte_offset"]), int(row["numel"]) * index.tensors[name].itemsize)
    for name in index.tensors for row in index.rows_of(name)
]
for first, size in rows:
    for second, other in rows:
        if first < second and data[first : first + size] != data[second : second + other] and size == other:
            os.pwrite(fd, data[first : first + size], second)
            os.pwrite(fd, data[second : second + size], first)
            look("two tensors of one size have changed places")
            os.pwrite(fd, data, 0)
half = rows[0][1] // 2
os.pwrite(fd, data[rows[0][0] + half : rows[0][0] + 2 * half] + data[rows[0][0] : rows[0][0] + half], rows[0][0])
look("the halves of a tensor have changed places")
os.pwrite(fd, data, 0)
for begin in range(0, len(data) - 1024, 512):
    os.pwrite(fd, data[begin + 512 : begin + 1024] + data[begin : begin + 512], begin)
    look("two sectors have changed places")
    os.pwrite(fd, data, 0)
"""


def test_blocks_that_have_changed_places_are_found(small, run_python):
    counts = run(run_python, small, 1, SWAPPED)
    assert set(counts) == {"refused"}
    assert counts["refused"] > 8


GARBAGE = """
dice = random.Random(0)
from hpcfsdp.checkpoint.format.footer import MAGIC
for turn in range(400):
    garbage = dice.randbytes(dice.randrange(3000))
    starts = [b"", b"\\x89HDF\\r\\n\\x1a\\n", data[: dice.randrange(300)]]
    ends = [b"", MAGIC, data[-dice.randrange(8, 80) :]]
    os.ftruncate(fd, 0)
    os.pwrite(fd, dice.choice(starts) + garbage + dice.choice(ends), 0)
    look("garbage")
for content in (b"", b"\\0", bytes(8), bytes(100), bytes(10000), MAGIC, b"\\x89HDF\\r\\n\\x1a\\n"):
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)
    look(repr(content[:20]))
"""


def test_garbage_is_refused(small, run_python):
    assert set(run(run_python, small, 1, GARBAGE)) == {"refused"}


# Files of versions that are no longer written


MANY_FLIPS = """
dice = random.Random(20260102)
tensors = [
    bit for name in index.tensors for row in index.rows_of(name)
    for bit in range(8 * int(row["byte_offset"]),
                     8 * (int(row["byte_offset"]) + int(row["numel"]) * index.tensors[name].itemsize))
]
for bit in dice.sample(tensors, min(len(tensors), 200)):
    flip(bit)
for bit in dice.sample(range(8 * len(data)), 8 * len(data) // every):
    flip(bit, allowed=(CheckpointError,), harmless=True)  # it may also be taken for one of a newer version
"""


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_flipped_bit_in_a_file_of_any_version_is_found_or_harmless(golden, run_python):
    counts = run(run_python, golden, 400, MANY_FLIPS)
    assert counts["refused"] > 500


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_file_of_any_version_that_is_cut_off_is_refused(golden, run_python):
    assert set(run(run_python, golden, 25, TRUNCATIONS)) == {"refused"}


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_many_flipped_bits_in_a_file_of_any_version_are_found_or_harmless(golden, run_python, part):
    code = MANY_FLIPS.replace("20260102", str(part))
    assert run(run_python, golden, 50, code)["refused"] > 1000


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_a_file_of_any_version_that_is_cut_off_anywhere_is_refused(golden, run_python):
    counts = run(run_python, golden, 1, TRUNCATIONS)
    assert counts == {"refused": golden.stat().st_size}


# Sound files that are not what is looked for


def sealed_file(path, fill):
    """An HDF5 file that another program has written, with a footer that is right."""
    image = SparseImage()
    with h5py.File(image, "w", libver=schema.LIBVER) as file:
        fill(file)
    regions = list(image.written(0, image.nbytes))
    content = bytearray(image.nbytes)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    path.write_bytes(bytes(content) + make_footer(regions, image.nbytes).pack())
    return path


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        open_index(path)
    assert str(caught.value).startswith(f"{path}: ")
    return type(caught.value), str(caught.value).removeprefix(f"{path}: ")


def test_a_newer_format_is_named_although_all_else_is_sound(tmp_path):
    def fill(file):
        file.attrs["format"] = np.bytes_("hpcfsdp")
        file.attrs["format_version"] = np.bytes_("7.3")

    kind, message = refusal(sealed_file(tmp_path / "a.h5", fill))
    assert kind is CheckpointError
    assert message.startswith("has format version 7.3, this hpcfsdp reads ")
    assert message.endswith("use a newer hpcfsdp")


@pytest.mark.parametrize("mark", [None, "another", 3, [1.5, 2]])
def test_another_programs_file_is_none_although_it_has_a_footer(tmp_path, mark):
    def fill(file):
        file["model/w"] = np.zeros(3)
        if mark is not None:
            file.attrs["format"] = mark

    kind, message = refusal(sealed_file(tmp_path / "a.h5", fill))
    assert (kind, message) == (CheckpointCorruptError, "an HDF5 file, but not an hpcfsdp checkpoint")


@pytest.mark.parametrize("version", ["", "x", "1", "-1.0", "1.0"])
def test_a_file_that_only_says_that_it_is_a_checkpoint_is_refused(tmp_path, version):
    def fill(file):
        file.attrs["format"] = np.bytes_("hpcfsdp")
        file.attrs["format_version"] = np.bytes_(version)

    kind, message = refusal(sealed_file(tmp_path / "a.h5", fill))
    assert kind is CheckpointCorruptError
    assert message


def test_a_finished_file_without_its_footer_is_refused(small, tmp_path):
    index = open_index(small)
    (tmp_path / "a.h5").write_bytes(small.read_bytes()[: -len(index.footer.pack())])
    kind, message = refusal(tmp_path / "a.h5")
    assert kind is CheckpointCorruptError
    assert "the footer that ends a file of format" in message
    assert struct.unpack("<Q", small.read_bytes()[-40:-32])[0] == small.stat().st_size


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe") == (CheckpointError, "is not a regular file")
    assert refusal(Path("/dev/zero")) == (CheckpointError, "is not a regular file")
    assert refusal(tmp_path) == (
        CheckpointError,
        "is a directory, not a checkpoint file (hpcfsdp ls lists those in it)",
    )
    assert refusal(tmp_path / ("x" * 300)) == (CheckpointError, "File name too long")
    assert refusal(tmp_path / "pipe" / "a.h5") == (CheckpointError, "Not a directory")
