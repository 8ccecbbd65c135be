"""Uses of a sharded model, or of modules inside, that would take shards for weights: errors that say what to call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp import _compat
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError, StateDictError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.units.build import become_root
from hpcfsdp.units.flat_unit import FlatUnit, ModelUnit

_INSTEAD = (
    "call {0}() of the FullyShardedDataParallel around the whole model, on all ranks, or call it within "
    "FullyShardedDataParallel.summon_full_params(model)"
)


class UnitHooks:
    """Hooks of modules that hold parameters of a unit, copied with it. In a copy without a unit they do nothing."""

    def __init__(self, unit: ModelUnit | None = None) -> None:
        self._is_inert = unit is None
        self._unit: Callable[[], Any] = (lambda: None) if unit is None else weakref.ref(unit)  # no cycle

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        return type(self)(memo.get(id(self._unit())))

    def __reduce__(self) -> tuple[type[UnitHooks], tuple[()]]:
        return type(self), ()


class _FlatUnitHooks(UnitHooks):
    """Hooks that raise while the parameters of a ``FlatUnit`` are not whole."""

    _stays_whole = False

    def before_saving(self, module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        """Refuse a state dict of shards; ``nn.Module.state_dict`` calls this."""
        if not self._shows_whole(reading=True):
            self._refuse(
                f"the parameters of this {type(module).__name__} are sharded, and its own state_dict() would return "
                f"this rank's part as if it were the whole: {_INSTEAD.format('state_dict')}; pass the result to "
                "save_pretrained as state_dict=; `hpcfsdp export` turns a checkpoint into a file of weights"
            )

    def before_loading(self, module: nn.Module, *_arguments: Any) -> None:
        """Refuse to load into shards; ``nn.Module.load_state_dict`` calls this."""
        if not self._shows_whole(reading=False):
            self._refuse(
                f"the parameters of this {type(module).__name__} are sharded, and its own load_state_dict() expects "
                f"whole ones: {_INSTEAD.format('load_state_dict')}"
            )

    def before_forward(self, module: nn.Module, _arguments: Any) -> None:
        """Refuse a forward of the module, unless the unit is in a forward or backward."""
        if not self._shows_whole(reading=True) and not self._is_unsharded():
            self._refuse(
                f"a {type(module).__name__} was called without the FullyShardedDataParallel around it, which gathers "
                "its parameters: call the wrapper. Call other methods of the wrapped module on all ranks within "
                "FullyShardedDataParallel.summon_full_params(model, writeback=False); add recurse=False if they call "
                "the units inside through their wrappers",
                EngineError,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        if id(self._unit()) not in memo and not self._shows_whole(reading=True):
            self._refuse(
                "the parameters of a module within a FullyShardedDataParallel are sharded, and a copy of the module "
                "alone would hold this rank's part as if it were the whole: copy the FullyShardedDataParallel around "
                "it on all ranks, or the plain module before wrapping it, or copy it within summon_full_params"
            )
        made = cast(_FlatUnitHooks, super().__deepcopy__(memo))
        made._stays_whole = self._stays_whole
        return made

    def __reduce__(self) -> tuple[type[UnitHooks], tuple[()]]:
        if not self._shows_whole(reading=True):
            self._refuse(
                "the parameters of a module within a FullyShardedDataParallel are sharded, and a pickle of the "
                "module would hold this rank's part as if it were the whole: save the state_dict() of the wrapped "
                "model, or save the model with hpcfsdp.checkpoint"
            )
        return super().__reduce__()

    def _shows_whole(self, *, reading: bool) -> bool:
        """Return whether the module holds whole parameters under their names; in a forward they can only be read."""
        unit = self._unit()
        if unit is None:
            return self._is_inert or self._stays_whole
        if unit.shows_state or unit.training_state is TrainingState.SUMMON or self._stays_whole:
            return True
        return reading and unit.options.use_orig_params and self._is_unsharded()

    def _is_unsharded(self) -> bool:
        unit = self._unit()
        return unit is not None and all(flat.is_unsharded or flat.shows_whole for flat in unit.sharded_params)

    def _refuse(self, message: str, kind: type[Exception] = StateDictError) -> NoReturn:
        unit = self._unit()
        raise kind(message if unit is None else f"{unit.name}: {message}")


def guard_modules(unit: FlatUnit, *, is_copy: bool = False) -> None:
    """Not collective. Register hooks in the modules of a unit's parameters; those of a copy have some already."""
    modules = {place: None for entry in unit.own.entries for place, _ in entry.places}
    if unit.own.entries:
        modules[unit.module] = None  # holds the flat parameters
    hooks = _FlatUnitHooks(unit)
    is_whole = all(entry.block is None or entry.block.is_whole for entry in unit.own.entries)
    is_replicated = unit.mesh.strategy is ShardingStrategy.NO_SHARD and unit.options.use_orig_params
    hooks._stays_whole = is_replicated and is_whole
    for module in modules if not is_copy else ():
        module.register_state_dict_pre_hook(hooks.before_saving)
        module.register_load_state_dict_pre_hook(hooks.before_loading)
    unit.guard([_compat.hooks_before_forward(module) for module in modules], hooks.before_forward)


@contextmanager
def showing_state(unit: FlatUnit) -> Iterator[None]:
    """Return a context in which the modules of a unit hold values for a state dict in place of their parameters."""
    before, unit.shows_state = unit.shows_state, True
    try:
        yield
    finally:
        unit.shows_state = before


def refuse_mistakes(unit: FlatUnit) -> None:
    """Refuse what cannot be right while ``torch.distributed.checkpoint.state_dict`` reads the names of a model."""
    call, mistaken = _compat.stock_state_dict_call(), None
    if call is None:
        return
    if call.has_optimizers:
        mistaken = "the shards that the optimizer steps as whole parameters"
    elif call.function.startswith("set_"):
        if call.options.full_state_dict and unit.sharded_params and not unit.options.use_orig_params:
            mistaken = "flat parameters as the model's own"
    elif call.has_submodules or (
        call.options.ignore_frozen_params and not all(param.requires_grad for param in unit.wrapper.parameters())
    ):
        mistaken = "the names of wrappers as parts of the names in a state dict"
    if mistaken is not None:
        raise StateDictError(
            f"torch.distributed.checkpoint.state_dict.{call.function} does not know hpcfsdp's class, and would treat "
            f"{mistaken}: call hpcfsdp.state_dict.{call.function}, which takes the same arguments"
        )


PAST_FORWARD = frozenset({"generate"})  # methods of transformers' modules that compute without a call of the wrapper


def guarded(unit: FlatUnit, name: str, method: Any) -> Any:
    """Return a method of the wrapped module that computes; collective, and refused while parameters are sharded."""
    if not callable(method):
        return method

    @public_call(name)
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unit.is_idle and not all(flat.is_unsharded or flat.shows_whole for flat in unit.sharded_params):
            raise EngineError(
                f"{unit.name}: {name} runs the wrapped module without the wrapper's forward, so its parameters are "
                "not gathered: call it within FullyShardedDataParallel.summon_full_params(model, recurse=False, "
                "writeback=False); units inside gather their own parameters"
            )
        if unit.root is None:
            become_root(unit)  # before units inside become roots
        return method(*args, **kwargs)

    return call


def refuse_ddp_around(unit: FlatUnit) -> None:
    """Refuse torch's DistributedDataParallel around units: its constructor lists the parameters of each wrapper."""
    found = _compat.ddp_in_construction()
    if found is None:
        return
    model, ignored = found
    name = next((name for name, module in model.named_modules() if module is unit.wrapper), "")
    plain, named = unit.options.ignored.params, unit.wrapper.named_parameters(prefix=name)
    averaged = [inner for inner, param in named if param not in plain and inner not in ignored]
    if averaged:
        raise EngineError(
            f"DistributedDataParallel was called with a {type(model).__name__} in which FullyShardedDataParallel has "
            f"wrapped {name!r}: it would overwrite this rank's shard of {averaged[0]!r} with rank 0's, and average "
            "gradients of different shards. Wrap each of the other modules in DistributedDataParallel, or the whole "
            "model in FullyShardedDataParallel"
        )
