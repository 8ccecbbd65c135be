"""From a process that a launcher started to a ``World``: ranks, node, device, process group, all found through MPI."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI


@dataclass(frozen=True)
class World:
    """All processes of the job as this process sees them."""

    rank: int
    """Of this process among all, 0 to size - 1."""
    size: int
    """Processes in the job."""
    local_rank: int
    """Of this process among those on its node."""
    local_size: int
    """Processes on this node."""
    node_rank: int
    """Of this node among all nodes, in the order of their lowest rank."""
    num_nodes: int
    device: torch.device
    """Where this rank computes."""
    comm: MPI.Intracomm
    """A communicator of its own over all processes: messages on it meet no one else's."""
    process_group: dist.ProcessGroup
    """torch's default process group: NCCL where `device` is a GPU, gloo otherwise."""


_world: World | None = None


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


def current_world() -> World | None:
    """The world that ``init`` made, None before it and after ``finalize``."""
    return _world


def init(device: str | torch.device | None = None, *, timeout_s: float = 1800.0) -> World:
    """Collective over all processes of the job. Start MPI and torch.distributed and return the ``World``.

    The launcher is mpirun, mpiexec or srun; a plain ``python`` process is a world of one. Ranks and nodes come from
    MPI (``MPI_Comm_split_type``), never from the environment. A second call returns the same world.

    Args:
        device: "cpu", "cuda", or one device such as "cuda:1". Default: a GPU where one is visible, else the CPU. Of
            several visible GPUs each rank takes the one of its local rank.
        timeout_s: seconds after which a collective of torch.distributed gives up.

    Raises:
        LaunchError: the launcher does not fit the MPI library, the wanted device is not there, two ranks share one
            GPU, or torch.distributed was initialised before with another number of ranks.
    """
    global _world
    if _world is not None:
        return _world
    mpi = load_mpi()
    import torch.distributed as dist

    from hpcfsdp.launch import abort, device as devices, rendezvous

    comm = mpi.COMM_WORLD.Dup()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    leader_rank = node.bcast(comm.rank)
    leaders = sorted(set(comm.allgather(leader_rank)))
    abort.install(comm)
    chosen = devices.bind(device, node)

    if not dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        store, address = rendezvous.open_store(comm, single_node=len(leaders) == 1, timeout_s=timeout_s)
        env.export_rendezvous(
            {
                "RANK": str(comm.rank),
                "WORLD_SIZE": str(comm.size),
                "LOCAL_RANK": str(node.rank),
                "LOCAL_WORLD_SIZE": str(node.size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(store.port),
            }
        )
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, timeout=timeout)
        abort.install(
            comm
        )  # again: torch has put a hook of its own in front, which holds output back until ours returns
    elif dist.get_world_size() != comm.size or dist.get_rank() != comm.rank:
        raise LaunchError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but MPI has this "
            f"process as rank {comm.rank} of {comm.size}: call hpcfsdp.init() first, or start with one launcher"
        )
    _world = World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node.rank,
        local_size=node.size,
        node_rank=leaders.index(leader_rank),
        num_nodes=len(leaders),
        device=chosen,
        comm=comm,
        process_group=dist.group.WORLD,
    )
    node.Free()
    return _world


def finalize() -> None:
    """Collective over all processes of the job. Take down the process group and forget the world.

    MPI itself ends with the process, so ``init`` may be called again. Without a world this does nothing.
    """
    global _world
    if _world is None:
        return
    import torch.distributed as dist

    from hpcfsdp.launch import abort

    if dist.is_initialized():
        dist.destroy_process_group()
    abort.uninstall()
    _world.comm.Free()
    _world = None
