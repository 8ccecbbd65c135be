import logging
import re
import sys

import pytest

from hpcfsdp.output.progress_bar import byte_progress, step_progress

logger = logging.getLogger("hpcfsdp.test_progress")


@pytest.fixture
def terminal(monkeypatch):
    """``terminal(yes)``: let stderr be a terminal, or not."""

    def let(yes):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: yes, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "100")

    return let


def run(rank, first, last, every):
    with step_progress(logger, rank, first, last, every) as show:
        for step in range(first, last + 1):
            show(step, f"loss {step / 2}")


@pytest.mark.parametrize(
    ("first", "last", "every", "logged"),
    [(1, 7, 3, [1, 3, 6, 7]), (4, 6, 100, [4, 6]), (5, 5, 1, [5]), (1, 3, 1, [1, 2, 3])],
)
def test_without_a_terminal_there_is_a_line_for_the_first_last_and_every_nth_step(
    terminal, caplog, first, last, every, logged
):
    terminal(False)
    with caplog.at_level(logging.INFO, logger.name):
        run(0, first, last, every)
    assert caplog.messages == [f"step {step}/{last} loss {step / 2}" for step in logged]


@pytest.mark.parametrize("yes", [True, False])
def test_other_ranks_show_nothing(terminal, caplog, capsys, yes):
    terminal(yes)
    with caplog.at_level(logging.INFO, logger.name):
        run(1, 1, 5, 1)
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")


def test_without_rich_a_terminal_gets_what_others_get(terminal, caplog, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    terminal(True)
    with caplog.at_level(logging.INFO, logger.name):
        run(0, 1, 2, 1)
    assert caplog.messages == ["step 1/2 loss 0.5", "step 2/2 loss 1.0"]
    with byte_progress("verify", 10) as advance:
        advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_no_lines(terminal, caplog, capsys):
    terminal(True)
    with caplog.at_level(logging.INFO, logger.name):
        run(0, 1, 8, 1)
    assert caplog.messages == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "8/8" in shown.err
    assert "loss 4.0" in shown.err


def test_a_bar_of_a_resumed_run_starts_where_it_was(terminal, capsys):
    terminal(True)
    with step_progress(logger, 0, 6, 8, 1):
        pass
    assert "5/8" in capsys.readouterr().err


@pytest.mark.parametrize("refused", [True, False])
def test_a_bar_has_colours_unless_the_user_refuses_them(terminal, capsys, monkeypatch, refused):
    terminal(True)
    monkeypatch.setenv("NO_COLOR", "1" if refused else "")
    run(0, 1, 3, 1)
    colours = re.findall(r"\x1b\[(?:\d+;)*3[0-8][0-9;]*m", capsys.readouterr().err)
    assert bool(colours) is not refused


def test_an_error_inside_is_passed_on(terminal):
    for yes in (True, False):
        terminal(yes)
        with pytest.raises(KeyError), step_progress(logger, 0, 1, 3, 1):
            raise KeyError
