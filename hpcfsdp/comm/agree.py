"""Agreement between ranks: all raise an error of one, and compare values that must be equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import CrossedCallsError, DisagreementError, HpcfsdpError, rebuild


@contextlib.contextmanager
def raise_together(comm: Communicator | Grid) -> Iterator[None]:
    """Collective over `comm`, at its end. If the block raises on any rank, every rank raises.

    The block itself must not call collectives on `comm`: a rank that fails would not take part. Ranks on which the
    block succeeded raise the error of the lowest rank that failed, and name that rank. Errors of other classes than
    hpcfsdp's own (say an OSError) become an ``HpcfsdpError`` there.
    """
    mine: Exception | None = None
    try:
        yield
    except CrossedCallsError:  # the others are in another call: they cannot be asked
        raise
    except Exception as error:
        mine = error
    mine_sent = None if mine is None else (type(mine).__name__, str(mine), getattr(mine, "raised_on_all_ranks", False))
    everyone = comm.all_gather_object(mine_sent)
    for rank, error in enumerate(everyone):
        if error is None:
            continue
        kind, message, named = error
        who = "" if named else f"rank {rank}: "  # an error that several ranks have raised together names them
        raised = mine or rebuild(kind, f"{who}{message}")
        if raised is not mine and type(raised) is HpcfsdpError and kind != HpcfsdpError.__name__:
            raised = HpcfsdpError(f"{who}{kind}: {message}")
        raised.raised_on_all_ranks = True
        raise raised


@contextlib.contextmanager
def raise_together_over(comms: Iterable[Communicator]) -> Iterator[None]:
    """Collective over each of `comms`, at its end; in a grid, along each of its dimensions. As ``raise_together``."""
    with contextlib.ExitStack() as stack:
        for comm in comms:
            stack.enter_context(raise_together(comm))
        yield


def assert_same(comm: Communicator, value: Any, what: str) -> None:
    """Collective over `comm`. Raise on every rank unless `value` (small and comparable) is equal on all of them."""
    values = comm.all_gather_object(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            error = DisagreementError(f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {other}")
            error.raised_on_all_ranks = True
            raise error
