"""Whether a pickle unfolds to about as much as it says. Pure; executes nothing.

A pickle may use an object that it has made any number of times. Forty tuples, of which each holds the one before it
twice, are a hundred bytes; to go through them, to print them, or to use one as a key takes for ever.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator
from typing import Any

UNFOLDED_PER_OBJECT = 100
"""Into how many objects a pickle may unfold for each that it makes, besides ``UNFOLDED_LEAST``."""

UNFOLDED_LEAST = 1 << 20

_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_ADDS = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
"""What adds to an object that is there."""


class _Shared:
    """An object that a pickle uses more than once.

    Attributes:
        own: objects in it that are used once, and it itself.
        parts: the others.
    """

    def __init__(self) -> None:
        self.own, self.parts = 1, []
        self.unfolded: int | None = None


_Object = int | _Shared
"""How many objects it is; or one that is used again."""


def check_pickle(stream: io.BufferedIOBase) -> None:
    """Go through one pickle, and raise if it unfolds to much more than it says; leaves the stream behind it.

    Raises:
        ValueError: it does, or it is no pickle.
    """
    begin = stream.tell()
    used, count = _used(stream)
    stream.seek(begin)
    most = UNFOLDED_LEAST + UNFOLDED_PER_OBJECT * count
    if _unfolded(_uses(stream, used, count), most) > most:
        raise ValueError("it holds lists or tuples that hold each other, more often than anybody could go through")


def _used(stream: io.BufferedIOBase) -> tuple[set[int], int]:
    """The numbers under which objects are fetched again, and how many steps there are."""
    used, count = set(), 0
    for opcode, argument, _ in pickletools.genops(stream):
        count += 1
        if opcode.name in _GETS:
            used.add(argument)
    return used, count


def _uses(stream: io.BufferedIOBase, used: set[int], count: int) -> _Shared:
    """All that a pickle fetches again, each object as often as it does."""
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
    """What any other opcode does to the stack."""
    before = opcode.stack_before
    fixed, taken = len(before), []
    if pickletools.markobject in before:
        fixed = before.index(pickletools.markobject)
        while (part := stack.pop()) is not None:
            taken.append(part)
    for _ in range(fixed):
        taken.append(stack.pop())
    if opcode.name in _ADDS:
        holder = taken.pop()  # the lowest
        stack.append(_joined(holder, taken))
        return
    for made in opcode.stack_after:
        stack.append(None if made is pickletools.markobject else _joined(1, taken))


def _joined(holder: _Object, parts: list[_Object]) -> _Object:
    """An object with others in it."""
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
    """How many objects there are when each is counted as often as it is used; more than `most` as `most` + 1.

    Raises:
        ValueError: one is in itself.
    """
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
            raise ValueError("it holds a list that is in itself")
        else:
            inside.add(id(part))
            path.append((part, iter(part.parts)))
    return whole.unfolded or 0
