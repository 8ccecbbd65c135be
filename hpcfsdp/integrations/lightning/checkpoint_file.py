"""Lightning's checkpoints as HDF5 files: model, optimizers, and what else Lightning keeps."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.plain_values import from_plain, to_plain
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

Path = str | os.PathLike[str]

TYPES = "lightning_types"
"""In `extra` of a file, next to Lightning's own entries: where tuples, tensors and bytes are in these."""
VERSION = "pytorch-lightning_version"
_IN_FILE = ("state_dict", "optimizer_states")  # what Lightning has in its dict, and the file in tensors of their own


class ModelCheckpoint(LightningModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, whose files are called ``.h5``."""

    FILE_EXTENSION = ".h5"


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, to save and load their state. It shares their groups, and cannot step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Not super's: groups and state are those of the optimizers.
        self._optimizers = optimizers
        self.defaults = {key: value for one in optimizers for key, value in one.defaults.items()}
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self.state: dict[Any, Any] = {key: state for one in optimizers for key, state in one.state.items()}
        params = [param for group in self.param_groups for param in group["params"]]
        if len(params) != len(set(params)):
            raise CheckpointError(
                "two optimizers step the same parameter, and a file has one state for each: give each its own"
            )

    def spread(self) -> None:
        """Give each optimizer its part of the state that was loaded into this one."""
        for one in self._optimizers:
            one.state.clear()
            for param in (param for group in one.param_groups for param in group["params"]):
                if param in self.state:
                    one.state[param] = self.state[param]


def save(
    path: Path,
    others: Mapping[str, Any],
    comm: Communicator,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    step: int,
) -> None:
    """Write one file with model, optimizers, and what else Lightning keeps. Collective over all ranks, those of `comm`.

    Rank 0's `path` counts, and its `others`.
    """
    with raise_together(comm):
        joined = JoinedOptimizer(optimizers) if optimizers else None
        values = _plain(others) if comm.rank == 0 else None
    checkpoint.save(path, model=model, optimizer=joined, step=step, extra=values)


def others_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``Trainer.dump_checkpoint`` gives beside states of model and optimizers; hooks must leave these."""
    if any(found["state_dict"]) or any(found.get("optimizer_states", ())):
        raise CheckpointError(
            "a hook has put values into checkpoint['state_dict'] or ['optimizer_states'], which the file does not "
            "take from there: use an entry of another name"
        )
    return {key: value for key, value in found.items() if key not in _IN_FILE}


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    types: dict[str, Any] = {}
    for key, value in found.items():
        try:
            values[key], types[key] = to_plain(f"the checkpoint's {key!r}", value)
        except CheckpointError as error:
            hint = "; self.save_hyperparameters(ignore=[...]) leaves it out" if key.endswith("hyper_parameters") else ""
            raise CheckpointError(f"{error}{hint}") from None
    return {**values, TYPES: {key: list(map(list, places)) for key, places in types.items() if places}}


def load(
    path: Path,
    comm: Communicator,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    strict: bool,
    *,
    is_fit: bool,
) -> dict[str, Any]:
    """Load model and optimizers from a file, and return the rest of Lightning's dict. Collective over all ranks.

    Rank 0's `path` counts. Without `optimizers` these stay as they are. The fit of a Trainer needs more than both:
    `is_fit` raises CheckpointMismatchError for a file that cannot resume it.
    """
    path = comm.broadcast_object(os.fspath(path))
    joined = JoinedOptimizer(optimizers) if optimizers else None
    if is_fit:
        with raise_together(comm):
            if comm.rank == 0:
                _check_resumable(path, needs_optimizer=joined is not None)
    try:
        extra = checkpoint.load(path, model=model, optimizer=joined, strict=strict).extra
    except CheckpointCorruptError as error:
        raise _explained(path, error) from error
    if joined is not None:
        joined.spread()
    if TYPES not in extra:  # no Trainer with this strategy wrote it: it is imported, or of hpcfsdp.checkpoint.save
        others = {key: value for key, value in extra.items() if key not in _IN_FILE and (key != "loops" or value)}
        return {VERSION: pl.__version__, **_with_tensors(others)}
    types = {key: [(tuple(at), kind) for at, kind in places] for key, places in extra[TYPES].items()}
    return {key: from_plain(value, types.get(key, ())) for key, value in extra.items() if key != TYPES}


def _with_tensors(value: Any) -> Any:
    """Tensors for arrays: callbacks compare their best scores with tensors."""
    if type(value) is dict:
        return {key: _with_tensors(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_tensors(entry) for entry in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _explained(path: str, error: CheckpointCorruptError) -> CheckpointCorruptError:
    if not zipfile.is_zipfile(path):
        return error
    kind = type(error)(
        f"{path} is a file of torch.save, as Lightning's other strategies write it, and not HDF5: convert it with "
        f"hpcfsdp import {path} {os.path.splitext(path)[0]}.h5"
    )
    kind.raised_on_all_ranks = True
    return kind


def _check_resumable(path: str, *, needs_optimizer: bool) -> None:
    """Raise CheckpointMismatchError unless the file has what ``fit`` goes on with."""
    try:
        index = checkpoint.open_index(path)
    except CheckpointCorruptError as error:
        raise _explained(path, error) from error
    lacks = "state of Lightning's loops" if "loops" not in index.info.extra else ""
    if needs_optimizer and index.param_groups is None:
        lacks = "optimizer, as after save_weights_only=True or an import"
    if lacks:
        raise CheckpointMismatchError(
            f"{path}: has no {lacks}, so a fit cannot resume from it: to start anew with its weights, call "
            "hpcfsdp.checkpoint.load(path, model=module) before trainer.fit(module)"
        )
