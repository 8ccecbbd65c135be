"""Configuration of a training run. Every field is a flag, an ``HPCFSDP_*`` variable and a key of the YAML file.

The text below a field is its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, Literal

from hpcfsdp.errors import UsageError


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the GPT."""

    layers: int = 4
    """Transformer blocks."""
    width: int = 256
    """Size of the embedding; a multiple of heads."""
    heads: int = 4
    """Attention heads of a block."""
    context: int = 128
    """Bytes that a prediction sees."""
    dropout: float = 0.0
    """Probability; each rank draws masks of its own."""


@dataclass(frozen=True)
class DataConfig:
    """Training data."""

    paths: list[str] | str = field(default_factory=list)
    """Files or folders of any text or binary data; empty: the source code of Python's standard library."""
    held_out: float = 0.05
    """Fraction of the files kept for evaluation."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate: linear warm-up, then a cosine down to min_lr at the last step."""

    lr: float = 1e-3
    """Highest learning rate of AdamW, after the warm-up."""
    muon_lr: float = 0.02
    """Highest learning rate of Muon, which follows that of AdamW in proportion."""
    min_lr: float = 1e-4
    """Learning rate of the last step."""
    warmup_steps: int = 40
    """Steps in which the learning rate rises to lr."""
    weight_decay: float = 0.1
    """Of all parameters."""
    beta1: float = 0.9
    """Of AdamW's running mean of gradients."""
    beta2: float = 0.95
    """Of AdamW's running mean of squared gradients."""
    clip_norm: float = 1.0
    """Largest norm of all gradients; 0: no limit."""


@dataclass(frozen=True)
class LoopConfig:
    """Steps and batches."""

    steps: int = 2000
    """Steps of the whole training, over all runs; the learning rate follows it."""
    run_steps: int = 0
    """At most this many steps in this run; 0: all that are left."""
    batch: int = 16
    """Sequences in a step, over all ranks; a step computes the same on any number of ranks."""
    accumulation: int = 1
    """Micro-batches in a step; more of them take less memory."""
    log_every: int = 20
    """Steps between log lines."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation at the end of a run."""

    bytes: int = 65536
    """Held-out bytes to predict, spread evenly; all if there are fewer."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, one HDF5 file each, in run_dir/checkpoints."""

    every: int = 200
    """Steps between checkpoints; one is always written at the end. 0: only at the end."""
    every_s: float = 0.0
    """Write one after so many seconds without, too. 0: not."""
    memory_every: int = 0
    """Steps between copies in the memory of other ranks and nodes, from which training goes on after ranks are lost. 0:
    none."""
    keep_last: int = 0
    """How many of the newest to keep; older ones are removed when a new one is complete. 0: all."""
    keep_every: int = 0
    """Keep those of every multiple of this step, too. 0: none."""
    asynchronous: bool = False
    """Train while a checkpoint is written, from copies in host memory."""
    resume: str = "auto"
    """auto: from the newest undamaged one in the run's folder, if there is one. The path of a file: from that file, if
    the folder holds none. never: refuse a folder that holds some."""
    resume_changed: bool = False
    """Resume even if the data, the seed, train.batch, dropout or the optimizer are not those of the checkpoint."""


@dataclass(frozen=True)
class ObserveConfig:
    """Figures of the run, in run_dir/metrics.jsonl."""

    every: int = 1
    """Steps in a record, which has their means."""
    peak_flops: float = 0.0
    """Operations per second of one rank's device at most, for flop_utilisation; 0: those of a large matrix product."""
    trace_from: int = 3
    """The first step that --trace records, counted from the start of the job."""
    trace_steps: int = 3
    """How many it records."""


@dataclass(frozen=True)
class MeshConfig:
    """How ranks share the model: replicate x shard x tensor ranks, where shard is what the other two leave."""

    replicate: int | Literal["nodes"] = 1
    """Copies of the model, each sharded over its own ranks; nodes: one copy on each node."""
    tensor: int = 1
    """Ranks over which each layer is cut; they compute with the same sequences."""


@dataclass(frozen=True)
class ResilienceConfig:
    """Going on in the same processes after ranks were lost: mpirun --with-ft ulfm."""

    spares: int = 0
    """Ranks, the highest, that wait until one of the others is lost, and take its place."""
    min_ranks: int = 1
    """With fewer ranks left, end, with exit code 75."""
    max_losses: int = -1
    """How often to go on; -1: as often as needed."""


@dataclass(frozen=True)
class RunConfig:
    """A training run."""

    run_dir: str = "runs/quickstart"
    """Folder of this run: config.yaml, metrics.jsonl, events.jsonl, logs/, checkpoints/."""
    take_over: bool = False
    """Train in run_dir even if another job seems to train there. That job stops at its next save."""
    device: str = "auto"
    """auto, cpu, or the type of an accelerator, such as cuda."""
    seed: int = 0
    """Of initial values, of the order of the data, and of dropout."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw; or muon, for the matrices of blocks, with AdamW for all other parameters."""
    track: list[str] | str = field(default_factory=list)
    """Give the figures to these trackers, too: tensorboard, wandb."""
    trace: bool = False
    """Write run_dir/trace.json: what units and queues of all ranks do in a few steps, for ui.perfetto.dev."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)


_POSITIVE = (
    *("model.layers", "model.width", "model.heads", "model.context"),
    *("train.steps", "train.batch", "train.accumulation", "train.log_every"),
    *("mesh.tensor", "mesh.replicate", "eval.bytes", "optim.lr", "optim.muon_lr"),
    *("observe.every", "observe.trace_from", "observe.trace_steps"),
)
_NOT_NEGATIVE = (
    *("train.run_steps", "checkpoint.every", "checkpoint.keep_last", "checkpoint.keep_every"),
    *("checkpoint.every_s", "checkpoint.memory_every"),
    *("optim.warmup_steps", "optim.clip_norm", "optim.min_lr", "optim.weight_decay", "seed"),
    "observe.peak_flops",
)
OF_THE_MODEL = ("model.layers", "model.width", "model.heads", "model.context")
"""A checkpoint with another value of one of these is of another model."""
OF_THE_TRAINING = (
    *("seed", "optimizer", "model.dropout", "train.batch", "data.held_out"),
    *("optim.weight_decay", "optim.beta1", "optim.beta2", "optim.clip_norm"),
)
"""To resume with another value of one of these changes the training. Its length and learning rate may be adjusted."""
_OF_A_JOB = (
    *("run_dir", "take_over", "device", "data.paths", "train.run_steps", "train.log_every"),
    *("checkpoint.resume", "checkpoint.resume_changed"),
    *("resilience.spares", "resilience.min_ranks", "resilience.max_losses"),
    *("track", "trace", "observe.every", "observe.peak_flops", "observe.trace_from", "observe.trace_steps"),
)
_FRACTIONS = ("model.dropout", "optim.beta1", "optim.beta2")


def as_list(values: list[str] | str) -> list[str]:
    """Values as a list; users may give a single one without a list."""
    return [values] if isinstance(values, str) else list(values)


def num_replicas(config: MeshConfig, num_nodes: int) -> int:
    """Return the number of copies of the model on so many nodes."""
    return num_nodes if config.replicate == "nodes" else config.replicate


def changes(config: RunConfig, before: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return keys of the training with other values in `before`, the configuration in a checkpoint: both values.

    Keys that only one of them has are left out.
    """
    old, new = _flat(before), _flat(asdict(config))
    return {key: (old[key], new[key]) for key in new if key in old and old[key] != new[key] and key not in _OF_A_JOB}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys: {"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def check(config: RunConfig, num_ranks: int, num_nodes: int = 1) -> None:
    """Raise a UsageError that names the first value that cannot work on so many ranks."""
    model, loop, mesh = config.model, config.train, config.mesh
    for name in (*_POSITIVE, *_NOT_NEGATIVE, *_FRACTIONS):
        value = attrgetter(name)(config)
        if name in _POSITIVE and value != "nodes" and not value > 0:
            raise UsageError(f"{name} must be positive, not {value}")
        if name in _NOT_NEGATIVE and not value >= 0:
            raise UsageError(f"{name} must not be negative, but is {value}")
        if name in _FRACTIONS and not 0 <= value < 1:
            raise UsageError(f"{name} must be in [0, 1), not {value}")
    if model.width % model.heads:
        raise UsageError(f"model.width ({model.width}) must be a multiple of model.heads ({model.heads})")
    if not 0 < config.data.held_out < 1:
        raise UsageError(f"data.held_out must be between 0 and 1, not {config.data.held_out}")
    product = num_replicas(mesh, num_nodes) * mesh.tensor
    if num_ranks % product:
        replicate = f"nodes, {num_nodes} here" if mesh.replicate == "nodes" else mesh.replicate
        raise UsageError(
            f"mesh.replicate ({replicate}) x mesh.tensor ({mesh.tensor}) = {product} does not divide the {num_ranks} "
            f"rank(s) of this job: change one of them, or start a multiple of {product} ranks"
        )
    if model.heads % mesh.tensor:
        heads = f"model.heads ({model.heads}) must be a multiple of mesh.tensor ({mesh.tensor})"
        raise UsageError(f"{heads}: attention is divided by heads")
    parts = num_ranks // mesh.tensor
    if loop.batch < loop.accumulation * parts:
        ranks = f"{parts} rank(s)" if mesh.tensor == 1 else f"{parts} group(s) of mesh.tensor={mesh.tensor} rank(s)"
        raise UsageError(
            f"train.batch ({loop.batch} sequences a step) is less than one for each of {ranks} in each of "
            f"train.accumulation={loop.accumulation} micro-batch(es): use a larger batch or fewer ranks"
        )
