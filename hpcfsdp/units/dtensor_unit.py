"""The unit of modules that were given to ``fully_shard``: their parameters become rows in ``DTensor`` parameters."""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator, raise_together_over
from hpcfsdp.engine.nested import tensors_in
from hpcfsdp.errors import EngineError
from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.dtensor_params import DTensorParam, DTensorParams, Gather
from hpcfsdp.params.extension_params import ExtensionParams, HookArguments, InnerTensor, has_gather_hooks, inner_tensors
from hpcfsdp.params.layout import TensorBlock, contiguous_strides
from hpcfsdp.params.sharded_params import Dtypes
from hpcfsdp.params.storage import nothing_of
from hpcfsdp.reshard.dtensor_ops import complete_operations_on
from hpcfsdp.reshard.sharded_tensors import Placed, as_dtensor
from hpcfsdp.units.build import chunk_numel, comms_for, dtypes_for, shares_memory
from hpcfsdp.units.flat_unit import ModelUnit
from hpcfsdp.units.guard import UnitHooks
from hpcfsdp.units.materialize import MetaTensor, refuse_uninitialised
from hpcfsdp.units.own import UNIT, OwnParam, UnitOptions, label, label_replaced, parts_of, refuse_subclass, retire
from hpcfsdp.units.same_model import check_same_model
from hpcfsdp.units.spmd import SpmdPlaced, spmd_placed
from hpcfsdp.units.unit_mesh import UnitMesh, rank_names


@dataclass(eq=False)
class OwnDTensor:
    """A parameter that a ``DTensorUnit`` owns."""

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]  # of the block if there is one
    dim: int  # along which it is cut
    block: TensorBlock | None
    mesh: UnitMesh  # its ranks, those of the unit or others
    param: DTensorParam
    has_hooks: bool = False  # whether its rows say how they are gathered
    inner: Sequence[InnerTensor] = ()  # of a subclass: what it holds
    spmd: SpmdPlaced | None = None  # where it is on a mesh with data-parallel dimensions

    @property
    def numel(self) -> int:
        """The number of elements, of the largest block: the same on all ranks."""
        return math.prod(self.shape) if self.block is None else self.block.largest_numel

    @property
    def lacks_hooks(self) -> bool:
        """Whether its rows are of a subclass, and do not say how they are gathered."""
        local = self.param.local
        return type(local) is not torch.Tensor and not has_gather_hooks(local)

    @property
    def placed(self) -> Placed | None:
        """Where the tensor-parallel parameter is of which this is a block; None if it is none."""
        block = self.block
        if block is None:
            return None
        return Placed(self.mesh.tensor_mesh, block.placements, torch.Size(block.shape), block.stride)

    def dressed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor that modules compute with, of what this rank has of it."""
        if self.spmd is not None:
            return self.spmd.of(value)
        return value if self.placed is None else as_dtensor(value, self.placed)

    def as_out(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value as torch's gather hooks get it to write it again: the object itself, in a ``DTensor``."""
        if self.placed is None:
            return value
        made = _compat.dtensor(value, *self.placed)
        _compat.set_local(made, value)
        return made


@dataclass
class ShownParam:
    """What modules hold instead of a leaf while they compute: a ``DTensor``, or what gather hooks have made."""

    own: OwnDTensor
    value: Callable[[], torch.Tensor]  # of this rank

    def show(self) -> None:
        """Not collective. Have modules hold a new tensor in each call, since it is part of the graph."""
        view = self.own.dressed(self.value())
        for module, name in self.own.param.places:
            module.__dict__[name] = view  # found before registered parameters

    def hide(self) -> None:
        """Have modules hold what they register."""
        for module, name in self.own.param.places:
            module.__dict__.pop(name, None)


class DTensorUnit(ModelUnit):
    """The unit of modules whose parameters are ``DTensor``s between steps, in memory of the engine.

    They may be moved, cast and replaced: ``prepare`` makes new memory then, and moves the rows there.
    """

    mp_policy = MixedPrecisionPolicy()
    gather: Gather | None = None  # the user's function to gather shards; None for that of the communicator

    def __init__(
        self, name: str, modules: Sequence[nn.Module], own: Sequence[OwnDTensor], mesh: UnitMesh, options: UnitOptions
    ) -> None:
        super().__init__(name, (), modules[0], mesh, options)
        assert options.device is not None
        self.own = tuple(own)
        self.device = options.device
        first = [(each, *each.param.places[0]) for each in self.own]
        self._registered = [(module._parameters, name, each) for each, module, name in first]
        self.is_stale = True  # the memory has to be made anew
        self.uninitialised: list[MetaTensor] = []  # was on the meta device, and perhaps has no value yet
        self._modules = [weakref.ref(module) for module in modules]
        self._called: set[nn.Module] = set()  # in this forward
        self._current = modules[0]
        self._num_calls_of: Counter[nn.Module] = Counter()  # that expect a backward
        # A forward that is not torch's may convert its DTensors itself.
        inside = [holder for holder in self._holders() if holder not in modules]
        stock = [holder for holder in inside if type(holder).forward.__module__.startswith("torch.nn.")]
        self.guard([_compat.hooks_before_forward(each) for each in stock], _DTensorUnitHooks(self).before_forward)

    @property
    def modules(self) -> list[nn.Module]:
        return [module for ref in self._modules if (module := ref()) is not None]

    def _holders(self) -> Iterable[nn.Module]:
        """Return the modules that hold its parameters."""
        return dict.fromkeys(place for each in self.own for place, _ in each.param.places)

    def add_state_hooks(self) -> None:
        """Not collective, once. Have modules hold rows while a state dict is made or loaded, and adopt new ones."""
        hooks = _DTensorUnitHooks(self)
        for module in self.modules:
            module.register_load_state_dict_post_hook(hooks.after_loading)
        for module in dict.fromkeys([*self.modules, *self._holders()]):
            module.register_state_dict_pre_hook(functools.partial(hooks.reshard, meet=False))
            module.register_load_state_dict_pre_hook(functools.partial(hooks.reshard, meet=True))

    def label_params(self) -> None:
        """Not collective. Label its parameters as owned by a unit. Moving them to a device takes the labels off."""
        for each in self.own:
            label(each.param.sharded, each.fqn, tuple(each.param.sharded.shape))

    def inner_units(self) -> Sequence[DTensorUnit]:
        return list(dict.fromkeys(unit for module in self.modules for unit in dtensor_units_in(module)))

    def choose_reshard(self) -> None:
        """Choose as torch: modules of the outermost unit stay unsharded between a forward and its backward."""
        self.choose_keepers()
        self.reshard_after_forward = not self.is_root if self.reshard_choice is None else self.reshard_choice

    def fits(self) -> bool:
        """Not collective, at rest. Adopt what the program has assigned. False if the memory has to be made anew."""
        for registry, name, each in self._registered if not self.unsharded_params.is_bound else ():
            if registry.get(name) is each.param.sharded:  # in each call: the rest is rare
                continue
            if (replaced := each.param.adopt_assigned(each.fqn)) is not None:
                label(each.param.sharded, each.fqn, tuple(replaced.shape))
                label_replaced(replaced)
        return not self.is_stale and all(flat.fits() for flat in self.sharded_params)

    def refresh(self) -> None:
        """``prepare`` it, unless a parameter has no memory yet. Collective over its ranks, unless it ``fits``."""
        # A program may keep a state dict: it stays that of the model as long as the rows stay where they are.
        if not self.fits() and not any(each.param.local.is_meta or each.lacks_hooks for each in self.own):
            self.prepare()

    def choose(self, **options: Any) -> None:
        """Change options of communication. Collective over the unit's ranks, unless they are as before."""
        if "memory" in options and (self.gather or self.reduce_options.scatter):
            raise AssertionError(f"{self.name}: set_custom_all_gather or set_custom_reduce_scatter chooses the memory")
        chosen = replace(self.options.comm_options, **options)
        with raise_together_over(self.mesh.subgroups()):
            self.mesh.refuse_options(chosen)
        if chosen != self.options.comm_options:
            self.options = replace(self.options, comm_options=chosen)
            self.remake()

    def remake(self) -> None:
        """Make the memory of the rows anew, as options have changed. Collective over the unit's ranks."""
        self.is_stale = True
        self.refresh()

    def get_ready(self) -> None:
        """``prepare`` it. Refuse parameters without values, the first time after the meta device."""
        for each in self.own:  # alike on all ranks
            if each.lacks_hooks and not each.param.local.is_meta:
                refuse_subclass(each.param.local, f"the parameter {each.fqn!r}")
        # The program may have given hooks to rows since they were made.
        self.is_stale |= any(has_gather_hooks(each.param.local) is not each.has_hooks for each in self.own)
        self.prepare()
        if self.uninitialised:
            with raise_together_over(self.mesh.subgroups()):
                refuse_uninitialised(self.uninitialised)
            self.uninitialised = []

    def prepare(self) -> None:
        """Make the memory of the rows. Collective over the unit's ranks, unless it ``fits``."""
        if self.root is not None:
            self.root.reshard([self], meet=False)  # its streams may not be those of the next root
            self.root = None
        if self.fits():
            return
        with raise_together_over(self.mesh.subgroups()):
            self._refuse_meta()
        sharded_params: list[DTensorParams] = []
        self.labels, chosen = [], self.options.comm_options
        for mesh, group, dtypes in self._groups():
            params = [(each.fqn, each.shape, each.dim, each.aliases, each.block) for each in group]
            layout = DTensorLayout.plan(params, dtypes.param, mesh.shard.size, itemsize=dtypes.itemsize)
            for comm in mesh.data_subgroups():
                with raise_together_over(other for other in mesh.subgroups() if other is not comm):
                    shared, _ = check_same_model(comm, [layout], [True], rank_names(comm), options=chosen)
                self.labels.append((comm, shared))
            gathers, reductions, replicas = comms_for(mesh, [dtypes], chosen)
            kwargs: dict[str, Any] = {"reduce_comm": reductions, "replicas": replicas, "dtypes": dtypes}
            kwargs |= {"device": self.device, "pin_memory": self.options.pin_memory, "gather": self.gather}
            made = [each.param for each in group]
            if group[0].has_hooks:
                as_out = [each.as_out for each in group]
                arguments = HookArguments(mesh.shard_mesh(), self.mp_policy, as_out)
                sharded_params.append(ExtensionParams(made, layout, gathers, arguments=arguments, **kwargs))
            else:
                sharded_params.append(DTensorParams(made, layout, gathers, **kwargs))
        self.hold(sharded_params)
        by_param = {id(each.param): each for each in self.own if each.param.is_shown_elsewhere}
        views = []
        for flat in sharded_params:
            for index, param in enumerate(flat.params):
                if (shown := by_param.get(id(param))) is not None:
                    views.append(ShownParam(shown, functools.partial(flat.in_graph, index)))
        self.views = tuple(views)
        self.is_stale = False

    def _refuse_meta(self) -> None:
        on_meta = [each.fqn for each in self.own if each.param.local.is_meta]
        if on_meta:
            more = f" and {len(on_meta) - 1} more" if len(on_meta) > 1 else ""
            raise EngineError(
                f"{self.name}: the parameter {on_meta[0]!r}{more} is on the meta device: call "
                f"model.to_empty(device={str(self.device)!r}) and initialise the parameters before the first forward, "
                "or load a state dict with assign=True"
            )

    def _groups(self) -> Iterator[tuple[UnitMesh, list[OwnDTensor], Dtypes]]:
        """Yield what is gathered together: parameters of the same ranks, dtype, device and ``requires_grad``."""
        # Rows along another dimension than the first are not contiguous in shared memory: they need some of their own.
        found: dict[tuple[object, ...], list[OwnDTensor]] = {}
        for each in self.own:
            local, apart = each.param.local, each.dim > 0 and shares_memory(each.mesh)
            each.has_hooks = has_gather_hooks(local)
            each.param.is_shown_elsewhere = each.has_hooks or each.block is not None or each.spmd is not None
            key = id(each.mesh), local.dtype, local.device, each.param.sharded.requires_grad, apart, each.has_hooks
            found.setdefault(key, []).append(each)
        for group in found.values():
            mesh, dtype = group[0].mesh, group[0].param.local.dtype
            dtypes = dtypes_for(self.options.mixed_precision, dtype)
            most = chunk_numel(mesh) if self.reduce_options.hook is None else None
            yield from ((mesh, part, dtypes) for part in parts_of(group, most))

    # Several modules in one unit

    def enter(self, module: nn.Module) -> None:
        """Not collective. One of the modules is called next."""
        self._current = module
        self._called.add(module)

    @property
    def is_partly_called(self) -> bool:
        return len(self._called) < len(self._modules)

    def end_forward(self, *, broken: bool) -> None:
        super().end_forward(broken=broken)
        if broken or not self.is_partly_called:
            self._called.clear()

    sharded_params: tuple[DTensorParams, ...]

    def lend(self, **_stays: bool) -> None:
        self.show()
        for flat in self.sharded_params:
            flat.lend()

    @property
    def stays_unsharded(self) -> bool:
        # Only where the program has asked for it: some changes cannot be seen, such as those by torch's _foreach_mul_.
        return self.is_kept or self.reshard_choice is False or not self.reshard_after_backward

    def complete_forward(self) -> bool:
        is_left = bool(self._called) and self.is_idle
        self._called.clear()
        return is_left and self.reshard_after_forward

    def expect_backward(self, *, later: bool) -> None:
        if not self.num_calls:
            self._num_calls_of.clear()
        self._num_calls_of[self._current] += later
        super().expect_backward(later=later)
        self.num_calls = max(self._num_calls_of.values())  # each module has its own part of the backward

    def end_backward(self) -> None:
        super().end_backward()
        self._called.clear()

    def reset(self) -> None:
        super().reset()
        self._called.clear()


class _DTensorUnitHooks(UnitHooks):
    """Hooks of modules that hold rows: for state dicts, and against calls of these modules alone."""

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Refuse a call from outside of the unit, where torch would refuse to compute with plain and DTensors."""
        unit = self._unit()
        is_at_rest = any(isinstance(param, DTensor) for param in module._parameters.values())
        tensors = list(tensors_in(args)) if is_at_rest else []
        if unit is not None and tensors and not any(isinstance(t, DTensor) or t.numel() == 1 for t in tensors):
            raise EngineError(
                f"{unit.name}: its {type(module).__name__} was called with plain tensors from outside of "
                "the unit, where its parameters are DTensors: call the module that was given to fully_shard, shard "
                "the inner module first, as a unit of its own, or call it between unshard() and reshard() of the unit"
            )

    def reshard(self, *_arguments: Any, meet: bool) -> None:
        unit = self._unit()
        if unit is not None and unit.root is not None:
            unit.root.reshard([unit], meet=meet)

    def after_loading(self, *_arguments: Any) -> None:
        """Adopt what was assigned."""
        unit = self._unit()
        if unit is not None:
            unit.refresh()


@torch.no_grad()
def shard_param(entry: OwnParam, mesh: UnitMesh, dim: int, options: UnitOptions) -> OwnDTensor:
    """Replace a parameter by this rank's rows of it, cut along `dim`. Collective over `mesh`, the first time."""
    device = options.device
    home = torch.device("cpu") if options.cpu_offload.offload_params else device
    whole, shape = entry.param, tuple(entry.param.shape)
    is_plain = type(whole.data) is torch.Tensor
    inner: Sequence[InnerTensor] = ()
    if is_plain:
        local = _plain_rows(whole.detach(), dim, mesh.shard, home)
    else:
        padded, length = _subclass_rows(whole.detach(), dim, mesh.shard, home)
        local, inner = padded.narrow(dim, 0, length), inner_tensors(whole.detach(), padded)
    device_mesh, placements = mesh.placed_rows(entry.block, dim)
    of_whole = shape if entry.block is None else entry.block.shape
    complete_operations_on(device_mesh)
    made = _compat.dtensor(local, device_mesh, placements, of_whole, contiguous_strides(of_whole))
    before = whole if entry.whole is None else entry.whole
    sharded = nn.Parameter(made, requires_grad=whole.requires_grad)
    made_by_class = () if is_plain else whole.detach().__dict__
    sharded.__dict__.update((name, value) for name, value in before.__dict__.items() if name not in made_by_class)
    _compat.move_hooks(before, sharded)
    leaf = whole
    if whole.is_meta or before is not whole or not is_plain:
        retire(before, entry.fqn, of_whole)  # another module may hold it
        leaf = nn.Parameter(nothing_of((), whole.dtype, device), requires_grad=whole.requires_grad)
    _compat.replace_data(leaf, nothing_of(shape, whole.dtype, device))  # its memory is free
    label(leaf, entry.fqn, of_whole, hidden=True)  # an optimizer may hold it
    param = DTensorParam(sharded, leaf, entry.places, is_shown_elsewhere=entry.block is not None)
    param.register(sharded)
    return OwnDTensor(
        entry.fqn, entry.aliases, shape, dim, entry.block, mesh, param, inner=inner, spmd=spmd_placed(entry.given)
    )


def _plain_rows(whole: torch.Tensor, dim: int, ranks: Communicator, home: torch.device) -> torch.Tensor:
    """Return this rank's rows. Not copied where they are at home: the unit moves them to memory of its own."""
    shape = whole.shape
    rows = -(-shape[dim] // ranks.size)
    begin = min(ranks.rank * rows, shape[dim])
    part = whole.narrow(dim, begin, min(rows, shape[dim] - begin))
    local = _compat.at_its_storage(part if part.is_meta else part.to(home))
    return local.clone(memory_format=torch.contiguous_format) if local.storage_offset() else local


def _subclass_rows(whole: torch.Tensor, dim: int, ranks: Communicator, home: torch.device) -> tuple[torch.Tensor, int]:
    """Return a copy of this rank's rows, with zeros behind them where the first rank has more, and their number.

    By those operations that classes with gather hooks have for torch's ``fully_shard``.
    """
    chunks = torch.chunk(whole, ranks.size, dim)
    padded = whole.new_zeros(chunks[0].shape)
    length = 0
    if ranks.rank < len(chunks):
        length = chunks[ranks.rank].shape[dim]
        padded.narrow(dim, 0, length).copy_(chunks[ranks.rank])
    if home != whole.device and not whole.is_meta:
        padded = padded.to(home)
    return padded, length


def dtensor_unit_of(module: nn.Module) -> DTensorUnit | None:
    """Return the unit of a module that was given to ``fully_shard``; None for any other."""
    return module.__dict__.get(UNIT)


def dtensor_units_in(module: nn.Module) -> list[DTensorUnit]:
    """Return the units within a module, itself included, outer ones first, each once."""
    return list(dict.fromkeys(unit for inner in module.modules() if (unit := dtensor_unit_of(inner)) is not None))
