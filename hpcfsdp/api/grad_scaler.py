"""A gradient scaler for sharded gradients."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.hang.calls import public_call


class ShardedGradScaler(TorchShardedGradScaler):
    """Scales losses and gradients for float16, like torch's class of the same name; all ranks step, or none.

    A rank sees the gradients of its own shards, so all ranks have to agree on whether there is an inf or a NaN. Beyond
    torch's:

    - ranks agree also for fused optimizers, which unscale on their own; in torch ranks without an inf step, and the
      scales differ;
    - the process group is looked up when it is needed; in torch the default is that of the time of import;
    - ranks with gradients on different devices, or without gradients, do not wait for each other;
    - the scale does not grow to infinity on the CPU either.

    Args:
        device: the kind of device of the scale, "cuda" or "cpu".
        init_scale: the first scale.
        backoff_factor: the scale is multiplied by this after a step with an inf or a NaN.
        growth_factor: the scale is multiplied by this after `growth_interval` steps without an inf or a NaN.
        growth_interval: a number of steps.
        enabled: False to do nothing at all.
        process_group: the ranks that hold gradients of one model, all replicas among them, as a ``ProcessGroup`` or a
            ``Communicator``; by default all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | Communicator | None = None,
    ) -> None:
        group: Any = process_group  # torch only keeps it
        super().__init__(device, init_scale, backoff_factor, growth_factor, growth_interval, enabled, group)

    @public_call("ShardedGradScaler.unscale_")
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale. Collective over the process group."""
        # Not torch's sharded one, which agrees after _unscale_grads_: ours agrees within.
        GradScaler.unscale_(self, optimizer)

    @public_call("ShardedGradScaler.step")
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless a rank has an inf or a NaN. Collective over the process group."""
        return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # Called by unscale_, and by the check for optimizers that unscale on their own.
        params = [_in_real_numbers(param) for group in optimizer.param_groups for param in group["params"]]
        shown: Any = SimpleNamespace(param_groups=[{"params": params}])
        found = super()._unscale_grads_(shown, inv_scale, found_inf, True)
        comm = communicator_for(self.process_group, required=False)
        here = torch.stack([flag.detach().reshape(1).to(comm.device) for flag in found.values()]).sum(0)
        comm.all_reduce(here, "max")
        return {found_inf.device: here.to(found_inf.device).view(found_inf.shape)}

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        scale = self._scale
        assert scale is not None  # set before the first update
        before = scale.clone()
        super()._amp_update_scale_cpu_(found_inf)
        if not scale.isfinite():
            scale.copy_(before)


def _in_real_numbers(param: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the parts of a complex gradient as its own, in place: torch unscales real ones alone."""
    if param.grad is None or not param.grad.is_complex():
        return param
    shown = torch.view_as_real(param.grad).detach()
    shown.grad = shown.detach()
    return shown
