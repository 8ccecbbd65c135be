"""The tracebacks of ranks that fail at about the same time: one rank gets them all, and prints equal ones once."""

import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hpcfsdp import env
from hpcfsdp.text.terminal import ranks

WINDOW_S = 0.6
"""How long a failed rank listens for others that have failed, too. Ranks in a collective never raise an error."""
TOGETHER_S = 3.0  # how long other ranks wait for the one that prints errors of several, and that aborts the job
MOST_RANKS = 128  # in larger jobs failed ranks send their error to rank 0 alone, not to every rank
ENDED = "ended the job after an uncaught error"
_MOST_HOSTS = 4
_TAG = 2
_POLL_S = 0.01


@dataclass(frozen=True)
class UncaughtError:
    """An uncaught error of a rank."""

    rank: int
    host: str
    raised_s: float  # Unix time, by the clock of the host
    stack: str  # files, lines and classes of it and of those that it followed from: equal for equal errors
    text: str  # the traceback as Python prints it
    error: str  # its last line: class and message


def error_of(rank: int, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> UncaughtError:
    """Not collective. Return the uncaught error of this rank."""
    whole = traceback.TracebackException(kind, error, trace)
    stack: list[str] = []
    part: traceback.TracebackException | None = whole
    each: BaseException | None = error
    while part is not None and each is not None:  # in parallel: Python 3.13 deprecates the class in the former
        stack += [type(each).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in part.stack)]
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    last = "".join(whole.format_exception_only()).strip()
    return UncaughtError(rank, env.host_name(), time.time(), "\n".join(stack), "".join(whole.format()), last)


def exchange(comm: Any, mine: UncaughtError) -> list[UncaughtError] | None:
    """Not collective: failed ranks call it, and it returns within ``TOGETHER_S``. This module alone uses its tag.

    Returns the errors of all ranks that have failed by now, if this one is to print them; None if a lower rank should
    have, and has not ended the job.
    """
    receivers = range(comm.size) if comm.size <= MOST_RANKS else [0]
    peers = [peer for peer in receivers if peer != mine.rank]
    sent = [comm.isend(mine, peer, _TAG) for peer in peers]
    known, arriving = {mine.rank: mine}, []
    began_s = time.monotonic()
    while True:
        while (message := comm.improbe(tag=_TAG)) is not None:
            arriving.append(message.irecv())
        for request in [*arriving]:
            is_here, other = request.test()
            if is_here:
                arriving.remove(request)
                known[other.rank] = other
        sent = [request for request in sent if not request.Test()]
        waited_s = time.monotonic() - began_s
        if waited_s > WINDOW_S and min(known) == mine.rank:
            return list(known.values())
        if waited_s > TOGETHER_S:
            return None
        time.sleep(_POLL_S)


def merged(errors: Iterable[UncaughtError], size: int) -> str:
    """Return one text for the errors of ranks: each different traceback once, the earliest first, with its ranks."""
    groups: dict[str, list[UncaughtError]] = {}
    for each in sorted(errors, key=lambda each: each.rank):
        groups.setdefault(each.stack, []).append(each)
    ordered = sorted(groups.values(), key=lambda group: min(each.raised_s for each in group))
    parts = []
    for group in ordered:
        first, *others = group
        lines = [f"{who(group, size)}: {ENDED}", first.text.rstrip()]
        lines += [f"rank {other.rank}: {other.error}" for other in others if other.error != first.error]
        parts.append("\n".join(lines))
    if len(ordered) > 1:
        first = min(ordered[0], key=lambda each: each.raised_s)
        parts.append(f"first: {who([first], size)}: {first.error}")
    return "\nhpcfsdp: ".join(parts)  # ``departure.end_job`` puts it in front of the first


def who(group: Sequence[UncaughtError], size: int) -> str:
    """Return the ranks and hosts of errors: "ranks 0-3 of 4 on node1"."""
    hosts = list(dict.fromkeys(each.host for each in group))
    shown = ", ".join(hosts) if len(hosts) <= _MOST_HOSTS else f"{len(hosts)} nodes, {hosts[0]} among them"
    return f"{ranks(each.rank for each in group)} of {size} on {shown}"
