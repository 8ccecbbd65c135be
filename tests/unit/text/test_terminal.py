import logging

import pytest

from hpcfsdp.errors import CheckpointError
from hpcfsdp.output import log
from hpcfsdp.text.terminal import members, ranks, shown, shown_lines, shown_message, shown_styled, spans

RAW = "a\x1b[31m\x9b2J\x07\u202e\u2066\ud800\x7f\n\t\u2028é漢"
SHOWN = r"a\x1b[31m\x9b2J\x07\u202e\u2066\ud800\x7f\n\t\u2028é漢"


def test_what_cannot_be_printed_is_written_out():
    assert shown(RAW) == SHOWN
    assert shown(SHOWN) == SHOWN
    assert shown(b"\x1b") == r"b'\x1b'"
    assert shown(3) == "3"


def test_line_ends_and_tabs_stay_where_they_are_meant():
    assert shown_lines(RAW) == SHOWN.replace(r"\n\t", "\n\t")


def test_no_line_of_a_message_looks_like_another_message():
    text = "a.h5: damaged: x\nhpcfsdp: all is well\n  set in already\n\n\tby a tab\r\x85end"
    assert shown_message(text).split("\n") == [
        "a.h5: damaged: x",
        "  hpcfsdp: all is well",
        "  set in already",
        "",
        "\tby a tab\\r\\x85end",
    ]


def test_styles_stay_and_nothing_else():
    assert shown_styled("\x1b[1;32mok\x1b[0m\x1b[2J\x1b]0;title\x07") == "\x1b[1;32mok\x1b[0m\\x1b[2J\\x1b]0;title\\x07"


def test_errors_quote_names_from_files_safely():
    error = CheckpointError("a.h5: no \x1b]0;x\x07\nmore")
    assert str(error) == "a.h5: no \\x1b]0;x\\x07\nmore"
    assert error.args == ("a.h5: no \x1b]0;x\x07\nmore",)


def test_so_do_log_lines(capsys):
    log.set_up(0, 1, "here")
    try:
        logging.getLogger("hpcfsdp.x").warning("tensor %s", "\x1b[2J\n2026-01-01T00:00:00Z INFO all is well")
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            logging.getLogger("hpcfsdp.x").exception("oh")
    finally:
        log.close()
    first, second, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith(r"x: tensor \x1b[2J")
    assert second == "  2026-01-01T00:00:00Z INFO all is well"
    assert rest[-1] == r"ValueError: \x1b[2J"


@pytest.mark.parametrize("text", ["", "plain", "two\nlines\n"])
def test_plain_text_stays_as_it_is(text):
    assert shown_lines(text) == shown_styled(text) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 8], "0-3,8"), ([5, 1, 4, 9, 1], "1,4-5,9")]
)
def test_spans_are_written_and_read(numbers, text):
    assert spans(numbers) == text
    assert members(text) == set(numbers)


def test_ranks_are_named():
    assert ranks([2]) == "rank 2"
    assert ranks(number for number in (0, 1, 4)) == "ranks 0-1, 4"
