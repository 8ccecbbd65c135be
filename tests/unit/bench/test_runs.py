import json

import pytest

from hpcfsdp.bench.harness import Ratio, Times
from hpcfsdp.errors import HpcfsdpError, UsageError
from tests.bench import runs


def run_of(**ratios):
    parts = {"step": {"command": ["hpcfsdp"], "ratios": [ratio._asdict() for ratio in ratios.values()]}}
    return {"format": runs.FORMAT, "parts": parts}


def ratio(value, low, high, better="lower", name="time"):
    return Ratio(name, value, low, high, better)


def test_ratios_are_those_of_rounds():
    own, other = Times((1.0, 2.0, 6.0)), Times((2.0, 1.0, 4.0))
    assert Ratio.of_times("t", own, other) == ("t", 1.5, 0.5, 2.0, "lower")
    assert Ratio.of_speeds("s", own, other) == ("s", pytest.approx(2 / 3), 0.5, 2.0, "higher")


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (ratio(1.0, 0.9, 1.1), ratio(1.05, 1.0, 1.2), "same"),
        (ratio(1.0, 0.9, 1.1), ratio(1.3, 1.2, 1.4), "worse"),
        (ratio(1.0, 0.9, 1.1), ratio(0.5, 0.4, 0.6), "better"),
        (ratio(1.0, 0.9, 1.1, "higher"), ratio(1.3, 1.2, 1.4, "higher"), "better"),
        (ratio(1.0, 0.9, 1.1, "higher"), ratio(0.5, 0.4, 0.6, "higher"), "worse"),
    ],
)
def test_a_change_counts_where_the_ranges_do_not_meet(before, now, verdict):
    (change,) = runs.changes(run_of(a=before), run_of(a=now))
    assert change.verdict == verdict


def test_ratios_of_one_run_alone_are_named():
    changes = runs.changes(run_of(a=ratio(1, 1, 1, name="old")), run_of(a=ratio(1, 1, 1, name="new")))
    assert {change.name: change.verdict for change in changes} == {"new": "new", "old": "gone"}


def test_what_else_differs_is_named():
    run = {"ranks": 2, "hardware": {"host": "a", "cores": 2}, "versions": {"torch": "2.13", "hpcfsdp": "1"}}
    other = {"ranks": 3, "hardware": {"host": "b", "cores": 2}, "versions": {"torch": "2.14", "hpcfsdp": "2"}}
    assert runs.differences(run, run) == []
    assert runs.differences(run, other) == ["ranks", "torch"]


def test_a_run_is_saved_and_read(tmp_path):
    kept = run_of(a=ratio(1.5, 1, 2))
    runs.save(tmp_path / "a.json", kept)
    assert runs.load(tmp_path / "a.json") == kept
    assert list(runs.ratios(kept)) == [("step", ratio(1.5, 1, 2))]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "another"}', json.dumps({"format": runs.FORMAT})])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"other\.json: this file is no report of benchmarks"):
        runs.load(path)


def test_ratios_that_are_no_numbers_are_refused(tmp_path):
    runs.save(tmp_path / "text.json", run_of(a=ratio("1.5", 1, 2)))
    with pytest.raises(UsageError, match="this file is no report of benchmarks"):
        runs.load(tmp_path / "text.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        runs.load(tmp_path / "none.json")


def test_a_figure_shows_every_ratio(tmp_path):
    found = [("step", ratio(0.5, 0.4, 0.6)), ("collectives", ratio(2.0, 1.5, 4.0, "higher", "speed"))]
    runs.draw_ratios(found, tmp_path / "a.svg", "a machine")
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    with pytest.raises(HpcfsdpError, match="unknown image format"):
        runs.draw_ratios(found, tmp_path / "a.mp3", "a machine")


def test_the_machine_is_described():
    found = {"date": "2026-01-02T03:04:05+00:00", "ranks": 2}
    text = runs.about({**found, "hardware": runs.hardware(), "versions": runs.software()})
    assert text.startswith("2026-01-02: ") and " cores, " in text and "torch 2" in text and text.endswith("; 2 ranks")
