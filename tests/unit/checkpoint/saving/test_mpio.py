"""Where a writer over MPI-IO is refused."""

from types import SimpleNamespace

import pytest

from hpcfsdp.checkpoint.saving import mpio
from hpcfsdp.comm.mpi.part_comm import PartComm
from hpcfsdp.errors import CheckpointError


def test_a_job_that_outlives_ranks_makes_no_communicator_of_mpi(monkeypatch):
    monkeypatch.setattr(mpio, "current_job", lambda: SimpleNamespace(comm=PartComm.__new__(PartComm)))
    with pytest.raises(CheckpointError, match=r"does not work in hpcfsdp\.resilient; save with writer=\"posix\""):
        mpio._mpi_of([0, 1])
