"""Files in memory are files: what was written is read, wherever, and the rest is zeros."""

import os

import h5py
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import image
from hpcfsdp.checkpoint.format.image import KnownRanges, SparseImage

pytestmark = pytest.mark.hdf5

OFFSETS = st.integers(0, 300)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), OFFSETS, st.binary(max_size=80)),
        st.tuples(st.just("read"), OFFSETS, st.integers(0, 120)),
        st.tuples(st.just("truncate"), OFFSETS, st.none()),
    ),
    max_size=12,
)


@pytest.fixture(scope="module", params=[7, 64])
def page(request):
    """Pages are as small as this, so that a few bytes lie on several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "_PAGE", request.param)
        yield request.param


@given(STEPS, OFFSETS, OFFSETS)
@settings(max_examples=300)
def test_an_image_is_a_file(page, steps, low, high):
    made, model = SparseImage(), bytearray()
    for kind, offset, detail in steps:
        made.seek(offset)
        if kind == "write":
            made.write(detail)
            if detail:
                model += bytes(max(0, offset + len(detail) - len(model)))
                model[offset : offset + len(detail)] = detail
            assert made.tell() == offset + len(detail)
        elif kind == "read":
            assert made.read(detail) == bytes(model[offset : offset + detail]).ljust(detail, b"\0")
        else:
            made.truncate(offset)
            model = model[:offset] + bytes(max(0, offset - len(model)))
    assert made.seek(0, os.SEEK_END) == len(model)
    made.seek(0)
    assert made.read(len(model)) == bytes(model)
    low, high = sorted((min(low, len(model)), min(high, len(model))))
    found = bytearray(high - low)
    end = low
    for begin, data in made.written(low, high):
        assert end <= begin
        assert data
        end = begin + len(data)
        found[begin - low : end - low] = data
    assert found == model[low:high]


@st.composite
def stretches(draw):
    known, end = [], 0
    for _ in range(draw(st.integers(0, 5))):
        begin = end + draw(st.integers(0, 40))
        data = draw(st.binary(max_size=40))
        known.append((begin, data))
        end = begin + len(data)
    return end + draw(st.integers(0, 20)), draw(st.permutations(known))


@given(stretches(), st.lists(st.tuples(OFFSETS, st.integers(0, 120)), max_size=6))
@settings(max_examples=300)
def test_known_ranges_are_a_file_with_zeros_between_them(made, reads):
    nbytes, known = made
    model = bytearray(nbytes)
    for begin, data in known:
        model[begin : begin + len(data)] = data
    file = KnownRanges(nbytes, known)
    assert file.seek(0, os.SEEK_END) == nbytes
    for offset, length in reads:
        file.seek(offset)
        assert file.read(length) == bytes(model[offset : offset + length]).ljust(length, b"\0")
        assert file.tell() == offset + length


@pytest.mark.parametrize("numel", [10, 200_000])
def test_what_hdf5_writes_into_an_image_it_reads_from_known_ranges(numel):
    made = SparseImage()
    values = np.arange(numel, dtype=np.float32)
    with h5py.File(made, "w") as file:
        file["a/b"] = values
        file.attrs["note"] = "x"
    with h5py.File(KnownRanges(made.nbytes, list(made.written(0, made.nbytes))), "r") as file:
        assert file.attrs["note"] == "x"
        np.testing.assert_array_equal(file["a/b"][...], values)


def test_an_image_takes_no_memory_for_what_was_not_written():
    made = SparseImage()
    made.seek(1 << 40)
    made.write(b"end")
    assert made.nbytes == (1 << 40) + 3
    ((begin, data),) = made.written(0, made.nbytes)
    assert len(data) <= 1 << 16
    assert begin + len(data) == made.nbytes


def test_a_copy_and_its_original_change_without_each_other():
    image = SparseImage()
    image.write(b"x" * 200_000)
    copy = image.copy()
    again = copy.copy()
    copy.seek(100_000)
    copy.write(b"copied")
    image.seek(3)
    image.write(b"changed")
    image.truncate(150_000)
    contents = [b"".join(data for _, data in one.written(0, one.nbytes)) for one in (image, copy, again)]
    assert contents[0] == b"xxxchanged" + b"x" * 149_990
    assert contents[1] == b"x" * 100_000 + b"copied" + b"x" * 99_994
    assert contents[2] == b"x" * 200_000
