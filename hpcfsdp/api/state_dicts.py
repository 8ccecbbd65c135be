"""State dicts of model and optimizer by the names of torch's FSDP: not there yet, and saying so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateDictConfig, OptimStateKeyType, StateDictConfig, StateDictType


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} of a sharded model is not supported yet: hpcfsdp.checkpoint.save writes a file that holds model and "
        "optimizer whole, and that any number of ranks loads; summon_full_params shows whole parameters"
    )


class StateDictMethods:
    """What the wrapper inherits."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported yet: it would hold shards under names of no use to anyone."""
        _refuse("state_dict")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("load_state_dict")

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("set_state_dict_type")

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("get_state_dict_type")

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("state_dict_type")

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("full_optim_state_dict")

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("sharded_optim_state_dict")

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("shard_full_optim_state_dict")

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("flatten_sharded_optim_state_dict")

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("scatter_full_optim_state_dict")

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("rekey_optim_state_dict")

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("optim_state_dict")

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> Any:
        """Not supported yet, see ``state_dict``."""
        _refuse("optim_state_dict_to_load")
