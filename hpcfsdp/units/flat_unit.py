"""A unit of a model: a module, its ranks, and its parameters. ``units_in`` finds the units of a model."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, StateDictSettings

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.root import Root
from hpcfsdp.engine.streams import Streams
from hpcfsdp.engine.unit import TrainingState, Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.params.sharded_params import ShardedParams, other_in_place_of
from hpcfsdp.reshard.sharded_tensors import Placed, as_dtensor
from hpcfsdp.units.keepers import ReshardChoice, keepers_for
from hpcfsdp.units.own import UNIT, OwnParam, OwnParams, UnitOptions, label, label_replaced
from hpcfsdp.units.same_model import compare_units
from hpcfsdp.units.unit_mesh import UnitMesh, rank_names

WRAPPED = "_fsdp_wrapped_module"  # the name of the wrapped module in its wrapper
_PREFETCHES = {BackwardPrefetch.BACKWARD_PRE: "pre", BackwardPrefetch.BACKWARD_POST: "post", None: None}


def flat_param_name(index: int) -> str:
    """Return the name of a unit's flat parameter in its module."""
    return f"_flat_param_{index}" if index else "_flat_param"


@dataclass
class TensorView:
    """The ``DTensor`` that modules hold instead of a leaf while they compute; the leaf is its block."""

    leaf: nn.Parameter
    block: TensorBlock
    mesh: DeviceMesh
    places: list[tuple[nn.Module, str]]  # modules, and the names of the leaf there
    is_registered: bool  # whether the leaf is a parameter of its modules, or an attribute alone

    @property
    def placed(self) -> Placed:
        """Mesh, placements, shape and stride of the whole."""
        return Placed(self.mesh, self.block.placements, torch.Size(self.block.shape), self.block.stride)

    def show(self) -> None:
        """Not collective. Have modules hold a new ``DTensor`` in each call, since it is part of the graph."""
        view = as_dtensor(self.leaf, self.placed)
        for module, name in self.places:
            module.__dict__[name] = view  # found before registered parameters

    def hide(self) -> None:
        """Have modules hold the leaf."""
        for module, name in self.places:
            if self.is_registered:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = self.leaf


class ModelUnit(Unit):
    """The engine's unit, with its module, its ranks, and the user's settings."""

    root: Root | None = None  # of all units under the outermost one, None until that is first called
    is_root = False
    reshard_choice: bool | None = None  # for ``reshard_after_forward``; None: the strategy's, and False for the root
    keepers_choice: ReshardChoice = True  # over how many ranks values stay where the forward frees them
    streams: Streams | None = None  # those that it shares with other outermost units; None for its own

    def __init__(
        self,
        name: str,
        sharded_params: Sequence[ShardedParams],
        holder: nn.Module,
        mesh: UnitMesh,
        options: UnitOptions,
    ) -> None:
        super().__init__(name, sharded_params)
        self.mesh = mesh
        self.options = options
        self.prefetch_forward = options.forward_prefetch
        self.prefetch_backward = _PREFETCHES[options.backward_prefetch]
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}  # before mixed precision has cast them
        self.labels: list[tuple[Communicator, str]] = []  # by which ranks know what they have made together
        self._holder = weakref.ref(holder)  # it holds the unit
        if options.reshard_after_forward is not None:
            self.set_reshard(options.reshard_after_forward)

    @property
    def wrapper(self) -> nn.Module:
        """The module that holds the unit, and that users call."""
        return self._holder()

    @property
    def module(self) -> nn.Module:
        """The module that computes."""
        return self.wrapper

    @property
    def comm(self) -> Communicator:
        """All ranks of the unit, without "tensor"; only the shards for a pair of groups that is not the world."""
        return self.mesh.data or self.mesh.shard

    @property
    def values_outlive_forward(self) -> bool:
        return super().values_outlive_forward or (self.is_root and self.reshard_choice is None)

    @abc.abstractmethod
    def inner_units(self) -> Sequence[ModelUnit]:
        """Not collective. Return the units in its module, itself included, outer ones first."""

    def confirm(self) -> None:
        """Refuse units inside that ranks have not made together, on all of them. Collective over the unit's ranks."""
        others = [comm for unit in self.inner_units() for comm, _ in unit.labels]  # some may be shared by other ranks
        for comm in dict.fromkeys([*self.mesh.data_subgroups(), *others]):
            if comm.size > 1:
                compare_units(comm.all_gather_object(made_inside(self.wrapper, comm)), rank_names(comm))

    def get_ready(self) -> None:
        """Do what comes before the unit gets a root. Collective over the unit's ranks."""

    def set_reshard(self, choice: ReshardChoice) -> None:
        """Have the forward free parameters, or keep them, as the program says. Collective as ``choose_reshard``."""
        self.reshard_choice, self.keepers_choice = bool(choice), choice
        if self.root is not None:
            self.choose_reshard()

    def choose_keepers(self) -> None:
        """Choose who keeps values that the forward frees. Collective over the unit's ranks, the first time."""
        for flat in self.sharded_params:
            flat.keepers = keepers_for(flat, self.keepers_choice, self.options.comm_options)

    def choose_reshard(self) -> None:
        """Set ``reshard_after_forward``, and who keeps values then. Collective over the unit's ranks, the first time.

        The root's backward begins where its forward ends, so it keeps its values.
        """
        self.choose_keepers()
        is_free = all(flat.stays_gathered for flat in self.sharded_params)
        keeps = self.mesh.keeps_values or (self.is_root and not is_free)
        self.reshard_after_forward = not keeps if self.reshard_choice is None else self.reshard_choice

    def check_at_rest(self, what: str) -> None:
        """Not collective. Refuse the call `what` in a forward or backward, or while summoned. Reshard the model."""
        root = self.root
        if root is not None:
            root.recover()
        if self.training_state is TrainingState.SUMMON:
            hint = "do not nest" if what == "summon_full_params" else f"call {what} outside of"
            raise EngineError(f"{self.name}: its parameters are already whole: {hint} summon_full_params")
        if not self.is_idle or (root is not None and root.is_busy):
            doing = self.training_state.value if not self.is_idle else "a forward or backward of the model"
            raise EngineError(
                f"{self.name}: {what} was called during {doing}: call it before the forward or after the backward"
            )
        if root is not None:
            root.rest()
        for flat in self.sharded_params:
            flat.adopt_user_data()  # before summon_full_params registers other parameters


class FlatUnit(ModelUnit):
    """The unit of a ``FullyShardedDataParallel``."""

    computes_in_full = False  # as ``FSDP_USE_FULL_PREC_IN_EVAL`` undoes mixed precision
    shows_state = False  # whether its modules hold values for a state dict in place of their parameters
    differing: str | None = None  # values that differ between ranks, for a warning
    state_dict_settings: StateDictSettings

    def __init__(
        self,
        wrapper: nn.Module,
        name: str,
        sharded_params: Sequence[FlatParam],
        *,
        mesh: UnitMesh,
        own: OwnParams,
        options: UnitOptions,
        flat_owner: nn.Module,
    ) -> None:
        super().__init__(name, sharded_params, wrapper, mesh, options)
        self.views = tuple(
            TensorView(entry.param, entry.block, mesh.tensor_mesh, entry.places, options.use_orig_params)
            for entry in own.entries
            if entry.block is not None
        )
        self.own = own
        # The flat parameters are registered where the user may put a checkpoint wrapper later: in what was wrapped.
        self.flat_owner = flat_owner
        self.param_names: dict[nn.Module, tuple[str, ...]] = {}  # in the order of the plain model
        self._is_shown = False
        # Where modules find original parameters: registered ones, or attributes.
        self._originals: list[tuple[dict[str, Any], dict[str, Any], str, nn.Parameter]] = []
        for entry in sorted(own.entries, key=lambda entry: entry.index) if not options.use_orig_params else ():
            self._originals += [(place._parameters, vars(place), name, entry.param) for place, name in entry.places]
        self._flat_names = [flat_param_name(index) for index in range(len(sharded_params))]
        self.lowered_buffers: dict[tuple[nn.Module, str], torch.dtype] = {}  # dtypes to return to after eval mode
        for flat, group in zip(sharded_params, own.groups, strict=True):
            flat.places = [entry.places for entry in group]
            flat.on_assigned = functools.partial(_adopt_assigned, weakref.ref(self), weakref.ref(flat), group)

    sharded_params: tuple[FlatParam, ...]

    @property
    def module(self) -> nn.Module:
        return self.wrapper._modules[WRAPPED]

    def inner_units(self) -> Sequence[ModelUnit]:
        return units_in(self.wrapper)

    def show(self) -> None:
        """Functions that list parameters find the original ones, whole, and not the flat ones, which are shards."""
        if not self._is_shown:
            self._is_shown = True
            replaced: str | None = None
            for name, flat in zip(self._flat_names, self.sharded_params):  # noqa: B905 (in each call of a unit)
                if self.options.use_orig_params:
                    replaced = flat.assigned_name() or replaced
                elif self.flat_owner._parameters.pop(name, None) is not flat.parameter:
                    replaced = name
            for registered, attributes, name, leaf in self._originals:
                attributes.pop(name, None)
                registered[name] = leaf
            if replaced is not None:
                raise other_in_place_of(replaced)
        super().show()

    def lend(self, *, stays: bool) -> None:
        if self.options.use_orig_params and not stays:
            self.unbind()  # what modules register and compute with are the same objects

    def hide(self) -> None:
        super().hide()
        if self._is_shown:
            self._is_shown = False
            for registered, attributes, name, leaf in self._originals:
                registered.pop(name, None)
                attributes[name] = leaf
            for name, flat in zip(self._flat_names, self.sharded_params if self._originals else ()):  # noqa: B905
                self.flat_owner._parameters[name] = flat.parameter


def _adopt_assigned(
    unit_ref: weakref.ref[FlatUnit], flat_ref: weakref.ref[FlatParam], entries: Sequence[OwnParam]
) -> None:
    """Not collective. Adopt parameters assigned at rest, ``module.weight = other``, as leaves, as torch's FSDP does."""
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None or unit.training_state is not TrainingState.IDLE:
        return
    for index, entry in enumerate(entries):
        held = [module._parameters.get(name) for module, name in entry.places]
        assigned = next((param for param in held if param is not None and param is not entry.param), None)
        if assigned is None:
            continue
        what = f"{unit.name}: another parameter of shape {tuple(assigned.shape)} was assigned to {entry.fqn!r}"
        if not flat.use_orig_params:
            raise EngineError(
                f"{what}, which is part of a flat parameter: assign it within "
                "FullyShardedDataParallel.summon_full_params(model), or wrap with use_orig_params=True"
            )
        if any(param is not assigned for param in held):
            places = ", ".join(map(repr, (entry.fqn, *entry.aliases)))
            raise EngineError(f"{what}, which is tied: assign the same parameter to all of {places}")
        if unit.views and entry.block is not None:
            raise EngineError(
                f"{what}, which is tensor-parallel: assign it within FullyShardedDataParallel.summon_full_params(model)"
            )
        flat.replace_leaf(index, assigned)
        unit.leaves.look()
        label_replaced(entry.param)
        label(assigned, entry.fqn, flat.layout.slots[index].whole_shape)
        entry.param = assigned


def made_inside(module: nn.Module, comm: Communicator) -> list[tuple[str, str]]:
    """Return the names of all units within a module, itself included, and the labels of those that `comm` has made."""
    found: dict[ModelUnit, str] = {}
    for name, inner in module.named_modules():
        unit = inner.__dict__.get(UNIT) or inner.__dict__.get("_unit")
        if isinstance(unit, ModelUnit):
            found.setdefault(unit, clean_path(name) or unit.name)
    return [(name, " ".join(label for ranks, label in unit.labels if ranks == comm)) for unit, name in found.items()]


def clean_path(name: str) -> str:
    """Return the name of a module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def unit_of(module: nn.Module) -> FlatUnit | None:
    """Return the unit of a wrapper; None for any other module."""
    found = module.__dict__.get("_unit")
    return found if isinstance(found, FlatUnit) else None


def units_in(module: nn.Module) -> list[FlatUnit]:
    """Return the units within a module, itself included, outer ones first."""
    return [unit for inner in module.modules() if (unit := unit_of(inner)) is not None]
