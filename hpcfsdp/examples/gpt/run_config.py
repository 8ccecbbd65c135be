"""Configuration of a training run. Every field is a flag, an ``HPCFSDP_*`` variable and a key of the YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcfsdp.errors import UsageError


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the GPT."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    """Bytes that a prediction may look back on."""
    dropout: float = 0.0


@dataclass(frozen=True)
class DataConfig:
    """What is learnt from."""

    paths: list[str] | str = field(default_factory=list)
    """Files or folders of any text or binary data; empty: the source code of Python's standard library."""
    held_out: float = 0.05
    """Fraction of the files that is kept for evaluation."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate: linear warm-up, then a cosine down to min_lr at the last step."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 40
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    """Bound on the norm of all gradients; 0 for none."""


@dataclass(frozen=True)
class LoopConfig:
    """Steps and batches."""

    steps: int = 2000
    """Of the whole training, over all runs; the learning rate follows it."""
    run_steps: int = 0
    """At most this many in this run; 0 for all that are left."""
    batch: int = 16
    """Sequences in a step, over all ranks; the number of ranks does not change what a step computes."""
    accumulation: int = 1
    """Micro-batches that a step is split into, to save memory."""
    log_every: int = 20


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation at the end of a run."""

    bytes: int = 65536
    """Held-out bytes to predict, spread evenly; fewer where there are fewer."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints, one HDF5 file each, in run_dir/checkpoints."""

    every: int = 200
    """Steps between two; one is always written at the end. 0: only at the end."""
    keep_last: int = 0
    """How many of the newest stay when a further one is complete; older ones are removed. 0: all."""
    keep_every: int = 0
    """Those of steps that are a multiple of this stay, too, if older ones are removed. 0: none."""
    asynchronous: bool = False
    """Train on while a checkpoint is written, from copies in host memory."""
    resume: str = "auto"
    """auto: from the newest in the run's folder that is not damaged, if there is one. The path of a file: from there,
    as long as the folder holds none. never: refuse a folder that holds some."""


@dataclass(frozen=True)
class MeshConfig:
    """What the ranks are to each other. They are replicate x shard x tensor; shard is what the other two leave."""

    replicate: int | Literal["nodes"] = 1
    """Copies of the model, each sharded over ranks of its own; nodes: as many as there are nodes, one in each."""
    tensor: int = 1
    """Ranks over which each layer is cut. They compute with the same sequences."""


@dataclass(frozen=True)
class RunConfig:
    """A training run."""

    run_dir: str = "runs/quickstart"
    """Folder of this run: config.yaml, metrics.jsonl, logs/, checkpoints/."""
    take_over: bool = False
    """Train in run_dir although another job seems to. That one stops when it saves next."""
    device: str = "auto"
    """auto, cpu or cuda."""
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


def data_paths(config: DataConfig) -> list[str]:
    """The paths as a list; a single one may be given bare."""
    return [config.paths] if isinstance(config.paths, str) else list(config.paths)


def num_replicas(config: MeshConfig, num_nodes: int) -> int:
    """Copies of the model on so many nodes."""
    return num_nodes if config.replicate == "nodes" else config.replicate


def check(config: RunConfig, num_ranks: int, num_nodes: int = 1) -> None:
    """Raise a UsageError that names the first value that cannot work on so many ranks."""
    model, loop = config.model, config.train
    _check_ranges(config)
    if model.width % model.heads:
        raise UsageError(f"model.width ({model.width}) must be a multiple of model.heads ({model.heads})")
    if not 0 < config.data.held_out < 1:
        raise UsageError(f"data.held_out must be between 0 and 1, not {config.data.held_out}")
    if config.device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device must be auto, cpu or cuda, not {config.device!r}")
    _check_mesh(config, num_ranks, num_nodes)
    sharing = num_ranks // config.mesh.tensor
    if loop.batch < loop.accumulation * sharing:
        ranks = f"{sharing} rank(s)"
        if config.mesh.tensor > 1:
            ranks = f"{sharing} group(s) of mesh.tensor={config.mesh.tensor} rank(s)"
        raise UsageError(
            f"train.batch ({loop.batch} sequences a step) is less than one for each of {ranks} in each of "
            f"train.accumulation={loop.accumulation} micro-batch(es): use a larger batch or fewer ranks"
        )


def _check_ranges(config: RunConfig) -> None:
    model, loop = config.model, config.train
    positive = {
        "model.layers": model.layers,
        "model.width": model.width,
        "model.heads": model.heads,
        "model.context": model.context,
        "train.steps": loop.steps,
        "train.batch": loop.batch,
        "train.accumulation": loop.accumulation,
        "train.log_every": loop.log_every,
        "mesh.tensor": config.mesh.tensor,
        "mesh.replicate": num_replicas(config.mesh, 1),
        "eval.bytes": config.eval.bytes,
        "optim.lr": config.optim.lr,
    }
    not_negative = {
        "train.run_steps": loop.run_steps,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "optim.warmup_steps": config.optim.warmup_steps,
        "optim.clip_norm": config.optim.clip_norm,
        "optim.min_lr": config.optim.min_lr,
        "optim.weight_decay": config.optim.weight_decay,
        "seed": config.seed,
    }
    fractions = {"model.dropout": model.dropout, "optim.beta1": config.optim.beta1, "optim.beta2": config.optim.beta2}
    for name, value in positive.items():
        if not value > 0:
            raise UsageError(f"{name} must be positive, not {value}")
    for name, value in not_negative.items():
        if not value >= 0:
            raise UsageError(f"{name} must not be negative, but is {value}")
    for name, value in fractions.items():
        if not 0 <= value < 1:
            raise UsageError(f"{name} must be in [0, 1), not {value}")


def _check_mesh(config: RunConfig, num_ranks: int, num_nodes: int) -> None:
    heads, mesh = config.model.heads, config.mesh
    replicas = num_replicas(mesh, num_nodes)
    if num_ranks % (replicas * mesh.tensor):
        given = f"mesh.replicate ({mesh.replicate}{f', {num_nodes} here' if mesh.replicate == 'nodes' else ''})"
        raise UsageError(
            f"{given} x mesh.tensor ({mesh.tensor}) = {replicas * mesh.tensor} does not divide the {num_ranks} rank(s) "
            f"of this job: change one of them, or start a multiple of {replicas * mesh.tensor} ranks"
        )
    if heads % mesh.tensor:
        raise UsageError(
            f"model.heads ({heads}) must be a multiple of mesh.tensor ({mesh.tensor}): attention is cut by heads"
        )
