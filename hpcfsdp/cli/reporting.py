"""Arguments and results of the reporting verbs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hpcfsdp.cli.printing import print_table
from hpcfsdp.errors import UsageError, nearest
from hpcfsdp.text.terminal import shown


class Parser(argparse.ArgumentParser):
    """Raises a ``UsageError`` instead of ending the process, knows ``--json``, and shows examples in its help."""

    def __init__(self, verb: str, description: str, examples: Sequence[str]) -> None:
        super().__init__(prog=f"hpcfsdp {verb}", description=description, allow_abbrev=False)
        self.examples = tuple(examples)
        self.add_argument("--json", action="store_true", help="machine-readable output; on failure an error object")

    def add_patterns(self, before: str = "") -> None:
        """Add patterns of names, in front of which the help says `before`."""
        text = (
            f"{before}names of tensors, with or without model/ before them; * stands for any text, ? for any "
            "character, [ab] for a or b"
        )
        # With no default, argparse calls them required where PATH is missing.
        self.add_argument("patterns", metavar="PATTERN", nargs="*", default=[], help=text)

    def format_help(self) -> str:
        """The help of argparse, and the examples below it."""
        return f"{super().format_help()}\nexamples:\n" + "".join(f"  {line}\n" for line in self.examples)

    def error(self, message: str) -> NoReturn:
        verb = self.prog.removeprefix("hpcfsdp ")
        raise UsageError(f"{verb}: {message}{self._nearest_option(message)} ({self.prog} --help shows the usage)")

    def _nearest_option(self, message: str) -> str:
        """The end of argparse's message about unknown arguments: the option that resembles the first one."""
        unknown = [word for word in message.split() if word.startswith("--")]
        if not message.startswith("unrecognized arguments:") or not unknown:
            return ""
        known = [option for action in self._actions for option in action.option_strings]
        return nearest(unknown[0].split("=", 1)[0], known)


def paths_and_patterns(first: Path, others: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates paths from patterns of names: a further path exists, or ends with .h5."""
    is_path = [name.endswith(".h5") or os.path.exists(name) for name in others]
    paths = [Path(name) for name, path in zip(others, is_path, strict=True) if path]
    return [first, *paths], [name for name, path in zip(others, is_path, strict=True) if not path]


def print_json(value: Any) -> None:
    """Write one JSON document to stdout, or nothing of it if it raises.

    Raises:
        ValueError: it contains a NaN or an infinity, which JSON cannot hold: see ``readable.plain_value``.
    """
    print(json.dumps(value, indent=2, allow_nan=False))


def print_line(*parts: Any) -> None:
    """Write parts to stdout as one line of printable characters, separated by spaces."""
    print(*map(shown, parts))


def print_note(text: str) -> None:
    """Write a remark to stderr as one line of printable characters."""
    print(f"hpcfsdp: {shown(text)}", file=sys.stderr)


def print_result(
    as_json: bool, value: Any, columns: Sequence[str], rows: Iterable[Sequence[Any]], **kinds: Sequence[str]
) -> None:
    """Write `value` to stdout as JSON, or else a table, see ``print_table``."""
    if as_json:
        print_json(value)
    else:
        print_table(columns, rows, **kinds)
