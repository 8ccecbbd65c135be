"""Compare the arguments of one call over ranks: a value that rank 0 provides must be equal on the others."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import DifferentCallsError, DisagreementError

Facts = Mapping[str, Any]
"""What a rank gives to a call, by the names of arguments: values that are small, and equal where they are the same."""

_SHOWN = 300
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Rank0Value:
    """A value that rank 0 provides: equal to that of any other rank."""

    value: Any = field(compare=False)


class GivenPath:
    """A rank's path: equal to one of the same spelling or the same absolute path, and to None.

    Ranks may have different working directories: rank 0's relative path counts. Other ranks need not give a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
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


def compare_calls(comm: Communicator, call: str, facts: Callable[[], Facts]) -> Facts:
    """Check that all ranks make the same call, named as "checkpoint.save", with the same arguments; return rank 0's.

    Raise DifferentCallsError or DisagreementError, and what `facts` raises on any rank. Collective over `comm`.
    """
    with raise_together(comm) as exchange:
        exchange.mine = call, facts()
    everyone: Sequence[tuple[str, Facts]] = exchange.everyone
    calls = [name for name, _ in everyone]
    if len(set(calls)) > 1:
        ranks_of = {name: [rank for rank, other in enumerate(calls) if other == name] for name in calls}
        where = ", ".join(f"{_ranks(ranks)} in {name}" for name, ranks in ranks_of.items())
        raise DifferentCallsError(
            f"{where}: all ranks of a model must make the same calls, in the same order"
        ).on_all_ranks()
    compare(call, [given for _, given in everyone])
    return everyone[0][1]


def all_agree(comm: Communicator, *facts: bool) -> list[bool]:
    """Return which of these facts hold on all ranks. Collective over `comm`."""
    agreed = torch.tensor(facts, dtype=torch.int64, device=comm.device)
    comm.all_reduce(agreed, "min")
    return [bool(fact) for fact in agreed.tolist()]


def compare(call: str, everyone: Sequence[Facts]) -> None:
    """Raise DisagreementError for the first value that differs from rank 0's. `everyone` is the same on all ranks."""
    for key in dict.fromkeys(itertools.chain(*everyone)):
        values = [facts.get(key, "nothing") for facts in everyone]
        differing = [rank for rank, value in enumerate(values) if values[0] != value]
        if differing:
            other = values[differing[0]]
            alike = [rank for rank in differing if values[rank] == other]
            raise DisagreementError(
                f"{call}: {key} differs between ranks: rank 0 has {_shown(values[0])}, {_ranks(alike, 'has', 'have')} "
                f"{_shown(other)}"
            ).on_all_ranks()


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _ranks(ranks: Sequence[int], one: str = "is", several: str = "are") -> str:
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"
