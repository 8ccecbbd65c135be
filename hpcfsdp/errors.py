"""Errors of hpcfsdp. Each carries the exit code that a command ends with when the error reaches it."""

import difflib
import heapq
import sys
import traceback
from collections.abc import Iterable

from hpcfsdp.terminal import shown_lines


class HpcfsdpError(RuntimeError):
    """Base of all errors that hpcfsdp raises on purpose; the message says what is wrong and what to do.

    A ``RuntimeError``, which is what torch raises and what programs written for it catch. Messages quote names from
    files; their text is safe to be printed.
    """

    exit_code = 1
    raised_on_all_ranks = False
    """Set on an error that every rank is known to raise at the same place: the ranks can then end in good order."""

    def __str__(self) -> str:
        return shown_lines(super().__str__())


class UsageError(HpcfsdpError):
    """A wrong command line or configuration."""

    exit_code = 2


class LaunchError(HpcfsdpError):
    """The processes were started in a way, or in a place, in which they cannot work together."""

    exit_code = 3


class CommunicationError(HpcfsdpError):
    """A collective was called with wrong tensors, or not by all ranks in the same way."""


class DifferentCallsError(CommunicationError):
    """Ranks came to one place with different calls; every rank that takes part raises it."""


class CrossedCallsError(DifferentCallsError):
    """Ranks wait for each other in different calls, which can never meet; every rank that waits raises it."""


class DataError(HpcfsdpError):
    """Training data that is missing, empty or unreadable."""


class EngineError(HpcfsdpError):
    """The sharding engine was used in a way that it does not allow."""


class StateDictError(HpcfsdpError, ValueError):
    """A state dict of a model or an optimizer cannot be made, or does not fit what it is to be loaded into."""


class ShardingError(HpcfsdpError, ValueError):
    """Shards, blocks or placements of a tensor do not fit the tensor, the ranks, or each other."""


class CheckpointError(HpcfsdpError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound but belongs to another model or optimizer."""


class CheckpointCorruptError(CheckpointError):
    """The file is damaged, not finished, or not a checkpoint."""

    exit_code = 4


class CheckpointReplacedError(CheckpointError):
    """While the file was being read, another one has got its name."""


class DisagreementError(HpcfsdpError):
    """Ranks that must hold the same value hold different ones."""


class DifferentValuesWarning(UserWarning):
    """Ranks wrap a model whose parameters or buffers have different values."""


def rebuild(kind: str, message: str) -> HpcfsdpError:
    """The error that another rank described by the name of its class and its message."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, HpcfsdpError):
        return found(message)
    return HpcfsdpError(message)


_MOST_COMPARED = 100
"""Names that difflib, which takes about a millisecond for two long ones, is given."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or nothing."""
    candidates = list(known)
    likely = candidates
    if len(candidates) > _MOST_COMPARED:  # a large model has 100,000
        likely = heapq.nlargest(_MOST_COMPARED, candidates, key=lambda key: _shared_ends(name, key))
    close = difflib.get_close_matches(name, likely, n=1, cutoff=0.5)
    if not close:  # the right key in the wrong section
        close = [key for key in candidates if key.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]][:1]
    return f"; did you mean {close[0]!r}?" if close else ""


def _shared_ends(one: str, other: str) -> int:
    """How many characters two names have in common at their beginnings and ends, less those by which one is longer."""
    shorter, longer = sorted((len(one), len(other)))
    ends = _shared_beginning(one, other) + _shared_beginning(one[::-1], other[::-1])
    return min(ends, shorter) - (longer - shorter)


def _shared_beginning(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def p_assert(condition: object, message: str) -> None:
    """``assert`` for code that autograd calls: prints the message and the stack to stderr before it raises.

    What is raised inside of a callback of autograd may reach the caller without its traceback, in another thread, or
    not at all.

    Raises:
        AssertionError: `condition` does not hold.
    """
    if condition:
        return
    stack = "".join(traceback.format_stack()[:-1])
    sys.stderr.write(f"AssertionError: {message}\n{stack}")  # in one piece: other ranks write too
    sys.stderr.flush()
    raise AssertionError(message)
