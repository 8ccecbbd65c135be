"""Importing this module gives torch.distributed the backend ``hpcmpi`` and the rendezvous ``mpi://``.

::

    import torch.distributed as dist
    import hpcfsdp.mpi

    dist.init_process_group("hpcmpi", init_method="mpi://")   # tensors over MPI, those on a GPU through the host
    dist.init_process_group("nccl", init_method="mpi://")     # NCCL, with ranks and the store found through MPI

Start the program with mpirun or srun. Importing does not start MPI.
"""

from hpcfsdp.comm.backend.process_group import NAME, MpiProcessGroup, register

__all__ = ["NAME", "MpiProcessGroup", "register"]

register()
