"""Which kind of state dict a model's units save and load: chosen per model, kept on each wrapper."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig, StateDictSettings, StateDictType

from hpcfsdp.errors import StateDictError
from hpcfsdp.units.flat_unit import FlatUnit, unit_of
from hpcfsdp.units.unit_mesh import UnitMesh

log = logging.getLogger("hpcfsdp.state")

_CONFIGS = {
    StateDictType.FULL_STATE_DICT: (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (fsdp.LocalStateDictConfig, fsdp.LocalOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictFormat:
    """How a state dict shows tensors: whole, as always under ``NO_SHARD``, or as this rank's chunk of the rows.

    That is a ``DTensor`` where the model was given a mesh, and else a ``ShardedTensor``.
    """

    sharded: bool = False
    rank0_only: bool = False  # the first rank alone gets them, whole
    offload_to_cpu: bool = False
    dtensor: bool = False  # chunks are a ``DTensor`` without such a mesh, too

    @classmethod
    def of(cls, config: StateDictConfig | OptimStateDictConfig, *, sharded: bool) -> StateDictFormat:
        """Return the format that a configuration chooses."""
        rank0_only, dtensor = (getattr(config, name, False) for name in ("rank0_only", "_use_dtensor"))
        return cls(sharded, rank0_only, config.offload_to_cpu, dtensor)

    def is_made_by(self, mesh: UnitMesh) -> bool:
        """Return whether this rank takes part in the gathering: under `rank0_only` one replica does."""
        return mesh.is_first("replicate") or not self.rank0_only

    def is_shown_by(self, mesh: UnitMesh) -> bool:
        """Return whether this rank gets the result."""
        return mesh.is_first() or not self.rank0_only

    def device(self, device: torch.device) -> torch.device:
        """Return the device of the result for tensors on `device`."""
        return torch.device("cpu") if self.offload_to_cpu else device


def default_settings() -> StateDictSettings:
    """Return full state dicts on every rank, where the model is; of the optimizer in host memory."""
    return make_settings(StateDictType.FULL_STATE_DICT, None, None)


def make_settings(
    kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> StateDictSettings:
    """Return settings of a kind, with torch's defaults for configurations that are not given."""
    if not isinstance(kind, StateDictType):
        raise TypeError(f"state_dict_type must be a StateDictType, not {kind!r}")
    names, chosen = ("state_dict_config", "optim_state_dict_config"), []
    for name, given, expected in zip(names, (config, optim_config), _CONFIGS[kind], strict=True):
        if given is not None and type(given) is not expected:
            raise StateDictError(f"{name} for {kind.name} must be a {expected.__name__}, not a {type(given).__name__}")
        chosen.append(given or expected())
    return StateDictSettings(kind, *chosen)


def set_kind(
    module: nn.Module, kind: StateDictType, config: StateDictConfig | None, optim_config: OptimStateDictConfig | None
) -> list[tuple[FlatUnit, StateDictSettings]]:
    """Set all units in `module` to copies; return them, outer ones first, and what they were set to before."""
    settings = make_settings(kind, config, optim_config)
    before = []
    for _, unit in _units(module):
        before.append((unit, unit.state_dict_settings))
        own = copy.deepcopy(settings)
        if unit.mesh.device_mesh is not None and kind is StateDictType.SHARDED_STATE_DICT:
            own.state_dict_config._use_dtensor = True
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
    """Return a context in which all units in `module` have a setting; after it each has its own again."""
    before = set_kind(module, kind, config, optim_config)
    try:
        yield
    finally:
        for unit, settings in before:
            unit.state_dict_settings = settings


def set_optim_use_dtensor(settings: StateDictSettings) -> None:
    """Have sharded state dicts of an optimizer show ``DTensor``."""
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        settings.optim_state_dict_config._use_dtensor = True


def settings_of(module: nn.Module) -> StateDictSettings:
    """Return the settings of the units in `module`: those of the outermost one, as only some units may have a mesh."""
    (first, root), *others = _units(module)
    settings = root.state_dict_settings
    for name, unit in others:
        if _chosen(unit.state_dict_settings) != _chosen(settings):
            raise StateDictError(
                f"units of one model have different state_dict_type settings: {first or 'the root'!r} is set to "
                f"{settings}, {name!r} to {unit.state_dict_settings}: call set_state_dict_type on the whole model"
            )
    return settings


def optim_format_of(module: nn.Module) -> StateDictFormat:
    """Return how the units in `module` show the state of their optimizer."""
    settings = settings_of(module)
    for _, unit in _units(module):
        kind_of(unit, settings.state_dict_type)
    sharded = settings.state_dict_type is not StateDictType.FULL_STATE_DICT
    return StateDictFormat.of(settings.optim_state_dict_config, sharded=sharded)


def kind_of(unit: FlatUnit, kind: StateDictType) -> StateDictType:
    """Return the kind of state dict that a unit saves and loads under a setting: full, if it is not sharded."""
    if unit.mesh.strategy is fsdp.ShardingStrategy.NO_SHARD:
        if kind is not StateDictType.FULL_STATE_DICT:
            _log_whole(kind)
        return StateDictType.FULL_STATE_DICT
    if kind is StateDictType.LOCAL_STATE_DICT and unit.mesh.device_mesh is not None:
        raise StateDictError(
            f"{unit.name} was given a device_mesh, which LOCAL_STATE_DICT does not support: set SHARDED_STATE_DICT"
        )
    return kind


@functools.cache
def _log_whole(kind: StateDictType) -> None:
    log.info("units under NO_SHARD save and load whole tensors, also under %s", kind.name)


def _units(module: nn.Module) -> list[tuple[str, FlatUnit]]:
    found = [(name, unit) for name, inner in module.named_modules() if (unit := unit_of(inner)) is not None]
    if not found:
        raise StateDictError(
            f"there is no FullyShardedDataParallel in this {type(module).__name__}: wrap the model first"
        )
    return found


def _chosen(settings: StateDictSettings) -> dict[str, Any]:
    """Return the settings without what follows from a unit's groups."""
    found = dataclasses.asdict(settings)
    for config in (found["state_dict_config"], found["optim_state_dict_config"]):
        config.pop("_use_dtensor", None)
    return found
