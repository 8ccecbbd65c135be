"""From a process that a launcher started to MPI: the library is loaded, and it and the launcher agree on the ranks."""

from __future__ import annotations

from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError


def load_mpi() -> Any:
    """Initialise MPI, if that has not happened, and return ``mpi4py.MPI``.

    On Cray systems mpi4py has to be loaded before torch: commands call this first of all.

    Raises:
        LaunchError: MPI has been finalised already, or the launcher started several processes that this MPI library
            takes for one each.
    """
    with env.singleton_mpi():
        from mpi4py import MPI
    if MPI.Is_finalized():
        raise LaunchError("MPI has been finalised in this process and cannot start again; call hpcfsdp.init() earlier")
    launched = env.launcher_size()
    if launched is not None and launched[1] > 1 and MPI.COMM_WORLD.size == 1:
        variable, count = launched
        library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
        raise LaunchError(
            f"the launcher started {count} processes ({variable}={count}), but the MPI library that mpi4py loaded "
            f"({library}) does not hear it: every process would be rank 0 of 1. Start with that library's own mpirun, "
            "choose its plug-in (srun --mpi=pmix or --mpi=pmi2), or install mpi4py for the launcher's MPI"
        )
    return MPI
