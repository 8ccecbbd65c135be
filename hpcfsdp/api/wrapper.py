"""``FullyShardedDataParallel``: a module whose parameters, gradients and optimizer state are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp.api import policies
from hpcfsdp.api.flatten import OwnParams, check_same_model, move_outside, own_params
from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.runtime.clip import clip_grad_norm
from hpcfsdp.runtime.state import Phase
from hpcfsdp.runtime.unit import Engine, Unit
from hpcfsdp.world import current_world

WRAPPED = "_fsdp_wrapped_module"
FLAT_PARAM = "_flat_param"


class FullyShardedDataParallel(nn.Module):
    """Shards a module's parameters over ranks, gathers them while it computes, and reduces their gradients.

    Constructing one is collective over the process group. Arguments stand in the order of torch's class of the same
    name. At rest each rank holds its shard alone: the optimizer is built from ``model.parameters()`` *after* wrapping
    and steps the shards. Original parameters keep name, shape and dtype; outside of forward and backward their values
    read as NaN.

    Args:
        module: to be sharded, in place; every rank passes the same one, with the same values unless
            `sync_module_states`.
        process_group: the ranks to shard over; by default all of them. A torch ``ProcessGroup`` or an hpcfsdp
            ``Communicator``.
        sharding_strategy: ``ShardingStrategy.FULL_SHARD`` (the default).
        auto_wrap_policy: chooses submodules that become units of their own, see ``hpcfsdp.wrap``. One unit at a time
            is gathered, so memory and overlap depend on it.
        backward_prefetch: accepted for torch's default; gathers are not issued ahead of time yet.
        device_id: where the module is moved before it is sharded; by default the world's device, or none for a
            `process_group` of one's own.
        sync_module_states: every rank takes rank 0's parameters and buffers.
        limit_all_gathers: accepted; never more than one unit and those around it are gathered.

    Raises:
        NotImplementedError: an argument that is not supported yet has another value than its default.
        ValueError: the module is wrapped already, has no parameters, parameters on several devices, or tied
            parameters that the policy tears apart.
        DisagreementError: ranks pass different models.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Communicator | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        _refuse_unsupported(
            sharding_strategy=(sharding_strategy, (None, ShardingStrategy.FULL_SHARD)),
            cpu_offload=(cpu_offload, (None, CPUOffload(offload_params=False))),
            mixed_precision=(mixed_precision, (None, MixedPrecision())),
            ignored_modules=(None if ignored_modules is None else list(ignored_modules), (None, [])),
            param_init_fn=(param_init_fn, (None,)),
            forward_prefetch=(forward_prefetch, (False,)),
            use_orig_params=(use_orig_params, (False,)),
            ignored_states=(None if ignored_states is None else list(ignored_states), (None, [])),
            device_mesh=(device_mesh, (None,)),
        )
        _check_module(module)
        self.comm = communicator_for(process_group, required=True)
        self._is_root = False
        device = _target_device(process_group, device_id)
        if device is not None:
            move_outside(module, device, stop_at=FullyShardedDataParallel)
        if auto_wrap_policy is not None:
            self._wrap_children(
                module,
                auto_wrap_policy,
                process_group=self.comm,
                backward_prefetch=backward_prefetch,
                sync_module_states=sync_module_states,
                limit_all_gathers=limit_all_gathers,
            )
        _check_readers(module)
        self._fsdp_wrapped_module = module
        own = own_params(module, stop_at=FullyShardedDataParallel)
        if not own.groups and not self.fsdp_modules(module):
            raise ValueError(f"{type(module).__name__} has no parameters to shard")
        self._unit = Unit(type(module).__name__, self._make_flats(own, sync_module_states))
        if sync_module_states:
            for buffer in own.buffers:
                self.comm.broadcast(buffer, 0)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def unit(self) -> Unit:
        """The unit of this wrapper: its flat parameters and their state."""
        return self._unit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Collective over the process group. Run the wrapped module with gathered parameters."""
        unit = self._unit
        if unit.engine is None:
            self._become_root()
        if self._is_root:
            unit.engine.recover()
        call = unit.pre_forward(args, kwargs)
        try:
            outputs = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            unit.leave_forward()
            raise
        unit.post_forward(call, outputs)
        return outputs

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Collective over the process group. Clip the gradients of the whole model to a total norm; for the root only.

        Returns:
            The norm before clipping, a scalar, the same on every rank.

        Raises:
            EngineError: called on a unit inside of another one, or during forward or backward.
        """
        units = [wrapper.unit for wrapper in self.fsdp_modules(self)]
        if self._unit.engine is not None and not self._is_root:
            raise EngineError("clip_grad_norm_ is to be called on the root FullyShardedDataParallel")
        busy = [unit for unit in units if unit.phase is not Phase.IDLE]
        if busy:
            raise EngineError(f"clip_grad_norm_ was called while {busy[0].name} is in {busy[0].phase.value}")
        shards = [flat.parameter for unit in units for flat in unit.flats]
        return clip_grad_norm(shards, self.comm, max_norm, norm_type)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers within `module`, itself included, outer ones first.

        Args:
            root_only: leave out wrappers that lie inside of another one.
        """
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        if root_only:
            inside = {inner for outer in found for inner in outer.modules() if inner is not outer}
            found = [wrapper for wrapper in found if wrapper not in inside]
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported yet: it would hold shards under names of no use to anyone."""
        raise NotImplementedError(
            "state_dict of a sharded model is not supported yet; hpcfsdp.checkpoint.save writes a file that holds "
            "every parameter whole, and that any number of ranks loads"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported yet, see ``state_dict``."""
        raise NotImplementedError(
            "load_state_dict of a sharded model is not supported yet; load into the plain module before wrapping it, "
            "or use hpcfsdp.checkpoint.load"
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "a sharded model cannot be moved or cast as a whole: move or cast the module before wrapping it, or pass "
            "device_id"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not set yet: an attribute is missing while the constructor runs
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fsdp_wrapped_module)

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)

    def _wrap_children(self, module: nn.Module, policy: Any, **arguments: Any) -> None:
        if FullyShardedDataParallel.fsdp_modules(module):
            raise ValueError(
                f"auto_wrap_policy was given for a {type(module).__name__} that holds FullyShardedDataParallel modules "
                "already: wrap either by hand or by policy"
            )
        chosen = policies.choose_units(module, policy)
        policies.check_ties(module, chosen)
        for child, own_arguments in chosen.items():
            wrapped = FullyShardedDataParallel(child, **{**arguments, **own_arguments})
            # A module may be registered in several places: each of them gets the one wrapper.
            for parent in list(module.modules()):
                for name, registered in parent._modules.items():
                    if registered is child and parent is not wrapped:
                        parent._modules[name] = wrapped

    def _make_flats(self, own: OwnParams, sync_module_states: bool) -> list[FlatParam]:
        layouts = [
            FlatLayout.plan(((p.fqn, p.param.shape, p.aliases) for p in group), group[0].param.dtype, self.comm.size)
            for group in own.groups
        ]
        check_same_model(self.comm, layouts, [group[0].param.requires_grad for group in own.groups])
        flats = []
        for index, (group, layout) in enumerate(zip(own.groups, layouts, strict=True)):
            leaves = [entry.param for entry in group]
            flat = FlatParam(leaves, layout, self.comm, sync_from=0 if sync_module_states else None)
            for entry in group:
                entry.deregister()
            self._fsdp_wrapped_module.register_parameter(FLAT_PARAM + (f"_{index}" if index else ""), flat.parameter)
            flats.append(flat)
        return flats

    def _become_root(self) -> None:
        wrappers = self.fsdp_modules(self)
        numel = sum(flat.layout.numel for wrapper in wrappers for flat in wrapper.unit.flats)
        if numel < self.comm.size:
            raise EngineError(
                f"the model has {numel} parameter element(s) for {self.comm.size} ranks: nothing to shard for some of "
                "them; start fewer ranks or use a larger model"
            )
        engine = Engine([wrapper.unit for wrapper in wrappers])
        names = {inner: name for name, inner in self.named_modules()}
        for wrapper in wrappers:
            wrapper._is_root = wrapper is self
            wrapper.unit.engine = engine
            wrapper.unit.name = names[wrapper].replace(f"{WRAPPED}.", "").replace(WRAPPED, "") or wrapper.unit.name


def _refuse_unsupported(**arguments: tuple[Any, tuple[Any, ...]]) -> None:
    for name, (value, supported) in arguments.items():
        if value not in supported:
            raise NotImplementedError(
                f"{name}={value!r} is not supported yet; supported: {', '.join(repr(s) for s in supported)}"
            )


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError("the module is a FullyShardedDataParallel already: wrap a module once")
    on_meta = [name for name, param in module.named_parameters() if param.is_meta]
    if on_meta:
        raise NotImplementedError(
            f"parameter {on_meta[0]!r} is on the meta device, which is not supported yet: materialise the module first"
        )


def _check_readers(module: nn.Module) -> None:
    """Refuse units inside of modules that read the parameters of their children without calling them."""
    for name, reader in module.named_modules():
        if isinstance(reader, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            inside = [child for child, m in reader.named_modules() if isinstance(m, FullyShardedDataParallel)]
            if inside:
                kind, where = type(reader).__name__, f" {name!r}" if name else ""
                raise ValueError(
                    f"{inside[0]!r} is a unit inside of the {kind}{where}, which reads its children's parameters "
                    f"without calling them and would read NaN: wrap the whole {kind}, see ModuleWrapPolicy"
                )


def _target_device(process_group: Any, device_id: int | torch.device | None) -> torch.device | None:
    """Where to move the module, None to leave it where it is."""
    if isinstance(device_id, int):
        return torch.device("cuda", device_id)
    if device_id is not None:
        return torch.device(device_id)
    world = current_world()
    return world.device if world is not None and process_group is None else None
