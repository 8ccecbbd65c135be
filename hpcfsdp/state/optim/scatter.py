"""A state dict that one rank has, told to all: scalars at once, tensors one parameter at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.compare import Untold, on_host, tellable
from hpcfsdp.state.ranks import Grid
from hpcfsdp.state.transfer import OnFirst
from hpcfsdp.tensor.sharded import check_readable


def check_can_be_sent(optim_state_dict: Mapping[str, Any]) -> None:
    """Refuse what one rank that has the state dict for all cannot give to others.

    Raises:
        StateDictError: with the first distributed tensor, of which it has a part, or value that cannot be pickled.
    """
    entries = [
        (key, state if isinstance(state, Mapping) else {"": state}) for key, state in optim_state_dict["state"].items()
    ]
    groups = optim_state_dict.get("param_groups", ())
    entries += [(f"parameter group {place}", group) for place, group in enumerate(groups)]
    for key, state in entries:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) and isinstance(tellable(value), Untold):
                raise StateDictError(
                    f"{name!r} of {key!r} is a {type(value).__name__} that cannot be pickled, and so not be sent to "
                    "other "
                    "ranks: leave it out, or have all ranks load the state dict without rank0_only"
                )
            if isinstance(value, torch.Tensor):
                check_readable(f"{key}/{name}", value)
            if isinstance(value, (ShardedTensor, DTensor)):
                raise StateDictError(
                    f"{name!r} of {key!r} is a {type(value).__name__}: where rank 0 has the state dict for all, "
                    "it has to have whole tensors; gather them, or have all ranks load it without rank0_only"
                )


def broadcast_processed_state(ranks: Communicator | Grid, optim_state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Collective over `ranks`. What rank 0 has, in which an ``OnFirst`` stands for each tensor with dimensions.

    Args:
        optim_state_dict: on rank 0; ignored elsewhere.
    """
    if ranks.rank != 0:
        return ranks.broadcast_object(None)
    ranks.broadcast_object(_processed(optim_state_dict or {}, with_tensors=False))
    return _processed(optim_state_dict or {}, with_tensors=True)


def _processed(optim_state_dict: Mapping[str, Any], *, with_tensors: bool) -> dict[str, Any]:
    """Stand-ins are for the values of state alone: what lies deeper, and tensors in groups, are small."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return on_host(value)
        return OnFirst(value.shape, value.dtype, value.detach() if with_tensors else None)

    state = {
        key: {name: stand_in(value) for name, value in entry.items()} if isinstance(entry, Mapping) else stand_in(entry)
        for key, entry in optim_state_dict["state"].items()
    }
    found = {**optim_state_dict, "state": state}
    if "param_groups" in optim_state_dict:
        found["param_groups"] = on_host([dict(group) for group in optim_state_dict["param_groups"]])
    return found


def broadcast_state(ranks: Communicator | Grid, value: Any, device: torch.device) -> Any:
    """Collective over `ranks` for an ``OnFirst``, or a dict of them: they become tensors on all ranks.

    All else is as it is.

    Args:
        device: where the tensor is to lie.
    """
    if isinstance(value, Mapping):
        return {key: broadcast_state(ranks, inner, device) for key, inner in sorted(value.items(), key=repr)}
    if not isinstance(value, OnFirst):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
    if ranks.rank == 0:
        tensor.copy_(value.tensor)
    ranks.broadcast(tensor, 0)
    return tensor.to(device)
