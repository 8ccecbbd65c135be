"""Which kind of state dict a model's units give and take: chosen per model, kept on each wrapper."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from hpcfsdp.errors import StateDictError

_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Full state dicts on every rank, where the model is; of the optimizer in host memory."""
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


def make_settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Settings of a kind, with torch's defaults for configurations that are not given.

    Raises:
        TypeError: `kind` is no ``StateDictType``, or a configuration is one of another kind.
    """
    if kind not in _CONFIGS:
        raise TypeError(f"state_dict_type must be a StateDictType, not {kind!r}")
    for name, given, expected in zip(
        ("state_dict_config", "optim_state_dict_config"), (config, optim_config), _CONFIGS[kind], strict=True
    ):
        if given is not None and type(given) is not expected:
            raise TypeError(f"{name} for {kind.name} must be a {expected.__name__}, not a {type(given).__name__}")
    model_kind, optim_kind = _CONFIGS[kind]
    return StateDictSettings(kind, config or model_kind(), optim_config or optim_kind())


def settings_of(module: nn.Module) -> StateDictSettings:
    """What the units in `module` are set to.

    Raises:
        StateDictError: they are not set alike, or there are none.
    """
    from hpcfsdp.api.wrapper import FullyShardedDataParallel  # which has this module's functions as methods

    found = {}
    for name, inner in module.named_modules():
        if isinstance(inner, FullyShardedDataParallel):
            found.setdefault(repr(inner._state_dict_settings), (name, inner._state_dict_settings))
    if not found:
        raise StateDictError(f"there is no FullyShardedDataParallel in this {type(module).__name__}")
    if len(found) > 1:
        (first, one), (second, other), *_ = found.values()
        raise StateDictError(
            f"units of one model are set to different state dicts, {first or 'the root'!r} to {one}, {second!r} to "
            f"{other}: call set_state_dict_type on the whole model"
        )
    [(_, settings)] = found.values()
    return settings
