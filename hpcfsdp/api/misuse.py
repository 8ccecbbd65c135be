"""Ways to use a wrapped model that would go past its forward: errors that say what to call instead."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hpcfsdp.errors import EngineError
from hpcfsdp.launch.calls import public_call
from hpcfsdp.runtime.state import Phase

if TYPE_CHECKING:
    from hpcfsdp.api.wrapper import FullyShardedDataParallel

PAST_FORWARD = frozenset({"generate"})
"""Methods of wrapped modules that run them, of which the wrapper hears nothing: those of transformers."""


def guarded(wrapper: FullyShardedDataParallel, name: str, method: Any) -> Any:
    """A method of the wrapped module that computes, as the wrapper shows it. Collective, if it is called.

    Raises:
        EngineError: when it is called while parameters of the wrapper itself are sharded.
    """
    if not callable(method):
        return method

    @public_call(name)
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        unit = wrapper._unit
        if unit.phase is Phase.IDLE and not all(flat.is_unsharded or flat.shows_whole for flat in unit.flats):
            raise EngineError(
                f"{unit.name}: {name} runs the wrapped module without the forward of the wrapper, which gathers the "
                f"parameters that no unit inside has: call it within FullyShardedDataParallel.summon_full_params("
                "model, recurse=False, writeback=False), where units inside gather their own"
            )
        wrapper.check_is_root()  # before units inside take themselves for the outermost ones
        return method(*args, **kwargs)

    return call


class RefusesDistributedDataParallel:
    """What the wrapper inherits."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Asked for by torch's DistributedDataParallel, before it changes anything.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            "DistributedDataParallel, or Accelerator.prepare, was called with a model that FullyShardedDataParallel "
            "has wrapped, which reduces gradients itself: use the wrapped model as it is, and with accelerate prepare "
            "the data loader alone; for replicas of shards use sharding_strategy=ShardingStrategy.HYBRID_SHARD"
        )
