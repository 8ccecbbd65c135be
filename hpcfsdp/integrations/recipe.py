"""How models of the Hugging Face libraries are sharded: their own settings as arguments of this package's class."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.errors import UsageError, nearest
from hpcfsdp.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

_STRATEGIES = {each.name.lower().lstrip("_"): each for each in ShardingStrategy}
_STRATEGIES |= {"true": ShardingStrategy.FULL_SHARD, "false": ShardingStrategy.SHARD_GRAD_OP}
_PREFETCH = {each.name.lower(): each for each in BackwardPrefetch} | {"no_prefetch": None}
_BY_LAYERS, _BY_SIZE, _NONE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
_BOOLEANS = ("forward_prefetch", "limit_all_gathers", "sync_module_states")
_ONLY = {
    "use_orig_params": ("true", "the optimizer is made before the model is sharded, so it must stay True"),
    "cpu_ram_efficient_loading": ("false", "build the model on the meta device, or load it on every rank"),
    "state_dict_type": ("full_state_dict", "save_model writes whole tensors, checkpoints are HDF5 files"),
    **dict.fromkeys(("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"), ("false", "XLA devices are not supported")),
}
"""Settings with one value that means the same here, and why another is refused."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to shard a model."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of ``FullyShardedDataParallel``
    # Names of the classes that become units. None: those that the model names in ``_no_split_modules``.
    layers: tuple[str, ...] | None = None
    activation_checkpointing: bool = False  # compute the forward of each of these layers again in the backward

    def shard(self, model: nn.Module, precision: str = "no") -> FullyShardedDataParallel:
        """Return the model in ``FullyShardedDataParallel``, if it is not in it. Collective over all ranks.

        `precision` is "no", "bf16" or "fp16": what to compute in where the options have no `mixed_precision`.
        """
        if isinstance(model, FullyShardedDataParallel):
            return model
        options = {"use_orig_params": True, "sync_module_states": True, **self.options}
        types = {type(module).__name__: type(module) for module in model.modules()}
        known = [name for name in getattr(model, "_no_split_modules", None) or () if name in types]
        names = known if self.layers is None else self.layers
        if (name := next((name for name in names if name not in types), None)) is not None:
            raise UsageError(f"no module of this {type(model).__name__} is a {name!r}{nearest(name, types)}")
        layers = {types[name] for name in names}
        if layers:
            options.setdefault("auto_wrap_policy", ModuleWrapPolicy(layers))
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if precision not in ("no", *dtypes):
            raise UsageError(f"mixed precision {precision!r} is not supported: choose bf16, fp16 or no")
        if precision != "no":
            # Buffers stay as they are: transformers computes the positions of rotary embeddings in float32.
            mixed = MixedPrecision(param_dtype=dtypes[precision], reduce_dtype=torch.float32)
            options.setdefault("mixed_precision", mixed)
        sharded = FullyShardedDataParallel(model, **options)
        if self.activation_checkpointing:
            if not layers:
                raise UsageError(
                    f"activation_checkpointing: the classes of layers of a {type(model).__name__} are not known: name "
                    "them (transformer_layer_cls_to_wrap, or layers=)"
                )
            _compat.checkpoint_activations(sharded, lambda module: isinstance(module, tuple(layers)))
        return sharded


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for ``FullyShardedDataParallel`` as users give them. Raises UsageError for `use_orig_params=False`."""
    if not options.get("use_orig_params", True):
        raise UsageError(f"fsdp_options: use_orig_params=False: {_ONLY['use_orig_params'][1]}")
    return dict(options)


def recipe_of(fsdp_config: Mapping[str, Any] | str | None, fsdp_options: Mapping[str, Any]) -> Recipe:
    """Return the recipe of ``TrainingArguments.fsdp_config``, where names may begin with "fsdp_", and further options.

    Raises UsageError for a setting that is unknown, cannot be had here, or is given twice.
    """
    if isinstance(fsdp_config, str):
        fsdp_config = json.loads(Path(fsdp_config).read_text(encoding="utf-8"))
    config = {name.removeprefix("fsdp_"): value for name, value in (fsdp_config or {}).items()}
    config.pop("version", None)  # both have these settings
    found: dict[str, Any] = {}
    for name in ("reshard_after_forward", "sharding_strategy"):
        if name in config:
            found["sharding_strategy"] = _choice(name, config.pop(name), _STRATEGIES)
    if "backward_prefetch" in config:
        found["backward_prefetch"] = _choice("backward_prefetch", config.pop("backward_prefetch"), _PREFETCH)
    for name in _BOOLEANS:
        if name in config:
            found[name] = _boolean(name, config.pop(name))
    if _boolean("cpu_offload", config.pop("cpu_offload", False)):
        found["cpu_offload"] = CPUOffload(offload_params=True)
    for name, (value, why) in _ONLY.items():
        if name in config and str(given := config.pop(name)).lower() != value:
            raise UsageError(f"fsdp_config: {name}={given!r} is not supported: {why}")
    checkpointing = _boolean("activation_checkpointing", config.pop("activation_checkpointing", False))
    layers, policy = _units(config)
    found.update(policy)
    if (name := next(iter(config), None)) is not None:
        known = [*_BOOLEANS, *_ONLY, "reshard_after_forward", "transformer_layer_cls_to_wrap", "min_num_params"]
        raise UsageError(f"fsdp_config: {name!r} is not known{nearest(name, known)}")
    if twice := sorted(set(found) & set(fsdp_options)):
        raise UsageError(f"{twice[0]} is set by fsdp_config and by fsdp_options: leave one of them out")
    return Recipe({**found, **check_options(fsdp_options)}, layers, checkpointing)


def _units(config: dict[str, Any]) -> tuple[tuple[str, ...] | None, dict[str, Any]]:
    """Return the classes of layers, and the option for another policy; takes its settings out of `config`."""
    least = int(config.pop("min_num_params", 0))
    names = config.pop("transformer_layer_cls_to_wrap", None)
    policy = config.pop("auto_wrap_policy", _BY_SIZE if least and names is None else _BY_LAYERS)
    layers = None if names is None else tuple([names] if isinstance(names, str) else names)
    wanted = {_BY_LAYERS: not least, _BY_SIZE: bool(least) and layers is None, _NONE: not least and layers is None}
    if policy not in wanted:
        raise UsageError(f"fsdp_config: auto_wrap_policy={policy!r}: choose one of {', '.join(wanted)}")
    if not wanted[policy]:
        raise UsageError(
            f"fsdp_config: auto_wrap_policy={policy!r} does not go with min_num_params={least} and "
            f"transformer_layer_cls_to_wrap={names!r}: {_BY_SIZE} takes the former, {_BY_LAYERS} the latter"
        )
    if policy == _BY_SIZE:
        return None, {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=least)}
    return (() if policy == _NONE else layers), {}


def _choice(name: str, value: Any, choices: Mapping[str, Any]) -> Any:
    given = str(getattr(value, "value", value)).lower()
    if given not in choices:
        raise UsageError(f"fsdp_config: {name}={value!r}: choose one of {', '.join(choices)}")
    return choices[given]


def _boolean(name: str, value: Any) -> bool:
    return bool(_choice(name, value, {"true": True, "false": False}))


def refuse_given(holder: str, given: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise UsageError for the first argument that is set, with the reason why it cannot be had."""
    for name, why in reasons.items():
        if given.get(name) not in (None, False):
            raise UsageError(f"{holder}({name}={given[name]!r}) is not supported: {why}")
