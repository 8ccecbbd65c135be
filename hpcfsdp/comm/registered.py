"""Device memory that is registered with the backend of a process group, where the user asks for it.

NCCL copies between a tensor and buffers of its own, unless it may reach the tensor's memory itself. That memory must
come from NCCL's allocator, and be registered with the group.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator, env

log = logging.getLogger("hpcfsdp.comm")

_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, Any | None] = weakref.WeakKeyDictionary()
"""One for each group: memory is registered with one communicator."""


def registered_memory(group: dist.ProcessGroup, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which device memory is registered with a group; nothing without the option.

    Collective if the group has sent nothing yet.
    """
    if not env.registered_memory():
        return contextlib.nullcontext()
    if group not in _pools:
        _pools[group] = _compat.registered_pool(group, device)
        if _pools[group] is None:
            log.warning(
                "%s has no registered memory: HPCFSDP_REGISTERED_MEMORY=1 has no effect", dist.get_backend(group)
            )
    pool = _pools[group]
    return contextlib.nullcontext() if pool is None else accelerator.allocating_from(pool, device)
