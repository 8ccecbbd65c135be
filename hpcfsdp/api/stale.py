"""What is looked at before an optimizer steps: that it steps the shards, and nothing else.

An optimizer that was built before wrapping holds parameters that nobody computes with any more.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp.api.taken import hidden_fqn
from hpcfsdp.errors import EngineError
from hpcfsdp.runtime.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """Have each optimizer of this process looked at before its first step. Further calls do nothing."""
    register_optimizer_step_pre_hook(_check)


def watch_engine(engine: Engine) -> None:
    """Have parameters that a forward without a backward has left whole resharded before an optimizer steps them."""
    _engines.add(engine)


def _check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for engine in _engines:
        engine.rest()
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _checked.get(optimizer) == count:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            fqn = hidden_fqn(param)
            if fqn is not None:
                mend = "build the optimizer from model.parameters() after wrapping the model"
                if isinstance(param, DTensor):  # of which units keep the block
                    mend += ", outside of summon_full_params"
                else:
                    mend += ", or wrap it with use_orig_params=True"
                raise EngineError(
                    f"the {type(optimizer).__name__} steps {fqn!r}, which has been sharded since and gets no gradient: "
                    + mend
                )
    _checked[optimizer] = count
