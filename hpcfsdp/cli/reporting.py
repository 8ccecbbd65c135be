"""Arguments, tables and numbers of the reporting verbs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from hpcfsdp import env
from hpcfsdp.errors import UsageError
from hpcfsdp.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console


class Parser(argparse.ArgumentParser):
    """Raises a ``UsageError`` instead of ending the process, and knows ``--json``."""

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(prog=f"hpcfsdp {verb}", description=description, allow_abbrev=False)
        self.add_argument("--json", action="store_true", help="machine-readable output")

    def add_patterns(self, before: str = "") -> None:
        """Add patterns of names, in front of which the help says `before`."""
        text = (
            f"{before}names of tensors, with or without model/ before them; * stands for any text, ? for any "
            "character, [ab] for a or b"
        )
        self.add_argument("patterns", metavar="PATTERN", nargs="*", help=text)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def print_json(value: Any) -> None:
    """Write one JSON document to stdout.

    Raises:
        ValueError: it contains a NaN or an infinity, which JSON cannot hold: see ``plain_value``.
    """
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


def print_line(*parts: Any) -> None:
    """Write parts to stdout as one line of printable characters, separated by spaces."""
    print(*map(shown, parts))


def console() -> Console:
    """A console on stdout, a terminal. Give it printable text only: ``shown``."""
    from rich.console import Console

    return Console(
        file=getattr(sys.stdout, "styled", sys.stdout), no_color=env.colour_refused() or None, highlight=False
    )


def print_result(
    as_json: bool, value: Any, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> None:
    """Write `value` to stdout as JSON, or else a table."""
    if as_json:
        print_json(value)
    else:
        print_table(columns, rows, right)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Write a table to stdout: aligned and coloured on a terminal, tab-separated otherwise.

    Args:
        right: names of the columns that are aligned to the right.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(map(shown, row)))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    console().print(table)


def print_markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a Markdown table to stdout."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(shown, row)) + " |")


def readable_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count} B"
        value /= 1024
    return f"{value:.1f} TiB"


def readable_shape(shape: Sequence[int]) -> str:
    """(2, 3) -> "2 x 3"; a scalar as "scalar"."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def readable_number(value: Any) -> str:
    """Six digits of a float, all of an integer, and nothing for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def plain_value(value: Any) -> Any:
    """A value of a checkpoint for JSON: arrays by their shape and dtype, NaN and infinity as text."""
    if isinstance(value, dict):
        return {plain_value(key): plain_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(entry) for entry in value]
    if hasattr(value, "dtype"):
        return f"array {readable_shape(value.shape)} {value.dtype}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
