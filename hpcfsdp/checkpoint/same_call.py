"""What the ranks give to one call, compared: a value that is taken from rank 0 must be the others', too."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import DifferentCallsError, DisagreementError

Facts = Mapping[str, Any]
"""What a rank gives to a call, by the names of arguments: values that are small, and equal where they are the same."""

_SHOWN = 300
"""Characters of a value in a message."""


@dataclass(frozen=True)
class OfFirst:
    """A value of which rank 0's counts: equal to that of any other rank."""

    value: Any = field(compare=False)


class GivenPath:
    """A path as one rank gives it. Equal to one that is spelled alike, or leads from the root to the same place.

    Ranks may have different working directories: of the same relative path rank 0's counts. Equal to None, too: a rank
    other than 0 need not give any.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Touches no disk.

        Raises:
            TypeError: it is no path.
        """
        self.given = os.fspath(path)
        self.expanded = os.path.expanduser(path)
        self.absolute = os.path.abspath(self.expanded)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GivenPath):
            return other is None
        return self.given == other.given or self.absolute == other.absolute

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.absolute


def enter(comm: Communicator, call: str, facts: Callable[[], Facts]) -> Facts:
    """Collective over `comm`. See that all ranks make the same call and give the same to it; what rank 0 gives.

    Args:
        call: its public name, as "checkpoint.save".
        facts: may raise, on any rank; then all do.

    Raises:
        DifferentCallsError: a rank makes another call.
        DisagreementError: a rank gives something else than rank 0.
    """
    mine: Facts = {}
    with raise_together(comm):
        mine = facts()
    everyone: list[tuple[str, Facts]] = comm.all_gather_object((call, mine))
    calls = [name for name, _ in everyone]
    if len(set(calls)) > 1:
        where = ", ".join(f"{_ranks(ranks)} in {name}" for name, ranks in _by_value(calls))
        error = DifferentCallsError(f"{where}: all ranks of a model make the same calls, in the same order")
        error.raised_on_all_ranks = True
        raise error
    compare(call, [given for _, given in everyone])
    return everyone[0][1]


def compare(call: str, everyone: Sequence[Facts]) -> None:
    """Not collective. Raise for the first thing that a rank gives otherwise than rank 0; the same on all ranks.

    Args:
        call: for the message.
        everyone: by rank, as all ranks know it.

    Raises:
        DisagreementError: there is something.
    """
    for key in dict.fromkeys(itertools.chain(*everyone)):
        values = [facts.get(key, _MISSING) for facts in everyone]
        differing = [rank for rank, value in enumerate(values) if values[0] != value]
        if differing:
            other = values[differing[0]]
            alike = [rank for rank in differing if values[rank] == other]
            error = DisagreementError(
                f"{call}: {key} differs between ranks: rank 0 has {_shown(values[0])}, {_ranks(alike, 'has', 'have')} "
                f"{_shown(other)}"
            )
            error.raised_on_all_ranks = True
            raise error


def compare_leaves(comm: Communicator, call: str, leaves: Mapping[str, str] | None) -> None:
    """Collective over `comm`, where their digests differ. As ``compare``, of what ``extra.leaves_of`` gives.

    Args:
        leaves: None on a rank that gives nothing, which may be any but 0.
    """
    everyone = comm.all_gather_object(leaves)
    compare(call, [everyone[0] or {} if own is None else own for own in everyone])


_MISSING = "nothing"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _ranks(ranks: Sequence[int], one: str = "is", several: str = "are") -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"


def _by_value(values: Iterable[Any]) -> list[tuple[Any, list[int]]]:
    """Each different value, and the ranks that have it."""
    found: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return list(found.items())
