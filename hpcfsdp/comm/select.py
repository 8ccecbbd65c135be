"""Which communicator carries a model's collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.comm.backend import carries
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator

_default: Communicator | None = None


def set_default(communicator: Communicator | None) -> None:
    """What carries tensors between all ranks on the device of this one, from ``hpcfsdp.init`` to ``finalize``."""
    global _default
    _default = communicator


def communicator_for(group: dist.ProcessGroup | Communicator | None, *, required: bool) -> Communicator:
    """The communicator for a process group; by default the one of the world.

    After ``hpcfsdp.init()`` the world's collectives go over MPI on CPU and over NCCL on GPUs. With torch.distributed
    alone they go over its default group; torch's "fake" backend gets a ``FakeCommunicator``. A ``Communicator`` is
    returned as it is.

    Args:
        group: a process group of torch.distributed, a communicator, or None for the world.
        required: raise where there is no world yet; otherwise this process stands alone.
    """
    if isinstance(group, dist.ProcessGroup):
        return _over(group)
    if group is not None:
        return _checked(group)
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
    if carries(group):
        on_gpu = _default is not None and _default.device.type == "cuda"
        return TorchGroupCommunicator(group, _default.device) if on_gpu else group.communicator
    if dist.get_backend(group) == "fake":  # torch's own, for planning and tests: its collectives move nothing
        return FakeCommunicator(group.rank(), group.size(), device=_compat.device_of_group(group))
    return TorchGroupCommunicator(group)


def _checked(group: Any) -> Communicator:
    missing = [name for name in ("rank", "size", "all_gather_into_tensor") if not hasattr(group, name)]
    if missing:
        raise TypeError(
            f"process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not "
            f"{type(group).__name__}"
        )
    return group
