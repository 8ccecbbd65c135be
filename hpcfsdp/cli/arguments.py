"""The parser of a verb, and types of arguments that several verbs have."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from hpcfsdp.errors import UsageError, nearest


class Parser(argparse.ArgumentParser):
    """Raises a ``UsageError`` instead of ending the process, knows ``--json``, and shows examples in its help."""

    def __init__(self, verb: str, description: str, *examples: str) -> None:
        super().__init__(prog=f"hpcfsdp {verb}", description=description, allow_abbrev=False)
        self.examples = examples
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
        """Return the help of argparse, and the examples below it."""
        return f"{super().format_help()}\nexamples:\n" + "".join(f"  {line}\n" for line in self.examples)

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")]
        meant = ""
        if message.startswith("unrecognized arguments:") and unknown:
            known = [option for action in self._actions for option in action.option_strings]
            meant = nearest(unknown[0].split("=", 1)[0], known)
        verb = self.prog.removeprefix("hpcfsdp ")
        raise UsageError(f"{verb}: {message}{meant} ({self.prog} --help shows the usage)")


def paths_and_patterns(first: Path, others: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates paths from patterns of names: a further path exists, or ends with .h5."""
    paths = [name for name in others if name.endswith(".h5") or os.path.exists(name)]
    return [first, *map(Path, paths)], [name for name in others if name not in paths]


def positive(text: str) -> int:
    """Return a whole number above 0."""
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return count


def number_in(low: float, above: float, what: str) -> Callable[[str], float]:
    """Return the type of numbers from `low` to below `above`; `what` says it in the message."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := float(text)) < above:
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return read


def size_in_bytes(text: str) -> int:
    """ "80GiB", "1.5GB" or "4096" as bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text)
    prefix = (found[2] or "") if found else ""
    unit = (1024 if prefix.endswith("i") else 1000) ** " KMGT".index(prefix[:1] or " ")
    size = int(float(found[1]) * unit) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size, such as 1GiB or 256MiB")
    return size
