"""State dicts that rank 0 of a model alone has: small values are broadcast at once, each tensor when it is loaded."""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.comm.communicator import Grid
from hpcfsdp.errors import HpcfsdpError, StateDictError
from hpcfsdp.reshard.sharded_tensors import check_readable, is_distributed
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.shown import is_extra_state
from hpcfsdp.state.tensors import Rank0Tensor
from hpcfsdp.units.flat_unit import units_in

FROM_RANK0 = (
    "if rank 0 alone has the state dict, load it with hpcfsdp.state_dict.set_model_state_dict and the options "
    "full_state_dict=True, broadcast_from_rank0=True"
)
"""How to load a state dict that other ranks do not have."""

_INSTEAD = "leave it out, make it of tensors and plain data, or pass the whole state dict on every rank"


def rank0_tensor(key: str, value: torch.Tensor) -> Rank0Tensor:
    """Return a tensor and its description. Raise a ``StateDictError`` if it is distributed or unreadable."""
    if is_distributed(value):
        raise StateDictError(
            f"{key!r} is a {type(value).__name__}: when only rank 0 has the state dict, its tensors must be whole; "
            "gather them, or pass the state dict on every rank"
        )
    check_readable(key, value)
    return Rank0Tensor(value.shape, value.dtype, value.detach())


def broadcast_values(ranks: Communicator | Grid, values_of: Callable[[], Any], src: int = 0) -> Any:
    """Return the result of `values_of`, which is called on rank `src` alone. Collective over `ranks`.

    The tensor of a ``Rank0Tensor`` stays there. Other tensors are in host memory on the other ranks. An error of
    `values_of` is a ``StateDictError`` on them.
    """
    values = packed = None
    try:
        with raise_together(ranks):
            if ranks.rank == src:
                values = values_of()
                packed = _packed(values)
    except HpcfsdpError as error:
        if type(error) is not HpcfsdpError:
            raise
        raise StateDictError(str(error)).on_all_ranks() from None  # other ranks may not know its class
    # Ranks broadcast bytes: an object that fails while it is pickled or unpickled would leave the others waiting.
    packed = ranks.broadcast_object(packed, src)
    with raise_together(ranks):
        try:
            return values if ranks.rank == src else pickle.loads(packed)
        except Exception as error:
            raise StateDictError(
                f"a value in the state dict of rank {src} cannot be unpickled here ({type(error).__name__}: {error}): "
                f"make the same classes importable on this rank, {_INSTEAD}"
            ) from error


def broadcast_tensor(ranks: Communicator | Grid, value: Rank0Tensor, src: int = 0) -> torch.Tensor:
    """Return the tensor, as new memory on all of them. Collective over `ranks`."""
    tensor = torch.empty(value.shape, dtype=value.dtype, device=ranks.device)
    if value.tensor is not None:
        tensor.copy_(value.tensor)
    ranks.broadcast(tensor, src)
    return tensor


class _HostPickler(pickle.Pickler):
    """Moves tensors to host memory: another rank may not have this device, or use it itself."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Rank0Tensor):
            return Rank0Tensor, (value.shape, value.dtype)
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _packed(values: Any) -> bytes:
    packed, error = _sendable(values)
    if error is None:
        return packed
    path: list[Any] = []
    while isinstance(values, (Mapping, list, tuple)):
        items = values.items() if isinstance(values, Mapping) else enumerate(values)
        found = next(((key, value, wrong) for key, value in items if (wrong := _sendable(value)[1])), None)
        if found is None:
            break
        key, values, error = found
        path.append(key)
    raise StateDictError(
        f"{' of '.join(map(repr, reversed(path))) or 'the state dict'} is a {type(values).__name__} that cannot be "
        f"pickled and unpickled ({error}), so it cannot be sent to other ranks: {_INSTEAD}"
    ) from error


def _sendable(value: Any) -> tuple[bytes, Exception | None]:
    """Return the pickle of a value, or the error that is raised when it is pickled or unpickled."""
    buffer = io.BytesIO()
    try:
        _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
        pickle.loads(buffer.getvalue())
    except Exception as error:  # whatever a class of a user's own raises
        return b"", error
    return buffer.getvalue(), None


class Rank0Source:
    """The first rank of a model, which alone has the model's state dict."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._rank = module, 0

    def announce(self, state_dict: Any) -> tuple[dict[str, Any], Any]:
        """Return the state dict with a ``Rank0Tensor`` per tensor, and its metadata. Collective over the model."""
        units, ranks = units_in(self._module), ranks_of_model(self._module)
        is_first = units[0].mesh.is_first()
        self._rank = ranks.all_gather_object(is_first).index(True)

        def values_of() -> dict[str, Any]:
            found = {
                key: rank0_tensor(key, value) if isinstance(value, torch.Tensor) and not is_extra_state(key) else value
                for key, value in checked(state_dict).items()
            }
            return {"state_dict": found, "_metadata": getattr(state_dict, "_metadata", None)}

        found = broadcast_values(ranks, values_of, self._rank)
        if any(unit.mesh.is_first() != is_first for unit in units):
            raise StateDictError(
                "only one rank has the state dict, but units are sharded over groups with different first ranks: "
                "pass the whole state dict on every rank"
            )
        return found["state_dict"], found["_metadata"]

    def broadcast(self, source: Rank0Tensor) -> torch.Tensor:
        """Return the tensor, on all of them. Collective over the ranks of the model."""
        return broadcast_tensor(ranks_of_model(self._module), source, self._rank)


def checked(state_dict: Any, hint: str = "") -> Mapping[str, Any]:
    """Return the state dict itself. The `hint` is added to the message for None."""
    if not isinstance(state_dict, Mapping):
        hint = f": {hint}" if hint and state_dict is None else ""
        raise TypeError(f"a state dict must be a mapping of names to tensors, not {type(state_dict).__name__}{hint}")
    for key in state_dict:
        if not isinstance(key, str):
            raise TypeError(f"the names in a state dict must be str, not {key!r} of type {type(key).__name__}")
    return state_dict
