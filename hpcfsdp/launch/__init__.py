"""Start and end: MPI, the process group, the device of this rank, signals and aborts."""

from hpcfsdp.launch.bootstrap import World, current_world, finalize, init

__all__ = ["World", "current_world", "finalize", "init"]
