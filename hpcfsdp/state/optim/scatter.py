"""A state dict that one rank has, told to all: scalars at once, tensors one parameter at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.values import on_host
from hpcfsdp.state.transfer import Rank0Tensor
from hpcfsdp.tensor.sharded import check_readable


def check_can_be_sent(optim_state_dict: Mapping[str, Any]) -> None:
    """Refuse what one rank that has the state dict for all cannot give to others.

    Raises:
        StateDictError: with the first distributed tensor, of which it has a part, or value that cannot be pickled, or
            not be made again from its pickle.
    """
    entries = [
        (key, state if isinstance(state, Mapping) else {"": state}) for key, state in optim_state_dict["state"].items()
    ]
    groups = optim_state_dict.get("param_groups", ())
    entries += [(f"parameter group {place}", group) for place, group in enumerate(groups)]
    for key, state in entries:
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                check_readable(f"{key}/{name}", value)
            else:
                _check_travels(f"{name!r} of {key!r}", value)
            if isinstance(value, (ShardedTensor, DTensor)):
                raise StateDictError(
                    f"{name!r} of {key!r} is a {type(value).__name__}: where rank 0 has the state dict for all, "
                    "it has to have whole tensors; gather them, or have all ranks load it without rank0_only"
                )


_PLAIN = (bool, int, float, str, type(None))


def _check_travels(what: str, value: Any) -> None:
    """Refuse a value of which other ranks cannot be sent a copy. Subclasses of plain types may be local ones, too."""
    if type(value) in _PLAIN:
        return
    hint = "leave it out, or have all ranks load the state dict without rank0_only"
    try:
        packed = pickle.dumps(on_host(value))
    except Exception as error:  # whatever a class of a user's own raises
        raise StateDictError(
            f"{what} is a {type(value).__name__} that cannot be pickled, and so not be sent to other ranks: {hint}"
        ) from error
    try:
        pickle.loads(packed)
    except Exception as error:
        raise StateDictError(
            f"{what} is a {type(value).__name__} that cannot be made again from its pickle ({error}), and so not be "
            f"sent to other ranks: {hint}"
        ) from error


def broadcast_processed_state(ranks: Communicator | Grid, optim_state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Collective over `ranks`. What rank 0 has, in which an ``Rank0Tensor`` stands for each tensor with dimensions.

    Args:
        optim_state_dict: on rank 0; ignored elsewhere. ``state`` and ``param_groups`` are sent, and nothing else.

    Raises:
        StateDictError: on all ranks, if rank 0 has what it cannot send, or another rank cannot read what it was sent.
    """
    packed = None
    with raise_together(ranks):
        if ranks.rank == 0:
            given = optim_state_dict or {"state": {}}
            check_can_be_sent(given)
            packed = _packed(_processed(given, with_tensors=False))
    # Ranks broadcast bytes: an object that fails as it is packed or read would leave the others waiting.
    packed = ranks.broadcast_object(packed)
    with raise_together(ranks):
        return _processed(given, with_tensors=True) if ranks.rank == 0 else _unpacked(packed)


def _packed(processed: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(processed)
    except Exception as error:  # of values each has been seen to be pickled: of what is left, keys
        raise StateDictError(f"the optimizer's state dict cannot be sent to other ranks: {error}") from error


def _unpacked(packed: bytes) -> dict[str, Any]:
    try:
        return pickle.loads(packed)
    except Exception as error:
        raise StateDictError(
            "what rank 0 has sent of the optimizer's state dict cannot be read here "
            f"({type(error).__name__}: {error}): let this rank import the same classes, or have all ranks load the "
            "state dict without rank0_only"
        ) from error


def _processed(optim_state_dict: Mapping[str, Any], *, with_tensors: bool) -> dict[str, Any]:
    """``state`` and ``param_groups``. Stand-ins are for the values of state alone: what lies deeper is small."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return on_host(value)
        return Rank0Tensor(value.shape, value.dtype, value.detach() if with_tensors else None)

    state = {
        key: {name: stand_in(value) for name, value in entry.items()} if isinstance(entry, Mapping) else stand_in(entry)
        for key, entry in optim_state_dict["state"].items()
    }
    found: dict[str, Any] = {"state": state}
    if "param_groups" in optim_state_dict:
        found["param_groups"] = on_host([dict(group) for group in optim_state_dict["param_groups"]])
    return found


def broadcast_state(ranks: Communicator | Grid, value: Any, device: torch.device) -> Any:
    """Collective over `ranks` for an ``Rank0Tensor``, or a dict of them: they become tensors on all ranks.

    All else is as it is.

    Args:
        device: where the tensor is to lie.
    """
    if isinstance(value, Mapping):
        return {key: broadcast_state(ranks, inner, device) for key, inner in sorted(value.items(), key=repr)}
    if not isinstance(value, Rank0Tensor):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
    if ranks.rank == 0:
        tensor.copy_(value.tensor)
    ranks.broadcast(tensor, 0)
    return tensor.to(device)
