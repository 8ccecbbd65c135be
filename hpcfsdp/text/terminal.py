"""Text from files, the environment and other programs, escaped for terminals.

Names and values in files can contain escape sequences, control characters, marks that change the direction of writing,
or halves of surrogate pairs. None of these reaches a terminal or a log: errors of hpcfsdp, its log lines, and the
output of its commands pass through here.
"""

from __future__ import annotations

import re
from typing import Any

_STYLES = re.compile(r"(\x1b\[[0-9;]*m)")
"""Escape sequences that set colours."""


def shown(value: Any) -> str:
    """A value in one line. Characters that cannot be printed become Python's escapes (``\\x1b``, ``\\n``)."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown_lines(text: str) -> str:
    """As ``shown``, but line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(part if part in ("\n", "\t") else shown(part) for part in re.split(r"([\n\t])", text))


def shown_message(text: str) -> str:
    """As ``shown_lines``, with indented lines after the first: none of them looks like another message."""
    first, *rest = shown_lines(text).split("\n")
    return "\n".join([first, *(line if line[:1] in ("", " ", "\t") else f"  {line}" for line in rest)])


def shown_styled(text: str) -> str:
    """As ``shown_lines``, but colours stay."""
    return "".join(part if place % 2 else shown_lines(part) for place, part in enumerate(_STYLES.split(text)))
