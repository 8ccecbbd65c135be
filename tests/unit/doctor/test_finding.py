import pytest

from hpcfsdp.doctor.finding import Finding, exit_code, summary


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
