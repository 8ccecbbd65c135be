"""The environment of the process. No other module reads or writes ``os.environ``."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hpcfsdp.errors import LaunchError

CONFIG_PREFIX = "HPCFSDP_"
_WAIT_LOG_S = "HPCFSDP_WAIT_LOG_S"
_HANG_S = "HPCFSDP_HANG_S"
_REGISTERED_MEMORY = "HPCFSDP_REGISTERED_MEMORY"
_PROGRESS_THREAD = "HPCFSDP_PROGRESS_THREAD"
_GOES_ON = "OMPI_MCA_mpi_ft_enable"
_OF_THE_LIBRARY = (_WAIT_LOG_S, _HANG_S, _REGISTERED_MEMORY, _PROGRESS_THREAD)
"""Variables with the prefix that are not part of a command's configuration."""


class Scheduler(NamedTuple):
    """The variables that a scheduler, or its launcher, sets in the processes of a job. Empty where it has none."""

    name: str
    jobs: tuple[str, ...]  # each may hold the number of the job; the first that is set counts
    array_index: str = ""  # the place of the job in an array, where `jobs` do not distinguish jobs of an array
    size: str = ""  # the number of processes that its launcher has started
    rank: str = ""  # of this one
    restarts: str = ""  # how often the job was requeued
    end: str = ""  # when the job ends, in seconds since the epoch


_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME")
SCHEDULERS = (
    Scheduler("SLURM", ("SLURM_JOB_ID",), "", *_SLURM),
    Scheduler("PBS", ("PBS_JOBID",)),  # the number of a job of an array has its index in it
    Scheduler("LSF", ("LSB_JOBID",), array_index="LSB_JOBINDEX", size="JSM_NAMESPACE_SIZE", rank="JSM_NAMESPACE_RANK"),
    # A script of flux batch knows the enclosing job alone.
    Scheduler("Flux", ("FLUX_JOB_ID", "FLUX_ENCLOSING_ID"), size="FLUX_JOB_SIZE", rank="FLUX_TASK_RANK"),
    Scheduler("PALS", ("PALS_APID",), rank="PALS_RANKID"),  # the launcher of Cray systems, within PBS
)
"""The outermost first: Flux may run within a job of another scheduler. launch/scheduler.py asks them for the end."""


class SchedulerJob(NamedTuple):
    """A job as a scheduler's variables describe it. Empty, or None, where they do not."""

    number: str = ""  # the scheduler's name of the job, also among the jobs of an array
    restarts: str = ""  # how often it was requeued
    end_s: float | None = None  # since the epoch
    scheduler: str = ""  # its name in ``SCHEDULERS``


# Launchers' variables for the number of processes, the most specific first. SLURM's variable is last: processes that an
# mpirun inside of an allocation started inherit it.
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *(each.size for each in reversed(SCHEDULERS) if each.size))
_LAUNCHER_RANKS = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    *(each.rank for each in reversed(SCHEDULERS) if each.rank),
)
# Variables for Open MPI, from its own mpirun, or from srun through PMIx or PMI2.
_OPEN_MPI_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")
# Variables for MPI, NCCL and threads that are often wrong or forgotten.
_DIAGNOSTIC = (
    *_LAUNCHER_SIZES,
    *_LAUNCHER_RANKS,
    *("MASTER_ADDR", "MASTER_PORT", "MPI4PY_RC_THREAD_LEVEL"),
    *("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"),
    *("SLURM_JOB_ID", "SLURM_MPI_TYPE", "SLURM_STEP_ID", _GOES_ON),
)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables for the devices that a process sees, which may differ between ranks."""
_ON_ACCELERATORS = (
    *("NCCL_", "TORCH_NCCL_", "RCCL_", "MPICH_GPU_", "FI_CXI_", "CUDA_DEVICE_MAX_CONNECTIONS", *VISIBLE),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
)
"""The beginnings of variables that decide how accelerators, their memory and their networks are used."""


_exported: dict[str, str] = {}  # variables that this process has set itself: another rendezvous may change them


def launcher_size() -> tuple[str, int] | None:
    """Return the launcher's variable for the number of processes, and the number; None without a launcher."""
    values = ((name, os.environ.get(name, "")) for name in _LAUNCHER_SIZES)
    return next(((name, int(value)) for name, value in values if value.isdecimal()), None)


def torchrun_size() -> int:
    """Return the number of processes if torchrun started this one, also within a step of srun; else 0."""
    count = os.environ.get("WORLD_SIZE", "")
    by_mpirun = "OMPI_COMM_WORLD_SIZE" in os.environ
    return int(count) if "TORCHELASTIC_RUN_ID" in os.environ and not by_mpirun and count.isdecimal() else 0


def launcher_rank() -> int | None:
    """Return the rank of this process according to the launcher, for use without MPI; None without a launcher."""
    values = (os.environ.get(name, "") for name in _LAUNCHER_RANKS)
    return next((int(value) for value in values if value.isdecimal()), None)


def launcher_ends_all() -> bool:
    """Return whether the launcher ends all processes as soon as one fails. Open MPI's does, unless it goes on."""
    return "OMPI_COMM_WORLD_RANK" in os.environ and not goes_on_after_loss()


def goes_on_after_loss(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI goes on after a process has died: ``mpirun --with-ft ulfm`` sets this for its ranks."""
    return environ.get(_GOES_ON, "").lower() in ("1", "true", "yes", "t", "y")


def started_by_srun() -> bool:
    """Return whether SLURM's own launcher started this process, not an mpirun inside of an allocation."""
    tasks, rank = os.environ.get("SLURM_STEP_NUM_TASKS"), os.environ.get("SLURM_PROCID")
    size = launcher_size()
    return size is not None and tasks == str(size[1]) and rank == str(launcher_rank())


def idle_tasks() -> int:
    """Return how many tasks the SLURM allocation of a process that srun has not started has beside it; 0 for others."""
    if launcher_size() not in (None, ("SLURM_STEP_NUM_TASKS", 1)) or "SLURM_JOB_ID" not in os.environ:
        return 0
    counts = (os.environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NNODES"))
    return max([0, *(int(count) - 1 for count in counts if count.isdecimal())])


def singleton_mpi() -> contextlib.AbstractContextManager[None]:
    """Return a context in which Open MPI starts without a launcher, and creates no shared-memory segment.

    Open MPI 5 leaves that segment in /dev/shm when a single process ends. One process needs no transport but the one to
    itself. The variables are unset on exit: an mpirun started from here would inherit them. Other MPI libraries do not
    read them.
    """
    launched = any(name in os.environ for name in _OPEN_MPI_MARKS)
    return _set_where_unset({} if launched else {"OMPI_MCA_btl": "self", "OMPI_MCA_pml": "ob1"})


def without_mpi(leave_out: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which processes start for which mpi4py does not initialise MPI: their parent is the rank."""
    return _set_where_unset({"MPI4PY_RC_INITIALIZE": "0"} if leave_out else {})


@contextlib.contextmanager
def _set_where_unset(wanted: Mapping[str, str]) -> Iterator[None]:
    names = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in names})
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def export_rendezvous(values: Mapping[str, str]) -> None:
    """Set ``RANK``, ``WORLD_SIZE`` and the like for third-party code, where they are unset."""
    for name, value in values.items():
        if os.environ.get(name) in (None, _exported.get(name)):
            os.environ[name] = _exported[name] = value


def compare_calls() -> bool:
    """Return whether ranks compare their calls before each collective: torch's own switch for that."""
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def registered_memory() -> bool:
    """Return whether gathered values are to be in memory that is registered with the backend of their group."""
    return _switch(_REGISTERED_MEMORY, "for registered memory")


def progress_thread() -> bool:
    """Return whether a thread is to advance collectives while the program computes."""
    return _switch(_PROGRESS_THREAD, "for a progress thread")


def _switch(name: str, one: str) -> bool:
    """Return whether a variable is 1. Raise LaunchError unless it is 0, 1 or unset."""
    given = os.environ.get(name, "0")
    if given not in ("", "0", "1"):
        raise LaunchError(f"{name}={given}: give 1 {one}, or 0")
    return given == "1"


def full_precision_in_eval() -> bool:
    """Return whether sharded modules in eval mode compute without mixed precision: torch's own switch for that."""
    return os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1"


def threads_chosen() -> bool:
    """Return whether the user fixed the number of threads per process."""
    return "OMP_NUM_THREADS" in os.environ


def config_values() -> dict[str, str]:
    """Return the ``HPCFSDP_*`` variables that configure commands."""
    names = (name for name in os.environ if name.startswith(CONFIG_PREFIX) and name not in _OF_THE_LIBRARY)
    return {name: os.environ[name] for name in names}


def wait_log_s() -> float:
    """Return the seconds after which a waiting rank logs that for the first time, 10 by default; 0: never."""
    return _seconds(_WAIT_LOG_S, "10", "for no such log lines")


def hang_s() -> float:
    """Return the seconds after which a wait is a hang, 300 by default; 0: never."""
    return _seconds(_HANG_S, "300", "to wait until the timeout")


def _seconds(name: str, default: str, zero: str) -> float:
    """Return the number of seconds in a variable. Raise LaunchError for anything else."""
    given = os.environ.get(name, default)
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise LaunchError(f"{name}={given}: give a number of seconds, or 0 {zero}")
    return seconds


def diagnostic_values() -> dict[str, str]:
    """Return the variables for ``hpcfsdp doctor`` that are set."""
    return {name: os.environ[name] for name in _DIAGNOSTIC if name in os.environ} | accelerator_values()


def accelerator_values() -> dict[str, str]:
    """Return the variables that are set and decide how accelerators, their memory and their networks are used."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ON_ACCELERATORS)}


def device_connections() -> int | None:
    """Return ``CUDA_DEVICE_MAX_CONNECTIONS``, the queues between a process and its GPU; None where it is no number.

    With one, kernels of all streams wait for each other in the order in which they were launched.
    """
    count = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(count) if count.isdecimal() else None


def hides_devices() -> bool:
    """Return whether the user has left no device to this process, as by ``CUDA_VISIBLE_DEVICES=``."""
    return any(os.environ.get(name) in ("", "-1") for name in VISIBLE)


def gpu_aware_mpi() -> bool:
    """Return whether Cray's MPI is to take GPU memory, and nothing preloads its library for that, GTL."""
    preloaded = "libmpi_gtl_" in os.environ.get("LD_PRELOAD", "")
    return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and not preloaded


def on_cray() -> bool:
    """Return whether Cray's MPI is the one of this environment, by its module."""
    return "CRAY_MPICH_VERSION" in os.environ or "CRAY_MPICH_DIR" in os.environ


def colour_refused() -> bool:
    """Return whether the user wants output without colour (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def host_name() -> str:
    """Return the name of this node, without its domain."""
    return socket.gethostname().split(".")[0]


def scheduler_jobs() -> list[SchedulerJob]:
    """Return the jobs that this process is in, the outermost first."""
    found = []
    for scheduler in SCHEDULERS:
        number = next((os.environ[name] for name in scheduler.jobs if os.environ.get(name)), "")
        index, end = os.environ.get(scheduler.array_index, ""), os.environ.get(scheduler.end, "")
        end_s = float(end) if end.isdecimal() and int(end) else None
        if number or end_s is not None:
            number += f"[{index}]" if index not in ("", "0") else ""
            restarts = os.environ.get(scheduler.restarts, "0") if scheduler.restarts else ""
            found.append(SchedulerJob(number, restarts, end_s, scheduler.name))
    return found


def scheduler_job() -> SchedulerJob:
    """Return the outermost job that this process is in; one without a number where there is none."""
    return next((job for job in scheduler_jobs() if job.number), SchedulerJob())


def restarts() -> dict[str, int]:
    """Return ``{"restart": n}``, for records: how often the job was requeued. Return {} where that is not counted."""
    count = scheduler_job().restarts
    return {"restart": int(count)} if count.isdecimal() else {}
