"""The job as MPI sees it, before there is any process group: all processes, and which of them share a node."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcfsdp import env
from hpcfsdp.launch.bootstrap import load_mpi
from hpcfsdp.launch.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

DEFAULT_TIMEOUT_S = 1800.0
"""How long a collective waits for ranks that do not take part."""


@dataclass(frozen=True)
class Job:
    """All processes that the launcher started together.

    Attributes:
        comm: over all of them, for what has to be exchanged while groups are made.
    """

    comm: MPI.Intracomm
    topology: Topology

    def export(self, topology: Topology, address: str, port: int) -> None:
        """Set the variables by which third-party code finds its rank and the store, only where they are unset.

        Args:
            topology: which gives the local ranks.
            address, port: of the store.
        """
        env.export_rendezvous(
            {
                "RANK": str(self.comm.rank),
                "WORLD_SIZE": str(topology.size),
                "LOCAL_RANK": str(topology.local_rank(self.comm.rank)),
                "LOCAL_WORLD_SIZE": str(len(topology.node_of(self.comm.rank))),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
            }
        )


@functools.cache
def current_job() -> Job:
    """Collective over all processes of the job, the first time. Start MPI, find the nodes, guard against failures."""
    mpi = load_mpi()
    from hpcfsdp.launch import abort, forks, shutdown  # these load torch, or start MPI: load_mpi comes before both

    comm = mpi.COMM_WORLD.Dup()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    topology = Topology.from_labels(comm.allgather(node.bcast(comm.rank)))
    node.Free()
    abort.install(comm)
    shutdown.install(comm.Dup())
    forks.install(comm)
    return Job(comm, topology)
