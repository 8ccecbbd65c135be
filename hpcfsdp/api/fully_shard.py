"""``fully_shard``: modules keep their class and names, and their parameters become rows in ``DTensor`` parameters."""

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hpcfsdp import _compat
from hpcfsdp.api.fsdp_module import FSDPModule, extended_class, units_of_modules
from hpcfsdp.api.torch_state import FullyShardState
from hpcfsdp.comm import raise_together_over
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.engine.streams import streams_for
from hpcfsdp.hang.calls import public_call
from hpcfsdp.units import materialize, own
from hpcfsdp.units.arguments import replicated_in
from hpcfsdp.units.dtensor_unit import DTensorUnit, dtensor_unit_of, shard_param
from hpcfsdp.units.flat_unit import unit_of
from hpcfsdp.units.groups import resolve_mesh, with_dtensors
from hpcfsdp.units.keepers import ReshardChoice, check_choice
from hpcfsdp.units.optimizer_check import watch_optimizers
from hpcfsdp.units.spmd import take_local
from hpcfsdp.units.unit_mesh import UnitMesh

Modules = TypeVar("Modules", bound=nn.Module | Sequence[nn.Module])
_STOCK = stock.fully_shard
_NO_MIXED_PRECISION, _NO_OFFLOAD = stock.MixedPrecisionPolicy(), stock.OffloadPolicy()


@public_call("fully_shard")
def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: ReshardChoice | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: stock.MixedPrecisionPolicy = _NO_MIXED_PRECISION,
    offload_policy: stock.OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: stock.DataParallelMeshDims | None = None,
    comm_options: CommOptions | None = None,
) -> Modules:
    """Shard the parameters of a module in place, as torch's function does. Collective over the ranks of `mesh`.

    The module stays the same object, with its names; its class gets ``FSDPModule`` as a base. Each parameter becomes a
    ``DTensor`` parameter of the whole shape, of which each rank stores rows. While the module computes it holds whole,
    plain parameters. Call it on inner modules first: each call makes one unit, whose parameters are gathered, and
    whose gradients are reduced, together. Build the optimizer afterwards.

    Args:
        module: a module; or a list of modules, which become one unit.
        mesh: the ranks to shard over; by default all. With two named dimensions (replicate, shard) for hybrid sharding.
        reshard_after_forward: whether to free parameters after the forward, and to gather them again for the backward.
            By default True, and False for the outermost module. A number of consecutive ranks, a divisor of those that
            shard, keeps the values on these until then, each a part; "node" does so on the ranks of each node. On CPUs
            a node keeps them in memory that its ranks share, also where they are more ranks than the number. It makes
            no difference where all ranks share memory.
        shard_placement_fn: chooses for each parameter ``Shard(dim)``, the dimension along which it is cut; None for 0.
            It may also return torch's ``ShardPlacementResult`` with another mesh.
        mp_policy: the dtypes to compute in, to reduce gradients in, and of outputs.
        offload_policy: ``CPUOffloadPolicy`` keeps shards and their gradients in host memory.
        ignored_params: parameters that are not sharded.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: the dimensions of `mesh` to shard and to replicate over, several
            as one. All parameters are DTensors on `mesh`, replicated along these, and modules compute with such.
        comm_options: how ranks communicate on an accelerator, see ``CommOptions``; torch has no such argument.

    Returns:
        `module`.

    Raises:
        ValueError: the module is sharded already, or is a container without a forward; a parameter has no dimension,
            or is tied to one of another unit; an argument does not fit the mesh; the backend of `mesh` lacks an option
            of `comm_options`.
        ShardingError: DTensors that `shard_placement_fn` sends nowhere else are on ranks of `mesh`.
        NotImplementedError: `dp_mesh_dims` has no dimension to shard over, or a parameter is of a subclass without
            gather hooks.
    """
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("fully_shard was given an empty list: give it one module or more")
    if len({id(each) for each in modules}) < len(modules):
        raise ValueError("fully_shard was given a list that names a module twice: name it once")
    given = (each for each in modules if isinstance(each, nn.Module))
    inside = {id(inner) for each in given for inner in each.modules() if inner is not each}
    modules = [each for each in modules if id(each) not in inside]  # units of others hold them anyway
    for each in modules:
        _check_module(each)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a torch DeviceMesh, not {type(mesh).__name__}")
    if not isinstance(mp_policy, stock.MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, not {mp_policy!r}")
    if not isinstance(offload_policy, stock.OffloadPolicy):
        raise TypeError(f"offload_policy must be an OffloadPolicy, not {offload_policy!r}")
    ignored = replicated_in(nn.ModuleList(modules), ignored_params or ())
    if dp_mesh_dims is not None:
        mesh = take_local(modules, mesh, dp_mesh_dims, ignored.params)
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a mesh of one dimension, or of two (replicate, shard), not {mesh.ndim}: pass a slice "
            "of it, such as mesh['shard']"
        )
    if mesh is not None and mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("a mesh of two dimensions needs names: make it with mesh_dim_names=('replicate', 'shard')")
    shard_modules(
        modules,
        resolve_mesh(None, mesh, _strategy(mesh)),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        comm_options=comm_options,
        ignored=ignored,
    )
    return module


fully_shard.state = _STOCK.state  # type: ignore[attr-defined]


def shard_modules(
    modules: Sequence[nn.Module],
    mesh: UnitMesh,
    *,
    reshard_after_forward: ReshardChoice | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: stock.MixedPrecisionPolicy = _NO_MIXED_PRECISION,
    offload_policy: stock.OffloadPolicy = _NO_OFFLOAD,
    comm_options: CommOptions | None = None,
    ignored: own.Ignored = own.NOTHING_IGNORED,
) -> None:
    """Make one unit of the modules. Collective over the ranks of `mesh`. Arguments are those of ``fully_shard``."""
    if reshard_after_forward is not None:
        reshard_after_forward = check_choice(reshard_after_forward, mesh.shard.size)
    watch_optimizers()
    container = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    comm_options = comm_options or CommOptions()
    with raise_together_over(mesh.subgroups()):
        mesh.refuse_options(comm_options)
        # Lazily: what is ignored may have no shape yet.
        free = (param for param in container.parameters() if param not in ignored.params)
        params = (param for param in free if param.dim() and own.unit_fqn(param) is None)
        chosen = {} if shard_placement_fn is None else {param: shard_placement_fn(param) for param in params}
    # Those of experts may be DTensors on ranks over which the others are sharded.
    infos = {param: getattr(placement, "mesh_info", None) for param, placement in chosen.items()}
    apart = {param: info.mesh for param, info in infos.items() if info is not None and info.mesh != mesh.device_mesh}
    meshes: dict[DeviceMesh, UnitMesh] = {}
    for other in dict.fromkeys(apart.values()):
        elsewhere = {*ignored.params, *(param for param in container.parameters() if apart.get(param) != other)}
        meshes[other] = with_dtensors(resolve_mesh(None, other, _strategy(other)), container, elsewhere)
    mesh = with_dtensors(mesh, container, {*ignored.params, *apart})
    others = {param: meshes[other] for param, other in apart.items()}
    casts = mp_policy.cast_forward_inputs
    options = own.UnitOptions(
        device=mesh.dtensor_ranks.device,
        ignored=ignored,
        mixed_precision=stock.MixedPrecision(
            mp_policy.param_dtype, mp_policy.reduce_dtype, cast_forward_inputs=casts, cast_root_forward_inputs=casts
        ),
        cpu_offload=stock.CPUOffload(offload_params=isinstance(offload_policy, stock.CPUOffloadPolicy)),
        comm_options=comm_options,
        reshard_after_forward=reshard_after_forward,
        pin_memory=isinstance(offload_policy, stock.CPUOffloadPolicy) and offload_policy.pin_memory,
    )
    for each in modules:
        own.move_buffers(each, mesh.dtensor_ranks.device, ignored=ignored)
    with raise_together_over(mesh.subgroups()):
        found = own.own_params(modules, options, mesh=mesh, others=others, takes_hooks=True)
        entries = sorted(found.entries, key=lambda entry: entry.index)
        dims = [_dim(entry, chosen.get(entry.given)) for entry in entries]
    rows = [
        shard_param(entry, others.get(entry.given, mesh), dim, options)
        for entry, dim in zip(entries, dims, strict=True)
    ]
    unit = DTensorUnit(" + ".join(type(each).__name__ for each in modules), modules, rows, mesh, options)
    unit.uninitialised = [state for each in modules for state in materialize.tensors_on_meta(each)]
    unit.label_params()
    unit.mp_policy = mp_policy
    for each in modules:
        each.__dict__[own.UNIT] = unit
        each.__class__ = extended_class(type(each))  # type: ignore[arg-type]  # mypy looks at __hash__ of instances
        _compat.show_state(_STOCK, each, FullyShardState(each))
        own.label_modules(each, ignored.modules)
    unit.add_state_hooks()
    unit.refresh()
    if len(unit.inner_units()) > 1:
        unit.confirm()


def _check_module(module: Any) -> None:
    """Refuse what is no module, has no forward, or is sharded already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes a torch.nn.Module or a list of them, not {type(module).__name__}")
    kind = type(module).__name__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard was given a {kind}, which has no forward in which its parameters could be gathered: shard "
            "the modules in it, or the module that calls them"
        )
    if dtensor_unit_of(module) is not None:
        raise ValueError(f"fully_shard was called twice with the same {kind}: call it once")
    for name, inner in module.named_modules():
        where = f"{name!r} in the {kind}" if name else f"the {kind}"
        if unit_of(inner) is not None or isinstance(inner, stock.FullyShardedDataParallel):
            raise ValueError(
                f"{where} is wrapped in FullyShardedDataParallel: shard a model with either fully_shard or "
                "FullyShardedDataParallel"
            )
        is_torchs = isinstance(inner, stock.FSDPModule) and not isinstance(inner, FSDPModule)
        if is_torchs and not _compat.is_replicated(inner):
            raise ValueError(
                f"{where} is sharded with torch's fully_shard: use hpcfsdp.fully_shard for all modules of a model, or "
                "torch's"
            )


def _dim(entry: own.OwnParam, chosen: Any) -> int:
    """Return the dimension along which a parameter is cut; `chosen` by the user's function, if there is one."""
    param = entry.given
    if not param.dim():
        raise ValueError(
            f"the parameter {entry.fqn!r} has no dimension along which ranks could share it: give it the shape (1,), "
            "or pass it in ignored_params"
        )
    placement = getattr(chosen, "placement", chosen)
    placement = Shard(0) if placement is None else placement
    if not isinstance(placement, Shard):
        raise ValueError(f"shard_placement_fn returned {chosen!r} for {entry.fqn!r}: it must be a Shard or None")
    dim = placement.dim + (param.dim() if placement.dim < 0 else 0)
    if not 0 <= dim < param.dim():
        raise ValueError(
            f"shard_placement_fn returned {placement} for {entry.fqn!r}, which has {param.dim()} dimension(s)"
        )
    return dim


def _strategy(mesh: DeviceMesh | None) -> stock.ShardingStrategy:
    is_hybrid = mesh is not None and mesh.ndim == 2
    return stock.ShardingStrategy.HYBRID_SHARD if is_hybrid else stock.ShardingStrategy.FULL_SHARD


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Not collective. Have the method `method_name` gather the parameters of `module`, as its forward does.

    It does nothing for a module that ``fully_shard`` has not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    original = getattr(module, method_name, None)
    if original is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    @functools.wraps(original)
    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        bound = getattr(original, "__self__", None) is module  # a copy of the module has a method of its own
        return self._run(types.MethodType(original.__func__, self) if bound else original, args, kwargs)

    setattr(module, method_name, types.MethodType(method, module))


def share_comm_ctx(modules: Iterable[FSDPModule]) -> None:
    """Not collective, at rest. Have several outermost modules use one set of streams, as stages of a pipeline do.

    Raises:
        ValueError: ``fully_shard`` has not sharded one of them.
    """
    units = units_of_modules(modules)
    shared = next((unit.streams for unit in units if unit.streams is not None), None)
    for unit in units:
        unit.streams = shared = shared or streams_for(unit.device)
        unit.root = None  # to be made with them
