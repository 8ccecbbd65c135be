"""The job as MPI sees it, before torch is loaded: all processes and their nodes."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import logging
import os
import re
import sys
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError, RankLostError
from hpcfsdp.hang import departure, lost
from hpcfsdp.launch import signals
from hpcfsdp.launch.topology import Topology

log = logging.getLogger("hpcfsdp.job")

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT_S = 1800.0  # how long a collective waits for missing ranks


@dataclass(frozen=True)
class Job:
    """All processes that the launcher started together."""

    comm: MPI.Intracomm  # over all of them, for messages while groups are created
    topology: Topology

    def export(self, topology: Topology, store: tuple[str, int] | None = None, local_rank: int | None = None) -> None:
        """Set the variables that give third-party code its rank, in `topology`, and the store, where they are unset.

        The store has an address and a port. `local_rank` is by default the
        place of this rank on its node.
        """
        rank, neighbours = self.comm.rank, topology.node_of(self.comm.rank)
        values: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": topology.size}
        if store is not None:
            values |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), store, strict=True))
        place = neighbours.index(rank) if local_rank is None else local_rank
        values |= {"LOCAL_RANK": place, "LOCAL_WORLD_SIZE": len(neighbours)}
        env.export_rendezvous({name: str(value) for name, value in values.items()})


def load_mpi() -> Any:
    """Initialise MPI, if that has not happened, and return ``mpi4py.MPI``.

    On Cray systems mpi4py has to be loaded before torch: commands call this first of all. Raises LaunchError if MPI has
    been finalised already, would end the process as it starts (``check_gtl``), or takes each of several processes that
    the launcher started for a job of one.
    """
    try:
        os.getcwd()
    except OSError as error:  # before libraries that end the process
        where = os.readlink("/proc/self/cwd")
        raise LaunchError(f"the working directory {where}: {error.strerror}; start in a folder that stays") from None
    check_gtl()
    guard = contextlib.nullcontext() if "mpi4py.MPI" in sys.modules else starting()
    with env.singleton_mpi(), guard:
        from mpi4py import MPI
    if MPI.Is_finalized():
        raise LaunchError("MPI has been finalised in this process and cannot start again; call hpcfsdp.init() earlier")
    if not MPI.Is_initialized():  # as in a process that a rank has started
        raise LaunchError(
            "mpi4py was kept from starting MPI in this process: where processes are spawned keep hpcfsdp.init() "
            'behind if __name__ == "__main__"; otherwise call MPI.Init_thread() first'
        )
    launched = env.launcher_size()
    if launched is not None and launched[1] > 1 and MPI.COMM_WORLD.size == 1:
        variable, count = launched
        library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
        raise LaunchError(
            f"the launcher started {count} processes ({variable}={count}), but the MPI library that mpi4py loaded "
            f"({library}) does not detect it: every process would be rank 0 of 1. Start with that library's own "
            "mpirun, choose its plug-in (srun --mpi=pmix or --mpi=pmi2), or install mpi4py for the launcher's MPI"
        )
    return MPI


@contextlib.contextmanager
def starting(*comms: Any) -> Iterator[None]:
    """Return a context for collectives of all processes before a loss can be handled. Not collective itself.

    Where MPI does not end the job when a process dies, this ends the process: when MPI reports a death to it, after
    `comms` are revoked so that no other waits in them, or at the hang limit, for MPI_Init may wait for the dead.
    """
    if not env.goes_on_after_loss():
        yield
        return
    is_limited = False
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no stderr, as in a notebook
        if limit_s := env.hang_s():
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)  # also while MPI holds the GIL
            is_limited = True
    try:
        yield
    except Exception as error:
        if getattr(error, "Get_error_class", lambda: 0)() not in lost.FAILURES:
            raise
        for comm in comms:
            comm.Revoke()
        log.error("a process of the job died while it started: start it again; %s ends, too", env.host_name())
        os._exit(RankLostError.exit_code)  # as all others: mpirun may wait for ever after MPI_Abort
    finally:
        if is_limited:
            faulthandler.cancel_dump_traceback_later()


_CRAYS_MPI = re.compile(rb"libmpi_(cray|gnu|intel|nvidia|amd|aocc)(_\w+)?\.so")


def check_gtl() -> None:
    """Not collective, before MPI starts. Raise where Cray's MPI is to take GPU memory without its library for that.

    It would end the process, and name no remedy. Where mpi4py does not say which MPI it loads, warn.
    """
    if not env.gpu_aware_mpi() or "mpi4py.MPI" in sys.modules:
        return
    known = b""
    with contextlib.suppress(OSError, ImportError, AttributeError, TypeError, ValueError):
        known = Path("/proc/self/maps").read_bytes()
        known += Path(importlib.util.find_spec("mpi4py.MPI").origin).read_bytes()  # type: ignore[union-attr, arg-type]
    by_cray = _CRAYS_MPI.search(known) is not None
    if b"libmpi_gtl_" in known or not (by_cray or env.on_cray()):
        return
    text = (
        "MPICH_GPU_SUPPORT_ENABLED=1, but mpi4py is not linked with Cray's library for that (libmpi_gtl_cuda or _hsa): "
        "MPI_Init ends the process with 'GTL library is not linked'. hpcfsdp gives no GPU memory to MPI: export "
        "MPICH_GPU_SUPPORT_ENABLED=0; or build mpi4py with the module craype-accel-* loaded, or preload that library"
    )
    if by_cray:
        raise LaunchError(text)
    warnings.warn(f"where mpi4py loads Cray's MPI: {text}", RuntimeWarning, stacklevel=3)


def check_step() -> None:
    """Not collective. Raise if this process would be alone in a SLURM allocation of more tasks, in no step of it."""
    if idle := env.idle_tasks():
        raise LaunchError(
            f"this process is in the allocation of SLURM's job {env.scheduler_job().number}, which has {1 + idle} "
            "tasks, but not in a step of it: it would train alone. Start it with srun (srun hpcfsdp train ...); one "
            "process alone: srun -n 1"
        )


def check_torchrun(size: int) -> None:
    """Not collective. Raise if torchrun started several processes, each of which would be rank 0 of `size` 1."""
    count = env.torchrun_size()
    if count > 1 and size == 1:
        raise LaunchError(
            f"torchrun started {count} processes, and MPI does not know of it: each would train alone, as rank 0 of "
            "1. Start the program with mpirun or srun, without torchrun: mpirun -n 2 python train.py"
        )


_job: Job | None = None


def current_job() -> Job:
    """Start MPI, find the nodes, install the abort hooks. Collective over all processes of the job, the first time."""
    global _job
    if _job is None:
        _job = _start()
    return _job


def replace(job: Job) -> None:
    """Not collective. Make `job` that of this process: of the ranks that live, after others were lost."""
    global _job
    _job = job


def _start() -> Job:
    mpi = load_mpi()
    with starting(mpi.COMM_WORLD):
        comm = mpi.COMM_WORLD.Dup()
    with starting(mpi.COMM_WORLD, comm):
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        leader, leaders = array("i", [comm.rank]), array("i", bytes(4 * comm.size))
        node.Bcast(leader)
        comm.Allgather(leader, leaders)  # 4 bytes for each rank, and no objects
        topology = Topology.from_labels(leaders)
        node.Free()
        departure.install(comm)
    signals.shield_children()
    if env.launcher_size() is not None:
        departure.watch_launcher()
    if comm.size > 1:
        _warn_of_forks(mpi)
        if env.goes_on_after_loss():
            with starting(mpi.COMM_WORLD, comm):
                lost.current = lost.Watch(comm, range(comm.size), comm.allgather(env.host_name()))
    else:
        try:
            check_step()
        except LaunchError as error:  # a program of the user's may be meant to run so, as in an interactive shell
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return Job(comm, topology)


def _warn_of_forks(mpi: Any) -> None:
    """Warn the first time that this process forks, as a DataLoader does for its workers by default on Linux."""
    process, warned = os.getpid(), []  # forked processes do not warn

    def warn_once() -> None:
        if os.getpid() != process or warned or mpi.Is_finalized():
            return
        warned.append(True)
        warnings.warn(
            "this process forks after MPI has started: MPI may hang or fail in the child and in this process. "
            'For a DataLoader with workers give multiprocessing_context="spawn" or "forkserver", or num_workers=0',
            RuntimeWarning,
            stacklevel=2,
        )

    os.register_at_fork(before=warn_once)
