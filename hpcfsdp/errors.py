"""Errors of hpcfsdp, with the exit codes of commands that they end."""

import contextlib
import difflib
import heapq
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from hpcfsdp.text.terminal import shown_lines

_Error = TypeVar("_Error", bound="HpcfsdpError")


class HpcfsdpError(RuntimeError):
    """Base of all errors that hpcfsdp raises on purpose. The message gives the problem and a remedy.

    A ``RuntimeError``, as torch's errors, so programs written for torch catch it. Messages quote names from files, and
    are safe to print.
    """

    exit_code = 1
    kind = "failure"
    """One word for programs, in the JSON of commands; some places set a narrower one (docs/reference/exit-codes.md)."""
    raised_on_all_ranks = False
    """Set on an error that every rank raises at the same place: the ranks then end together, with one message."""

    def of_kind(self: _Error, kind: str) -> _Error:
        """Return this error, with another `kind` than its class has."""
        self.kind = kind
        return self

    def on_all_ranks(self: _Error) -> _Error:
        """Return this error, which every rank raises at the same place."""
        self.raised_on_all_ranks = True
        return self

    def __str__(self) -> str:
        return shown_lines(super().__str__())


class UsageError(HpcfsdpError):
    """A wrong command line or configuration."""

    exit_code = 2
    kind = "usage"


class LaunchError(HpcfsdpError):
    """The processes were started in a way, or in a place, in which they cannot work together."""

    exit_code = 3
    kind = "launch"


class CommunicationError(HpcfsdpError):
    """A collective has wrong tensors, or ranks call it in different ways."""

    kind = "communication"


class DifferentCallsError(CommunicationError):
    """Ranks meet in one collective with different calls. Every rank that takes part raises it."""


class CrossedCallsError(DifferentCallsError):
    """Ranks wait for each other in different calls, which can never meet. Every waiting rank raises it."""


class HangError(CommunicationError):
    """A collective has waited for other ranks longer than a job may hang. A report says where they are."""

    exit_code = 76
    kind = "hang"


class RankLostError(CommunicationError):
    """Processes of other ranks have ended, or were ended because they hung. Every rank that lives raises it.

    ``hpcfsdp.resilient`` goes on without them. The exit code asks the scheduler to start the job again.

    Attributes:
        ranks: the lost ranks of the world, ascending.
        hosts: the node of each.
        waited_for: what this rank did when it found out: a collective, with its public call.
    """

    exit_code = 75
    kind = "lost"

    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    waited_for = ""

    @classmethod
    def of(cls, ranks: Sequence[int], hosts: Sequence[str], waited_for: str, why: str = "") -> "RankLostError":
        """Return the error about `ranks` on `hosts`; `why` is the reason that the job does not go on without them."""
        named = ", ".join(f"{rank} on {host}" for rank, host in zip(ranks, hosts, strict=True))
        made = cls(f"lost rank(s) {named}, noticed in {waited_for}" + (f": {why}" if why else ""))
        made.ranks, made.hosts, made.waited_for = tuple(ranks), tuple(hosts), waited_for
        return made


class DataError(HpcfsdpError):
    """Training data that is missing, empty or unreadable."""

    kind = "data"


class EngineError(HpcfsdpError):
    """A use of the sharding engine that it does not allow."""


class StateDictError(HpcfsdpError, ValueError):
    """A state dict of a model or an optimizer cannot be made, or does not fit the model or optimizer that loads it."""


class ShardingError(HpcfsdpError, ValueError):
    """Shards, blocks or placements of a tensor do not fit the tensor, the ranks, or each other."""


class CheckpointError(HpcfsdpError):
    """A checkpoint cannot be written or read."""

    kind = "checkpoint"


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound but belongs to another model or optimizer."""

    kind = "mismatch"


class CheckpointCorruptError(CheckpointError):
    """The file is damaged, not finished, or not a checkpoint."""

    exit_code = 4
    kind = "damaged"


class CheckpointReplacedError(CheckpointError):
    """Another file has replaced this one while it was read."""

    kind = "replaced"


class DisagreementError(HpcfsdpError):
    """Ranks have different values where they must have equal ones."""


class DifferentValuesWarning(UserWarning):
    """Ranks wrap a model whose parameters or buffers have different values."""


def rebuild(kind: str, message: str) -> HpcfsdpError:
    """Return the error of another rank, from `kind`, the name of its class, and its message."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, HpcfsdpError):
        return found(message)
    return HpcfsdpError(message)


_MOST_COMPARED = 100  # names that difflib compares. It takes about a millisecond for two long ones.


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or nothing."""
    likely = candidates = list(known)
    if len(candidates) > _MOST_COMPARED:  # a large model has 100,000
        likely = heapq.nlargest(_MOST_COMPARED, candidates, key=lambda key: _shared_ends(name, key))
    close = difflib.get_close_matches(name, likely, n=1, cutoff=0.5)
    if not close:  # the key in another section
        close = [key for key in candidates if key.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {close[0]!r}?" if close else ""


def _shared_ends(one: str, other: str) -> int:
    """Return the number of equal characters at both ends of two names, less their difference in length."""
    shorter, longer = sorted((len(one), len(other)))
    ends = 0
    for left, right in ((one, other), (one[::-1], other[::-1])):
        pairs = enumerate(zip(left, right, strict=False))
        ends += next((place for place, (here, there) in pairs if here != there), shorter)
    return min(ends, shorter) - (longer - shorter)


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Return a context for importing packages that only the extra `extra` of hpcfsdp installs, and `what` needs.

    Raises HpcfsdpError where one of them cannot be loaded.
    """
    try:
        yield
    except ImportError as error:
        raise HpcfsdpError(
            f"{what} needs packages that cannot be loaded ({error}): pip install 'hpcfsdp[{extra}]'"
        ) from None


def p_assert(condition: object, message: str) -> None:
    """Do as ``assert``, in code that autograd calls: print the message and the stack to stderr before raising.

    An error in a callback of autograd may reach the caller without its traceback, in another thread, or not at all.
    Raises AssertionError if `condition` does not hold.
    """
    if condition:
        return
    stack = "".join(traceback.format_stack()[:-1])
    sys.stderr.write(f"AssertionError: {message}\n{stack}")  # in one piece: other ranks write too
    sys.stderr.flush()
    raise AssertionError(message)
