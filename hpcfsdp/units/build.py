"""Construction of units, in which ranks compare their models, and of the ``Root`` when a model is first called."""

import functools
import itertools
import uuid
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator, raise_together_over
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.engine.root import Root
from hpcfsdp.errors import EngineError
from hpcfsdp.hang import calls
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.params.module_states import sync_params_and_buffers
from hpcfsdp.params.sharded_params import Dtypes
from hpcfsdp.units.flat_unit import FlatUnit, ModelUnit, clean_path, flat_param_name, made_inside, units_in
from hpcfsdp.units.groups import check_apart
from hpcfsdp.units.mixed_precision import cast_buffers
from hpcfsdp.units.optimizer_check import watch_root
from hpcfsdp.units.own import OwnParams, UnitOptions, label, parts_of
from hpcfsdp.units.same_model import check_same_model, warn_of_values
from hpcfsdp.units.unit_mesh import GroupCache, UnitMesh, rank_names

CHUNK_NUMEL, CHUNK_NUMEL_OF_NODES = 1 << 20, 1 << 22
"""Most elements of a flat parameter where ranks share memory, and where such ranks are on several nodes. Gradient
buffers are as large as the largest flat parameter, and small ones stay in the cache between write and read. Other
transports need large messages."""
_WARNED = "the user has been warned"


def make_unit(
    wrapper: nn.Module, module: nn.Module, mesh: UnitMesh, own: OwnParams, made: Collection[str], options: UnitOptions
) -> FlatUnit:
    """Make the unit of `module`. Collective over its ranks. `made`: names of what this rank alone has initialised."""
    for dim, comm in mesh.along.items() if options.sync_module_states else ():
        if comm.size > 1:
            params, buffers = own.alike(dim == "tensor")
            sync_params_and_buffers(comm, [*(entry.param for entry in params), *buffers.values()])
    granularity, mixed = options.granularity, options.mixed_precision
    granularity_of = granularity if callable(granularity) else lambda _fqn, _shape: granularity
    if granularity == 1:  # of large blocks, few would fit well into small flat parameters
        own.groups = [part for group in own.groups for part in parts_of(group, chunk_numel(mesh))]
    dtypes = [
        dtypes_for(mixed, group[0].param.dtype, isinstance(group[0].places[0][0], options.full_precision))
        for group in own.groups
    ]
    layouts = [
        FlatLayout.plan(
            ((p.fqn, p.param.shape, p.aliases) for p in group),
            of_group.param,
            mesh.shard.size,
            {p.fqn: p.block for p in group if p.block is not None},
            itemsize=of_group.itemsize,
            granularity=None
            if granularity == 1
            else {p.fqn: granularity_of(p.fqn, torch.Size(p.shape)) for p in group},
        )
        for group, of_group in zip(own.groups, dtypes, strict=True)
    ]
    to_compare = None if options.sync_module_states else made
    agreed = _compare(module, own, layouts, mesh, to_compare, options.comm_options)
    gathers, reductions, replicas = comms_for(mesh, dtypes, options.comm_options)
    sharded_params = []
    for index, (group, layout) in enumerate(zip(own.groups, layouts, strict=True)):
        for entry in group:
            entry.replace_dtensor()
            label(entry.param, entry.fqn, entry.shape)  # while it has its shape
        flat = FlatParam(
            [entry.param for entry in group],
            layout,
            gathers,
            reduce_comm=reductions,
            replicas=replicas,
            dtypes=dtypes[index],
            device=options.device,
            use_orig_params=options.use_orig_params,
            offload=options.cpu_offload.offload_params,
            always_whole=mesh.strategy is ShardingStrategy.NO_SHARD,
        )
        if not options.use_orig_params:
            for entry in group:
                entry.deregister()
            module.register_parameter(flat_param_name(index), flat.parameter)
        sharded_params.append(flat)
    name = type(module).__name__
    for entry in own.entries:
        too_late = (
            f"parallelize_module was called with {entry.fqn!r} of the unit {name}, which is already sharded: call "
            "parallelize_module first, and wrap its result"
        )
        for place, _ in entry.places:
            _compat.refuse_parallelizing(place, functools.partial(EngineError, too_late))
    unit = FlatUnit(wrapper, name, sharded_params, mesh=mesh, own=own, options=options, flat_owner=module)
    unit.labels = [(comm, made_as) for comm, (made_as, _) in agreed.items()]
    unit.differing = next((differing for _, differing in agreed.values() if differing is not None), None)
    return unit


def join_tp_group(unit: FlatUnit, tensor_mesh: DeviceMesh, *, sync_module_states: bool) -> None:
    """Add tensor-parallel ranks to a unit without DTensors, maybe with the first one's values. Collective over both."""
    mesh, sharded_params = unit.mesh.with_tensor(tensor_mesh), unit.sharded_params
    sharing = mesh.ranks("replicate", "shard")
    with raise_together_over(mesh.subgroups()):
        check_apart(f"the unit around {unit.name}", tensor_mesh, unit.name, sharing)
    trained = [flat.requires_grad for flat in sharded_params]
    with raise_together_over(unit.mesh.subgroups()):
        check_same_model(mesh.tensor, [flat.layout for flat in sharded_params], trained, mesh.ranks("tensor"))
    if sync_module_states:
        shards = [flat.parameter.data.clone() for flat in sharded_params]  # shared memory cannot receive
        sync_params_and_buffers(mesh.tensor, [*shards, *unit.own.alike()[1].values()])
        for flat, shard in zip(sharded_params, shards, strict=True):
            flat.parameter.data.copy_(shard)
    unit.mesh = mesh


def warn_of_units(root: nn.Module, stacklevel: int) -> None:
    """Warn once about values in units within `root` that differ between ranks."""
    names = {module: name for name, module in root.named_modules()}
    found = {unit: unit.differing for unit in units_in(root) if unit.differing is not None}
    if found and _WARNED not in found.values():
        unit, what = next(iter(found.items()))
        name = clean_path(names[unit.wrapper])
        warn_of_values(f"in the unit {name!r}, {what}" if name else what, stacklevel=stacklevel)
    if found:
        next(iter(found)).differing = _WARNED


def _compare(
    module: nn.Module,
    own: OwnParams,
    layouts: Sequence[FlatLayout],
    mesh: UnitMesh,
    made: Collection[str] | None,
    options: CommOptions,
) -> dict[Communicator, tuple[str, str | None]]:
    """Refuse different parameters, and units inside that ranks made otherwise. Collective over the unit's ranks."""
    trained = [group[0].param.requires_grad for group in own.groups]
    counted = {entry.fqn: entry.counted_fqn for entry in own.entries}
    comms: list[Communicator] = mesh.subgroups()
    agreed: dict[Communicator, tuple[str, str | None]] = {}
    for comm in comms:
        is_tensor = comm is mesh.tensor  # each has another block
        alike = [layout.of_tensor_rank(0) for layout in layouts] if is_tensor else layouts
        # Shards may be drawn by different ranks; replicas of a shard must be the same.
        are_parts = not is_tensor and (mesh.size("replicate") == 1 or comm is mesh.shard)
        excluded = frozenset(made) if made is not None and are_parts else frozenset()
        params, buffers = own.alike(is_tensor)
        held = [("parameter", e.fqn, e.param) for e in sorted(params, key=lambda e: e.index)]
        held += [("buffer", fqn, buffer) for fqn, buffer in buffers.items()]
        values = {f"{kind} {fqn!r}": tensor for kind, fqn, tensor in held if fqn not in excluded}
        with raise_together_over(other for other in comms if other is not comm):
            agreed[comm] = check_same_model(
                comm,
                alike,
                trained,
                rank_names(comm),
                counted_fqns=counted,
                values=None if made is None else values,
                inside=made_inside(module, comm),
                options=options,
            )
    return agreed


def shares_memory(mesh: UnitMesh) -> bool:
    """Return whether ranks of a unit share memory."""
    return any(comm.shares_memory for dim, comm in mesh.along.items() if dim != "tensor" and comm.size > 1)


def chunk_numel(mesh: UnitMesh) -> int | None:
    """Return the most elements that are gathered and reduced together; None for any number."""
    spans_nodes = any(comm.spans_nodes for dim, comm in mesh.along.items() if dim != "tensor")
    return (CHUNK_NUMEL_OF_NODES if spans_nodes else CHUNK_NUMEL) if shares_memory(mesh) else None


def comms_for(
    mesh: UnitMesh, dtypes: Sequence[Dtypes], options: CommOptions
) -> tuple[Communicator, Communicator, Communicator | None]:
    """Return communicators for gathers and reductions of parameters of these dtypes, and over replicas.

    Collective over the data ranks of the unit, the first time.
    """
    if not dist.is_initialized():
        return mesh.shard, mesh.shard, mesh.replicas
    cache, reductions, replicas = GroupCache.current(), mesh.shard, mesh.replicas
    gathers = cache.for_gathers(mesh.shard, options)
    if any(of_group.param.is_floating_point for of_group in dtypes):
        narrow = any(of_group.reduce != of_group.accumulate for of_group in dtypes)
        reductions = cache.for_reductions(mesh.shard, narrow=narrow, options=options)
        replicas = None if replicas is None else cache.for_gathers(replicas, options, name="replicas")
    return gathers, reductions, replicas


def dtypes_for(mixed: MixedPrecision, kept: torch.dtype, full_precision: bool = False) -> Dtypes:
    """Return the dtypes of parameters that have the dtype `kept`, in a unit, or in modules in full precision."""
    mixed = MixedPrecision() if full_precision else mixed
    low_grads = mixed.keep_low_precision_grads
    return Dtypes.plan(kept, param=mixed.param_dtype, reduce=mixed.reduce_dtype, keep_low_precision_grads=low_grads)


class Forward:
    """A context in which messages speak of a unit's forward. It gives the compiler that is for the module alone."""

    @_compat.run_as_written
    def __init__(self, unit: ModelUnit) -> None:
        self._unit = unit

    @_compat.run_as_written
    def __enter__(self) -> Any:
        self._compiler = _compat.set_compiler(None)
        self._is_outermost = not calls.here.call
        if self._is_outermost:
            calls.here.call = f'forward of "{self._unit.name}"'
        return self._compiler

    @_compat.run_as_written
    def __exit__(self, *_error: object) -> None:
        if self._is_outermost:
            calls.here.call = ""
        _compat.set_compiler(self._compiler)


_numbers = itertools.count(1)


@torch.inference_mode(False)  # the first call may be in inference mode, and training follows
@torch.no_grad()
def become_root(unit: ModelUnit) -> Root:
    """Make a unit the root of the units inside. Collective over the unit's ranks."""
    units = list(unit.inner_units())
    for each in units:
        each.get_ready()
    unit.confirm()
    if isinstance(unit, FlatUnit):
        # The largest block counts: all ranks find the same number.
        slots = [slot for each in units for flat in each.sharded_params for slot in flat.layout.slots]
        numel = sum(slot.numel if slot.block is None else slot.block.largest_numel for slot in slots)
        if 0 < numel < unit.mesh.shard.size:
            raise EngineError(
                f"the model has {numel} parameter element(s) for {unit.mesh.shard.size} ranks: some ranks would hold "
                "none of it; start fewer ranks or use a larger model"
            )
    names = {module: name for name, module in unit.wrapper.named_modules()}
    cast: dict[torch.Tensor, torch.Tensor] = {}
    # A module in several units has its buffers cast once, and a unit may have been a root before.
    dtypes = {place: dtype for each in units for place, dtype in each.buffer_dtypes.items()}
    for each in units:
        mixed = each.options.mixed_precision
        each.is_root = each is unit
        each.choose_reshard()
        each.name = clean_path(names.get(each.wrapper, "")) or each.name
        each.inside = frozenset(inner for inner in each.inner_units() if inner is not each)
        cast_inputs = mixed.cast_root_forward_inputs if each is unit else mixed.cast_forward_inputs
        each.input_dtype = mixed.param_dtype if cast_inputs else None
        if mixed.buffer_dtype is not None:
            dtypes = {**cast_buffers(each.module, each.options, cast), **dtypes}
    host = GroupCache.current().host_of(unit.comm) if dist.is_initialized() else None
    label, number = (host or unit.comm).broadcast_object((uuid.uuid4().hex, next(_numbers)))
    lines = None if unit.mesh.data is None else (unit.mesh.shard, unit.mesh.replicas)
    root = Root(units, unit.comm, label, number=number, host=host, streams=unit.streams, lines=lines)
    watch_root(root)
    for each in units:
        each.root = root
        each.buffer_dtypes = dtypes
    return root
