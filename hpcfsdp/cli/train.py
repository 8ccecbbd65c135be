"""``hpcfsdp train [run.yaml] [--section.key value]``"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp import config as configuration, env
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.examples.gpt.run_config import RunConfig
from hpcfsdp.launch.job import load_mpi
from hpcfsdp.launch.shutdown import abort
from hpcfsdp.launch.signals import StopRequest

EXIT_RUN_AGAIN = 75
"""After a signal, with a complete checkpoint (EX_TEMPFAIL of sysexits.h)."""

_PROG = "hpcfsdp train"


def main(arguments: Sequence[str]) -> int:
    """Collective over all processes of the job. Train; the exit code is the same on every rank."""
    if {"-h", "--help", "--print_config"} & set(arguments):
        configuration.parse(RunConfig, arguments, prog=_PROG)
    mpi = load_mpi()
    comm = mpi.COMM_WORLD
    with StopRequest() as stop:
        try:
            return _train(arguments, comm, stop)
        except HpcfsdpError as error:
            if comm.size == 1:
                raise
            return _end_together(error, comm)


def _train(arguments: Sequence[str], comm: Any, stop: Any) -> int:
    from hpcfsdp import world as worlds  # from here on torch, which MPI has to come before
    from hpcfsdp.comm.agree import raise_together
    from hpcfsdp.comm.mpi import MpiCommunicator
    from hpcfsdp.examples.gpt.loop import train
    from hpcfsdp.observe import log

    with raise_together(MpiCommunicator(comm.Dup())):
        config = configuration.parse(RunConfig, arguments, prog=_PROG)
        try:
            log.set_up(comm.rank, comm.size, env.host_name(), Path(config.run_dir, "logs"))
        except OSError as error:
            raise HpcfsdpError(f"run_dir {config.run_dir}: cannot write there: {error.strerror}") from error
    world = worlds.init(None if config.device == "auto" else config.device)
    try:
        outcome = train(config, world, stop)
        if world.rank == 0 and outcome.held_out is not None:
            print(_summary(config, outcome))
        worlds.finalize()
        return EXIT_RUN_AGAIN if outcome.signal else 0
    finally:
        log.close()


def _summary(config: RunConfig, outcome: Any) -> str:
    held_out = outcome.held_out
    return (
        f"held-out: {held_out.bits_per_byte:.3f} bits per byte "
        f"(unigram baseline of the same {held_out.predicted_bytes} bytes: {held_out.unigram_bits_per_byte:.3f})\n"
        f"step: {outcome.step} of {config.train.steps}\n"
        f"checkpoint: {outcome.checkpoint}"
    )


def _end_together(error: HpcfsdpError, comm: Any) -> int:
    """Print the error once where all ranks have it; otherwise end the job, since the others wait for this one."""
    if error.raised_on_all_ranks:
        if comm.rank == 0:
            print(f"hpcfsdp: {error}", file=sys.stderr, flush=True)
        # A launcher may kill the other ranks as soon as one ends with an error: not before the message is out.
        comm.Barrier()
    else:
        abort(str(error), error.exit_code)
    return error.exit_code
