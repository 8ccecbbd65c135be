"""JSON of other shapes, and files of JSON lines that are damaged or that another process is writing."""

import json
import math
import os

import pytest

from hpcfsdp.text import json_input
from hpcfsdp.text.json_input import Tail, Tally, number, parse, records, seconds_of, step_of

SHAPE = {"name": str, "at": (None, [str, int]), "many": [[int, (str, None)]], "share": float, "done": bool}
SOUND = {"name": "a", "at": ["b", 1], "many": [[1, "c"], [2, None]], "share": 0.5, "done": True}
DEEP = b"[" * 100_000 + b"]" * 100_000


def test_damaged_lines_are_counted_and_the_others_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\xff\n\n[1, 2]\n' + DEEP + b'\n{"step": 2}\n{"step": 9' + b"9" * 5000 + b"}\n")
    tally = Tally()
    assert [record["step"] for record in records(path, tally)] == [1, 2]
    assert (tally.sound, tally.damaged, tally.first_damaged) == (2, 4, 2)


def test_a_last_line_without_an_end_is_not_damaged_but_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    tally = Tally()
    assert [record["step"] for record in records(path, tally)] == [1]
    assert tally.damaged == 0


def test_a_line_without_an_end_takes_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_input, "LONGEST_LINE", 64)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 1000 + b'\n{"step": 3}\n')
    tally = Tally()
    assert [record["step"] for record in records(path, tally)] == [3]
    assert (tally.damaged, tally.first_damaged) == (1, 1)


def test_a_file_that_is_not_there_has_no_records(tmp_path):
    assert [*records(tmp_path / "none", Tally())] == []
    assert Tail(tmp_path / "none").poll() == ([], False)


def test_a_tail_gives_each_line_once_it_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    with open(path, "wb", buffering=0) as file:
        file.write(b'{"step": 1}\n{"st')
        assert tail.poll() == ([{"step": 1}], True)
        assert tail.poll() == ([], False)
        file.write(b'ep": 2}\nnoise\n{"step": 3}\n')
        assert tail.poll() == ([{"step": 2}, {"step": 3}], False)


def test_a_tail_reads_a_replaced_file_from_its_beginning(tmp_path):
    path, draft = tmp_path / "metrics.jsonl", tmp_path / "draft"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    tail = Tail(path)
    tail.poll()
    draft.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n')  # longer: its size does not show it
    os.replace(draft, path)
    found, anew = tail.poll()
    assert anew
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    path.write_bytes(b'{"step": 1}\n')  # the same file, shorter
    assert tail.poll() == ([{"step": 1}], True)
    path.unlink()
    assert tail.poll() == ([], True)


def test_a_tail_begins_near_the_end_of_a_long_file_with_a_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d}\n' % step for step in range(10, 100)]
    path.write_bytes(b"".join(lines))
    for last_bytes in range(1, 3 * len(lines[0])):
        found, _ = Tail(path, last_bytes).poll()
        assert [record["step"] for record in found] == [*range(100 - last_bytes // len(lines[0]), 100)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        (0.5, 0.5),
        (True, None),
        (None, None),
        ("3", None),
        (math.inf, None),
        (math.nan, None),
        (10**400, None),
    ],
)
def test_numbers_are_finite(value, expected):
    found = number(value)
    assert found == expected if expected is not None else math.isnan(found)


@pytest.mark.parametrize("step", [-1, 1.5, None, "4", True, 1e300, math.nan])
def test_what_is_no_step(step):
    assert step_of({"step": step}) is None


def test_dates_are_utc():
    assert seconds_of("1970-01-01T00:01:00Z") == seconds_of("1970-01-01T01:01:00+01:00") == 60
    assert seconds_of("1970-01-01T00:01:00") == 60
    for wrong in ("yesterday", 5, None, "0001-01-01T00:00:00+23:59"):
        assert math.isnan(seconds_of(wrong)) or seconds_of(wrong) < 0


@pytest.mark.parametrize("changed", [{}, {"at": None}, {"many": []}, {"many": [[-(1 << 63), None]]}])
def test_a_value_of_the_shape(changed):
    assert parse(json.dumps(SOUND | changed).encode(), SHAPE) == SOUND | changed


@pytest.mark.parametrize(
    "changed",
    [
        *({"name": value} for value in (1, None, ["a"], {})),
        *({"at": value} for value in ("b", [], ["b"], ["b", 1, 2], ["b", True], [1, "b"])),
        *({"many": value} for value in ([1], [[1]], [[1 << 63, "c"]], [[1.0, "c"]], {}, "ab")),
        {"share": 1},
        {"done": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_value_of_another_shape_is_none(changed):
    assert parse(json.dumps(SOUND | changed).encode(), SHAPE) is None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"\x80\x04N.", b"[" * 100_000, b'{"name": 1' + b"0" * 5000 + b"}"]
)
def test_what_is_no_json_is_none(text):
    assert parse(text, SHAPE) is None


def test_a_name_that_is_missing():
    assert parse(json.dumps({"name": "a"}).encode(), SHAPE) is None
