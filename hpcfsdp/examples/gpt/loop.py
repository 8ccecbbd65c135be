"""The training: resume, step, checkpoint, evaluate, and stop after a step when the job is about to end."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from hpcfsdp import Preemption, World, checkpoint, observe
from hpcfsdp.data import ResumableSampler
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, DataError, HpcfsdpError, UsageError
from hpcfsdp.examples.gpt import data
from hpcfsdp.examples.gpt.callbacks import Callbacks
from hpcfsdp.examples.gpt.evaluate import HeldOut, evaluate
from hpcfsdp.examples.gpt.optimizers import learning_rate, make_optimizer, set_options, set_rate
from hpcfsdp.examples.gpt.parallel import make_mesh, shard, share_of, to_device
from hpcfsdp.examples.gpt.run_config import OF_THE_MODEL, OF_THE_TRAINING, RunConfig, as_list, changes, num_replicas
from hpcfsdp.examples.gpt.transformer import GPT, count_elements

Result = TypeVar("Result")

log = logging.getLogger("hpcfsdp.train")
data_log = logging.getLogger("hpcfsdp.data")
checkpoint_log = logging.getLogger("hpcfsdp.checkpoint")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    """Steps done in all runs so far."""
    checkpoint: Path | None
    """The newest checkpoint, None if nothing was trained."""
    held_out: HeldOut | None
    """None if it was stopped."""
    stopped: str
    """Why it was stopped before its last step, or ""."""


class Trainer:
    """Model, optimizer and data of one run on one rank. Creating one and all methods are collective over all ranks.

    ``run_config.check`` must have accepted the configuration.
    """

    def __init__(self, config: RunConfig, world: World, stop: Preemption, callbacks: Callbacks) -> None:
        self.config, self.world, self.stop, self.callbacks = config, world, stop, callbacks
        self.run_dir = Path(config.run_dir)
        self.window = config.model.context + 1
        self.step = 0
        self.resumed_from: checkpoint.CheckpointInfo | None = None
        self.observed: observe.Run | None = None
        # Rank 0 looks for all: one walk through the folders, and one view of a shared file system.
        self.newest, self.split, self.keeps_place = on_rank_0(world, self._look)
        self.corpus = data.Corpus(self.split.train)
        windows = data.num_windows(len(self.corpus), config.model.context)
        # The samples of all ranks, which micro-batches and parts divide, also where these do not divide the batch.
        options: dict[str, Any] = {"seed": config.seed, "tail": "pad", "rank": 0, "ranks": 1}
        self.sampler = ResumableSampler(windows, global_batch=config.train.batch, **options)
        self.batches: Iterator[list[int]] = iter(())
        self.mesh = make_mesh(config.mesh, world)
        self.share = share_of(self.mesh, world)
        torch.manual_seed(config.seed)
        self.model = shard(GPT(config.model), self.mesh, world, use_orig_params=config.optimizer == "muon")
        self.optimizer = make_optimizer(config, self.model, world)
        self.manager = checkpoint.CheckpointManager(
            self.run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last or None,
            keep_every=config.checkpoint.keep_every or None,
            asynchronous=config.checkpoint.asynchronous,
            on_saved=lambda saved: self.observed.checkpoint(saved) if self.observed is not None else None,
            every=config.checkpoint.every or None,
            every_s=config.checkpoint.every_s or None,
            memory_every=config.checkpoint.memory_every or None,
        )
        self.saved_config = asdict(config)
        self._resume()
        callbacks.before_save()

    def run(self) -> Outcome:
        """Train until the steps are done or the job has to stop; the newest checkpoint then holds every step."""
        loop = self.config.train
        began = self.callbacks.began_after(self.step)
        last = min(loop.steps, began + loop.run_steps) if loop.run_steps else loop.steps
        if self.step >= last:
            log.warning("all %d steps are done already; raise train.steps to go on", loop.steps)
        stopped = False
        try:
            with self._observe() as observed:
                with self.manager, self.callbacks.steps(self.step, last):
                    while self.step < last and not stopped:
                        loss, norm, rate, tokens = self._train_step()
                        observed.step(loss=loss, reduce=False, tokens=tokens, grad_norm=norm, lr=rate)
                        stopped = self.stop.requested(self.step)
                        self.save(now=self.step == last or stopped)
                if stopped:
                    log.warning("stopped after step %d: %s; the checkpoint is complete", self.step, self.stop.reason)
                    observed.event("signal", reason=self.stop.reason)
                    observed.close("stopped", self.stop.reason)
                    return Outcome(self.step, self.newest, None, self.stop.reason)
                corpus = data.Corpus(self.split.held_out)
                with contextlib.closing(corpus):
                    sizes = self.config.model.context, self.config.eval.bytes
                    held_out = evaluate(self.model, self.world, self.share, corpus, *sizes)
                observed.record("held_out", **asdict(held_out))
                return Outcome(self.step, self.newest, held_out, "")
        finally:
            self.corpus.close()

    def save(self, *, now: bool) -> None:
        """Save checkpoints of the current step that are due, or a file `now`, unless parameters are not finite."""
        given: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "config": self.saved_config}
        given |= {"data": self.sampler, "extra": {"data": {"corpus": self.split.fingerprint}}}
        if now:
            self.manager.step()
            with self.observed.paused():
                self.newest = self.manager.save(self.step, metrics=self._before_file(), **given)
        else:
            self.newest = self.manager.step(self.step, metrics=self._before_file, **given) or self.newest

    def _before_file(self) -> dict[str, tuple[list[int], list[float]]]:
        """Check that a file may be written; return its curves."""
        self._check_finite()
        self.callbacks.before_save()
        return self.observed.series()

    def _observe(self) -> observe.Run:
        """Return the figures of the steps that follow."""
        config, shape = self.config.observe, self.config.model
        # A query attends to half of the context on average; a forward and backward multiply by keys and by values.
        attention = 6 * shape.layers * shape.context * shape.width
        self.observed = observe.Run(
            self.run_dir,
            model=self.model,
            optimizer=self.optimizer,
            resume_step=self.step,
            resumed_from=self.resumed_from,
            every=config.every,
            flops_per_token=6 * count_elements(shape) + attention,
            peak_flops=config.peak_flops or None,
            trace=range(config.trace_from, config.trace_from + config.trace_steps) if self.config.trace else False,
            trackers=as_list(self.config.track),
            on_record=self.callbacks.record,
        )
        return self.observed

    def _train_step(self) -> tuple[float, float, float, int]:
        """Return one optimizer step: loss in nats per byte, gradient norm, learning rate, bytes of this rank."""
        config, share = self.config, self.share
        # Each part of the data has its own dropout masks; ranks that compute with the same part need the same masks.
        torch.manual_seed(data.mask_seed(config.seed, self.step, share.rank))
        rate = learning_rate(self.step, config.train.steps, config.optim)
        set_rate(self.optimizer, config.optim, rate)
        predicted = config.train.batch * config.model.context
        nats, own = torch.zeros((), dtype=torch.float64, device=self.world.device), 0
        for samples in data.share(self._next_batch(), config.train.accumulation, share.rank, share.size):
            windows = [self.corpus.read(sample * config.model.context, self.window) for sample in samples]
            ids = to_device(np.stack(windows), self.world.device)
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            # FSDP averages gradients over the parts. The mean over all bytes of the step differs from that where parts
            # have different numbers of sequences.
            (loss * (share.size / predicted)).backward()
            nats += loss.detach().double()
            own += logits.shape[0] * config.model.context
        norm = self.model.clip_grad_norm_(config.optim.clip_norm or math.inf)
        self.world.communicator.all_reduce(nats, "sum")
        # The only point of a step where the host waits for a device: no optimizer steps before the figures are known.
        total, norm = torch.stack([nats, norm.double()]).tolist()
        mean = total / (predicted * share.copies)
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise _diverged(f"the loss is {mean} and the gradient norm {norm} at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return mean, norm, rate, own

    def _next_batch(self) -> list[int]:
        """Return the samples of a step, over all ranks; behind the last ones of an epoch those of the next."""
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.sampler)
            batch = next(self.batches)
        return batch

    def _check_finite(self) -> None:
        # The loss shows it one step later, when the checkpoint to go back to would hold it already.
        finite = [param.detach().isfinite().all() for param in self.model.parameters()]
        bad_ranks = (~torch.stack(finite).all()).double()
        self.world.communicator.all_reduce(bad_ranks, "sum")
        if bad_ranks.item():
            ranks = f"{int(bad_ranks.item())} of {self.world.size} rank(s)"
            raise _diverged(f"the parameters are not finite after step {self.step} on {ranks}")

    def _look(self) -> tuple[Path | None, data.Split, bool]:
        """On one rank. The newest checkpoint, the data, and whether its place in the data counts.

        They fit each other; no memory of a device is used yet.
        """
        folder = self.run_dir / "checkpoints"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise HpcfsdpError(f"{folder}: cannot write checkpoints there: {error.strerror}") from error
        newest, given = checkpoint.latest(folder), self.config.checkpoint.resume
        if newest is not None and given == "never" and not self.callbacks.goes_on:
            raise UsageError(
                f"checkpoint.resume is never, but {self.run_dir} holds checkpoints up to {newest.name}: a second "
                "training would mix its files with them; choose another run_dir, or remove this one"
            )
        split = self._find_data()
        if newest is not None:
            paths = checkpoint.checkpoint_files(folder)[::-1]
        else:
            paths = [] if given in ("auto", "never") else [Path(given)]
        keeps_place = True  # as versions in memory, which are of this run
        for path in paths:
            try:
                info = checkpoint.open_index(path).info
            except CheckpointError:  # loading reports it, or falls back to the one before
                continue
            check_changes(self.config, split.fingerprint, info)
            same = info.extra.get("data", {}).get("corpus") == split.fingerprint
            keeps_place = same and info.data is not None and info.data.get("seed") == self.config.seed
            break
        return newest, split, keeps_place

    def _find_data(self) -> data.Split:
        split = data.make_split(as_list(self.config.data.paths), self.config.data.held_out)
        sizes = {}
        for name, spans in (("training", split.train), ("held-out", split.held_out)):
            sizes[name] = sum(span.end - span.begin for span in spans)
            data_log.info("%s %d bytes of %d files from %s", name, sizes[name], len(spans), split.source)
        if sizes["training"] < self.window or sizes["held-out"] < 2:
            raise DataError(
                f"{split.source}: {sizes['training']} bytes to learn from and {sizes['held-out']} held out; at least "
                f"{self.window} (model.context + 1) and 2 are needed"
            )
        elements = count_elements(self.config.model)
        ranks = self.world.size // num_replicas(self.config.mesh, self.world.num_nodes)
        if elements < ranks:
            raise UsageError(f"the model has {elements} parameter elements for {ranks} ranks: use fewer ranks")
        return split

    def _resume(self) -> None:
        wanted, path = self.config.checkpoint.resume, self.newest
        if path is None and wanted not in ("auto", "never"):
            path = Path(wanted)
        elif path is not None and wanted != "auto" and Path(wanted) != path:
            # A job that the scheduler starts again has its first arguments: it must not start over.
            log.warning("the run has continued since %s: resuming from %s", wanted, path)
        began = time.perf_counter()
        given: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        given |= {"data": self.sampler if self.keeps_place else None, "fresh": True}
        try:
            info = self.manager.load_latest(**given)
            if info is None and path is not None:
                info = checkpoint.load(path, **given)
        except CheckpointError as error:
            error.args = (f"{error}\nmove the file away to start without it, or choose another run_dir",)
            raise
        if info is None:
            ranks = f"{self.world.size} rank(s)"
            if self.mesh is not None:
                sizes = zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True)
                ranks += " (" + " x ".join(f"{name}={size}" for name, size in sizes) + ")"
            elements = count_elements(self.config.model)
            log.info("new run: %d parameters on %s, %s", elements, ranks, self.world.device.type)
            return
        if not self.keeps_place and info.place is not None:  # in an order that is another one now
            self.sampler.set_epoch(info.place[0] + 1)
        self.step, self.resumed_from = info.step, info
        self.newest = info.path if info.source == "file" else self.newest
        source, seconds = info.path if info.source == "file" else info.source, time.perf_counter() - began
        checkpoint_log.info("loaded %s step=%d ranks=%d secs=%.2f", source, info.step, info.world_size, seconds)
        set_options(self.optimizer, self.config.optim)


def check_changes(config: RunConfig, corpus: str, info: checkpoint.CheckpointInfo) -> None:
    """Compare a training with that of a checkpoint, before anything is loaded. Log what differs, or raise.

    `corpus` is the fingerprint of the data.
    """
    differing = changes(config, info.config or {})
    trained_on = info.extra.get("data", {}).get("corpus", corpus)
    texts = {key: f"{key} was {old}, now {new}" for key, (old, new) in differing.items()}
    if wrong := [texts[key] for key in OF_THE_MODEL if key in texts]:
        raise CheckpointMismatchError(
            f"{info.path} belongs to another model: {'; '.join(wrong)}. Use the checkpoint's values, or choose "
            "another run_dir"
        )
    changed = [texts[key] for key in OF_THE_TRAINING if key in texts]
    if trained_on != corpus:
        paths = (info.config or {}).get("data", {}).get("paths")
        changed.append(f"the data is not what it was trained on (data.paths was {paths}, now {config.data.paths})")
    if changed and not config.checkpoint.resume_changed:
        raise UsageError(
            f"{info.path} belongs to another training: {'; '.join(changed)}. Use the checkpoint's values, choose "
            "another run_dir, or give --checkpoint.resume_changed true to continue with the new values"
        )
    noted = changed + [text for key, text in texts.items() if key not in OF_THE_TRAINING]
    if noted:
        log.info("resuming %s with changes: %s", info.path.name, "; ".join(noted))


def on_rank_0(world: World, work: Callable[[], Result]) -> Result:
    """Have rank 0 do `work`: all ranks return its result, or raise its error. Collective over all ranks."""
    result: Any = None
    error = None
    if world.rank == 0:
        try:
            result = work()
        except HpcfsdpError as caught:
            error = caught
    result, error = world.host.broadcast_object((result, error))
    if error is not None:
        raise error.on_all_ranks()
    return result


def _diverged(what: str) -> HpcfsdpError:
    return HpcfsdpError(
        f"{what}: training has diverged; the last checkpoint is from before that. Try a lower optim.lr or a longer "
        "optim.warmup_steps"
    ).on_all_ranks()
