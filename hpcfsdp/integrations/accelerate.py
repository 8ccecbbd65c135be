"""``ShardedAccelerator``: accelerate's ``Accelerator``, which shards models with this package and saves to HDF5."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn

from hpcfsdp import _compat, checkpoint
from hpcfsdp.checkpoint import CheckpointInfo
from hpcfsdp.comm import raise_together
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import CheckpointError, EngineError, LaunchError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardedGradScaler
from hpcfsdp.integrations.recipe import Recipe, check_options, refuse_given
from hpcfsdp.integrations.training_state import FILE_NAME, pack, unpack
from hpcfsdp.state_dict import StateDictOptions, get_model_state_dict
from hpcfsdp.units.flat_unit import unit_of
from hpcfsdp.world import World, before_finalize, current_world, init

_REFUSED = dict.fromkeys(
    "fsdp_plugin deepspeed_plugin deepspeed_plugins megatron_lm_plugin torch_tp_plugin parallelism_config".split(),
    "hpcfsdp shards the model: set fsdp_options={...}, the arguments of FullyShardedDataParallel",
) | dict.fromkeys(("dynamo_backend", "dynamo_plugin"), "compile the model, or its layers, before prepare")


class ShardedAccelerator(Accelerator):
    """An ``Accelerator`` whose ``prepare`` shards models over all MPI ranks.

    Constructing one is collective over all ranks. It calls ``hpcfsdp.init()`` where the program has not.
    ``prepare``, ``backward``, ``accumulate``, ``no_sync``, ``gather_for_metrics`` and the rest work as in accelerate.

    Args:
        fsdp_options: arguments of ``hpcfsdp.fsdp.FullyShardedDataParallel``. By default each layer becomes a unit (see
            `layers`), rank 0's values are broadcast, and `mixed_precision` follows that of accelerate.
        layers: names of the classes that become units; by default those in the model's ``_no_split_modules``.
        activation_checkpointing: compute the forward of each layer again in the backward.
        cpu: as the world has it. Others are refused.
        named: other arguments of ``Accelerator``.

    Raises:
        UsageError: plug-ins of accelerate for sharding or compiling, or a setting that cannot be had.
        LaunchError: accelerate has started before ``hpcfsdp.init()``, and counts other processes.
    """

    def __init__(
        self,
        *,
        fsdp_options: Mapping[str, Any] | None = None,
        layers: Sequence[str] | None = None,
        activation_checkpointing: bool = False,
        cpu: bool | None = None,
        **named: Any,
    ) -> None:
        refuse_given("ShardedAccelerator", named, _REFUSED)
        options = check_options(fsdp_options or {})
        world = current_world() or init("cpu" if cpu else None)
        on_cpu = world.device.type == "cpu"
        if cpu is not None and cpu != on_cpu:
            raise UsageError(f"ShardedAccelerator(cpu={cpu}): the ranks compute on {world.device}: leave cpu= out")
        super().__init__(cpu=on_cpu, **named)
        self.shard_with(Recipe(options, None if layers is None else tuple(layers), activation_checkpointing), world)

    def shard_with(self, recipe: Recipe, world: World) -> None:
        """Not collective. How models are sharded from now on. Raises LaunchError, UsageError as the constructor."""
        if self.num_processes != world.size:
            raise LaunchError(
                f"accelerate counts {self.num_processes} processes, and MPI {world.size}: call hpcfsdp.init() before "
                "anything of accelerate or transformers is made; on CPUs give TrainingArguments use_cpu=True"
            )
        usual = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
        if self.distributed_type not in usual:
            raise UsageError(
                f"accelerate is configured for {self.distributed_type}: unset ACCELERATE_USE_FSDP and such"
            )
        if self.mixed_precision == "fp16" and self.scaler is None:
            raise UsageError("fp16 needs a GPU, with its scaling of gradients: use bf16 on CPUs")
        self._recipe = recipe
        if self.scaler is not None:
            given = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **given)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the model in ``FullyShardedDataParallel``, for evaluation alone, too. Collective over all ranks.

        `device_placement` does not matter: the ranks' device holds the shards. Calls of the model inside, and its
        ``generate``, are collective from now on, too.
        """
        sharded = self._recipe.shard(model, self.mixed_precision)
        if sharded is not model:
            _route_calls(sharded)
        return super().prepare_model(sharded, device_placement=False, evaluation_mode=True)  # else it adds its DDP

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Not collective. The model that was prepared. It holds shards: save it with ``get_state_dict(model)``."""
        if isinstance(model, FullyShardedDataParallel):
            return model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of one prepared model to a total norm over all ranks. Collective over all ranks.

        `parameters` are ``model.parameters()``, all of them or all that are trained; others raise EngineError, as the
        norm of some of them is not known. Returns the norm before clipping, a scalar, the same on every rank.
        """
        self.unscale_gradients()
        given = {id(parameter) for parameter in ([parameters] if torch.is_tensor(parameters) else parameters)}
        for model in self._models:
            trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
            if trained and trained <= given <= {id(parameter) for parameter in model.parameters()}:
                return model.clip_grad_norm_(max_norm, norm_type)
        raise EngineError(
            "clip_grad_norm_: these are not all parameters of one model that prepare has returned: give it "
            "model.parameters() of that model"
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole tensors on the CPU of rank 0, {} on other ranks. Collective over all ranks."""
        if not isinstance(model, FullyShardedDataParallel):
            return super().get_state_dict(model, unwrap)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, *, step: int = 0
    ) -> Path:
        """Save models, optimizers, schedulers and random numbers to HDF5; return the folder. Collective over all ranks.

        The first model is checkpoint.h5 in `output_dir` (made if it is missing; None with automatic_checkpoint_naming),
        with all that is registered for checkpointing; further models are checkpoint_1.h5 and so on. `step` is a number
        of your own, which `hpcfsdp ls` shows; `safe_serialization` has no effect, as HDF5 holds no pickles. Raises
        CheckpointError where the file cannot be written, no model is prepared, a model has several optimizers, or a
        state dict holds what a file cannot keep.
        """
        if self.dataloader_config.use_stateful_dataloader:
            raise CheckpointError("save_state: states of stateful data loaders differ between ranks and are not saved")
        folder = self._new_folder(output_dir)
        for hook in self._save_model_state_pre_hook.values():
            hook(list(self._models), [], str(folder))
        for number, (model, optimizer) in enumerate(self._pairs("save_state")):
            extra = {"accelerate_step": self.step, **pack(self._holders())} if number == 0 else {}
            checkpoint.save(_file(folder, number), model=model, optimizer=optimizer, step=step, extra=extra)
        self.project_configuration.iteration += 1
        self._remove_old()
        return folder

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> CheckpointInfo:
        """Load what ``save_state`` has saved, by any number of ranks. Collective over all ranks.

        `input_dir` is the folder; None with automatic_checkpoint_naming: the newest. Returns step, world size and more
        of the checkpoint. Raises CheckpointError where a file is missing or damaged, or belongs to other objects.
        """
        folder = Path(input_dir).expanduser() if input_dir is not None else self._newest_folder()
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(folder))  # hooks may take out models that they have loaded themselves
        pairs = enumerate(self._pairs("load_state"))
        first, *_ = [checkpoint.load(_file(folder, number), model=one, optimizer=two) for number, (one, two) in pairs]
        unpack(first.extra, self._holders(), folder)
        self.step = first.extra["accelerate_step"]
        return first

    def end_training(self) -> None:
        """Not collective. Trackers write what they hold. ``hpcfsdp.finalize()`` ends the process group, not this."""
        for tracker in self.trackers:
            tracker.finish()

    def _pairs(self, call: str) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
        """Return each prepared model, with the optimizer that steps its parameters."""
        pairs, left = [], [plain_optimizer(optimizer) for optimizer in self._optimizers]
        for model in self._models:
            own = {id(parameter) for parameter in model.parameters()}
            mine = [one for one in left if all(id(p) in own for group in one.param_groups for p in group["params"])]
            if len(mine) > 1:
                raise CheckpointError(f"{call}: {len(mine)} optimizers step one model, and a file has room for one")
            left = [one for one in left if one not in mine]
            pairs.append((model, mine[0] if mine else None))
        if not pairs or left:
            what = f"{len(left)} optimizer(s) step other parameters than" if left else "there is none of"
            raise CheckpointError(f"{call}: {what} the models that prepare has returned")
        return pairs

    def _holders(self) -> dict[str, Any]:
        """Objects with a state dict that are saved beside models and optimizers, by name."""
        found = {f"scheduler_{number}": scheduler for number, scheduler in enumerate(self._schedulers)}
        found |= {f"custom_{number}": custom for number, custom in enumerate(self._custom_objects)}
        return found | ({} if self.scaler is None else {"scaler": self.scaler})

    def _new_folder(self, given: str | os.PathLike[str] | None) -> Path:
        """Return the folder of the next checkpoint. Collective over all ranks."""
        if not self.project_configuration.automatic_checkpoint_naming:
            if given is None:
                raise CheckpointError("save_state: give a folder, or set automatic_checkpoint_naming")
            return Path(given).expanduser()
        world, folder = running_world(), self._checkpoints() / f"checkpoint_{self.save_iteration}"
        with raise_together(world.host):
            if world.rank == 0 and folder.exists():
                raise CheckpointError(f"{folder} exists already: set project_configuration.iteration to go on")
        return folder

    def _remove_old(self) -> None:
        """Keep the newest checkpoints; called when the new one is complete. Collective over all ranks."""
        naming, world = self.project_configuration, running_world()
        if not naming.automatic_checkpoint_naming or naming.total_limit is None:
            return
        with raise_together(world.host):
            if world.rank == 0:
                found = sorted(self._checkpoints().glob("checkpoint_*"), key=_number)
                for path in found[: max(0, len(found) - max(1, naming.total_limit))]:
                    shutil.rmtree(path)

    def _newest_folder(self) -> Path:
        """Return the newest folder of the project. Collective over all ranks."""
        if not self.project_configuration.automatic_checkpoint_naming:
            raise CheckpointError("load_state: give the folder of a checkpoint, or set automatic_checkpoint_naming")
        found = sorted(self._checkpoints().glob("checkpoint_*"), key=_number) if running_world().rank == 0 else []
        newest = running_world().comm.bcast(found[-1] if found else None)
        if newest is None:
            raise CheckpointError(f"load_state: there is no checkpoint in {self._checkpoints()}")
        return newest

    def _checkpoints(self) -> Path:
        if self.project_dir is None:
            raise CheckpointError("automatic_checkpoint_naming needs project_dir")
        return Path(self.project_dir) / "checkpoints"


def _route_calls(sharded: FullyShardedDataParallel) -> None:
    """Have calls of the model inside gather its parameters, too: libraries make them on the model that they unwrap."""
    model, reference = sharded.module, weakref.ref(sharded)  # a strong one would be a cycle
    kind, summon = type(model), FullyShardedDataParallel.summon_full_params

    def is_at_rest(wrapper: Any) -> bool:
        return unit_of(wrapper).training_state is TrainingState.IDLE

    def call(*given: Any, **named: Any) -> Any:
        wrapper: Any = reference()
        return (wrapper if is_at_rest(wrapper) else functools.partial(_compat.call_module, wrapper.module))(
            *given, **named
        )

    def generate(*given: Any, **named: Any) -> Any:
        wrapper: Any = reference()
        with summon(wrapper, recurse=False, writeback=False) if is_at_rest(wrapper) else contextlib.nullcontext():
            return kind.generate(wrapper.module, *given, **named)

    _compat.set_call(model, call)
    if hasattr(kind, "generate") and "generate" not in vars(model):
        model.generate = functools.wraps(kind.generate)(generate)


def _count_anew() -> None:
    """Not collective. Have accelerate count processes anew: all its objects share one state, that of the lost world."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()  # with loaders that the loss has left in their middle


before_finalize(lambda: None, _count_anew)


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer in accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _file(folder: Path, number: int) -> Path:
    return folder / (FILE_NAME if number == 0 else FILE_NAME.replace(".", f"_{number}."))


def _number(path: Path) -> int:
    found = re.search(r"\d+$", path.name)
    return int(found[0]) if found else -1


def running_world() -> World:
    """Not collective. The world of ``init``; raises LaunchError where ``finalize`` has ended it."""
    world = current_world()
    if world is None:
        raise LaunchError(
            "the world has ended: call hpcfsdp.finalize() after the last call of the accelerator or trainer"
        )
    return world
