"""What differs between versions of torch, and the private parts of torch that the engine stands on, in one place."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renames the two collectives and deprecates the older names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Work = dist._Work
"""Base of work handles that are written in Python."""


def all_gather_single(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``dist.all_gather_into_tensor`` by the name that this torch has for it."""
    return _all_gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, full: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``dist.reduce_scatter_tensor`` by the name that this torch has for it."""
    return _reduce_scatter(output, full, op=op, group=group, async_op=async_op)


def premultiplier(op: Any) -> Any | None:
    """What ``ReduceOp.PREMUL_SUM`` multiplies each rank's values by before it sums them; None for any other op."""
    return op.__getstate__()[1] if op == dist.ReduceOp.PREMUL_SUM else None


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """The device on which a process group works: a GPU if it can, with the index that is current."""
    kinds = {device.type for device in getattr(group, "_device_types", [])}
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def in_backward() -> bool:
    """Whether the calling thread is inside a run of the autograd engine."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def run_wrap_policy(policy: Any, root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """The modules that one of torch's policy objects wants wrapped, each with keyword arguments of its own."""
    return policy._run_policy(root, ignored_modules=set(), root_kwargs={})


def is_policy_object(policy: Any) -> bool:
    """Whether `policy` is one of torch's policy objects (``ModuleWrapPolicy``, ``CustomPolicy``)."""
    from torch.distributed.fsdp.wrap import _Policy

    return isinstance(policy, _Policy)


def tensors_of(value: Any) -> Iterable[torch.Tensor] | None:
    """The tensors of a container that torch's pytree registry knows, None for a type it does not know."""
    from torch.utils import _pytree

    if type(value) not in _pytree.SUPPORTED_NODES:
        return None
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
