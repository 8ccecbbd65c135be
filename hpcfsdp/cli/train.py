"""``hpcfsdp train [run.yaml] [--section.key value]``: runs the program in examples/gpt.

Adds the configuration, the folder of the run, its logs, signals, and exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfsdp import config as configuration, env
from hpcfsdp.cli.failure import end_together
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.examples.gpt.callbacks import Callbacks
from hpcfsdp.examples.gpt.run_config import RunConfig, as_list, check
from hpcfsdp.hang import lost
from hpcfsdp.launch.job import check_step, current_job, load_mpi
from hpcfsdp.launch.lock import RunLock
from hpcfsdp.output import log as logs
from hpcfsdp.output.progress_bar import step_progress
from hpcfsdp.preempt import Preemption, exit_requeue, preemption
from hpcfsdp.resilience.run import resilient

if TYPE_CHECKING:
    from hpcfsdp.examples.gpt.loop import Outcome
    from hpcfsdp.world import World

log = logging.getLogger("hpcfsdp.train")

_PROG = "hpcfsdp train"
EXAMPLES = (
    "mpirun -n 4 hpcfsdp train                                         # the example's own settings",
    "mpirun -n 4 hpcfsdp train run.yaml --train.steps 1000             # a file, and a flag that overrides it",
    "srun --mpi=pmix hpcfsdp train --data.paths /my/texts --run_dir runs/mine",
    "mpirun -n 4 hpcfsdp train --trace --track tensorboard             # run_dir/trace.json; figures for TensorBoard",
    "hpcfsdp train --print_config > run.yaml                           # all keys with their defaults",
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return configuration.parser_of(RunConfig, _PROG)


def main(arguments: Sequence[str]) -> int:
    """Train; the exit code is the same on every rank. Collective over all processes of the job."""
    if {"-h", "--help"} & set(arguments):
        print(parser().format_help() + "\nexamples:\n" + "".join(f"  {line}\n" for line in EXAMPLES), end="")
        return 0
    if "--print_config" in arguments:
        configuration.parse(RunConfig, arguments, prog=_PROG)
    check_step()
    with preemption() as stop:  # a signal may arrive while the program starts
        comm = load_mpi().COMM_WORLD
        try:
            return _main(arguments, comm, stop)
        except HpcfsdpError as error:
            if comm.size == 1:
                raise
            return end_together(error, current_job().comm if lost.generation else comm, ())


def _main(arguments: Sequence[str], comm: Any, stop: Preemption) -> int:
    from hpcfsdp.comm.agree import raise_together  # these load torch, which has to come after MPI
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator
    from hpcfsdp.examples.gpt import loop  # noqa: F401  spares, too, load it before the others wait for them

    with raise_together(MpiCommunicator(comm.Dup())):
        config = configuration.parse(RunConfig, arguments, prog=_PROG)
        with _writing_to(config.run_dir):
            logs.set_up(comm.rank, comm.size, env.host_name(), Path(config.run_dir, "logs"))
    device, of = None if config.device == "auto" else config.device, config.resilience
    start = _Start((comm.rank, comm.size))

    def train(world: World) -> Outcome:
        if (world.rank, world.size) != start.logged_as:
            start.logged_as = world.rank, world.size
            logs.set_up(*start.logged_as, env.host_name(), Path(config.run_dir, "logs"))
        if lost.generation and world.rank == 0:
            log.warning("going on with %d rank(s) after loss %d of this job", world.size, lost.generation)
        outcome = run(config, world, stop, start)
        if world.rank == 0 and (held_out := outcome.held_out) is not None:
            print(
                f"held-out: {held_out.bits_per_byte:.3f} bits per byte "
                f"(unigram baseline of the same {held_out.predicted_bytes} bytes: {held_out.unigram_bits_per_byte:.3f})"
                f"\nstep: {outcome.step} of {config.train.steps}\ncheckpoint: {outcome.checkpoint}"
            )
        return outcome

    limits = {"min_ranks": of.min_ranks, "max_losses": of.max_losses if of.max_losses >= 0 else None}
    try:
        outcome = resilient(train, spares=of.spares, **limits, device=device, run_dir=config.run_dir)
        if outcome is not None and outcome.stopped:
            exit_requeue()
        return 0
    finally:
        logs.close()


@dataclass
class _Start:
    """What a process keeps while the job goes on after losses."""

    logged_as: tuple[int, int]  # rank and number of ranks in the log
    began_after: int | None = None  # the step before the first one of this job; None: a spare knows of none


def run(config: RunConfig, world: World, stop: Preemption, start: _Start | None = None) -> Outcome:
    """Run the training that `config` describes, as the only job in the folder of the run. Collective over all ranks."""
    from hpcfsdp.comm.agree import raise_together  # as above
    from hpcfsdp.examples.gpt.loop import Trainer
    from hpcfsdp.observe.trackers import check_trackers

    with raise_together(world.host):
        check(config, world.size, world.num_nodes)
        check_trackers(as_list(config.track))
    lock = RunLock(Path(config.run_dir))
    with raise_together(world.host), _writing_to(config.run_dir):
        if world.rank == 0:
            again = lost.generation > 0  # the last rank 0 of this job may hold the folder
            lock.acquire(by_force=config.take_over or again, alone=again)
    callbacks = _Command(config, world, lock, start or _Start((world.rank, world.size)))
    try:
        return Trainer(config, world, stop, callbacks).run()
    finally:
        lock.release()


class _Command(Callbacks):
    """Writes the configuration of the run, and shows steps. Rank 0 holds the lock."""

    def __init__(self, config: RunConfig, world: World, lock: RunLock, start: _Start) -> None:
        self._config, self._world, self._lock, self._start = config, world, lock, start
        self.goes_on = lost.generation > 0
        self._show: Callable[[int, str], None] = lambda step, text: None

    def before_save(self) -> None:
        from hpcfsdp.comm.agree import raise_together  # loads torch, after MPI

        with raise_together(self._world.host), _writing_to(self._config.run_dir):
            if self._world.rank == 0:
                self._lock.check()
                # Without what was allowed for this start alone: config.yaml starts later ones.
                kept = replace(self._config.checkpoint, resume_changed=False)
                lasting = replace(self._config, take_over=False, checkpoint=kept)
                configuration.write_yaml(lasting, Path(self._config.run_dir, "config.yaml"))

    def began_after(self, step: int) -> int:
        known = [began for began in self._world.host.all_gather_object(self._start.began_after) if began is not None]
        self._start.began_after = min(known, default=step)
        return self._start.began_after

    @contextlib.contextmanager
    def steps(self, done: int, last: int) -> Iterator[None]:
        every = self._config.train.log_every
        with step_progress(log, self._world.rank, done + 1, last, every) as self._show:
            yield

    def record(self, record: Mapping[str, Any]) -> None:
        if record["kind"] != "train":
            return
        figures = {**record, **record.get("not_finite", {})}
        loss, norm, rate = (float(figures[name]) for name in ("loss", "grad_norm", "lr"))
        self._show(
            record["step"],
            f"loss {loss:.4f} ({loss / math.log(2):.3f} bits/byte) norm {norm:.3f} lr {rate:.2e} "
            f"{figures['tokens_per_s']:.0f} tokens/s, {figures['flop_utilisation']:.0%} of peak, "
            f"{figures['comm_share']:.0%} waiting",
        )


@contextlib.contextmanager
def _writing_to(run_dir: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HpcfsdpError(f"run_dir {run_dir}: cannot write there: {error.strerror}") from error
