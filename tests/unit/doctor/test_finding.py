import pytest

from hpcfsdp.doctor.finding import Finding, exit_code, summary
from hpcfsdp.text.number_ranges import members, ranks, spans


def found(*levels):
    return [Finding("area", level, "what") for level in levels]


@pytest.mark.parametrize(
    ("levels", "code", "text"),
    [
        ([], 0, "all fine: ready to train"),
        (["ok", "ok"], 0, "all fine: ready to train"),
        (["ok", "note", "warning", "warning"], 0, "2 warnings, 1 note: ready to train"),
        (["ok", "problem", "note"], 3, "1 problem, 1 note: a training would break here"),
    ],
)
def test_only_problems_change_the_exit_code(levels, code, text):
    assert exit_code(found(*levels)) == code
    assert summary(found(*levels)) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3,8"), ([5, 1, 4, 9, 1], "1,4-5,9")]
)
def test_spans_are_written_and_read(numbers, text):
    assert spans(numbers) == text
    assert members(text) == set(numbers)


def test_ranks_are_named():
    assert ranks([2]) == "rank 2"
    assert ranks(number for number in (0, 1, 4)) == "ranks 0-1,4"
