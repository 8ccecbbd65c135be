"""The footer holds what it was made from, and is refused if anything about it or the file has changed."""

import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import footer as module
from hpcfsdp.checkpoint.format.footer import MAGIC, Footer, make_footer, packed_bytes, read_footer, read_regions


@st.composite
def layouts(draw):
    """Regions of a file, and where they end."""
    regions, end = [], 0
    for _ in range(draw(st.integers(0, 4))):
        begin = end + draw(st.integers(0, 9))
        regions.append((begin, draw(st.binary(min_size=1, max_size=20))))
        end = begin + len(regions[-1][1])
    return regions, end + draw(st.integers(0, 9))


def sealed(regions, data_end):
    """The bytes of a file."""
    content = bytearray(data_end)
    for begin, data in regions:
        content[begin : begin + len(data)] = data
    return bytes(content) + make_footer(regions, data_end).pack()


def reader(content):
    def read(begin, nbytes):
        assert 0 <= begin <= begin + nbytes <= len(content), "reads beyond the file"
        return content[begin : begin + nbytes]

    return read


def read_file_footer(content):
    return read_footer(len(content), reader(content))


@given(layouts())
@settings(max_examples=100)
def test_what_is_sealed_is_read_again(layout):
    regions, data_end = layout
    content = sealed(*layout)
    footer = make_footer(*layout)
    assert len(footer.pack()) == packed_bytes(len(regions)) == footer.file_bytes - data_end
    assert content.endswith(MAGIC)
    assert read_file_footer(content) == footer
    assert read_regions(footer, reader(content)) == regions


@given(layouts(), st.integers(1, 20))
@settings(max_examples=40)
def test_bytes_before_the_footer_that_it_does_not_count_are_found(layout, more):
    (_, data_end), content = layout, sealed(*layout)
    longer = content[:data_end] + bytes(more) + content[data_end:]
    with pytest.raises(ValueError, match=f"of a file of {len(content)} bytes, it has {len(longer)}"):
        read_file_footer(longer)


@given(layouts())
@settings(max_examples=40)
def test_each_flipped_bit_of_footer_and_regions_is_found_and_no_other(layout):
    regions, data_end = layout
    content = sealed(*layout)
    covered = {place for begin, data in regions for place in range(begin, begin + len(data))}
    covered |= set(range(data_end, len(content)))
    for place in range(len(content)):
        for bit in range(8):
            changed = content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            try:
                footer = read_file_footer(changed)
                found = footer is None or read_regions(footer, reader(changed)) is None
            except ValueError:
                found = True
            assert found == (place in covered)


@given(layouts(), st.integers(0, 300))
@settings(max_examples=200)
def test_a_file_that_ends_too_early_or_too_late_has_no_good_footer(layout, length):
    content = sealed(*layout)
    changed = content[:length] if length < len(content) else content + bytes(length - len(content) + 1)
    try:
        assert read_file_footer(changed) is None
    except ValueError:
        assert changed[-len(MAGIC) :] == MAGIC


@given(st.binary(max_size=80))
@settings(max_examples=200)
def test_bytes_that_end_like_a_footer_are_refused(content):
    with pytest.raises(ValueError, match="its last bytes"):
        read_file_footer(content.ljust(packed_bytes(0), b"x") + MAGIC)


@pytest.mark.parametrize(
    "regions",
    [((0, 5), (4, 3)), ((4, 3), (0, 2)), ((0, 101),), ((90, 11),), ((1 << 63, 1 << 63),), ((0, (1 << 64) - 1),)],
    ids=["overlapping", "out of order", "too long", "into the footer", "far away", "huge"],
)
def test_regions_that_cannot_be_are_refused_although_the_footer_is_right(regions):
    packed = Footer(100 + packed_bytes(len(regions)), regions, 0).pack()
    with pytest.raises(ValueError, match="overlap, or are not in the file"):
        read_file_footer(bytes(100) + packed)


def test_a_number_of_regions_beyond_the_file_is_refused_before_anything_is_read():
    trailer = module._TRAILER.pack(packed_bytes(0), (1 << 64) - 1, 0, 0, MAGIC)
    with pytest.raises(ValueError, match="its last bytes"):
        read_file_footer(trailer)


def test_two_files_that_differ_in_anything_have_different_footers():
    regions = [(0, b"abc"), (5, b"de")]
    footers = [
        make_footer(regions, 10),
        make_footer(regions, 11),
        make_footer([(0, b"abx"), (5, b"de")], 10),
        make_footer([(0, b"abc"), (6, b"de")], 10),
        make_footer([(0, b"abcd"), (5, b"e")], 10),
    ]
    assert len({footer.pack() for footer in footers}) == len(footers) == len(set(footers))
