"""Stops a Trainer before its job ends, on all ranks after the same step, with a checkpoint and the exit code 75."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointError
from hpcfsdp.launch.job import current_job
from hpcfsdp.preempt import exit_requeue, preemption

log = logging.getLogger("hpcfsdp.lightning")


class Requeue(Callback):
    """When a signal arrives or the job ends soon: saves ``requeue.h5``, and leaves with 75, "run me again".

    From its construction on USR1, USR2 and TERM end no rank: the training step that is running is finished first.
    `folder` is that of the file, and of other checkpoints to resume from; `before_end_s` is as ``hpcfsdp.preemption``
    takes it. Raises LaunchError outside of the main thread, and UsageError if `before_end_s` is negative.
    """

    def __init__(self, folder: str | os.PathLike[str], *, before_end_s: float | None = None) -> None:
        self.folder = Path(folder)
        self._stop = preemption(before_end_s=before_end_s)
        self._stop.__enter__()
        self._step = -1

    def resume_path(self) -> str | None:
        """Return the file in the folder with the most steps that ``fit`` can resume. Collective over the job.

        Rank 0 looks at ``*.h5`` and ``*.ckpt``. It leaves out files without optimizer, and logs which are damaged.
        None where there is no such file: the training starts.
        """
        comm, found = current_job().comm, list[tuple[int, float, str]]()
        paths = [path for path in self.folder.glob("*") if path.suffix in (".h5", ".ckpt")] if comm.rank == 0 else []
        for path in sorted(paths):
            try:
                index = checkpoint.open_index(path)
            except CheckpointError as error:
                log.warning("not resuming from %s", error)
                continue
            if index.param_groups is not None and "loops" in index.info.extra:
                found.append((index.info.step, path.stat().st_mtime, str(path)))
        return comm.bcast(max(found)[2] if found else None)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str = "") -> None:
        # Again: the Trainer sets a handler of its own for TERM before each run, which communicates while a rank may be
        # inside of a collective.
        self._stop.__enter__()

    on_sanity_check_start = setup

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.setup(trainer, pl_module)
        self._step = trainer.global_step  # after a loss the same on all ranks, also those that were spares

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop.__exit__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._step:  # gradients are being accumulated, and would be lost
            return
        self._step = step
        if self._stop.requested(step):
            trainer.save_checkpoint(self.folder / "requeue.h5")
            if trainer.is_global_zero:
                log.warning("stopped after step %d: %s", step, self._stop.reason)
            exit_requeue()
