"""A unit of a model: a module, the ranks that shard it, and the parameters that it owns. Found by ``units_in``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, StateDictSettings

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.phase import Phase
from hpcfsdp.engine.root import Root
from hpcfsdp.engine.unit import ComputedView, Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.sharded.own import Ignored, OwnParams
from hpcfsdp.sharded.unit_mesh import UnitMesh

WRAPPED = "_fsdp_wrapped_module"
"""The name that a wrapper has for its module."""


def flat_param_name(index: int) -> str:
    """Under which a unit's flat parameters are registered in its module."""
    return f"_flat_param_{index}" if index else "_flat_param"


class ShardedUnit(Unit):
    """What the engine knows of a unit, with its module, its ranks, and how the user has set it.

    Attributes:
        mesh: the ranks.
        own: its parameters and buffers.
        ignored: what it leaves alone.
        mixed_precision: never None.
        full_precision: classes of modules that compute in full precision all the same.
        flat_owner: the module in which the flat parameters are registered: the wrapped one, of the time of wrapping.
            Another may take its place later, say a checkpoint wrapper around it.
        param_names: of its modules, in the order of the plain model.
        root: of all units under the outermost one, None until that is first called.
        is_root: whether it is the outermost one.
        buffer_dtypes: of buffers that mixed precision has cast, by module and name, what they were before.
        lowered_buffers: the way back, while ``FSDP_USE_FULL_PREC_IN_EVAL`` has undone it.
        computes_in_full: whether that holds now.
        state_dict_settings: what ``set_state_dict_type`` has chosen.
        shows_state: whether its modules hold what a state dict is to show of their parameters.
        differing: what ranks begin with different values of; None where that is nothing, or has been warned of.
    """

    root: Root | None = None
    is_root = False
    computes_in_full = False
    shows_state = False
    differing: str | None = None
    state_dict_settings: StateDictSettings

    def __init__(
        self,
        wrapper: nn.Module,
        name: str,
        flats: Sequence[FlatParam],
        views: Sequence[ComputedView],
        *,
        mesh: UnitMesh,
        own: OwnParams,
        ignored: Ignored,
        use_orig_params: bool,
        mixed_precision: MixedPrecision,
        full_precision: tuple[type[nn.Module], ...],
        flat_owner: nn.Module,
        reshard_after_forward: bool,
    ) -> None:
        super().__init__(name, flats, views, reshard_after_forward=reshard_after_forward)
        self.mesh = mesh
        self.own = own
        self.ignored = ignored
        self.use_orig_params = use_orig_params
        self.mixed_precision = mixed_precision
        self.full_precision = full_precision
        self.flat_owner = flat_owner
        self.param_names: dict[nn.Module, tuple[str, ...]] = {}
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self.lowered_buffers: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._wrapper = weakref.ref(wrapper)  # which holds the unit

    @property
    def wrapper(self) -> nn.Module:
        """The module that is called in place of the wrapped one, and holds the unit."""
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.wrapper._modules[WRAPPED]

    @property
    def comm(self) -> Communicator:
        """All ranks of the unit, replicas too; only the shards of hybrid groups that do not make up the world."""
        return self.mesh.data or self.mesh.shard

    def check_at_rest(self, what: str) -> None:
        """Not collective. Refuse to go on at work, or summoned; reshard what a forward has left for its backward.

        Args:
            what: the user has called.

        Raises:
            EngineError: with what the unit is doing, and what to do.
        """
        root = self.root
        if root is not None:
            root.recover()
        if self.phase is Phase.SUMMON:
            hint = "do not nest" if what == "summon_full_params" else f"call {what} outside of"
            raise EngineError(f"{self.name}: its parameters are whole already: {hint} summon_full_params")
        if self.phase is not Phase.IDLE or (root is not None and root.is_busy):
            doing = self.phase.value if self.phase is not Phase.IDLE else "a forward or backward of the model"
            raise EngineError(
                f"{self.name}: {what} was called during {doing}: call it before the forward or after the backward"
            )
        if root is not None:
            root.rest()
        for flat in self.flats:
            flat.adopt_user_data()  # while what users have assigned is not mixed with what summon_full_params registers


def unit_of(module: nn.Module) -> ShardedUnit | None:
    """The unit that a module is the wrapper of; None for any other module."""
    found = module.__dict__.get("_unit")
    return found if isinstance(found, ShardedUnit) else None


def units_in(module: nn.Module) -> list[ShardedUnit]:
    """The units of a module and of all inside, outer ones first."""
    return [unit for inner in module.modules() if (unit := unit_of(inner)) is not None]
