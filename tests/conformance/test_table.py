"""The table names tests that exist, and every test here stands for one of torch's."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
REASONS = ("inside", "wording", "device", "newer", "other", "differs")
ROW = re.compile(r"\| `(?P<torch>[\w.]+)` \| (?P<here>.+) \|")


def rows():
    """Of each row of the table: torch's file, torch's test, and what stands beside it."""
    file = None
    for line in (FOLDER / "README.md").read_text().splitlines():
        if line.startswith("## "):
            file = line.removeprefix("## ").strip("`")
        elif row := ROW.fullmatch(line):
            yield file, row["torch"], row["here"]


def all_here():
    """``file::test`` of all tests of this folder but those of the table."""
    return {
        f"{path.stem}::{node.name}"
        for path in FOLDER.glob("test_*.py")
        if path != Path(__file__)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_row_names_a_test_or_a_reason():
    existing, wrong = all_here(), []
    for file, test, here in rows():
        named = re.findall(r"`(test_\w+::test_\w+)`", here)
        if not set(named) <= existing or not (named or here.startswith(tuple(f"*{reason}*: " for reason in REASONS))):
            wrong.append((file, test, here))
    assert not wrong


def test_each_test_is_in_the_table():
    named = {name for _, _, here in rows() for name in re.findall(r"`(test_\w+::test_\w+)`", here)}
    assert all_here() == named


def test_no_test_of_torch_stands_there_twice():
    names = [(file, test) for file, test, _ in rows()]
    assert names
    assert len(names) == len(set(names))
