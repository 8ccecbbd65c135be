import io
import json
import sys

import pytest

from hpcfsdp import env
from hpcfsdp.cli import doctor
from hpcfsdp.doctor.examine import Diagnosis
from hpcfsdp.doctor.findings import Finding

FINDINGS = [Finding("torch", "ok", "2.13.0"), Finding("mpi", "problem", "does not\nstart", "hint it")]
REPORT = Diagnosis(FINDINGS, {"host": "n1"}, [{"rank": 0}])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """``on_terminal()``: the report on a terminal, from a process without a launcher."""
    for name in [*env.diagnostic_values(), "NO_COLOR"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")

    def report():
        monkeypatch.setattr(sys, "stdout", Terminal())
        doctor._print_as_text(REPORT)
        return sys.stdout.getvalue()

    return report


def test_a_pipe_gets_one_line_for_each_finding(capsys):
    doctor._print_as_text(REPORT)
    assert capsys.readouterr().out.splitlines() == [
        "ok       torch      2.13.0",
        "problem  mpi        does not start -> hint it",
        "1 problem: a training would break here",
    ]


def test_json(capsys):
    doctor._print_as_json(REPORT)
    report = json.loads(capsys.readouterr().out)
    assert report["findings"][0] == {"area": "torch", "level": "ok", "what": "2.13.0", "hint": ""}
    assert (report["facts"], report["ranks"]) == ({"host": "n1"}, [{"rank": 0}])


def test_a_terminal_gets_colours_and_hints_on_their_own_lines(on_terminal):
    text = on_terminal()
    assert "\x1b[32mok" in text
    assert any("-> hint it" in line and "mpi" not in line for line in text.splitlines())


def test_no_color(on_terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = on_terminal()
    assert "-> hint it" in text
    assert "\x1b[3" not in text


def test_a_rank_prints_plainly_even_to_a_terminal(on_terminal, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    assert on_terminal().startswith("ok       torch      2.13.0\n")
