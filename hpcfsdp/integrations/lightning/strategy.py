"""A strategy for Lightning's Trainer that shards the model over all ranks of MPI, and what that for Fabric shares."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision as Autocast, Precision
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import hpcfsdp
from hpcfsdp import accelerator
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import LaunchError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardedGradScaler
from hpcfsdp.integrations.lightning import checkpoint_file
from hpcfsdp.integrations.lightning.sharding import checked_options, dtypes_of, metrics_to, shard
from hpcfsdp.launch.device import choose
from hpcfsdp.launch.job import current_job
from hpcfsdp.params.gradient import note_unchanged
from hpcfsdp.world import World, current_world

NAME = "hpcfsdp"


class MPIClusterEnvironment(MPIEnvironment):
    """Ranks and nodes as hpcfsdp finds them: from MPI, under mpirun, mpiexec and srun; a plain process is rank 0 of 1.

    Creating one is collective over all processes of the job. It starts MPI.

    Raises:
        LaunchError: the launcher does not fit the MPI library.
    """

    def __init__(self) -> None:
        self._job = current_job()  # before mpi4py is imported in another way
        super().__init__()

    @staticmethod
    def detect() -> bool:
        """Return whether MPI has several processes. Collective over all processes of the job."""
        return current_job().comm.size > 1

    @property
    def is_current(self) -> bool:
        """Whether the job still consists of these ranks: in ``hpcfsdp.resilient`` others may take part in a run."""
        return self._job is current_job()

    def world_size(self) -> int:
        return self._job.topology.size

    def global_rank(self) -> int:
        return self._job.comm.rank

    def local_rank(self) -> int:
        return self._job.topology.local_rank(self.global_rank())

    def node_rank(self) -> int:
        return self._job.topology.node_rank(self.global_rank())

    def local_size(self) -> int:
        """Return processes on this node."""
        return len(self._job.topology.node_of(self.global_rank()))

    def num_nodes(self) -> int:
        return self._job.topology.num_nodes

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Not collective. Compare what a Trainer was given with MPI. 1 of either is Lightning's default, and right."""
        remedy = "leave devices and num_nodes out: MPI knows them"
        if num_nodes not in (1, self.num_nodes()):
            raise LaunchError(
                f"Trainer(num_nodes={num_nodes}), but MPI has its {self.world_size()} process(es) on "
                f"{self.num_nodes()} node(s): {remedy}, or ask the scheduler for {num_nodes} nodes"
            )
        if num_devices not in (1, self.local_size()):
            raise LaunchError(
                f"Trainer(devices={num_devices}), but MPI started {self.local_size()} process(es) on this node: "
                f"{remedy}, or start {num_devices} on each node (mpirun --map-by ppr:{num_devices}:node, srun "
                f"--ntasks-per-node={num_devices})"
            )


class ShardingOverMpi:
    """The part of a strategy in front of Lightning's ``ParallelStrategy``, that of the Trainer or of Fabric."""

    strategy_name = NAME

    def __init__(self, **options: Any) -> None:
        self._environment = MPIClusterEnvironment()
        self._options = checked_options(options)
        super().__init__(cluster_environment=self._environment)

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = None
        if not devices:
            return
        kind, size = devices[0].type, self._environment.local_size()
        self._wanted = kind
        if len(devices) != accelerator.device_count():  # else "auto": all that this process sees, of which any will do
            self._wanted = ""
            self._environment.validate_settings(len(devices), 1)
        chosen = devices[:size] if len(devices) >= size else [choose(kind, rank) for rank in range(size)]
        self._parallel_devices = list(chosen)

    @property
    def num_nodes(self) -> int:
        return self._environment.num_nodes()

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._environment.validate_settings(1, num_nodes)

    def set_world_ranks(self) -> None:
        """Not collective. Tell Lightning's ``rank_zero_only`` this rank."""
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank

    def _fit(self, plugin: Any, base: type, kinds: tuple[type, ...]) -> None:
        """Refuse a precision that shards cannot have, and have its scaler agree over all ranks."""
        if type(plugin) is not base and not isinstance(plugin, kinds):
            raise UsageError(
                f"HpcfsdpStrategy does not support {type(plugin).__name__}: use precision= 32-true, 64-true, 16-true, "
                "bf16-true, 16-mixed or bf16-mixed"
            )
        if dtypes_of(plugin) and self._options.get("mixed_precision") is not None:
            raise UsageError(
                f"Trainer(precision={plugin.precision!r}) and HpcfsdpStrategy(mixed_precision=...): give one of them"
            )
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None and not isinstance(scaler, ShardedGradScaler):
            names = ("growth_factor", "backoff_factor", "growth_interval")
            same = {name: getattr(scaler, f"get_{name}")() for name in names}
            plugin.scaler = ShardedGradScaler(plugin.device, init_scale=scaler.get_scale(), **same)

    @property
    def world(self) -> World:
        """All processes of the job, once a run has begun; raises LaunchError before."""
        found = current_world()
        if found is None:
            raise LaunchError("there is no world: hpcfsdp.init() is called when a run of the Trainer begins")
        return found

    @property
    def root_device(self) -> torch.device:
        """Return the device of this rank: that of ``hpcfsdp.init``, once that has chosen one of the same kind."""
        mine: torch.device = self.parallel_devices[self.local_rank]
        found = current_world()
        return mine if found is None or found.device.type != mine.type else found.device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Call ``hpcfsdp.init``, unless the program has. Collective over all processes of the job."""
        if not self._environment.is_current:
            now = current_job().comm
            raise LaunchError(
                f"this strategy was made for other ranks, as rank {self.global_rank} of {self.world_size}, and is used "
                f"as rank {now.rank} of {now.size}: make strategy and Trainer, or Fabric, within the function that "
                "hpcfsdp.resilient calls"
            )
        found = current_world() or hpcfsdp.init(self._wanted or self.root_device)
        if found.device.type != self.root_device.type:
            raise LaunchError(
                f"hpcfsdp.init() has chosen {str(found.device)!r}, and the Trainer {str(self.root_device)!r}: give "
                f"Trainer(accelerator={found.device.type!r})"
            )
        super().setup_environment()

    def do_nothing(self, *_given: Any, **_named: Any) -> None:
        """Do nothing: the units move their parameters, and a file is loaded as a whole."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks. Collective over all ranks."""
        if current_world() is not None:
            self.world.host.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`, by pickle. Collective over all ranks, once a run has begun."""
        return obj if current_world() is None else self.world.host.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor in place. Collective over the group, all ranks by default. Anything else stays as it is.

        The mean of integers is an integer, rounded towards zero, as with Lightning's other strategies.
        """
        if not isinstance(tensor, torch.Tensor) or not dist.is_initialized():
            return tensor
        op = reduce_op
        if isinstance(reduce_op, str):
            op = getattr(dist.ReduceOp, {"MEAN": "AVG"}.get(reduce_op.upper(), reduce_op.upper()), None)
        if op is None:
            raise UsageError(f"reduce_op={reduce_op!r}: use 'mean', 'sum', 'min', 'max' or 'product'")
        if op != dist.ReduceOp.AVG:
            dist.all_reduce(tensor, op, group=group)
            return tensor
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
        mean = tensor / dist.get_world_size(group)
        return tensor.copy_(mean if mean.dtype == tensor.dtype else mean.trunc())


class HpcfsdpStrategy(ShardingOverMpi, ParallelStrategy):
    """``Trainer(strategy=HpcfsdpStrategy(...))``: shards the LightningModule; MPI gives ranks, nodes and devices.

    Creating one is collective over all processes of the job. Leave `devices` and `num_nodes` of the Trainer out.

    Args:
        options: arguments of ``hpcfsdp.fsdp.FullyShardedDataParallel``. `auto_wrap_policy` may be a set of classes,
            `sharding_strategy` a name, `cpu_offload` a bool. Here `use_orig_params` and `sync_module_states` are True
            by default: ``configure_optimizers`` may choose among ``self.parameters()``, and rank 0's values count.

    Raises:
        UsageError: there is no such argument.
        LaunchError: the launcher does not fit the MPI library.
    """

    is_distributed = True
    restore_checkpoint_after_setup = True  # into the model that is sharded by then
    lightning_restore_optimizer = False  # loaded with the file

    def __init__(self, **options: Any) -> None:
        self._roots: list[FullyShardedDataParallel] = []
        super().__init__(**options)

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin
        if plugin is None:
            return
        self._fit(plugin, Precision, (Autocast, DoublePrecision, HalfPrecision))
        plugin.clip_grad_by_norm, plugin.clip_grad_by_value = self.clip_grad_norm, clip_elements

    @property
    def checkpoint_io(self) -> Any:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise UsageError(
            f"HpcfsdpStrategy writes checkpoints by hpcfsdp.checkpoint.save, on all ranks at once: leave the plugin "
            f"{type(io).__name__} out"
        )

    # The model and its steps.

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model, if that has not happened, and make the optimizers for ``fit``. Collective over all ranks."""
        self.accelerator.setup(trainer)
        _refuse(trainer, self._layer_sync)
        module = self.precision_plugin.convert_module(self.lightning_module)
        metrics_to(module, self.root_device)
        self.model, self._roots = shard(module, self._options | dtypes_of(self.precision_plugin))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
                raise UsageError(
                    "LBFGS computes products of whole gradients, and a rank has shards: use an optimizer that works "
                    "element by element, as AdamW"
                )
        self.setup_precision_plugin()

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return a context to build a model in: on the CPU, or on the meta device, where it takes no memory."""
        where = torch.device("meta") if empty_init else contextlib.nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank."""
        with contextlib.ExitStack() as stack:
            for root in self._roots:
                stack.enter_context(root.no_sync())
            yield

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """As Lightning's, but the backward comes before the step begins. Collective over all ranks.

        An optimizer refuses to begin while ranks hold gradients of their own, which that backward reduces.
        """
        result = closure()
        return super().optimizer_step(optimizer, lambda: result, model, **kwargs)

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the gradients that `optimizer` steps to a norm over all ranks. Collective over all ranks."""
        with grads_of(optimizer, self._roots):
            if len(self._roots) == 1:
                self._roots[0].clip_grad_norm_(clip_val)
                return
            norms = [float(root.clip_grad_norm_(math.inf)) for root in self._roots]
            total = math.hypot(*norms)
            for root, norm in zip(self._roots, norms, strict=True):
                if total > clip_val and norm > 0:
                    root.clip_grad_norm_(clip_val * norm / total)

    # Checkpoints: the file has the state of model and optimizers.

    def _no_state(self, *_: Any) -> dict[str, Any]:
        return {}

    lightning_module_state_dict = optimizer_state = _no_state
    load_model_state_dict = load_optimizer_state_dict = model_to_device = ShardingOverMpi.do_nothing

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See ``checkpoint_file.save``. Collective over all ranks."""
        if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED:
            raise _on_exception("a callback")
        if storage_options is not None:
            raise UsageError(f"storage_options={storage_options!r} is not supported: an HDF5 file has none")
        host, optimizers = self.world.host, self.optimizers if "optimizer_states" in checkpoint else []
        with raise_together(host):
            others = checkpoint_file.others_in(checkpoint)
        checkpoint_file.save(filepath, others, host, self.model, optimizers, checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """See ``checkpoint_file.load``. Collective over all ranks. Files hold no pickles, whatever `weights_only`."""
        is_fit = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fit else None
        strict = self.lightning_module.strict_loading
        return checkpoint_file.load(checkpoint_path, self.world.host, self.model, optimizers, strict, is_fit=is_fit)

    def teardown(self) -> None:
        """Not collective. The model stays where it is, sharded, for the next run."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


StrategyRegistry.register(NAME, HpcfsdpStrategy, "Shards the model over all ranks of MPI")


@contextlib.contextmanager
def grads_of(optimizer: torch.optim.Optimizer, roots: Iterable[FullyShardedDataParallel]) -> Iterator[None]:
    """Return a context in which parameters of the models that `optimizer` does not step have no gradients."""
    own = set(_params(optimizer))
    others = [param for root in roots for param in root.parameters() if param not in own]
    hidden = [(param, param.grad) for param in others if param.grad is not None]
    for param, _ in hidden:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in hidden:
            param.grad = grad


def clip_elements(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
    """Not collective. Clip each element of the gradients that `optimizer` steps."""
    torch.nn.utils.clip_grad_value_(_params(optimizer), clip_val)
    for param in _params(optimizer):
        note_unchanged(param.grad)  # no rank has clipped by a norm of its own


def _params(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse(trainer: pl.Trainer, layer_sync: Any) -> None:
    """Raise UsageError for options of the Trainer that would do something else than they should."""
    if layer_sync is not None:
        raise UsageError(
            "sync_batchnorm=True is not supported: convert the module in configure_model, by "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, callbacks.OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False):
            raise _on_exception(name)
        if name in ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"):
            raise UsageError(f"{name} copies a module that is not sharded: average checkpoint files instead")


def _on_exception(callback: str) -> UsageError:
    return UsageError(
        f"{callback} saves on an exception, which other ranks may not have, and a save needs all ranks: use "
        "hpcfsdp.integrations.lightning.Requeue for the end of a job"
    )
