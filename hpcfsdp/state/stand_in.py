"""What modules are shown, while they save or load, in place of tensors that this rank does not have whole."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype


class StandIn(torch.Tensor):
    """A tensor without memory that has shape and dtype of its `source`.

    Modules detach it, and put it in place of a parameter. What is computed from it has no source.
    """

    source: Any = None

    @classmethod
    def of(cls, source: Any) -> StandIn:
        """In place of a ``ShardedTensor``, a ``DTensor`` or an ``Rank0Tensor``."""
        shape, dtype = shape_and_dtype(source)
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.source = source
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.detach:
            result.source = args[0].source
        return result


def shown_for(value: Any) -> Any:
    """What modules are shown of a value; torch warns when a ``ShardedTensor`` itself is detached."""
    if isinstance(value, (ShardedTensor, DTensor, Rank0Tensor)):
        return StandIn.of(value)
    return value.detach() if isinstance(value, torch.Tensor) else value
