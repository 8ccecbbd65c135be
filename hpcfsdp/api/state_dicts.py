"""State dicts of model and optimizer by the names of torch's FSDP: what the wrapper has of ``state/``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from hpcfsdp import _compat
from hpcfsdp.launch.calls import public_call
from hpcfsdp.sharded.unit import ShardedUnit
from hpcfsdp.state import settings
from hpcfsdp.state.load import load_model
from hpcfsdp.state.optim import load as load_optimizer, rekey, save as save_optimizer
from hpcfsdp.state.save import save_model
from hpcfsdp.state.transfer import StateDictFormat
from hpcfsdp.state.within import LoadWithin


class StateDictMethods:
    """What the wrapper inherits."""

    _unit: ShardedUnit

    @public_call("state_dict")
    def state_dict(
        self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Collective over the ranks of the model. Its parameters and buffers, as ``set_state_dict_type`` says.

        By default every rank gets whole tensors, on the device where the model computes. Names are those of the plain
        model, without what wrappers, activation checkpointing and compilation add. Parameters have the dtype in which
        they are kept, buffers that which they had before mixed precision cast them. Parameters are new memory, but for
        ``LOCAL_STATE_DICT``. Buffers and ignored parameters are the modules' own memory, as in a plain module's state
        dict, unless they are brought to host memory or back to their dtype; extra states are the modules' own.

        Everything is gathered before the modules' own ``state_dict`` is called, and with it hooks; what fails there on
        one rank is told to all. Under ``rank0_only`` hooks are called on all ranks, of which the others find NaN.

        Under ``SHARDED_STATE_DICT`` each parameter is a ``ShardedTensor``, or a ``DTensor`` where the model was given a
        ``device_mesh``, of which each rank holds a chunk of the rows. Under ``LOCAL_STATE_DICT`` each unit's flat
        parameters are there as they are, in 1-D ``ShardedTensor``. Units under ``NO_SHARD`` give whole tensors always.

        Args:
            args: `destination`, `prefix` and `keep_vars`, as of other modules.
            destination: added to, and returned.
            prefix: of all names.

        Raises:
            EngineError: a forward or backward is running, or parameters are summoned.
            StateDictError: units or ranks are set differently, or two tensors have one name without those of wrappers;
                ``LOCAL_STATE_DICT`` with a ``device_mesh``.
            Exception: on every rank of the replica, what a hook has raised on one; elsewhere as an ``HpcfsdpError``.
        """

        destination, prefix, keep_vars = (*args, *(destination, prefix, keep_vars)[len(args) :])
        return save_model(self._unit, destination, prefix, keep_vars=keep_vars)

    @public_call("load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Collective over the ranks of the model. Load parameters and buffers, or change nothing on any rank.

        Values may be whole tensors, which every rank passes, or distributed ones (``ShardedTensor``, ``DTensor``),
        whatever ``set_state_dict_type`` says; under ``LOCAL_STATE_DICT`` names are those of flat parameters, and any
        number of ranks may have saved them. Names may carry what wrappers add.

        Ranks compare names, shapes, dtypes and where the blocks of distributed tensors lie before anything is copied.
        They do not compare values: of what every rank passes whole each takes its own part, and of what is not
        sharded, everything.

        Extra states are set when all tensors are loaded, and then hooks for the time after loading are called, with
        whole parameters, whose changes stay. If one of these raises, all ranks do, and what was loaded remains. Names
        that are still missing after hooks could have forgiven them are refused, and loading is undone.

        Args:
            strict: all names must be there, and no others.
            assign: not supported: a sharded model keeps its own memory.

        Returns:
            A named tuple of missing_keys and unexpected_keys, both clean.

        Raises:
            EngineError: a forward or backward is running, or parameters are summoned.
            StateDictError: on every rank, if the state dict does not fit the model on one of them, has a tensor without
                readable values (meta, sparse, quantized), or ranks pass different ones. It is a ``RuntimeError``, too.
            Exception: on every rank, what a module has raised on one; elsewhere as an ``HpcfsdpError``.
        """

        return load_model(self, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by a module around this one that loads a state dict; see ``state.later``."""

        del strict  # always True here: the module around this one knows
        waiting = LoadWithin(
            self._unit,
            state_dict,
            prefix,
            local_metadata,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        self.__dict__["_load_within"] = waiting, _compat.loading_module(), missing_keys

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the kind of state dicts of all units in `module`, which need not be one itself.

        Args:
            state_dict_config, optim_state_dict_config: of the classes that belong to the kind; torch's defaults.

        Returns:
            What was set before, of the outermost unit.

        Raises:
            TypeError: there is no such kind.
            StateDictError: a configuration is one of another kind, or there is no unit.
        """

        return settings.set_kind(module, state_dict_type, state_dict_config, optim_state_dict_config)[0][1]

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """What the units in `module` are set to.

        Raises:
            StateDictError: they are not set alike, or there are none.
        """

        return settings.settings_of(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which ``set_state_dict_type`` holds; after it each unit is set as before, whatever happened."""
        return settings.state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    @public_call("full_optim_state_dict")
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Collective over all ranks. The whole optimizer state in host memory, whatever the state dict type.

        Args:
            optim_input: what `optim` was built from; not needed.
            rank0_only: the other ranks get an empty dict.
            group: the ranks, where they are not those of the model.

        Returns, raises: see ``optim_state_dict``.
        """

        form = StateDictFormat(rank0_only=rank0_only, offload_to_cpu=True)
        return save_optimizer.optim_state_dict(model, optim, form=form, optim_input=optim_input, group=group)

    @staticmethod
    @public_call("sharded_optim_state_dict")
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """Collective over all ranks. The optimizer state with this rank's rows in host memory, in any state dict type.

        Returns, raises: see ``optim_state_dict``.
        """

        form = StateDictFormat(sharded=True, offload_to_cpu=True)
        return save_optimizer.optim_state_dict(model, optim, form=form, group=group)

    @staticmethod
    @public_call("shard_full_optim_state_dict")
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Collective over all ranks. What each rank's optimizer loads of a whole state dict, which every rank has.

        Args:
            optim_input: instead of `optim`: what it was built from; by default ``model.parameters()``.

        Returns, raises: see ``optim_state_dict_to_load``.
        """

        return load_optimizer.optim_state_dict_to_load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    @public_call("flatten_sharded_optim_state_dict")
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Collective over all ranks. What each rank's optimizer loads of a state dict of distributed tensors.

        Returns, raises: see ``optim_state_dict_to_load``.
        """

        return load_optimizer.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    @public_call("scatter_full_optim_state_dict")
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> dict[str, Any]:
        """Collective over all ranks. What each rank's optimizer loads of a whole state dict that rank 0 alone has.

        Args:
            full_optim_state_dict: on rank 0; that of other ranks is ignored.
            optim_input: instead of `optim`: what it was built from; by default ``model.parameters()``.
            group: the ranks, where they are not those of the model.

        Returns, raises: see ``optim_state_dict_to_load``.
        """

        return load_optimizer.optim_state_dict_to_load(
            model, optim, full_optim_state_dict, rank0_only=True, optim_input=optim_input, group=group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Names of parameters for numbers in a whole optimizer state dict, or numbers for names. Not collective.

        With names a state dict of a plain model's optimizer loads into that of a sharded model; with numbers it is the
        other way round. Groups keep the order of the optimizer, by which ``Optimizer.load_state_dict`` goes.

        Args:
            optim_state_key_type: what keys are to be.
            model: a plain model, or a wrapped one with ``use_orig_params=True``, whose parameters `optim` steps.
            optim_input: instead of `optim`: what it was built from; by default ``model.parameters()``.

        Raises:
            StateDictError: names and numbers are mixed, or are not those of the model and the optimizer.
        """

        return rekey.rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)

    @staticmethod
    @public_call("optim_state_dict")
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Collective over all ranks. The state of `optim` as that of an optimizer of the whole, unwrapped model.

        ``state_dict_type`` chooses the form: whole tensors, or this rank's rows as ``ShardedTensor``, or as ``DTensor``
        where the model was given a device mesh. Memory for one unit is taken beyond the result. Ranks agree on what
        they have before anything is gathered.

        Args:
            model: wrapped, or with wrapped modules in it.
            optim: steps the parameters of the wrapped model.
            optim_state_dict: its state dict, if it has been taken already.
            group: the ranks, where they are not those of the model.

        Returns:
            ``state`` by the names of the model's parameters, without those of wrappers, and ``param_groups`` with these
            names. Empty on other ranks than 0 under ``rank0_only``.

        Raises:
            StateDictError: on all ranks, if ranks step different parameters, have other groups, or state that differs;
                units or ranks are set differently; state has no readable values (meta, sparse, quantized).
            Exception: on every rank, what a hook of the optimizer has raised on one; elsewhere as an ``HpcfsdpError``.
        """

        return save_optimizer.optim_state_dict(model, optim, optim_state_dict, group=group)

    @staticmethod
    @public_call("optim_state_dict_to_load")
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """Collective over all ranks. What ``optim.load_state_dict`` takes, from a state dict of the whole model.

        That may come from ``optim_state_dict`` at any number of ranks, or from a plain model, see
        ``rekey_optim_state_dict``. Under ``rank0_only`` rank 0 alone needs to have it. Everything is checked on all
        ranks before anything moves, and neither the optimizer nor what was given is changed.

        Args:
            model: wrapped, or with wrapped modules in it.
            optim: steps the parameters of the wrapped model.
            optim_state_dict: parameters by name; tensors whole or distributed, whatever ``state_dict_type`` says.
            is_named_optimizer: whether `optim` has names for keys, as TorchRec's ``KeyedOptimizer``.
            load_directly: load it, too.
            group: the ranks, where they are not those of the model.

        Raises:
            StateDictError: on all ranks, if it belongs to another model, lacks state that the optimizer has, has
                tensors of other shapes than the parameters, groups of other parameters, or differs between ranks.
        """

        found = load_optimizer.optim_state_dict_to_load(
            model, optim, optim_state_dict, rank0_only=None, is_named_optimizer=is_named_optimizer, group=group
        )
        if load_directly:
            optim.load_state_dict(found)
        return found
