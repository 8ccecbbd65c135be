"""Trackers: libraries of others that get the figures of each record, on rank 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcfsdp.errors import UsageError, nearest


class Tracker(Protocol):
    """An object that gets figures. ``Run`` calls it on rank 0 alone."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take figures of a step, `values` by name, such as "loss" and "memory/peak_bytes"; all are finite."""

    def close(self) -> None:
        """End: the run has ended."""


class TensorBoard:
    """Writes event files of TensorBoard to the folder tensorboard/ of the run, with torch's ``SummaryWriter``."""

    def __init__(self, directory: Path, *, resume_step: int = 0) -> None:
        """Open the event file in `directory`. TensorBoard hides what an earlier run wrote after `resume_step`."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step else None
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the `values` of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases. The run has the name of its folder, and goes on after a restart.

    ``WANDB_MODE=offline`` keeps everything in the folder wandb/ of the run; ``wandb sync`` uploads it later. A run that
    ``wandb.init`` has begun before is used as it is, and left open.
    """

    def __init__(self, directory: Path, *, resume_step: int = 0) -> None:
        """Begin the run of the folder `directory`, or go on with it: steps up to `resume_step` are there already."""
        import wandb

        del resume_step  # wandb refuses steps that it has, with a warning
        self._is_own = wandb.run is None
        name = directory.resolve().name
        self._run = wandb.run or wandb.init(dir=str(directory), id=name, name=name, resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the `values` of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


_BY_NAME: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
"""By the names of the packages that they need."""


def check_trackers(names: Iterable[Any]) -> None:
    """Raise a UsageError for one of `names` that is unknown, or whose library is not installed. Not collective.

    Objects with the methods of ``Tracker`` pass.
    """
    for name in names:
        if not isinstance(name, str):
            if not (callable(getattr(name, "log", None)) and callable(getattr(name, "close", None))):
                raise UsageError(f"observe: {type(name).__name__} is no tracker: it needs the methods log and close")
            continue
        if name not in _BY_NAME:
            raise UsageError(
                f"observe: there is no tracker {name!r}: use one of {', '.join(_BY_NAME)}{nearest(name, _BY_NAME)}"
            )
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"observe: the tracker {name!r} needs {name}: pip install 'hpcfsdp[{name}]'")


def make_trackers(names: Iterable[Any], directory: Path, *, resume_step: int) -> list[Tracker]:
    """Return the trackers of these names; objects are returned as they are. On rank 0."""
    return [_BY_NAME[name](directory, resume_step=resume_step) if isinstance(name, str) else name for name in names]
