"""State dicts of schedulers, scalers and the like in the ``extra`` of a checkpoint; random numbers that wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hpcfsdp.checkpoint.format.plain_values import from_plain, to_plain
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.errors import CheckpointMismatchError

FILE_NAME = "checkpoint.h5"  # of the checkpoint in a folder that a library has chosen
_KEY = "state_dicts"


def pack(holders: Mapping[str, Any]) -> dict[str, Any]:
    """Return `extra` of a checkpoint with the state dicts of objects. Raises CheckpointError for what no file keeps."""
    packed = {}
    for name, holder in holders.items():
        value, types = to_plain(f"the state dict's {name!r}", holder.state_dict())
        packed[name] = {"value": value, "types": [[list(place), kind] for place, kind in types]}
    return {_KEY: packed}


def unpack(extra: Mapping[str, Any], holders: Mapping[str, Any], path: Any) -> None:
    """Load the state dicts of ``pack`` into the same objects.

    Raises CheckpointMismatchError if the file at `path` was saved with other objects.
    """
    packed = extra.get(_KEY, {})
    if set(packed) != set(holders):
        raise CheckpointMismatchError(
            f"{path}: was saved with {_listed(packed)}, and here are {_listed(holders)}: prepare and register the same "
            "objects before loading"
        )
    for name, holder in holders.items():
        types = tuple((tuple(place), kind) for place, kind in packed[name]["types"])
        holder.load_state_dict(from_plain(packed[name]["value"], types))


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"


class HeldGenerators:
    """Random number states of a checkpoint, which a training loop restores later than the rest."""

    def __init__(self) -> None:
        self._states: dict[str, np.ndarray] | None = None
        self._device = torch.device("cpu")

    @contextlib.contextmanager
    def held_back(self, device: torch.device) -> Iterator[None]:
        """Return a context around ``checkpoint.load``: afterwards generators are as before; new states are kept."""
        before, self._device = rng.capture(device), device
        yield
        self._states = rng.capture(device)
        rng.restore(before, device)

    def restore(self) -> None:
        """Not collective. Set the generators to the states of the checkpoint; without one nothing happens."""
        if self._states is not None:
            rng.restore(self._states, self._device)
            self._states = None
