"""Long waits: log lines with the collective and the missing ranks, and errors where ranks wait for each other.

A rank that has waited for a second stores a record in torch's store: its collective, its public call, and the missing
ranks. It reads the records of these ranks. To each it adds an answer: its own call at the place where that rank waits,
which is the same collective, another, or nothing yet. Two ranks that are missing to each other, and have both called
another collective or nothing yet, will never meet. Both know, and both raise. Their records stay: a rank that begins
to wait for one of them later raises, too.

A thread accesses the store: the store may not answer, and a wait must handle signals and timeouts all the same.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcfsdp import _compat, env
from hpcfsdp.errors import DifferentCallsError
from hpcfsdp.hang import calls, events
from hpcfsdp.text import json_input

log = logging.getLogger("hpcfsdp.comm")

LOOK_AFTER_S = 1.0  # a wait of this length is a long one
_LOOK_EVERY_S = (0.25, 4.0)  # seconds between two polls of the store, at first and after a long time
_MOST_READ = 16  # the number of records of missing ranks that a rank reads
_LOG_AT = (1, 3, 6, 12, 30)
"""When a wait is logged, in multiples of ``env.wait_log_s``; then after each further multiple of the last."""
_MOST_LOGGING = 16  # ranks of a group up to which each logs its waits; in larger groups the lowest waiting rank does

Place = tuple[Any, Any]  # a collective: the key of its member (see ``register``), and the number of the call
UNKNOWN, NOTHING_YET = None, ""

_MOST_BYTES = 1 << 20  # of a record
_RECORD = {
    **dict.fromkeys(("rank", "serial"), int),
    **dict.fromkeys(("call", "label"), str),
    **dict.fromkeys(("firm", "over", "crossed"), bool),
    "place": (None, [(str, [str, int]), (int, [int, int])]),
    "missing": [int],
    "answers": [[int, int, (str, None)]],
}


@dataclass(frozen=True)
class Waiting:
    """The record of a waiting rank in the store."""

    rank: int
    serial: int  # the number of the wait among the long waits of this rank
    call: str  # the public call, "" outside of all of them
    label: str  # of the collective
    place: Place | None  # of the collective, None where collectives are not counted
    missing: tuple[int, ...]  # ranks of the world
    firm: bool  # the rank does nothing else until this wait is over
    # This rank's calls at the places where other ranks wait: rank -> serial of its wait, label.
    answers: Mapping[int, tuple[int, str | None]] = field(default_factory=dict)
    over: bool = False  # the wait has ended with an error
    crossed: bool = False  # which was a ``CrossedCallsError``

    def __str__(self) -> str:
        return events.described(self.call, self.label)


def crossed(mine: Waiting, theirs: Waiting) -> bool:
    """Return whether two ranks wait for each other, and neither will make the call that the other waits for."""
    if not (mine.firm and theirs.firm and theirs.rank in mine.missing and mine.rank in theirs.missing):
        return False
    about_mine, about_theirs = theirs.answers.get(mine.rank), mine.answers.get(theirs.rank)
    if about_mine is None and theirs.crossed:  # it left before this rank began to wait
        about_mine = mine.serial, NOTHING_YET
    if about_mine is None or about_theirs is None:
        return False
    (serial, they_called), (their_serial, i_called) = about_mine, about_theirs
    if (serial, their_serial) != (mine.serial, theirs.serial) or UNKNOWN in (they_called, i_called):
        return False
    if they_called == i_called == NOTHING_YET:
        return True
    return they_called not in (NOTHING_YET, mine.label) or i_called not in (NOTHING_YET, theirs.label)


def describe(mine: Waiting, theirs: Sequence[Waiting]) -> str:
    """Return the error message of ranks with crossed calls."""
    calls_of = {each.rank: each.call or each.label for each in (mine, *theirs)}
    if len(set(calls_of.values())) == 1:  # within the same public call
        calls_of = {each.rank: str(each) for each in (mine, *theirs)}
    parts = [f"rank {rank} is in {call}" for rank, call in sorted(calls_of.items())]
    return (
        f"ranks wait for each other in different calls: {', '.join(parts)}. All ranks must make the same calls in the "
        "same order"
    )


class _Board:
    """The records in the store, as of the thread's last access."""

    def __init__(self) -> None:
        self.read: dict[int, Waiting] = {}
        self.written: Waiting | None = None
        self._wanted: tuple[int, Waiting | None, tuple[int, ...]] | None = None
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def exchange(self, rank: int, mine: Waiting | None, peers: Sequence[int]) -> None:
        """Not blocking. Write `mine` as the record of `rank`, and read those of `peers`."""
        self._wanted = rank, mine, tuple(peers)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="hpcfsdp-waits", daemon=True)
            self._thread.start()
        self._wake.set()

    def _serve(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                with contextlib.suppress(Exception):  # the store is gone with its rank: no record changes any more
                    self._serve_one(*wanted)

    def _serve_one(self, rank: int, mine: Waiting | None, peers: Sequence[int]) -> None:
        store = _compat.default_store()
        if store is None:
            return
        store.set(_key(rank), b"" if mine is None else pack(mine))
        # As get, which would wait for a missing key.
        found = (unpack(peer, store.compare_set(_key(peer), "", "")) for peer in peers)
        self.read, self.written = {each.rank: each for each in found if each is not None}, mine


def _key(rank: int) -> str:
    return f"hpcfsdp/waits/{rank}"


def pack(mine: Waiting) -> bytes:
    return json.dumps({**vars(mine), "answers": [(rank, *answer) for rank, answer in mine.answers.items()]}).encode()


def unpack(rank: int, text: bytes) -> Waiting | None:
    """Return the record of a rank in the store; None for other text: whoever reaches its port can write there."""
    found = json_input.parse(text, _RECORD) if 0 < len(text) <= _MOST_BYTES else None
    if found is None or found["rank"] != rank:
        return None
    answers = {about: (serial, label) for about, serial, label in found["answers"]}
    place = found["place"] and tuple(tuple(each) if isinstance(each, list) else each for each in found["place"])
    return Waiting(**{**found, "place": place, "missing": tuple(found["missing"]), "answers": answers})


_board = _Board()
_serials = itertools.count(1)
_members: dict[Any, weakref.ref[Any]] = {}  # the members of this process, by key
_raised_with: dict[int, int] = {}
"""The ranks with which this rank has raised, and the serials of their waits: their records may stay for long."""
_made: collections.Counter[Sequence[int]] = collections.Counter()


def key_of(member: Any, world_ranks: Sequence[int]) -> Any:
    """Not collective. Return the key of a communicator: its ranks, and how many of these came before it."""
    _made[world_ranks] += 1
    key = (hashlib.blake2b(repr(world_ranks).encode(), digest_size=8).hexdigest(), _made[world_ranks])
    register(key, member)
    return key


def forget() -> None:
    """Not collective. Forget all communicators and waits: the next world has other processes, which know of none."""
    _members.clear()
    _made.clear()
    _raised_with.clear()
    _board.read, _board.written = {}, None


def register(key: Any, member: Any) -> None:
    """Not collective. Answer ranks that wait for this one in a call of `member`. `key` is the same on all ranks.

    A member is a communicator, or an order of units, that counts its collectives. Its method `called` returns the label
    of this rank's collective of a number, or ``NOTHING_YET``, or ``UNKNOWN``. Its attributes are `key` and
    `world_ranks`, its ranks in the world; None where these are not known: then its waits are only logged.
    """
    _members[key] = weakref.ref(member)


def same_call(gathered: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the values of pairs (public call, value) from all ranks. Raises on all ranks if the calls differ."""
    for rank, (call, _) in enumerate(gathered):
        if call != gathered[0][0]:
            first, other = (each or "no call of hpcfsdp" for each in (gathered[0][0], call))
            text = f"rank 0 is in {first}, rank {rank} in {other}: all ranks must make the same calls in the same order"
            raise DifferentCallsError(text).on_all_ranks()
    return [value for _, value in gathered]


class LongWait:
    """A wait of more than a second. The waiting thread calls ``look`` when that is due, and ``end``.

    It is for a collective of `owner`, whose waits are only logged if it is no member. `number` is that of the call,
    None where calls are not counted.
    """

    def __init__(self, label: str, owner: Any, number: Any) -> None:
        self._label = label
        self._ranks: Sequence[int] | None = getattr(owner, "world_ranks", None)
        self._place = None if number is None else (owner.key, number)
        self._serial = next(_serials)
        self._mine: Waiting | None = None
        self._crossed = False
        self._pause_s = _LOOK_EVERY_S[0]
        self._log_s = env.wait_log_s() or float("inf")
        self._logged = 0
        self.due_s = LOOK_AFTER_S if self._ranks is not None else self._next_log_s()

    def look(self, waited_s: float, rank: int, missing: Sequence[int], *, firm: bool) -> str | None:
        """Log the wait when that is due, store this rank's record, and read those of missing ranks.

        `rank` is this one as the owner numbers its ranks, and so the `missing` ones. The wait is `firm` if this process
        does nothing else meanwhile. Returns why it will never end, None where it may end.
        """
        ranks, reason = self._ranks, None
        if ranks is not None:
            rank, missing = ranks[rank], [ranks[each] for each in missing]
        events.ring.begin_wait(time.time() - waited_s, self._label, calls.current(), missing)
        if ranks is not None:
            self.due_s = waited_s + self._pause_s
            reason = self._compare(rank, missing, firm)
        if waited_s >= self._next_log_s():
            while waited_s >= self._next_log_s():
                self._logged += 1
            if len(ranks or ()) <= _MOST_LOGGING or rank == min(set(ranks or ()) - set(missing), default=rank):
                others = f": {_describe_waits(missing)}" if ranks is not None and missing else ""
                where, whom = events.described(calls.current(), self._label), named(missing)
                log.warning("rank %d has waited %.0f s in %s for %s%s", rank, waited_s, where, whom, others)
        if ranks is None:
            self.due_s = self._next_log_s()
        return reason

    def end(self, failed: bool) -> None:
        """End the wait: remove the record, or mark it as failed."""
        events.ring.end_wait()
        if self._mine is not None:
            over = replace(self._mine, over=True, crossed=self._crossed) if failed else None
            _board.exchange(self._mine.rank, over, ())

    def others(self, missing: Sequence[int]) -> str:
        """Describe the waits of missing ranks of the owner, for messages."""
        return "" if self._ranks is None else _describe_waits([self._ranks[each] for each in missing])

    def _compare(self, rank: int, missing: Sequence[int], firm: bool) -> str | None:
        read, written = _board.read, _board.written
        answers = {peer: (each.serial, _called(each.place)) for peer, each in read.items() if peer in missing}
        earlier = self._mine.answers if self._mine is not None else {}
        firm = firm and self._place is not None
        awaited, answers = tuple(missing[:_MOST_READ]), {**earlier, **answers}
        mine = Waiting(rank, self._serial, calls.current(), self._label, self._place, awaited, firm, answers)
        self._mine = mine
        found = [read[peer] for peer in mine.missing if peer in read and crossed(mine, read[peer])]
        crossing = [each for each in found if _raised_with.get(each.rank) != each.serial]
        known = written is not None and (written.serial, written.answers) == (mine.serial, mine.answers)
        _board.exchange(rank, mine, mine.missing)
        if not crossing or not known:
            self._pause_s = min(1.5 * self._pause_s, _LOOK_EVERY_S[1])
            return None
        self._crossed = True
        _raised_with.update((each.rank, each.serial) for each in crossing)
        return describe(mine, crossing)

    def _next_log_s(self) -> float:
        last = len(_LOG_AT) - 1
        factor = _LOG_AT[self._logged] if self._logged <= last else _LOG_AT[last] * (self._logged - last + 1)
        return self._log_s * factor


def _describe_waits(missing: Sequence[int]) -> str:
    parts = []
    for rank in missing[:_MOST_READ]:
        each = _board.read.get(rank)
        if each is None:
            parts.append(f"rank {rank} does not wait within hpcfsdp: it computes, or waits elsewhere")
        elif each.over:
            parts.append(f"rank {rank} has raised an error in {each}")
        else:
            parts.append(f"rank {rank} waits in {each} for {named(each.missing)}")
    return "; ".join(parts)


def named(ranks: Sequence[int]) -> str:
    """Name the ranks that are missing, in messages."""
    if not ranks:
        return "other ranks"
    shown = ", ".join(map(str, sorted(ranks)[:_MOST_READ]))
    return f"rank(s) {shown}" + (f" and {len(ranks) - _MOST_READ} more" if len(ranks) > _MOST_READ else "")


def _called(place: Place | None) -> str | None:
    """Return this rank's call at a place where another rank waits."""
    if place is None:
        return UNKNOWN
    key, number = place
    if key not in _members:
        return NOTHING_YET  # this rank has not created the communicator yet
    member = _members[key]()
    try:
        return UNKNOWN if member is None else member.called(number)
    except TypeError:  # a number of another kind of member, which no rank has written
        return UNKNOWN
