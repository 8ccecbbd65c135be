"""The communicator for a process group."""

from __future__ import annotations

import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.backend.process_group import is_mpi_group
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator

_default: Communicator | None = None


def set_default(communicator: Communicator | None) -> None:
    """Set the communicator of the world, from ``hpcfsdp.init`` to ``finalize``."""
    global _default
    _default = communicator


def communicator_for(group: dist.ProcessGroup | Communicator | None, *, required: bool) -> Communicator:
    """The communicator for a process group; by default the one of the world.

    After ``hpcfsdp.init()`` the world communicates over MPI on CPU and over NCCL on GPUs. With torch.distributed alone
    it uses the default group. torch's "fake" backend gets a ``FakeCommunicator``. A ``Communicator`` is returned as it
    is.

    Args:
        group: a process group of torch.distributed, a communicator, or None for the world.
        required: raise where there is no world yet; otherwise the communicator has this process alone.
    """
    if isinstance(group, dist.ProcessGroup):
        return _over(group)
    if group is not None:
        if not isinstance(group, Communicator):
            raise TypeError(
                "process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not "
                f"{type(group).__name__}"
            )
        return group
    if _default is not None:
        return _default
    if dist.is_initialized():
        return communicator_for(dist.group.WORLD, required=required)
    if required:
        raise RuntimeError(
            "there is no process group yet: call hpcfsdp.init() first (or torch.distributed.init_process_group)"
        )
    return FakeCommunicator()


def _over(group: dist.ProcessGroup) -> Communicator:
    if is_mpi_group(group):
        staged = _default is not None and accelerator.is_accelerator(_default.device)
        return TorchGroupCommunicator(group, _default.device) if staged else group.communicator
    if dist.get_backend(group) == "fake":  # torch's own, for planning and tests: its collectives move no bytes
        return FakeCommunicator(group.rank(), group.size(), device=_compat.device_of_group(group))
    return TorchGroupCommunicator(group)
