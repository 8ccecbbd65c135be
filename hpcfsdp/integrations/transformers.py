"""``ShardedTrainer``: transformers' ``Trainer``, which shards the model with this package and saves to HDF5."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import is_peft_available

from hpcfsdp import checkpoint
from hpcfsdp.comm import raise_together
from hpcfsdp.data import ResumableSampler, ThreadedLoader
from hpcfsdp.errors import CheckpointError, LaunchError, UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.integrations.accelerate import ShardedAccelerator, plain_optimizer, running_world
from hpcfsdp.integrations.recipe import recipe_of, refuse_given
from hpcfsdp.integrations.training_state import FILE_NAME, HeldGenerators, pack, unpack
from hpcfsdp.preempt import Preemption, exit_requeue
from hpcfsdp.text import json_input, safe_files
from hpcfsdp.world import current_world

log = logging.getLogger("hpcfsdp.trainer")

_STATE_NAME = "trainer_state.json"
_MOST_STATE_BYTES = 1 << 28
_FOLDERS = "checkpoint-*"
_REFUSED = {
    **dict.fromkeys(("deepspeed", "parallelism_config"), "hpcfsdp shards the model"),
    "torch_compile": "compile the model, or its layers, before you give it to the trainer",
    "auto_find_batch_size": "ranks that run out of memory at different times would part: choose the batch size",
    **dict.fromkeys(("fp16_full_eval", "bf16_full_eval"), "the model stays in shards: use bf16=True or fp16=True"),
    "save_on_each_node": "ranks write one file together: output_dir must be on a file system that all nodes share",
    "enable_jit_checkpoint": "ranks would not stop after the same step: give preemption=",
    "push_to_hub": "upload the folder that save_model writes",
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        "it is an option of DistributedDataParallel, and the model is sharded",
    ),
}
_ELEMENTWISE = {"adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "sgd", "adagrad", "rmsprop"}
"""Optimizers by name that treat each element alone, so that they may step shards."""


class ShardedTrainer(Trainer):
    """A ``Trainer`` that shards the model over all MPI ranks, and saves checkpoints as one HDF5 file each.

    Call ``hpcfsdp.init()`` before you make ``TrainingArguments``. All ranks call all methods. ``trainer.model`` is the
    model you give, in shards from the first use on; ``trainer.model_wrapped`` is the ``FullyShardedDataParallel``.

    Args:
        model: plain, not wrapped; or give `model_init`.
        args: its `fsdp_config` sets how to shard (docs/how-to/transformers.md); `bf16` and `fp16` set what to compute
            in. Leave `fsdp` unset: the model is always sharded.
        fsdp_options: further arguments of ``hpcfsdp.fsdp.FullyShardedDataParallel``.
        data: the order of ``train_dataset``, whose place goes into checkpoints, so that any number of ranks goes on
            with the next sample. Its `global_batch` counts, not ``per_device_train_batch_size``; threads read ahead.
        preemption: of ``hpcfsdp.preemption()``: when it asks for it all ranks stop after the same step, save a
            checkpoint, and leave with exit code 75. An evaluation that is due at that step is left out.
        given, named: other arguments of ``Trainer``, or of the class behind this one, in that one's order::

            class ShardedDPOTrainer(ShardedTrainer, trl.DPOTrainer): ...

    Raises:
        UsageError: an argument, or a setting in `fsdp_config`, that cannot be had here.
        LaunchError: there is no world, or `args` was made before it.
    """

    def __init__(
        self,
        *given: Any,
        fsdp_options: Mapping[str, Any] | None = None,
        data: ResumableSampler | None = None,
        preemption: Preemption | None = None,
        **named: Any,
    ) -> None:
        if current_world() is None:
            raise LaunchError("ShardedTrainer: call hpcfsdp.init() first, and then make TrainingArguments")
        named = self._by_name(*given, **named)
        if isinstance(named.get("model"), FullyShardedDataParallel):
            raise UsageError("ShardedTrainer shards the model itself: give it the plain one")
        args = named["args"] = copy.copy(named.get("args"))
        settings = {} if args is None else vars(args)
        refuse_given("TrainingArguments", settings, _REFUSED)
        if settings.get("save_only_model") and settings.get("load_best_model_at_end"):
            raise UsageError("load_best_model_at_end loads the best checkpoint: leave save_only_model=True out")
        self._recipe = recipe_of(settings.get("fsdp_config"), fsdp_options or {})
        if self._recipe.activation_checkpointing and settings.get("gradient_checkpointing"):
            raise UsageError("activation checkpointing is set in TrainingArguments and in fsdp_config: choose one")
        if args is not None:  # or the base class would have torch shard the model, too
            args.fsdp, args.fsdp_plugin_args = None, None
            args.ignore_data_skip = args.ignore_data_skip or data is not None  # the sampler goes on by itself
        self._data, self._generators = data, HeldGenerators()
        self._whole_numel = 0
        super().__init__(**named)
        if preemption is not None:
            self.add_callback(_StopTogether(self, preemption))

    def _by_name(self, *given: Any, **named: Any) -> dict[str, Any]:
        """Arguments by name. Classes between this one and ``Trainer``, as those of TRL, have orders of their own."""
        classes = type(self).__mro__
        for kind in classes[classes.index(ShardedTrainer) + 1 :]:
            signature = inspect.signature(kind.__init__)
            if all(each.kind is not each.VAR_POSITIONAL for each in signature.parameters.values()):
                break
        arguments = signature.bind_partial(self, *given).arguments
        arguments.pop("self")
        return dict(**arguments, **named)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # How an Accelerator is made of the arguments depends on the version of transformers.
        self.accelerator.__class__ = ShardedAccelerator
        self.accelerator.shard_with(self._recipe, running_world())

    def _do_nothing(self, *_given: Any, **_named: Any) -> None:
        """Do nothing: units move themselves; the scaler and all ranks' random number states are in the checkpoint."""

    _move_model_to_device = _save_scaler = _save_rng_state = _load_scaler = _do_nothing

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the sharded model, for training and evaluation. Collective over all ranks."""
        wrapped = self.model_wrapped
        if isinstance(wrapped, FullyShardedDataParallel) and wrapped.module is model:
            model = wrapped
        elif not isinstance(model, FullyShardedDataParallel) and hasattr(model, "num_parameters"):
            self._whole_numel = model.num_parameters(exclude_embeddings=True)
        self.model_wrapped = self.accelerator.prepare_model(model)
        return self.model_wrapped

    def get_train_dataloader(self) -> Any:
        """As in ``Trainer``; with `data` a ``ThreadedLoader`` of the same set and collator."""
        loader = super().get_train_dataloader()
        if self._data is None:
            return loader
        return ThreadedLoader(loader.dataset, batch_sampler=self._data, collate_fn=loader.collate_fn)

    def create_optimizer(self, *given: Any, **named: Any) -> torch.optim.Optimizer:
        """As in ``Trainer``. Raises UsageError for optimizers by name that look at whole matrices."""
        name = getattr(self.args.optim, "value", self.args.optim)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and name not in _ELEMENTWISE:
            known = ", ".join(sorted(_ELEMENTWISE))
            raise UsageError(
                f"optim={name!r} may look at whole matrices, and ranks hold shards of them: choose one of {known}, or "
                "give an optimizer that you know to treat each element alone as optimizer_cls_and_kwargs="
            )
        return super().create_optimizer(*given, **named)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Of one forward and backward with `inputs`. The base class counts the elements of this rank's shards."""
        mine = super().floating_point_ops(inputs)
        return mine * self._whole_numel // self.model.num_parameters(exclude_embeddings=True) if mine else 0

    def newest_checkpoint(self) -> str | None:
        """Return the folder of the newest complete checkpoint in `output_dir`, or None. Collective over all ranks.

        ``trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())`` begins or goes on.
        """
        world, newest = running_world(), None
        with raise_together(world.host):
            if world.rank == 0:
                found = [path for path in Path(self.args.output_dir).glob(_FOLDERS) if _step_of(path) >= 0]
                complete = (path for path in sorted(found, key=_step_of, reverse=True) if _is_complete(path))
                newest = next(map(str, complete), None)
        return world.comm.bcast(newest)

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **named: Any) -> Any:
        """As in ``Trainer``; any number of ranks resumes. Collective over all ranks.

        `resume_from_checkpoint` is a folder that this class has saved; True: the newest complete one.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.newest_checkpoint()
            if resume_from_checkpoint is None:
                raise CheckpointError(
                    f"{self.args.output_dir}: there is no complete checkpoint to resume from; to begin without one, "
                    "give resume_from_checkpoint=trainer.newest_checkpoint()"
                )
        return super().train(resume_from_checkpoint, *given, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model as ``from_pretrained`` loads it; of PEFT's, the adapters. Collective over all ranks.

        Rank 0 gathers the model in host memory and writes. Other ranks raise its errors, too.
        """
        folder = Path(output_dir or self.args.output_dir)
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        wrapped, world, state = self._wrap_model(self.model), running_world(), {}
        if self._has_adapters():
            for name in self.model.peft_config:
                _adapters().save_adapter(wrapped, folder if name == "default" else folder / name, name)
        elif not is_checkpoint:
            state = self.accelerator.get_state_dict(wrapped)
        with raise_together(world.host):
            if world.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                if not is_checkpoint and not self._has_adapters():
                    self._save(str(folder), state_dict=state)
                else:
                    self._save_description(folder)

    def _save_description(self, folder: Path) -> None:
        """Rank 0 alone: what belongs to a model beside its weights, which `hpcfsdp export` adds, and the tokenizer."""
        if isinstance(self.model, PreTrainedModel):
            config = copy.deepcopy(self.model.config)
            # from_pretrained does without these two, but programs that choose the class by them do not.
            config.architectures, config.dtype = [type(self.model).__name__], self.model.dtype
            config.save_pretrained(folder)
            if self.model.can_generate():
                self.model.generation_config.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _has_adapters(self) -> bool:
        if not is_peft_available():
            return False
        from peft import PeftModel  # installed with the extra "hf", but not needed for other models

        return isinstance(self.model, PeftModel)

    def _saved_names(self) -> list[str] | None:
        """Return the tensors of the model in a checkpoint, None for all: those of adapters without the frozen model."""
        if not self._has_adapters():
            return None
        of_adapter = _adapters().tensors_of_adapter
        return sorted({name for key in self.model.peft_config for name in of_adapter(self.model_wrapped, key)})

    def _holders(self) -> dict[str, Any]:
        found = {"scheduler": self.lr_scheduler}
        return found | ({} if self.accelerator.scaler is None else {"scaler": self.accelerator.scaler})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Model, optimizer, scheduler, scaler and random numbers in one file. Collective over all ranks."""
        is_first = running_world().rank == 0
        settings = {"training_arguments": json.loads(self.args.to_json_string())} if is_first else None
        checkpoint.save(
            Path(output_dir) / FILE_NAME,
            model=self.model_wrapped,
            optimizer=plain_optimizer(self.optimizer),
            step=self.state.global_step,
            extra=pack(self._holders()),
            config=settings,
            metrics=_curves(self.state.log_history),
            names=self._saved_names(),
            data=self._data,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Look for the file. The model is loaded when it is sharded, by ``_load_optimizer_and_scheduler``."""
        if not Path(resume_from_checkpoint, FILE_NAME).exists():
            raise CheckpointError(
                f"{resume_from_checkpoint}: has no {FILE_NAME}: it was saved by another Trainer, or with "
                "save_only_model=True; load its model by from_pretrained, and begin anew"
            )

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        """Everything but the random numbers, which must not change the order of the data. Collective over all ranks."""
        if checkpoint_dir is None:
            return
        path, optimizer = Path(checkpoint_dir) / FILE_NAME, plain_optimizer(self.optimizer)
        with self._generators.held_back(running_world().device):
            given = {"optimizer": optimizer, "names": self._saved_names(), "data": self._data}
            found = checkpoint.load(path, model=self.model_wrapped, **given)
        unpack(found.extra, self._holders(), path)

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        """Restore the generators, after the batches of earlier steps have been skipped."""
        self._generators.restore()

    def _load_best_model(self) -> None:
        """Load the best checkpoint. Collective over all ranks."""
        path = Path(self.state.best_model_checkpoint) / FILE_NAME
        checkpoint.load(path, model=self.model_wrapped, names=self._saved_names() or ["*"])  # no random numbers


class _StopTogether(TrainerCallback):
    """Saves and leaves when the scheduler wants the job to end."""

    def __init__(self, trainer: ShardedTrainer, stop: Preemption) -> None:
        self._trainer, self._stop, self._stopping = trainer, stop, False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # After the last step the program itself goes on to its end.
        if self._stop.requested(state.global_step) and state.global_step < state.max_steps:
            self._stopping = True
            control.should_save, control.should_evaluate = True, False
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._stopping:
            if state.is_world_process_zero:
                log.warning("stopped after step %d: %s", state.global_step, self._stop.reason)
            self._trainer.callback_handler.on_train_end(args, state, control)  # trackers write what they hold
            exit_requeue()


def _adapters() -> ModuleType:
    from hpcfsdp.integrations import peft  # imports the library peft, which other models do not need

    return peft


def _step_of(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _is_complete(folder: Path) -> bool:
    """Return whether a save came to its end: the state of the trainer is written last."""
    try:
        state = json_input.parse(safe_files.read(folder / _STATE_NAME, _MOST_STATE_BYTES), dict)
    except OSError:
        return False
    return state is not None and (folder / FILE_NAME).exists()


def _curves(history: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return logged numbers by name, each with its steps. Pure."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for entry in history:
        for name, value in entry.items():
            if name != "step" and isinstance(value, (int, float)):
                steps, values = curves.setdefault(name.replace("/", "."), ([], []))
                steps.append(entry["step"])
                values.append(float(value))
    return curves
