"""The reference pages about commands, exit codes and errors, compared with the code."""

import ast
import functools
import re

import pytest

from hpcfsdp import errors, preempt
from hpcfsdp.cli import main
from tests.cli.conftest import ROOT

REFERENCE = ROOT / "docs" / "reference"


@functools.cache
def trees():
    """The modules of the package, parsed: in the tests that look, not wherever tests are collected."""
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "hpcfsdp").rglob("*.py"))]


def test_the_page_of_commands_has_a_section_for_each_verb():
    """The site fills them from the parsers."""
    page = (REFERENCE / "commands.md").read_text()
    assert re.findall(r"^## hpcfsdp (.*)$", page, re.MULTILINE) == list(main.VERBS)
    assert re.findall(r"^```\{command-help\} (.*)$", page, re.MULTILINE) == list(main.VERBS)


def rows(page, columns):
    """The cells of all rows of the tables with so many columns, without headers."""
    lines = (REFERENCE / page).read_text().splitlines()
    found = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")]
    found = [row for row in found if len(row) == columns and not set(row[0]) <= {"-"}]
    return [row for row in found if row[0] not in ("code", "kind", "the message contains")]


def texts(tree):
    """All strings of a module; what an f-string puts in is {}."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@functools.cache
def source():
    return "\n".join(text for tree in trees() for text in texts(tree))


MESSAGES = [row[0].strip("`") for row in rows("errors.md", 3)]


def test_there_are_many_messages_and_none_twice():
    assert len(MESSAGES) >= 25
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_package(message):
    assert message in source()


def kinds_in_the_source():
    """What errors are given as their kind: by their class, or where they are raised."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "of_kind":
                yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))
    from hpcfsdp.checkpoint.format.access import _KINDS

    yield from _KINDS.values()
    yield "unreadable"  # any other
    yield from (kind.kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "kind"))
    yield from (main.OutputError.kind, "internal")


def test_all_kinds_are_listed_and_no_others():
    assert {row[0].strip("`") for row in rows("exit-codes.md", 3) if row[0].startswith("`")} == set(
        kinds_in_the_source()
    )


def test_all_exit_codes_of_errors_are_listed():
    listed = {
        int(code) for code in re.findall(r"^\| (\d+) \|", (REFERENCE / "exit-codes.md").read_text(), re.MULTILINE)
    }
    used = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert listed == used | {0, 130, preempt.EXIT_REQUEUE, main.EXIT_BROKEN_PIPE}
