"""A strategy for Lightning Fabric that shards models over all ranks of MPI."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.fabric.strategies import STRATEGY_REGISTRY, ParallelStrategy
from torch import nn

from hpcfsdp.errors import CheckpointMismatchError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.integrations.lightning import checkpoint_file
from hpcfsdp.integrations.lightning.sharding import dtypes_of, metrics_to
from hpcfsdp.integrations.lightning.strategy import NAME, ShardingOverMpi, clip_elements, grads_of


class HpcfsdpFabricStrategy(ShardingOverMpi, ParallelStrategy):
    """``Fabric(strategy=HpcfsdpFabricStrategy(...))``, or "hpcfsdp": ``setup`` shards each model over all ranks.

    Creating one is collective over all processes of the job. Call ``fabric.launch()``, which starts no process. Leave
    `devices` and `num_nodes` out. Arguments and errors are those of ``HpcfsdpStrategy``.
    """

    # What Fabric calls by other names than the Trainer.
    _num_nodes = ShardingOverMpi.num_nodes
    _set_world_ranks = ShardingOverMpi.set_world_ranks
    all_reduce = ShardingOverMpi.reduce
    module_to_device = ShardingOverMpi.do_nothing

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = self

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return module.no_sync() if enabled else contextlib.nullcontext()

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context to build a model in: on the CPU, or on the meta device, where it takes no memory."""
        with torch.device("meta" if empty_init else "cpu"), self.precision.module_init_context():
            yield

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model. Collective over all ranks. Optimizers of its parameters stay valid."""
        self._fit(self.precision, Precision, (MixedPrecision, DoublePrecision, HalfPrecision))
        metrics_to(module, self.root_device)
        if isinstance(module, FullyShardedDataParallel):
            return module
        return FullyShardedDataParallel(module, **self._options | dtypes_of(self.precision))

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Any, max_norm: float, norm_type: Any = 2.0, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clip the gradients that `optimizer` steps to a norm over all ranks. Collective over all ranks."""
        self.precision.unscale_gradients(optimizer)
        with grads_of(optimizer, [module]):
            norm: torch.Tensor = module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm.item()}: error_if_nonfinite=False accepts that")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Not collective. Clip each element of the gradients that `optimizer` steps."""
        self.precision.unscale_gradients(optimizer)
        clip_elements(optimizer, clip_val)

    def save_checkpoint(
        self, path: Any, state: Mapping[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write one HDF5 file with the models, optimizers and other values of `state`. Collective over all ranks."""
        if storage_options is not None or filter:
            raise UsageError("fabric.save(filter=...) is not supported: use hpcfsdp.checkpoint.save(names=[...])")
        model, optimizers, others = _sorted_out(state)
        values = {key: each.state_dict() if hasattr(each, "state_dict") else each for key, each in others.items()}
        step = others.get("step")
        checkpoint_file.save(path, values, self.world.host, model, optimizers, step if type(step) is int else 0)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file into the objects of `state`, or a model, and return what is left. Collective over all ranks."""
        model, optimizers, others = _sorted_out({"model": state} if isinstance(state, nn.Module) else state)
        found = checkpoint_file.load(path, self.world.host, model, optimizers, strict, is_fit=False)
        for key, each in others.items():
            if key in found and hasattr(each, "load_state_dict"):
                each.load_state_dict(found.pop(key))
            elif key in found:
                state[key] = found.pop(key)
            elif strict:
                raise CheckpointMismatchError(f"{path}: has no {key!r}: give strict=False to go without")
        return found


STRATEGY_REGISTRY.register(NAME, HpcfsdpFabricStrategy, "Shards models over all ranks of MPI")


def _sorted_out(state: Any) -> tuple[nn.Module, list[torch.optim.Optimizer], dict[str, Any]]:
    """Return the models of a state as one, its optimizers, and all else."""
    kinds = (nn.Module, torch.optim.Optimizer, object)
    found: tuple[dict[str, Any], ...] = ({}, {}, {})
    for key, each in (state or {}).items():
        next(part for part, kind in zip(found, kinds, strict=True) if isinstance(each, kind))[key] = each
    models, optimizers, others = found
    if not models:
        raise UsageError('give a state with a model that Fabric has set up: {"model": model, "optimizer": optimizer}')
    model = nn.ModuleDict(models) if len(models) > 1 else next(iter(models.values()))
    return model, list(optimizers.values()), others
