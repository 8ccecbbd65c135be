"""Ranks and nodes for Lightning, from MPI."""

from __future__ import annotations

from lightning.pytorch.plugins.environments import MPIEnvironment

from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import current_job


class MPIClusterEnvironment(MPIEnvironment):
    """Ranks and nodes as hpcfsdp finds them: from MPI, under mpirun, mpiexec and srun; a plain process is rank 0 of 1.

    Creating one is collective over all processes of the job. It starts MPI.

    Raises:
        LaunchError: the launcher does not fit the MPI library.
    """

    def __init__(self) -> None:
        self._job = current_job()  # before mpi4py is imported in another way
        super().__init__()

    @staticmethod
    def detect() -> bool:
        """Return whether MPI has several processes. Collective over all processes of the job."""
        return current_job().comm.size > 1

    def world_size(self) -> int:
        return self._job.topology.size

    def global_rank(self) -> int:
        return self._job.comm.rank

    def local_rank(self) -> int:
        return self._job.topology.local_rank(self.global_rank())

    def node_rank(self) -> int:
        return self._job.topology.node_rank(self.global_rank())

    def local_size(self) -> int:
        """Return processes on this node."""
        return len(self._job.topology.node_of(self.global_rank()))

    def num_nodes(self) -> int:
        return self._job.topology.num_nodes

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Not collective. Compare what a Trainer was given with MPI. 1 of either is Lightning's default, and right.

        Raises:
            LaunchError: the numbers differ.
        """
        remedy = "leave devices and num_nodes out: MPI knows them"
        if num_nodes not in (1, self.num_nodes()):
            raise LaunchError(
                f"Trainer(num_nodes={num_nodes}), but MPI has its {self.world_size()} process(es) on "
                f"{self.num_nodes()} node(s): {remedy}, or ask the scheduler for {num_nodes} nodes"
            )
        if num_devices not in (1, self.local_size()):
            raise LaunchError(
                f"Trainer(devices={num_devices}), but MPI started {self.local_size()} process(es) on this node: "
                f"{remedy}, or start {num_devices} on each node (mpirun --map-by ppr:{num_devices}:node, srun "
                f"--ntasks-per-node={num_devices})"
            )
