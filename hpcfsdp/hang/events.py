"""The last events of a rank in a ring of fixed size, which the other ranks of its node read when the rank hangs.

The memory is one that the node shares: it can be read while the rank is stuck in C code or stopped, and after its end.
Writing an event takes under a microsecond and no lock; a reader may see one that is half written, and drops it.
"""

import itertools
import json
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CALL, BEGIN, END, PASS, FORWARD, BACKWARD, STEP = range(7)
KINDS = ("call", "begin", "end", "pass", "forward", "backward", "step")
"""Names of the kinds of events: a public call; a collective that begins, or is complete; a pass through the model that
begins; the forward or backward of a unit; a step that the program has done."""

EVENTS = 256  # the number of events in a ring, a power of two
_EVENT = struct.Struct("<qdb175s")
_OWNER = struct.Struct("<qqqq")
_WAIT = struct.Struct("<dH")
_WAIT_BYTES = 900
_HEADER_BYTES = 1024
_ASKED = struct.Struct("<d")
_ASKED_AT = _HEADER_BYTES - _ASKED.size
NBYTES = _HEADER_BYTES + EVENTS * _EVENT.size  # the size of a rank's ring
_MOST_MISSING = 16
_LABEL_CHARS = 300


@dataclass(frozen=True)
class RankEvent:
    """An event of a rank."""

    number: int  # counts the events of the rank
    time_s: float  # since the epoch
    kind: str  # one of ``KINDS``
    text: str  # the public call, the label of the collective, the name of the unit, or the number of the pass or step


@dataclass(frozen=True)
class CurrentWait:
    """A collective that a rank waits in."""

    since_s: float  # since the epoch
    label: str  # of the collective
    call: str  # the public call that it belongs to, or ""
    missing: tuple[int, ...]  # ranks of the world that have not come; the first 16
    num_missing: int


@dataclass(frozen=True)
class Record:
    """What a ring holds."""

    pid: int  # 0 if no rank has written here
    started: int  # in the system's clock ticks
    stacks_fd: int  # the descriptor in that process of the file that gets its Python stacks, -1 without one
    main_thread: int  # its identifier
    wait: CurrentWait | None = None  # if it has waited for more than a second
    events: Sequence[RankEvent] = ()  # the latest last


class EventRing:
    """The ring of this process, for its own events."""

    def __init__(self) -> None:
        self._memory: Any = bytearray(NBYTES)
        self._numbers = itertools.count(1)  # its next() is atomic: two threads add events

    def move_to(self, memory: memoryview) -> None:
        """Not collective. Continue in other memory of ``NBYTES`` bytes, which others may read."""
        memory[:] = bytes(self._memory)
        self._memory = memory

    def leave(self) -> None:
        """Not collective. Continue in memory of this process alone."""
        self._memory = bytearray(self._memory)

    def note(self, kind: int, text: str) -> None:
        """Not collective. Add an event; `kind` is an index into ``KINDS``."""
        number = next(self._numbers)
        begin = _HEADER_BYTES + number % EVENTS * _EVENT.size
        _EVENT.pack_into(self._memory, begin, number, time.time(), kind, text.encode())

    def own(self, pid: int, started: int, stacks_fd: int, main_thread: int) -> None:
        """Not collective. Name the process; see ``Record``."""
        _OWNER.pack_into(self._memory, 0, pid, started, stacks_fd, main_thread)

    def begin_wait(self, since_s: float, label: str, call: str, missing: Sequence[int]) -> None:
        """Not collective. Note that this rank waits; see ``CurrentWait``."""
        begin, whom = _OWNER.size, (list(missing[:_MOST_MISSING]), len(missing))
        text = json.dumps((label[:_LABEL_CHARS], call[:_LABEL_CHARS], *whom)).encode()
        if len(text) > _WAIT_BYTES:  # characters that JSON escapes
            text = json.dumps(("", "", *whom)).encode()
        self._memory[begin + _WAIT.size : begin + _WAIT.size + len(text)] = text
        _WAIT.pack_into(self._memory, begin, since_s, len(text))

    def end_wait(self) -> None:
        _WAIT.pack_into(self._memory, _OWNER.size, 0.0, 0)

    @property
    def asked_s(self) -> float:
        """Return when a rank of this node last asked this process for its stacks, in seconds since the epoch."""
        return _ASKED.unpack_from(self._memory, _ASKED_AT)[0]


ring = EventRing()  # the ring of this process


def described(call: str, label: str) -> str:
    """Describe a collective by the public call around it, "" for none, and its label."""
    return f"{call} ({label})" if call else label


def note_question(memory: memoryview) -> None:
    """Note in the ring of a rank that this process asks it for its stacks: it has no other request to answer then."""
    _ASKED.pack_into(memory, _ASKED_AT, time.time())


def read(memory: memoryview) -> Record:
    """Not collective. Read a ring, to which its rank may write meanwhile."""
    events = [_EVENT.unpack_from(memory, _HEADER_BYTES + place * _EVENT.size) for place in range(EVENTS)]
    found = [
        RankEvent(number, time_s, KINDS[kind], text.rstrip(b"\0").decode(errors="replace"))
        for number, time_s, kind, text in sorted(events)
        if number > 0 and 0 <= kind < len(KINDS)
    ]
    return Record(*_OWNER.unpack_from(memory, 0), _read_wait(memory), found)


def _read_wait(memory: memoryview) -> CurrentWait | None:
    begin = _OWNER.size
    for _ in range(3):  # the rank may be writing
        since_s, length = _WAIT.unpack_from(memory, begin)
        if not length:
            return None
        try:
            label, call, missing, count = json.loads(bytes(memory[begin + _WAIT.size : begin + _WAIT.size + length]))
        except ValueError:
            continue
        return CurrentWait(since_s, label, call, tuple(missing), count)
    return None
