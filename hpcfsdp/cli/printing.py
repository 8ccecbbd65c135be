"""Output of verbs: values for people and as JSON; tables, fitted to a terminal, tab-separated and complete elsewhere.

On a terminal no cell of numbers is ever cut or wrapped: the column of names gives way, then the layout.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpcfsdp import env
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console


_GAP = "  "
_LEAST = {"name": 16, "text": 20}
"""Columns of a terminal that names and prose need. With fewer, each gets a line of its own."""


class Brief(str):
    """A cell that is shorter on a terminal than elsewhere."""

    brief: str

    def __new__(cls, whole: Any, brief: str) -> Brief:
        cell = super().__new__(cls, whole)
        cell.brief = brief
        return cell


def console(*, moving: bool = False) -> Console:
    """Return a console on stdout, a terminal; `moving` the cursor if so. Give it printable text only: ``shown``."""
    from rich.console import Console  # takes 50 ms, and few calls print on a terminal

    stream = getattr(sys.stdout, "moving" if moving else "styled", sys.stdout)
    return Console(file=stream, no_color=env.colour_refused() or None, highlight=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Sequence[str] = (),
    names: Sequence[str] = (),
    text: Sequence[str] = (),
) -> None:
    """Write a table to stdout: aligned and fitted on a terminal, tab-separated otherwise.

    Columns `right` are aligned to the right, `names` are shortened in the middle on a narrow terminal, and `text`, one
    at most, is prose that is wrapped at spaces. A terminal does not show an empty one.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(map(shown, row)))
        return
    output, rows = console(), list(rows)
    filled = [place for place, name in enumerate(columns) if name not in text or any(row[place] for row in rows)]
    cells = [[shown(getattr(row[place], "brief", row[place])) for place in filled] for row in (columns, *rows)]
    kind_of = {column: kind for kind, of in (("right", right), ("text", text), ("name", names)) for column in of}
    kinds = [kind_of.get(columns[place], "left") for place in filled]
    ellipsis = "…" if "…".encode(getattr(sys.stdout, "encoding", None) or "ascii", "ignore") else "..."
    for number, line in enumerate(_lines(cells, kinds, output.width, ellipsis)):
        output.print(line, markup=False, soft_wrap=True, style="bold" if number == 0 else "")


def _lines(
    cells: list[list[str]], kinds: list[str], width: int, ellipsis: str, notes: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines of a table whose first row is the header, with a note below each row that has one."""
    widths = [max(_width(row[place]) for row in cells) for place in range(len(kinds))]
    fitted = [min(size, _LEAST.get(kind, size)) for size, kind in zip(widths, kinds, strict=True)]
    spare = width - len(_GAP) * (len(kinds) - 1) - sum(fitted)
    if spare < 0 and "text" in kinds and len(kinds) > 1:
        prose = kinds.index("text")
        rest = [[cell for place, cell in enumerate(row) if place != prose] for row in (kinds, *cells)]
        yield from _lines(rest[1:], rest[0], width, ellipsis, ["", *(row[prose] for row in cells[1:])])
        return
    for place in sorted(range(len(kinds)), key=lambda place: kinds[place] != "name"):  # names first
        grown = min(widths[place] - fitted[place], max(spare, 0))
        fitted[place], spare = fitted[place] + grown, spare - grown
    for number, row in enumerate(cells):
        if spare >= 0:
            yield from _row(row, kinds, fitted, ellipsis)
        else:
            yield from _under_name(row, cells[0] if number else None, kinds, widths, width, ellipsis)
        if notes and notes[number]:
            yield from (_GAP + line for line in _filled(notes[number].split(" "), width - len(_GAP), " "))


def _row(row: list[str], kinds: list[str], widths: list[int], ellipsis: str) -> Iterator[str]:
    """Yield a row of the table; several lines where prose is wrapped."""
    parts = [
        _filled(cell.split(" "), size, " ")
        if kind == "text"
        else [_shortened(cell, size, ellipsis) if kind == "name" else cell]
        for cell, kind, size in zip(row, kinds, widths, strict=True)
    ]
    for number in range(max(map(len, parts))):
        line = [part[number] if number < len(part) else "" for part in parts]
        padded = [
            " " * (size - _width(cell)) + cell if kind == "right" else cell + " " * (size - _width(cell))
            for cell, kind, size in zip(line, kinds, widths, strict=True)
        ]
        yield _GAP.join(padded).rstrip()


def _under_name(
    row: list[str], header: list[str] | None, kinds: list[str], widths: list[int], width: int, ellipsis: str
) -> Iterator[str]:
    """For narrow terminals: a name on a line of its own, and the other cells below it, in columns if these fit."""
    first = kinds.index("name") if "name" in kinds else 0
    others = [place for place in range(len(kinds)) if place != first]
    yield _shortened(row[first], width, ellipsis)
    if sum(widths[place] + len(_GAP) for place in others) <= width:
        cut = [[line[place] for place in others] for line in (row, kinds, widths)]
        yield from (_GAP + line for line in _row(*cut, ellipsis))
    elif header is not None:  # the row is not the header itself
        parts = [f"{header[place]} {row[place]}" for place in others if row[place]]
        yield from (_GAP + line for line in _filled(parts, width - len(_GAP), _GAP) if line)


def _shortened(name: str, size: int, ellipsis: str) -> str:
    """Return a name of at most `size` columns, without its middle; its end matters more than its beginning."""
    if _width(name) <= size:
        return name
    room = size - len(ellipsis)
    tail = name
    while _width(tail) > room - room // 3:
        tail = tail[1:]
    head = name
    while _width(head) > room - _width(tail):
        head = head[:-1]
    return head + ellipsis + tail


def _filled(parts: Iterable[str], size: int, gap: str) -> list[str]:
    """Return lines of at most `size` columns, of parts with gaps between them; a longer part is broken nowhere."""
    lines = [""]
    for part in parts:
        joined = lines[-1] + gap + part if lines[-1] else part
        if lines[-1] and _width(joined) > size:
            lines.append(part)
        else:
            lines[-1] = joined
    return lines


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # as above

    return cell_len(text)


def readable_shape(shape: Sequence[int]) -> str:
    """(2, 3) -> "2 x 3"; a scalar as "scalar"."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def readable_number(value: Any) -> str:
    """Six digits of a float (four on a terminal), all of an integer, and nothing for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else Brief(f"{value:.6g}", f"{value:.4g}")


def readable_date(date: str) -> str:
    """Return a date of a checkpoint, ISO 8601; on a terminal without seconds and time zone."""
    return Brief(date, date[:16].replace("T", " ") if date.endswith("+00:00") else date)


DATE = Brief("date", "date (UTC)")
"""The header of a column of dates."""


def plain_value(value: Any) -> Any:
    """Return a value of a checkpoint for JSON: arrays by their shape and dtype, NaN and infinity as text."""
    if isinstance(value, dict):
        return {plain_value(key): plain_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(entry) for entry in value]
    if hasattr(value, "dtype"):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


_LONGEST_LIST = 8


def shortened(value: Any) -> Any:
    """Return a nested value for people: a list of more than 8 single values as text with its length and its ends."""
    if isinstance(value, dict):
        return {key: shortened(entry) for key, entry in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) <= _LONGEST_LIST or any(isinstance(entry, (dict, list, tuple)) for entry in value):
        return [shortened(entry) for entry in value]
    return f"{len(value)} values from {value[0]} to {value[-1]}; all of them: --json"


def print_json(value: Any) -> None:
    """Write one JSON document to stdout; nothing, but a ValueError, where it has a NaN: see ``plain_value``."""
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
