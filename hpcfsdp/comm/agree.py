"""Agreement between ranks: all raise an error of one, and compare values that must be equal."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcfsdp.comm.communicator import Communicator, Grid
from hpcfsdp.errors import CrossedCallsError, DisagreementError, HpcfsdpError, rebuild

T = TypeVar("T")


@dataclass
class Exchange:
    """Values that ranks exchange at the end of a ``raise_together``."""

    mine: Any = None  # this rank's, which the block sets
    everyone: Sequence[Any] = ()  # those of all ranks, by rank, once the block has succeeded on all of them


@contextlib.contextmanager
def raise_together(comm: Communicator | Grid) -> Iterator[Exchange]:
    """Raise on every rank if the block raises on any. Collective over `comm`, at its end.

    The block itself must not call collectives on `comm`: a rank that fails would not take part. Ranks on which the
    block succeeded raise the error of the lowest rank that failed, and name that rank. Errors of other classes than
    hpcfsdp's own (say an OSError) become an ``HpcfsdpError`` there. Values to compare can go with the errors.
    """
    mine, exchange = None, Exchange()
    try:
        yield exchange
    except CrossedCallsError:  # the others are in another call: they cannot be asked
        raise
    except Exception as error:
        mine = error
    everyone = comm.all_gather_object((_sent(mine), None if mine else exchange.mine))
    for rank, (error, _) in enumerate(everyone):
        if error is not None:
            raise mine or _received(rank, *error)
    exchange.everyone = [value for _, value in everyone]


def of_rank_0(comm: Communicator, make: Callable[[], T]) -> T:
    """Return what `make` returns on rank 0, which alone calls it, or raise its error. Collective over `comm`."""
    mine, made = None, None
    if comm.rank == 0:
        try:
            made = make()
        except Exception as caught:
            mine = caught
    error, made = comm.broadcast_object((_sent(mine), made))
    if error is not None:
        raise mine or _received(0, *error)
    return made


def _sent(error: Exception | None) -> tuple[str, str, bool] | None:
    """Return an error in the form in which other ranks get it; from now on it is raised on all ranks."""
    if error is None:
        return None
    sent = type(error).__name__, str(error), getattr(error, "raised_on_all_ranks", False)
    error.raised_on_all_ranks = True
    return sent


def _received(rank: int, kind: str, message: str, named: bool) -> Exception:
    """Return the error of another rank. One that several ranks have raised together (`named`) names them."""
    who = "" if named else f"rank {rank}: "
    error = rebuild(kind, f"{who}{message}")
    if type(error) is HpcfsdpError and kind != HpcfsdpError.__name__:
        error = HpcfsdpError(f"{who}{kind}: {message}")
    return error.on_all_ranks()


@contextlib.contextmanager
def raise_together_over(comms: Iterable[Communicator]) -> Iterator[None]:
    """See ``raise_together``. Collective over each of `comms`, at its end; in a grid, along each of its dimensions."""
    with contextlib.ExitStack() as stack:
        for comm in comms:
            stack.enter_context(raise_together(comm))
        yield


def assert_same(comm: Communicator, value: Any, what: str) -> None:
    """Raise on every rank unless `value` (small and comparable) is equal on all of them. Collective over `comm`."""
    values = comm.all_gather_object(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            text = f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {other}"
            raise DisagreementError(text).on_all_ranks()
