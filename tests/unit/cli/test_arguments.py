import argparse

import pytest

from hpcfsdp.cli.arguments import positive, size_in_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1GiB", 1 << 30),
        ("3KB", 3000),
        ("2 MB", 2 * 10**6),
        ("1Ti", 1 << 40),
        ("1.5GiB", 3 << 29),
        ("77", 77),
        ("5B", 5),
    ],
)
def test_sizes_have_units(text, nbytes):
    assert size_in_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "1 Gb", "GiB", "1e9", "1GiBx"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size, such as 1GiB"):
        size_in_bytes(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "2.5", "many"])
def test_what_is_not_counted(text):
    assert positive("3") == 3
    with pytest.raises(argparse.ArgumentTypeError, match="is not a positive whole number"):
        positive(text)
