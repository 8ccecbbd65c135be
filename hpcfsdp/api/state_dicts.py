"""The wrapper's methods for state dicts of model and optimizer, by the names of torch's FSDP."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed.fsdp as stock
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.hang.calls import public_call
from hpcfsdp.state import settings
from hpcfsdp.state.load import LoadWithin, load_model
from hpcfsdp.state.optim import keys, load as load_optimizer, save as save_optimizer
from hpcfsdp.state.save import save_model
from hpcfsdp.state.settings import StateDictFormat
from hpcfsdp.units.flat_unit import FlatUnit


class StateDictMethods(nn.Module):
    """Methods of the wrapper.

    Those for optimizers are collective over all ranks, but for ``rekey_optim_state_dict``. Their arguments have one
    meaning:

    Args:
        model: wrapped, or with wrapped modules in it.
        optim: the optimizer, which steps the parameters of the wrapped model.
        optim_input: the argument with which `optim` was built, by default ``model.parameters()``; not needed with
            `optim`.
        group: the ranks, where they are not those of the model.
    """

    _unit: FlatUnit

    @public_call("state_dict")
    def state_dict(  # type: ignore[override]  # torch's has overloads for the type of `destination`
        self, *args: Any, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return its parameters and buffers, as ``state_dict_type`` sets. Collective over the ranks of the model.

        By default every rank gets whole tensors, on the device of the computation. Names are those of the plain model,
        without those of wrappers, activation checkpointing and compilation. Parameters have the dtype of their shards,
        buffers the one before mixed precision. Parameters are new memory, except under ``LOCAL_STATE_DICT``. Buffers
        and ignored parameters share the modules' memory, as in a plain module's state dict, unless they are copied to
        host memory or cast; extra states are the modules' own.

        All tensors are gathered before the modules' own ``state_dict`` and hooks are called. An exception there on one
        rank is raised on all. Under ``rank0_only`` hooks are called on all ranks, and find NaN on ranks other than 0.

        Under ``SHARDED_STATE_DICT`` each parameter is a ``ShardedTensor``, or with a ``device_mesh`` a ``DTensor``, and
        each rank holds a chunk of the rows. Under ``LOCAL_STATE_DICT`` each unit's flat parameters are 1-D
        ``ShardedTensor``. Units under ``NO_SHARD`` always give whole tensors.

        Args:
            args: `destination`, `prefix` and `keep_vars`, as of other modules.
            destination: a dict to which entries are added, and which is returned.
            prefix: text that is put before all names.

        Raises:
            EngineError: a forward or backward is running, or parameters are summoned.
            StateDictError: units or ranks are set differently, or two tensors have one name without those of wrappers;
                ``LOCAL_STATE_DICT`` with a ``device_mesh``.
            Exception: on every rank of the replica, the one that a hook has raised; elsewhere as an ``HpcfsdpError``.
        """
        given: tuple[Any, ...] = (*args, *(destination, prefix, keep_vars)[len(args) :])
        destination, prefix, keep_vars = given
        return save_model(self._unit, destination, prefix, keep_vars=keep_vars)

    @public_call("load_state_dict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and buffers, or change nothing on any rank. Collective over the ranks of the model.

        Values may be whole tensors, which every rank passes, or distributed ones (``ShardedTensor``, ``DTensor``), in
        any ``state_dict_type``. Under ``LOCAL_STATE_DICT`` names are those of flat parameters, saved by any number of
        ranks. Names may contain those of wrappers.

        Ranks compare names, shapes, dtypes and the blocks of distributed tensors before anything is copied. They do not
        compare values: each rank copies its own part of whole tensors, and all of unsharded ones.

        Extra states are set when all tensors are loaded. Then hooks for the time after loading are called, with whole
        parameters, and their changes stay. If one of these raises, all ranks do, and the loaded values remain. Names
        that hooks leave among the missing ones are refused, and loading is undone.

        Args:
            state_dict: values by name.
            strict: all names must be present, and no others.
            assign: not supported: a sharded model keeps its own memory.

        Returns:
            A named tuple of missing_keys and unexpected_keys, without the names of wrappers.

        Raises:
            EngineError: a forward or backward is running, or parameters are summoned.
            StateDictError: on every rank, if the state dict does not fit the model on one of them, has a tensor without
                readable values (meta, sparse, quantized), or ranks pass different ones. It is a ``RuntimeError``, too.
            Exception: on every rank, the one that a module has raised; elsewhere as an ``HpcfsdpError``.
        """
        return load_model(self, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load for a module around this one, which calls this; see ``state.load.LoadWithin``."""
        # Here `strict` is always True; the module around this one has the argument.
        state_dict, prefix, local_metadata, _strict, missing_keys, unexpected_keys, error_msgs = args
        waiting = LoadWithin(self._unit, state_dict, prefix, local_metadata, missing_keys, unexpected_keys, error_msgs)
        self.__dict__["_load_within"] = waiting, _compat.loading_module(), missing_keys

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: stock.StateDictType,
        state_dict_config: stock.StateDictConfig | None = None,
        optim_state_dict_config: stock.OptimStateDictConfig | None = None,
    ) -> stock.StateDictSettings:
        """Set the kind of state dict for all units in `module`, which need not be a unit itself.

        Args:
            state_dict_type: the kind.
            state_dict_config, optim_state_dict_config: configurations of the classes for that kind. Default: torch's.

        Returns:
            The earlier settings of the outermost unit.

        Raises:
            TypeError: there is no such kind.
            StateDictError: a configuration belongs to another kind, or there is no unit.
        """
        return settings.set_kind(module, state_dict_type, state_dict_config, optim_state_dict_config)[0][1]

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> stock.StateDictSettings:
        """Return the settings of the units in `module`, which need not be a unit itself.

        Raises:
            StateDictError: they differ, or there is no unit.
        """
        return settings.settings_of(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: stock.StateDictType,
        state_dict_config: stock.StateDictConfig | None = None,
        optim_state_dict_config: stock.OptimStateDictConfig | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context with the settings of ``set_state_dict_type``; its end restores those of each unit."""
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
        """Return ``optim_state_dict`` with whole tensors in host memory, whatever the state dict type.

        Under `rank0_only` other ranks get an empty dict.
        """
        form = StateDictFormat(rank0_only=rank0_only, offload_to_cpu=True)
        return save_optimizer.optim_state_dict(model, optim, form=form, optim_input=optim_input, group=group)

    @staticmethod
    @public_call("sharded_optim_state_dict")
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """Return ``optim_state_dict`` with this rank's rows, in host memory."""
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
        """Call ``optim_state_dict_to_load`` with `full_optim_state_dict`, whole and on every rank."""
        return load_optimizer.optim_state_dict_to_load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    @public_call("flatten_sharded_optim_state_dict")
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Call ``optim_state_dict_to_load`` with `sharded_optim_state_dict`, of distributed tensors."""
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
        """Call ``optim_state_dict_to_load`` with rank 0's `full_optim_state_dict`, whole; others are ignored."""
        return load_optimizer.optim_state_dict_to_load(
            model, optim, full_optim_state_dict, rank0_only=True, optim_input=optim_input, group=group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: stock.OptimStateKeyType,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Not collective. Replace numbers of parameters by names in a whole optimizer state dict, or names by numbers.

        With names the state dict of a plain model's optimizer loads into that of a sharded model; with numbers that of
        a sharded model into that of a plain one. Groups keep the order of the optimizer, as
        ``Optimizer.load_state_dict`` needs it.

        Args:
            optim_state_dict: the state dict, which is not changed.
            optim_state_key_type: the kind of keys of the result.
            model: a plain model, or a wrapped one with ``use_orig_params=True``.

        Raises:
            StateDictError: names and numbers are mixed, or are not those of the model and the optimizer.
        """
        return keys.rekey_optim_state_dict(optim_state_dict, optim_state_key_type, model, optim_input, optim)

    @staticmethod
    @public_call("optim_state_dict")
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """Return the state of `optim` as an optimizer of the unwrapped model would have it.

        ``state_dict_type`` chooses the form: whole tensors, or this rank's rows as ``ShardedTensor`` (``DTensor`` with
        a device mesh). Besides the result it needs memory for one unit. Ranks compare their state before anything is
        gathered.

        Args:
            optim_state_dict: the state dict of `optim`, if the caller has it already.

        Returns:
            ``state`` by the names of the model's parameters, without those of wrappers, and ``param_groups`` with these
            names. Empty on ranks other than 0 under ``rank0_only``.

        Raises:
            StateDictError: on all ranks, if ranks step different parameters, have different groups, state or settings;
                units have different settings; state has no readable values (meta, sparse, quantized).
            Exception: on every rank, the one that a hook of the optimizer has raised; elsewhere as an ``HpcfsdpError``.
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
        """Make the argument for ``optim.load_state_dict`` from a whole model's state.

        That may come from ``optim_state_dict`` at any number of ranks, or from a plain model, see
        ``rekey_optim_state_dict``. Under ``rank0_only`` only rank 0 needs it. All ranks check it before any transfer,
        and neither the optimizer nor the given state dict is changed.

        Args:
            optim_state_dict: parameters by name; tensors whole or distributed, in any ``state_dict_type``.
            is_named_optimizer: whether the keys of `optim` are names, as in TorchRec's ``KeyedOptimizer``.
            load_directly: also load it.

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
