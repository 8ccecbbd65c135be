"""Hooks for a program that runs the training: the folder of the run, and the output of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any


class Callbacks:
    """Called by the training on every rank. These do nothing; ``hpcfsdp train`` has its own."""

    goes_on = False
    """Whether this job goes on after a loss: the checkpoints in the folder of the run are its own."""

    def before_save(self) -> None:
        """Do what comes before a checkpoint, and before the training. Collective over all ranks."""

    def began_after(self, step: int) -> int:
        """Return the step after which this job began, where it goes on after `step` now. Collective over all ranks."""
        return step

    def steps(self, done: int, last: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the steps `done` + 1 to `last`."""
        return contextlib.nullcontext()

    def record(self, record: Mapping[str, Any]) -> None:
        """Handle a record of ``observe.Run``: the figures of a step ("train"), or of the evaluation ("held_out")."""
