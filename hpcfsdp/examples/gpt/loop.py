"""The training loop: resume, step, checkpoint, evaluate, and stop in good order when the scheduler asks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from hpcfsdp import checkpoint, config as configuration
from hpcfsdp.checkpoint.content import Metrics
from hpcfsdp.comm import Communicator, communicator_for, raise_together
from hpcfsdp.errors import CheckpointError, DataError, HpcfsdpError, UsageError
from hpcfsdp.examples.gpt import data
from hpcfsdp.examples.gpt.evaluate import HeldOut, evaluate
from hpcfsdp.examples.gpt.parallel import make_mesh, shard, share_of
from hpcfsdp.examples.gpt.run_config import RunConfig, check, data_paths, num_replicas
from hpcfsdp.examples.gpt.schedule import learning_rate
from hpcfsdp.examples.gpt.transformer import GPT, count_elements
from hpcfsdp.launch.lock import RunLock
from hpcfsdp.launch.signals import StopRequest
from hpcfsdp.observe.metrics import MetricsFile
from hpcfsdp.observe.progress import progress
from hpcfsdp.world import World

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
    """None when the run was stopped early."""
    signal: int
    """Number of the signal that stopped it, 0 if none did."""


class Trainer:
    """Model, optimizer and data of one run on one rank. Making one and all of its methods are collective."""

    def __init__(self, config: RunConfig, world: World, lock: RunLock) -> None:
        self.config, self.world, self.lock = config, world, lock
        self.comm: Communicator = communicator_for(None, required=True)
        self.run_dir = Path(config.run_dir)
        self.step = 0
        self.newest: Path | None = None
        self.curves = _Curves()
        self.manager = checkpoint.CheckpointManager(
            self.run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last or None,
            keep_every=config.checkpoint.keep_every or None,
            asynchronous=config.checkpoint.asynchronous,
        )
        with raise_together(self.comm):
            self.mesh = make_mesh(config.mesh, world)
        self.share = share_of(self.mesh, world)
        self._check_folder()
        self.split = self._find_data()
        self.corpus = data.Corpus(self.split.train)
        self.window = config.model.context + 1
        with raise_together(self.comm):
            self._check_sizes()
        torch.manual_seed(config.seed)
        self.model = shard(GPT(config.model), self.mesh, world)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.optim.lr,
            betas=(config.optim.beta1, config.optim.beta2),
            weight_decay=config.optim.weight_decay,
        )
        self._resume()
        self._write_config()

    def run(self, stop: StopRequest) -> Outcome:
        """Train until the steps are done or a signal asks to stop; the newest checkpoint then holds every step."""
        loop, first = self.config.train, self.step + 1
        last = loop.steps if not loop.run_steps else min(loop.steps, self.step + loop.run_steps)
        if last < first:
            log.warning("all %d steps are done already; raise train.steps to go on", loop.steps)
        metrics = MetricsFile(self.run_dir / "metrics.jsonl", resume_step=self.step) if self.world.rank == 0 else None
        signal_number, began = 0, time.perf_counter()
        try:
            with self.manager, progress(log, self.world.rank, first, last, loop.log_every) as shown:
                while self.step < last and not signal_number:
                    loss, norm, rate, signal_number = self._train_step(stop)
                    seconds, began = time.perf_counter() - began, time.perf_counter()
                    speed = loop.batch * self.config.model.context / seconds
                    shown.step(
                        self.step,
                        f"loss {loss:.4f} ({loss / math.log(2):.3f} bits/byte) norm {norm:.3f} lr {rate:.2e} "
                        f"{speed:.0f} bytes/s",
                    )
                    record = _record(self.step, loss, norm, rate, seconds, speed)
                    self.curves.add(record)
                    if metrics is not None:
                        metrics.write(record)
                    self.manager.step()
                    every = self.config.checkpoint.every
                    if self.step == last or signal_number or (every and self.step % every == 0):
                        self.save()
            if signal_number:
                log.warning("stopped after step %d by signal %d; the checkpoint is complete", self.step, signal_number)
                return Outcome(self.step, self.newest, None, signal_number)
            held_out = self._evaluate()
            if metrics is not None:
                metrics.write({"step": self.step, "kind": "held_out", **vars(held_out)})
            return Outcome(self.step, self.newest, held_out, 0)
        finally:
            self.corpus.close()
            if metrics is not None:
                metrics.close()

    def save(self) -> None:
        """Save a checkpoint of the current step, unless the step has made parameters that are not finite."""
        self._check_finite()
        self._write_config()
        position = {"samples": self.step * self.config.train.batch, "corpus": self.split.fingerprint}
        self.newest = self.manager.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            extra={"data": position},
            config=configuration.to_dict(self.config),
            metrics=self.curves.metrics,
        )

    def _check_finite(self) -> None:
        # The loss tells only at the next step, when the checkpoint to go back to would be damaged already.
        found = [~param.detach().isfinite().all() for param in self.model.parameters()]
        bad = torch.stack(found).any().double()
        self.comm.all_reduce(bad, "sum")
        if bad.item():
            ranks = f"{int(bad.item())} of {self.comm.size} rank(s)"
            raise _diverged(f"the parameters are not finite after step {self.step} on {ranks}")

    def _train_step(self, stop: StopRequest) -> tuple[float, float, float, int]:
        """One optimizer step: loss in nats per byte, gradient norm, learning rate, signal that any rank received."""
        config, comm, share = self.config, self.comm, self.share
        # Dropout masks are found by number, as sequences are: other ones for each part of the data, and on ranks that
        # share a part the same ones, for what they compute there has to be the same.
        torch.manual_seed(data.mask_seed(config.seed, self.step, share.rank))
        rate = learning_rate(self.step, config.train.steps, config.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        predicted = config.train.batch * config.model.context
        summed = torch.zeros((), dtype=torch.float64, device=self.world.device)
        parts = data.share(self.step, config.train.batch, config.train.accumulation, share.rank, share.size)
        for samples in parts:
            ids = self._batch(samples)
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            # The engine averages over parts of the data; what is wanted is the mean over all bytes of the step, also
            # where parts have different numbers of sequences.
            (loss * (share.size / predicted)).backward()
            summed += loss.detach().double()
        norm = self.model.clip_grad_norm_(config.optim.clip_norm or math.inf)
        told = torch.stack([summed, summed.new_tensor(float(stop.received))])
        received = told[1:].clone()
        comm.all_reduce(told, "sum")
        comm.all_reduce(received, "max")
        mean = told[0].item() / (predicted * share.copies)
        if not (math.isfinite(mean) and math.isfinite(norm.item())):
            raise _diverged(f"the loss is {mean} and the gradient norm {norm.item()} at step {self.step + 1}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return mean, norm.item(), rate, int(received.item())

    def _batch(self, samples: range) -> torch.Tensor:
        starts = [data.train_window(self.config.seed, s, len(self.corpus), self.window) for s in samples]
        rows = [torch.from_numpy(self.corpus.read(start, self.window)) for start in starts]
        return torch.stack(rows).to(self.world.device, torch.int64)

    def _evaluate(self) -> HeldOut:
        corpus = data.Corpus(self.split.held_out)
        try:
            context, num_bytes = self.config.model.context, self.config.eval.bytes
            return evaluate(self.model, self.comm, self.share, corpus, context, num_bytes, self.world.device)
        finally:
            corpus.close()

    def _check_folder(self) -> None:
        newest = None
        with raise_together(self.comm):
            if self.world.rank == 0:  # for all: on a shared file system another rank may see an older listing
                newest = checkpoint.latest(self.run_dir / "checkpoints")
                if newest is not None and self.config.checkpoint.resume == "never":
                    raise UsageError(
                        f"checkpoint.resume is never, but {self.run_dir} holds checkpoints up to {newest.name}: a "
                        "second training there would mix with the first; choose another run_dir, or remove that one"
                    )
        self.newest = self.comm.broadcast_object(newest)

    def _write_config(self) -> None:
        with raise_together(self.comm):
            try:
                if self.world.rank == 0:
                    self.lock.check()
                    configuration.write_yaml(self.config, self.run_dir / "config.yaml")
            except OSError as error:
                raise HpcfsdpError(f"run_dir {self.run_dir}: cannot write there: {error.strerror}") from error

    def _find_data(self) -> data.Split:
        found = None
        with raise_together(self.comm):
            if self.world.rank == 0:  # one walk through the folders, not one for each rank
                found = data.make_split(data_paths(self.config.data), self.config.data.held_out)
                for name, spans in (("training", found.train), ("held-out", found.held_out)):
                    size = sum(span.end - span.begin for span in spans)
                    data_log.info("%s %d bytes of %d files from %s", name, size, len(spans), found.source)
        return self.comm.broadcast_object(found)

    def _check_sizes(self) -> None:
        held_out = sum(span.end - span.begin for span in self.split.held_out)
        if len(self.corpus) < self.window or held_out < 2:
            raise DataError(
                f"{self.split.source}: {len(self.corpus)} bytes to learn from and {held_out} held out; at least "
                f"{self.window} (model.context + 1) and 2 are needed"
            )
        elements = count_elements(self.config.model)
        holders = self.comm.size // num_replicas(self.config.mesh, self.world.num_nodes)
        if elements < holders:
            raise UsageError(f"the model has {elements} parameter elements for {holders} ranks: use fewer ranks")

    def _ranks(self) -> str:
        said = f"{self.comm.size} rank(s)"
        if self.mesh is not None:
            extents = zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True)
            said += " (" + " x ".join(f"{name}={extent}" for name, extent in extents) + ")"
        return said

    def _resume(self) -> None:
        wanted, path = self.config.checkpoint.resume, self.newest
        if path is None and wanted not in ("auto", "never"):
            path = Path(wanted)
        elif path is not None and wanted != "auto" and Path(wanted) != path:
            # A job that is requeued has the same arguments as at first: it must not start over.
            log.warning("the run has gone on since %s: resuming from %s", wanted, path)
        if path is None:
            elements = count_elements(self.config.model)
            log.info("new run: %d parameters on %s, %s", elements, self._ranks(), self.world.device.type)
            return
        began = time.perf_counter()
        try:
            if path == self.newest:
                info = self.manager.load_latest(model=self.model, optimizer=self.optimizer)
            else:
                info = checkpoint.load(path, model=self.model, optimizer=self.optimizer)
        except CheckpointError as error:
            error.args = (f"{error}\nmove the file away to start without it, or choose another run_dir",)
            raise
        self.step, self.newest = info.step, info.path
        seconds = time.perf_counter() - began
        checkpoint_log.info("loaded %s step=%d ranks=%d secs=%.2f", info.path, info.step, info.world_size, seconds)
        with raise_together(self.comm):
            if self.world.rank == 0:
                self.curves.go_on(checkpoint.open_index(info.path).metrics)
        position = info.extra.get("data", {})
        if position.get("corpus") != self.split.fingerprint:
            data_log.warning(
                "the data is not what the checkpoint was trained on: sequences will differ from the first run's"
            )
        if position.get("samples") != self.step * self.config.train.batch:
            data_log.warning("train.batch was another one: some sequences may be seen again or left out")


class _Curves:
    """What is noted of every step of a training, over all of its runs, for its checkpoints. Rank 0's are kept."""

    NAMES = ("loss", "grad_norm", "lr")

    def __init__(self) -> None:
        self.metrics: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in self.NAMES}

    def go_on(self, metrics: Metrics) -> None:
        """Begin with those of a checkpoint."""
        for name in self.NAMES:
            steps, values = metrics.get(name, ((), ()))
            self.metrics[name] = [int(step) for step in steps], [float(value) for value in values]

    def add(self, record: Mapping[str, Any]) -> None:
        """Note a step, from its record."""
        for name, (steps, values) in self.metrics.items():
            steps.append(record["step"])
            values.append(record[name])


def _diverged(what: str) -> HpcfsdpError:
    error = HpcfsdpError(
        f"{what}: training has diverged; the last checkpoint is from before. Try a lower optim.lr or a longer "
        "optim.warmup_steps"
    )
    error.raised_on_all_ranks = True
    return error


def _record(step: int, loss: float, norm: float, rate: float, seconds: float, speed: float) -> dict[str, object]:
    return {
        "step": step,
        "kind": "train",
        "loss": loss,
        "grad_norm": norm,
        "lr": rate,
        "seconds": round(seconds, 6),
        "bytes_per_s": round(speed, 1),
    }


def train(config: RunConfig, world: World, stop: StopRequest) -> Outcome:
    """Collective over all ranks. Run the training that `config` describes."""
    with raise_together(communicator_for(None, required=True)):
        check(config, world.size, world.num_nodes)
    with _held(config, world) as lock:
        return Trainer(config, world, lock).run(stop)


@contextlib.contextmanager
def _held(config: RunConfig, world: World) -> Iterator[RunLock]:
    """Collective over all ranks. Keep other jobs out of the run's folder while the block runs; rank 0 does it."""
    lock = RunLock(Path(config.run_dir))
    with raise_together(communicator_for(None, required=True)):
        if world.rank == 0:
            try:
                lock.take(by_force=config.take_over)
            except OSError as error:
                raise HpcfsdpError(f"run_dir {config.run_dir}: cannot write there: {error.strerror}") from error
    try:
        yield lock
    finally:
        lock.release()
