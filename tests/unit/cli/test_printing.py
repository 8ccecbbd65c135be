"""Tables on terminals of any width, and elsewhere."""

import io
import re
import sys

import numpy as np
import pytest

from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.cli.main import main
from hpcfsdp.cli.printing import Brief, print_table

LONG = "model/transformer.layers.11.attention.self_attention.query_key_value.weight"


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self):
        return True

    def text(self):
        self.flush()
        return re.sub(r"\x1b\[[0-9;]*m", "", self.buffer.getvalue().decode(self.encoding))


@pytest.fixture
def terminal(monkeypatch):
    """``terminal(columns, encoding)``: a new stdout."""

    def make(columns, encoding="utf-8"):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        stream = Terminal(encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return make


@pytest.fixture
def checkpoint(tmp_path):
    """With a tensor of a long name, and numbers of many digits."""
    values = np.linspace(-1.2345678e-5, 9.8765432e4, 12, dtype=np.float32)
    spec = TensorSpec(LONG, (3, 4), "float32")
    return write_alone(tmp_path / "a.h5", [spec], lambda _, start, numel: values[start : start + numel])


def test_a_note_without_room_is_below_its_row(terminal):
    stream = terminal(40)
    rows = [("a/long/name/of/a/file.h5", "1.5 KiB", "truncated: was the copy complete?"), ("b.h5", "2 B", "")]
    print_table(("file", "size", "note"), rows, ("size",), names=("file",), text=("note",))
    assert stream.text().splitlines() == [
        "file                         size",
        "a/long/name/of/a/file.h5  1.5 KiB",
        "  truncated: was the copy complete?",
        "b.h5                          2 B",
    ]


@pytest.mark.parametrize("columns", [200, 100, 80, 60, 40, 30])
@pytest.mark.parametrize("verb", ["stats", "ls"])
def test_no_number_is_cut_at_any_width(terminal, checkpoint, columns, verb):
    stream = terminal(columns)
    assert main([verb, str(checkpoint)]) == 0
    lines = stream.text().splitlines()
    wanted = {"stats": ["-1.235e-05", "9.877e+04", "4.938e+04", "2.02e+05"], "ls": ["48 B", "float32"]}[verb]
    for cell in ("3 x 4", *wanted):
        assert any(cell in line for line in lines), (cell, lines)
    assert all(len(line) <= columns for line in lines)


def test_a_long_name_loses_its_middle(terminal, checkpoint):
    stream = terminal(80)
    assert main(["ls", str(checkpoint)]) == 0
    _, row = stream.text().splitlines()
    name = row.split("  ")[0]
    assert len(row) <= 80
    assert name.startswith("model/transf") and name.endswith("query_key_value.weight")
    assert name.count("…") == 1


def test_an_ascii_terminal_gets_three_dots(terminal, checkpoint):
    stream = terminal(80, "ascii")
    assert main(["ls", str(checkpoint)]) == 0
    assert "..." in stream.text()


def test_elsewhere_everything_is_complete(monkeypatch, checkpoint):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["stats", str(checkpoint)]) == 0
    _, row = sys.stdout.getvalue().splitlines()
    assert row.split("\t")[:4] == [LONG, "3 x 4", "float32", "-1.23457e-05"]


def test_dates_are_short_on_a_terminal_alone(terminal, monkeypatch, checkpoint):
    stream = terminal(100)
    assert main(["ls", str(checkpoint.parent)]) == 0
    header, row = stream.text().splitlines()
    assert re.search(r"date \(UTC\)", header)
    assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d$", row)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["ls", str(checkpoint.parent)]) == 0
    assert re.search(r"\t\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\t$", sys.stdout.getvalue().splitlines()[1])


def test_prose_is_wrapped_at_spaces_and_an_empty_column_is_not_shown(terminal):
    stream = terminal(40)
    print_table(
        ("n", "note"), [(1, "the quick brown fox jumps over the lazy dog"), (12345, "")], ("n",), text=("note",)
    )
    lines = stream.text().splitlines()
    assert max(map(len, lines)) <= 40
    assert [line[:5] for line in lines] == ["    n", "    1", "     ", "12345"]
    assert " ".join(line[7:] for line in lines[1:3]) == "the quick brown fox jumps over the lazy dog"
    stream = terminal(40)
    print_table(("n", "note"), [(1, "")], text=("note",))
    assert stream.text() == "n\n1\n"


def test_wide_characters_count_twice(terminal):
    stream = terminal(30)
    print_table(("name", "n"), [("漢字" * 10, 7)], ("n",), names=("name",))
    _, row = stream.text().splitlines()
    assert row.endswith("  7")
    assert 28 <= len(row) + sum(char in "漢字" for char in row) <= 30


def test_no_color_leaves_no_colour(terminal, monkeypatch, checkpoint):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = terminal(80)
    assert main(["ls", str(checkpoint)]) == 0
    stream.flush()
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", stream.buffer.getvalue())


def test_a_brief_cell_is_brief_on_a_terminal(terminal, monkeypatch):
    stream = terminal(80)
    print_table(("a",), [(Brief("whole", "short"),)])
    assert stream.text() == "a\nshort\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_table(("a",), [(Brief("whole", "short"),)])
    assert sys.stdout.getvalue() == "a\nwhole\n"
