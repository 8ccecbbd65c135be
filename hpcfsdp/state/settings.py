"""Which kind of state dict a model's units give and take: chosen per model, kept on each wrapper."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from hpcfsdp.errors import StateDictError
from hpcfsdp.sharded.unit import ShardedUnit, unit_of

log = logging.getLogger("hpcfsdp.state")

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
        TypeError: `kind` is no ``StateDictType``.
        StateDictError: a configuration is one of another kind.
    """
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type must be a StateDictType, not {kind!r}")
    for name, given, expected in zip(
        ("state_dict_config", "optim_state_dict_config"), (config, optim_config), _CONFIGS[kind], strict=True
    ):
        if given is not None and type(given) is not expected:
            raise StateDictError(f"{name} for {kind.name} must be a {expected.__name__}, not a {type(given).__name__}")
    model_kind, optim_kind = _CONFIGS[kind]
    return StateDictSettings(kind, config or model_kind(), optim_config or optim_kind())


def set_kind(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> list[tuple[ShardedUnit, StateDictSettings]]:
    """Set all units in `module`, which is none itself perhaps; each keeps copies of the configurations.

    Returns:
        The units, outer ones first, and what they were set to before.

    Raises:
        TypeError: see ``make_settings``.
        StateDictError: likewise, or there is no unit.
    """
    settings = make_settings(kind, config, optim_config)
    before = []
    for _, unit in _units(module):
        before.append((unit, unit.state_dict_settings))
        own = copy.deepcopy(settings)
        if unit.mesh.device_mesh is not None:
            set_use_dtensor(own)
            set_optim_use_dtensor(own)
        unit.state_dict_settings = own
    return before


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """A context in which all units in `module` are set so; after it each is set as before, whatever happened."""
    before = set_kind(module, kind, config, optim_config)
    try:
        yield
    finally:
        for unit, settings in before:
            unit.state_dict_settings = settings


def set_use_dtensor(settings: StateDictSettings) -> None:
    """Have sharded state dicts of a unit that was given a mesh show ``DTensor``."""
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        settings.state_dict_config._use_dtensor = True


def set_optim_use_dtensor(settings: StateDictSettings) -> None:
    """The same for the state of its optimizer."""
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        settings.optim_state_dict_config._use_dtensor = True


def settings_of(module: nn.Module) -> StateDictSettings:
    """What the units in `module` are set to; of the outermost one, as units may differ in whether they have a mesh.

    Raises:
        StateDictError: they are not set alike, or there are none.
    """
    (first, root), *others = _units(module)
    settings = root.state_dict_settings
    for name, unit in others:
        if _chosen(unit.state_dict_settings) != _chosen(settings):
            raise StateDictError(
                f"units of one model are set to different state dicts, {first or 'the root'!r} to {settings}, {name!r} "
                f"to {unit.state_dict_settings}: call set_state_dict_type on the whole model"
            )
    return settings


def optim_settings_of(module: nn.Module) -> StateDictSettings:
    """What the units in `module` are set to, for the state of their optimizer.

    Raises:
        StateDictError: see ``settings_of`` and ``kind_of``.
    """
    settings = settings_of(module)
    for _, unit in _units(module):
        kind_of(unit, settings.state_dict_type)
    return settings


def kind_of(unit: ShardedUnit, kind: StateDictType) -> StateDictType:
    """What a unit gives and takes under a setting: whole tensors, if it is not sharded.

    Raises:
        StateDictError: flat parameters of a model that was given a mesh.
    """
    if unit.mesh.strategy is ShardingStrategy.NO_SHARD:
        if kind is not StateDictType.FULL_STATE_DICT:
            _tell_of_whole(kind)
        return StateDictType.FULL_STATE_DICT
    if kind is StateDictType.LOCAL_STATE_DICT and unit.mesh.device_mesh is not None:
        raise StateDictError(
            f"{unit.name} was given a device_mesh, which LOCAL_STATE_DICT knows nothing of: set "
            "SHARDED_STATE_DICT, which gives DTensors"
        )
    return kind


@functools.cache
def _tell_of_whole(kind: StateDictType) -> None:
    log.info("units under NO_SHARD give and take whole tensors, also under %s", kind.name)


def _units(module: nn.Module) -> list[tuple[str, ShardedUnit]]:
    found = [(name, unit) for name, inner in module.named_modules() if (unit := unit_of(inner)) is not None]
    if not found:
        raise StateDictError(
            f"there is no FullyShardedDataParallel in this {type(module).__name__}: wrap the model first"
        )
    return found


def _chosen(settings: StateDictSettings) -> dict[str, Any]:
    """The settings without what follows from a unit's groups."""
    found = dataclasses.asdict(settings)
    for config in (found["state_dict_config"], found["optim_state_dict_config"]):
        config.pop("_use_dtensor", None)
    return found
