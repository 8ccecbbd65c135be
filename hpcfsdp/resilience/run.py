"""Go on in the same processes after ranks were lost."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hpcfsdp import world
from hpcfsdp.errors import LaunchError, RankLostError, UsageError
from hpcfsdp.hang import lost
from hpcfsdp.launch import job
from hpcfsdp.launch.signals import StopSignals
from hpcfsdp.world import World

if TYPE_CHECKING:
    from hpcfsdp.resilience.survivors import Survivors

Result = TypeVar("Result")

log = logging.getLogger("hpcfsdp.job")

_LOADED_BY_SPARES = ("hpcfsdp.fsdp", "hpcfsdp.fsdp2", "hpcfsdp.checkpoint", "hpcfsdp.observe")

_is_running = False
_survivors: Survivors | None = None  # from the first call on


def resilient(
    train: Callable[[World], Result],
    *,
    spares: int = 0,
    min_ranks: int = 1,
    max_losses: int | None = None,
    **of_init: Any,
) -> Result | None:
    """Call ``train(world)`` on all ranks but the spares, and again when ranks were lost. Collective over all processes.

    It starts the world, and ends it. When processes die, or hang and are ended, all others leave `train` with
    ``RankLostError``, which it must not swallow. Spares take the lost places, on the same node where one is there;
    without spares the world gets smaller. Then `train` is called again with the new world, in the same processes. It
    makes model, optimizer and groups itself, and loads the newest checkpoint (``CheckpointManager.load_latest``, from
    memory with ``memory_every``): what it made in the last world raises at its next collective.

    Other exceptions end the job, as without `resilient`. Where MPI or its launcher cannot go on after a loss, one line
    of the log names the reason, spares train, too, and a lost rank ends the job: docs/how-to/losing-ranks.md.

    Args:
        train: the training, from the start of the world to its end.
        spares: how many processes, those with the highest ranks, wait for a place.
        min_ranks: the smallest world with which to go on.
        max_losses: how often to go on. None: as often as needed.
        of_init: arguments of ``hpcfsdp.init``.

    Returns:
        The result of the last call of `train`; None on spares that were not needed.

    Raises:
        RankLostError: fewer than `min_ranks` are left, or `max_losses` is reached. The exit code is 75: start the job
            again.
        LaunchError: called after ``init``, or within `resilient`.
        UsageError: numbers that are not whole, too small, or more spares than leave `min_ranks`.
    """
    global _is_running
    if _is_running:
        raise LaunchError("hpcfsdp.resilient was called within hpcfsdp.resilient: call it once, around the training")
    if world.current_world() is not None:
        raise LaunchError(
            "hpcfsdp.resilient was called after hpcfsdp.init: it calls init itself, with arguments such as device=; "
            "leave init out, or call hpcfsdp.finalize first"
        )
    size = job.current_job().comm.size
    for name, value, least in (("spares", spares, 0), ("min_ranks", min_ranks, 1), ("max_losses", max_losses, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"resilient: {name} is a whole number of at least {least}, not {value!r}")
    _is_running = True
    try:
        if size == 1:
            return _train_once(train, of_init)
        from hpcfsdp.resilience import survivors  # loads torch, after MPI

        if reason := survivors.unable():
            if job.current_job().comm.rank == 0:
                log.warning("a lost rank ends this job: %s", reason)
            return _train_once(train, of_init)
        if size - spares < min_ranks:
            raise UsageError(f"resilient: {size} processes with spares={spares} leave fewer than min_ranks={min_ranks}")
        return _train_on(train, spares, min_ranks, max_losses, of_init)
    finally:
        _is_running = False


def _train_once(train: Callable[[World], Result], of_init: dict[str, Any]) -> Result:
    """Start a world, train, and end it. Collective over all ranks of the job."""
    made, result, error = world.init(**of_init), None, None
    try:
        result = train(made)
    except BaseException as caught:
        if not getattr(caught, "raised_on_all_ranks", False):
            world.finalize()  # waits for nobody while an exception propagates
            raise
        error = caught
    world.finalize()
    if error is not None:
        raise error
    return result


def _train_on(
    train: Callable[[World], Result], spares: int, min_ranks: int, max_losses: int | None, of_init: dict[str, Any]
) -> Result | None:
    from hpcfsdp.resilience.survivors import Survivors  # loads torch, after MPI

    global _survivors
    if _survivors is None:
        with job.starting(job.current_job().comm):
            _survivors = Survivors()
            _survivors.sit()
    else:
        _survivors.settle()  # the last world's tags are used again
    _survivors.divide(spares)
    if _survivors.is_spare:
        _load()
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect()
        gc.freeze()  # what lives now need not be searched for the memory of a lost world
    lost.goes_on = True
    try:
        return _train_until_done(_survivors, train, min_ranks, max_losses, of_init)
    finally:
        lost.goes_on = False
        if freezes:
            gc.unfreeze()


def _load() -> None:
    """Load what a training needs: the others would wait until this process, which is a spare, has."""
    for name in _LOADED_BY_SPARES:
        importlib.import_module(name)
    torch = importlib.import_module("torch")
    torch.optim.SGD([torch.zeros(1)], 0.1)  # torch loads as much again with the first optimizer


def _train_until_done(
    all_alive: Survivors,
    train: Callable[[World], Result],
    min_ranks: int,
    max_losses: int | None,
    of_init: dict[str, Any],
) -> Result | None:
    losses = all_alive.losses  # before this call
    while True:
        result, done = None, True
        if not all_alive.is_spare:
            try:
                result, done = _attempt(train, of_init)
            except (KeyboardInterrupt, SystemExit):
                all_alive.dismiss()
                raise
        began_s = time.monotonic()
        if not done:
            world.abandon()
            gc.collect()  # the lost world's memory, which tracebacks have kept
        with StopSignals() if all_alive.is_spare else contextlib.nullcontext():
            loss = all_alive.meet(done=done)
        if loss is None:
            world.forget()
            all_alive.divide(0)  # they go on together
            return result
        ranks, places = len(all_alive.world), len(all_alive.spares)
        problem = f"{ranks} are left, min_ranks={min_ranks}" if ranks < min_ranks else ""
        if max_losses is not None and all_alive.losses - losses > max_losses:
            problem = f"the job has gone on after max_losses={max_losses} losses already"
        if problem:
            all_alive.divide(0)  # spares end, too
            raise RankLostError.of(loss.ranks, loss.hosts, loss.waited_for, problem).on_all_ranks()
        if all_alive.rank == all_alive.world[0]:
            took_s = time.monotonic() - (all_alive.noticed_s if done else began_s)
            log.warning("%s: going on with %d rank(s) and %d spare(s), %.2f s later", loss, ranks, places, took_s)


def _attempt(train: Callable[[World], Result], of_init: dict[str, Any]) -> tuple[Result | None, bool]:
    """Train in a world. Return the result, and whether there is one: not if ranks were lost."""
    try:
        return _train_once(train, of_init), True
    except Exception as error:
        # Backends of torch may notice a death long before MPI reports it.
        within_s = lost.REPORTED_WITHIN_S if isinstance(error, RuntimeError) else None
        if not isinstance(error, RankLostError) and not lost.news(within_s):
            raise
        log.info("left the training: %s: %s", type(error).__name__, error)
    return None, False
