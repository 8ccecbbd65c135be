"""Bounds the number of objects that a pickle unfolds to. Pure; executes nothing.

A pickle may use an object any number of times. Forty tuples, each with the previous one twice, are a hundred bytes;
traversing, printing or hashing them never ends.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import Any

from hpcfsdp.errors import CheckpointError

UNFOLDED_PER_OBJECT = 100
"""Into how many objects a pickle may unfold for each that it makes, besides ``UNFOLDED_LEAST``."""

UNFOLDED_LEAST = 1 << 20

STEPS_LEAST = 1 << 20
BYTES_PER_STEP = 16
"""A pickle may have a step for so many bytes of the file, besides ``STEPS_LEAST``. Each takes torch microseconds, and
an object a hundred bytes. A tensor has about 30 steps."""

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_ADDS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""What adds to an object that is there."""


class _Shared:
    """An object that a pickle uses more than once:

    `own` counts its objects that are used once, `parts` has the others.
    """

    def __init__(self) -> None:
        self.own, self.parts = 1, []
        self.unfolded: int | None = None


_Object = int | _Shared
"""How many objects it is; or one that is used again."""


def check_pickle(stream: io.BufferedIOBase, nbytes: int = 0) -> None:
    """Raises ValueError unless the stream's next bytes are a pickle of bounded size; leaves the stream behind it.

    CheckpointError for more steps than the `nbytes` explain that the file, with its tensors, takes on the disk.
    """
    begin = stream.tell()
    used, count = _used(stream, STEPS_LEAST + nbytes // BYTES_PER_STEP)
    stream.seek(begin)
    most = UNFOLDED_LEAST + UNFOLDED_PER_OBJECT * count
    if _unfolded(_uses(stream, used, count), most) > most:
        raise ValueError("it holds lists or tuples that contain each other too often to be traversed")


def _used(stream: io.BufferedIOBase, most: int) -> tuple[set[int], int]:
    """The memo numbers that are fetched, and the number of opcodes. Raises CheckpointError for more than `most`."""
    used, count = set(), 0
    for opcode, argument, _ in pickletools.genops(stream):
        count += 1
        if count > most:
            raise CheckpointError(
                f"its pickle has more than {most} steps, too many for the size of the file: save long lists of numbers "
                "as tensors"
            )
        if opcode.name in _GETS:
            used.add(argument)
    return used, count


def _uses(stream: io.BufferedIOBase, used: set[int], count: int) -> _Shared:
    """All objects that a pickle fetches from its memo, once for each fetch."""
    stack: list[_Object | None] = []  # None: a mark
    memo: dict[int, _Shared] = {}
    uses, places = _Shared(), 0
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name in _PUTS:
                place = places if argument is None else argument
                places += 1
                if place > count:
                    raise ValueError("it numbers objects that it does not have")  # memory for all of them would be made
                if place in used:
                    memo[place] = stack[-1] = _shared(stack[-1])
            elif name in _GETS:
                stack.append(memo[argument])
                uses.parts.append(memo[argument])
            elif name == "DUP":
                stack[-1] = _shared(stack[-1])
                stack.append(stack[-1])
                uses.parts.append(stack[-1])
            elif name != "STOP":
                _step(stack, opcode)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("it takes objects that it has not made") from None
    return uses


def _step(stack: list[_Object | None], opcode: Any) -> None:
    """Applies any other opcode to the stack."""
    before = opcode.stack_before
    fixed, popped = len(before), []
    if pickletools.markobject in before:
        fixed = before.index(pickletools.markobject)
        while (part := stack.pop()) is not None:
            popped.append(part)
    for _ in range(fixed):
        popped.append(stack.pop())
    if opcode.name in _ADDS:
        holder = popped.pop()  # the lowest
        stack.append(_joined(holder, popped))
        return
    for made in opcode.stack_after:
        stack.append(None if made is pickletools.markobject else _joined(1, popped))


def _joined(holder: _Object, parts: list[_Object]) -> _Object:
    """An object with others inside."""
    if isinstance(holder, int) and any(isinstance(part, _Shared) for part in parts):
        holder = _shared(holder)
    for part in parts:
        if isinstance(holder, int):
            holder += part
        elif isinstance(part, int):
            holder.own += part
        else:
            holder.parts.append(part)
    return holder


def _shared(found: _Object) -> _Shared:
    if isinstance(found, _Shared):
        return found
    shared = _Shared()
    shared.own = found
    return shared


def _unfolded(whole: _Shared, most: int) -> int:
    """The number of objects, each counted once for each use, up to `most` + 1; raises ValueError for a cycle."""
    path: list[tuple[_Shared, Iterator[_Shared]]] = [(whole, iter(whole.parts))]
    inside = {id(whole)}
    while path:
        found, parts = path[-1]
        part = next((part for part in parts if part.unfolded is None), None)
        if part is None:
            found.unfolded = min(most + 1, found.own + sum(inner.unfolded or 0 for inner in found.parts))
            inside.discard(id(found))
            path.pop()
        elif id(part) in inside:
            raise ValueError("it holds a list that contains itself")
        else:
            inside.add(id(part))
            path.append((part, iter(part.parts)))
    return whole.unfolded or 0


def first_line(error: BaseException) -> str:
    """The reason of an error of reading damaged bytes, which may quote much of them."""
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
