"""Uses of a wrapped model that bypass its forward: errors with what to call instead."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.units.flat_unit import FlatUnit
from hpcfsdp.units.lazy_init import become_root

PAST_FORWARD = frozenset({"generate"})
"""Methods of wrapped modules that compute without a call of the wrapper: those of transformers."""


def guarded(unit: FlatUnit, name: str, method: Any) -> Any:
    """A method of the wrapped module that computes. Calls are collective.

    They raise an ``EngineError`` while parameters of the wrapper itself are sharded.
    """
    if not callable(method):
        return method

    @public_call(name)
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.is_idle and not all(flat.is_unsharded or flat.shows_whole for flat in unit.sharded_params):
            raise EngineError(
                f"{unit.name}: {name} runs the wrapped module without the wrapper's forward, so its parameters are "
                "not gathered: call it within FullyShardedDataParallel.summon_full_params(model, recurse=False, "
                "writeback=False); units inside gather their own parameters"
            )
        if unit.root is None:
            become_root(unit)  # before units inside become roots
        return method(*args, **kwargs)

    return call


class RefusesOtherWrappers:
    """Attributes that other libraries read before they wrap a module."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Read by torch's DistributedDataParallel before it changes anything. Always raises an ``EngineError``."""
        raise EngineError(
            "DistributedDataParallel, or Accelerator.prepare, was called with a model that is already wrapped in "
            "FullyShardedDataParallel, which reduces gradients itself: use the wrapped model as it is; with "
            "accelerate, prepare only the optimizer and the data loader; transformers' Trainer takes the plain model "
            "and trains replicas; hpcfsdp.integrations has a Trainer and an Accelerator that shard; for replicas of "
            "shards use sharding_strategy=ShardingStrategy.HYBRID_SHARD"
        )

    @functools.cached_property  # accelerate may set it
    def _is_accelerate_prepared(self) -> bool:
        """Read by ``Accelerator.prepare`` and ``Accelerator.prepare_model`` before they change anything.

        Warns:
            UserWarning: accelerate counts one process, and the model is sharded over several.
        """
        size = self._unit.mesh.dtensor_ranks.size  # type: ignore[attr-defined]
        accelerate = sys.modules.get("accelerate")
        if accelerate is not None and size > 1 and accelerate.PartialState().num_processes == 1:
            warnings.warn(
                f"the model is sharded over {size} ranks, but accelerate sees only one process and gives every rank "
                "the same data. Call hpcfsdp.init() before Accelerator() (on CPUs: Accelerator(cpu=True)), or divide "
                "the data yourself",
                stacklevel=4,
            )
        return False


def refuse_ddp_around(unit: FlatUnit) -> None:
    """Called when a wrapper lists its own parameters, as torch's DistributedDataParallel does for all modules.

    Raises:
        EngineError: one is under construction around the wrapper, and would average sharded parameters.
    """
    found = _compat.ddp_in_construction()
    if found is None:
        return
    model, ignored = found
    name = next((name for name, module in model.named_modules() if module is unit.wrapper), "")
    plain = unit.options.ignored.params
    sharded = [inner for inner, param in unit.wrapper.named_parameters(prefix=name) if param not in plain]
    averaged = [inner for inner in sharded if inner not in ignored]
    if averaged:
        raise EngineError(
            f"DistributedDataParallel was called with a {type(model).__name__} in which FullyShardedDataParallel has "
            f"wrapped {name!r}: it would overwrite this rank's shard of {averaged[0]!r} with rank 0's, and average "
            "gradients of different shards. Wrap each of the other modules in DistributedDataParallel, or the whole "
            "model in FullyShardedDataParallel"
        )
