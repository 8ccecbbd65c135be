"""A state dict that the first rank of a model alone has, for all others to load."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.sharded.unit import units_in
from hpcfsdp.state.ranks import ranks_of_model
from hpcfsdp.state.sources import is_extra_state
from hpcfsdp.state.transfer import Rank0Tensor
from hpcfsdp.tensor.sharded import check_readable

FROM_RANK0 = (
    "if rank 0 alone has the state dict, load it with hpcfsdp.state_dict.set_model_state_dict and the options "
    "full_state_dict=True, broadcast_from_rank0=True"
)
"""How to load what other ranks do not have."""


def checked(state_dict: Any, hint: str = "") -> Mapping[str, Any]:
    """The state dict itself.

    Args:
        hint: what to do if there is none.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(state_dict, Mapping):
        hint = f": {hint}" if hint and state_dict is None else ""
        raise TypeError(f"a state dict must be a mapping of names to tensors, not {type(state_dict).__name__}{hint}")
    for key in state_dict:
        if not isinstance(key, str):
            raise TypeError(f"the names in a state dict must be str, not {key!r} of type {type(key).__name__}")
    return state_dict


class Rank0Source:
    """The first rank of a model, that alone has what is to be loaded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rank = 0

    def announce(self, state_dict: Any) -> tuple[dict[str, Any], Any]:
        """Collective over the ranks of the model. What the first rank has, without its values, and the metadata.

        Extra states are objects, and come as such; tensors in them lie in host memory on other ranks.

        Raises:
            StateDictError: it is not all whole tensors, units do not have their first rank in common, or an extra state
                cannot be sent.
            TypeError: it is no state dict, on the first rank.
            Exception: on the first rank, what its mapping has raised; on others as a ``StateDictError``.
        """
        units, ranks = units_in(self._module), ranks_of_model(self._module)
        is_first = units[0].mesh.is_first()
        self._rank = ranks.all_gather_object(is_first).index(True)
        blob, problem = None, None
        announced: dict[str, tuple[bool, Any]] = {}
        metadata = None
        if is_first:
            try:  # the other ranks wait: whatever is wrong has to be told to them
                announced = {key: _described(key, value) for key, value in checked(state_dict).items()}
                metadata = getattr(state_dict, "_metadata", None)
                blob = _packed(announced, metadata)
            except Exception as error:
                problem = error
        blob, wrong = ranks.broadcast_object((blob, None if problem is None else str(problem)), self._rank)
        if wrong is not None:
            raise problem or StateDictError(f"rank {self._rank}: {wrong}")
        if not is_first:
            announced, metadata = _unpacked(blob, self._rank)
        if any(unit.mesh.is_first() != is_first for unit in units):
            raise StateDictError(
                "one rank is to give the state dict to all, but units are sharded over groups with different first "
                "ranks: pass the whole state dict on every rank"
            )
        values = {
            key: Rank0Tensor(*value, state_dict[key] if is_first else None) if is_tensor else value
            for key, (is_tensor, value) in announced.items()
        }
        return values, metadata

    def broadcast(self, source: Rank0Tensor) -> torch.Tensor:
        """Collective over the ranks of the model. The tensor, on all of them."""
        ranks = ranks_of_model(self._module)
        if source.tensor is None:
            there = torch.empty(source.shape, dtype=source.dtype, device=ranks.device)
        else:
            there = source.tensor.detach().to(ranks.device).contiguous()
        ranks.broadcast(there, self._rank)
        return there


def _described(key: str, value: Any) -> tuple[bool, Any]:
    """Whether a value is a tensor to be loaded, and its shape and dtype if it is; the value itself otherwise."""
    if isinstance(value, (ShardedTensor, DTensor)):
        raise StateDictError(
            f"{key!r} is a {type(value).__name__}: where one rank has the state dict for all, it has to have whole "
            "tensors"
        )
    if is_extra_state(key) or not isinstance(value, torch.Tensor):
        return False, value
    check_readable(key, value)
    return True, (value.shape, value.dtype)


class _OntoHost(pickle.Pickler):
    """Has tensors arrive in host memory: a device of this rank may be none of another one, or another rank's own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _OntoHost(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _packed(announced: Mapping[str, tuple[bool, Any]], metadata: Any) -> bytes:
    """What other ranks are told, as bytes.

    Raises:
        StateDictError: pickle does not take all of it, with the name of what it does not take.
    """
    try:
        return _pickled((announced, metadata))
    except Exception as error:
        for name, value in [*announced.items(), ("_metadata", metadata)]:
            try:
                _pickled(value)
            except Exception as reason:
                raise StateDictError(
                    f"{name!r} cannot be sent to the other ranks, as it cannot be pickled ({reason}): make it of "
                    "tensors and plain data, or pass the whole state dict on every rank"
                ) from error
        raise


def _unpacked(blob: bytes, rank: int) -> tuple[dict[str, tuple[bool, Any]], Any]:
    """What `_packed` has made on another rank.

    Raises:
        StateDictError: a class or function in it is not known here, or refuses.
    """
    try:
        return pickle.loads(blob)
    except Exception as error:
        raise StateDictError(
            f"an extra state in the state dict of rank {rank} cannot be unpickled here ({type(error).__name__}: "
            f"{error}): make it of tensors and plain data, or pass the whole state dict on every rank"
        ) from error
