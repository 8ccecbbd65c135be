"""``FullyShardedDataParallel``: a module whose parameters, gradients and optimizer state are sharded over ranks."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp import _compat, env
from hpcfsdp.api import copying, policies, precision, unshard
from hpcfsdp.api.arguments import check_module, check_readers, check_types, target_device, warn_of_container
from hpcfsdp.api.attributes import PublicAttributes
from hpcfsdp.api.build import make_unit, sync_values, warn_of_units
from hpcfsdp.api.eval_precision import follow_eval_mode
from hpcfsdp.api.flatten import move_outside, own_params
from hpcfsdp.api.groups import Groups, TensorRanks, resolve_groups
from hpcfsdp.api.guard import guard_modules, refuse_mistakes
from hpcfsdp.api.ignored import resolve_ignored
from hpcfsdp.api.materialize import materialize
from hpcfsdp.api.misuse import PAST_FORWARD, RefusesOtherWrappers, guarded, refuse_ddp_around
from hpcfsdp.api.same_model import check_same_model
from hpcfsdp.api.stale import watch_optimizers, watch_root
from hpcfsdp.api.state_dicts import StateDictMethods
from hpcfsdp.api.tensor_parallel import check_apart, replicated_grad, with_tensor_ranks
from hpcfsdp.api.unshard import WRAPPED
from hpcfsdp.comm import Communicator, raise_together_over
from hpcfsdp.engine.clip import clip_grad_norm
from hpcfsdp.engine.phase import Phase
from hpcfsdp.engine.root import Root
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.gradient import note_unchanged
from hpcfsdp.flat.names import get_root_modules
from hpcfsdp.flat.sync import sync_params_and_buffers
from hpcfsdp.launch import calls
from hpcfsdp.launch.calls import public_call
from hpcfsdp.world import current_world


class FullyShardedDataParallel(PublicAttributes, RefusesOtherWrappers, StateDictMethods, nn.Module):
    """Shards a module's parameters over ranks, gathers them while it computes, and reduces their gradients.

    Constructing one is collective over the ranks it shards over. Arguments are those of torch's class of the same
    name. At rest each rank holds its shard alone. Without `use_orig_params` the optimizer is built from
    ``model.parameters()`` *after* wrapping and steps the shards; original parameters keep name, shape and dtype, and
    read as NaN outside of forward and backward. With it ``model.parameters()`` are the original parameters, which at
    rest are 1-D and hold this rank's run of each, possibly empty.

    Args:
        module: to be sharded, in place; every rank passes the same one, with the same values unless
            `sync_module_states`.
        process_group: the ranks to shard over; by default all of them. A torch ``ProcessGroup``, an hpcfsdp
            ``Communicator``, or for hybrid strategies a pair (shard, replicate).
        sharding_strategy: ``FULL_SHARD`` by default. ``SHARD_GRAD_OP`` keeps gathered parameters between forward and
            backward, ``NO_SHARD`` replicates; ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2`` shard within each node and
            replicate across nodes, as MPI sees them.
        cpu_offload: keep shards and their gradients in host memory.
        auto_wrap_policy: chooses submodules that become units of their own, see ``hpcfsdp.wrap``. One unit at a time
            is gathered, so memory and overlap depend on it.
        backward_prefetch: gather the next unit before (``BACKWARD_PRE``) or after (``BACKWARD_POST``) the gradients of
            one are computed. Where a node shares its memory there is nothing to gather.
        mixed_precision: dtypes to compute and to reduce in, and of buffers.
        ignored_modules: modules that stay as they are.
        param_init_fn: gives values to modules that were built on the meta device; their ``reset_parameters`` otherwise.
        device_id: where the module is moved before it is sharded; by default the world's device, or none for a
            `process_group` of one's own.
        sync_module_states: every rank takes rank 0's parameters and buffers.
        forward_prefetch: gather the unit that comes next in the forward before computing with one.
        limit_all_gathers: accepted for torch's sake: memory for one unit ahead is all that is ever taken.
        use_orig_params: ``parameters()`` are the original ones.
        ignored_states: instead of `ignored_modules`: modules or parameters.
        device_mesh: instead of `process_group`: a mesh of one dimension, or (replicate, shard).

    Raises:
        ValueError: the module is wrapped already, has parameters on several devices, or tied parameters that the policy
            tears apart; arguments that exclude each other.
        DisagreementError: ranks pass different models.

    Warns:
        DifferentValuesWarning: ranks pass different values, and not `sync_module_states`.
    """

    @public_call("FullyShardedDataParallel(...)")
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | Communicator | tuple[Any, Any] | None = None,
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
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        watch_optimizers()
        check_module(module, FullyShardedDataParallel)
        check_types(cpu_offload, mixed_precision, backward_prefetch)
        groups = resolve_groups(process_group, device_mesh, sharding_strategy)
        self._ignored = resolve_ignored(
            module,
            ignored_modules,
            ignored_states,
            stop_at=FullyShardedDataParallel,
            inherited=[wrapper._ignored for wrapper in self.fsdp_modules(module)],
        )
        if not isinstance(process_group, Groups):  # those of an outer unit, which has looked at all of the model
            name, left = type(module).__name__, self._ignored.params
            groups = with_tensor_ranks(groups, module, self.fsdp_modules(module), name, left)
        self._groups = groups
        self._show(
            mixed_precision=mixed_precision,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
        )
        self._full_in_eval = env.full_precision_in_eval()
        self._computes_in_full = False
        self._prepare_state_dicts()
        self._root: Root | None = None  # of all units under the outermost one; made when that is first called
        self._is_root = False
        self._use_orig_params = use_orig_params
        self._offload = cpu_offload is not None and cpu_offload.offload_params
        device = target_device(process_group, device_mesh, device_id)
        fresh = functools.partial(
            materialize,
            module,
            device=device or torch.device("cpu"),
            param_init_fn=param_init_fn,
            stop_at=FullyShardedDataParallel,
            ignored=self._ignored,
            values_count=not sync_module_states,
        )
        if device is not None:
            move_outside(module, device, stop_at=FullyShardedDataParallel, ignored=self._ignored)
        made = [] if auto_wrap_policy is not None else fresh()
        if auto_wrap_policy is not None:
            self._wrap_children(
                module,
                auto_wrap_policy,
                process_group=self._groups,
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                mixed_precision=mixed_precision,
                param_init_fn=param_init_fn,
                device_id=device,
                sync_module_states=sync_module_states,
                forward_prefetch=forward_prefetch,
                limit_all_gathers=limit_all_gathers,
                use_orig_params=use_orig_params,
                ignored_states=self._ignored,
            )
            made = fresh()
        check_readers(module, FullyShardedDataParallel)
        apart = precision.ignored_classes(mixed_precision)
        in_full = precision.find_full_precision(module, apart, stop_at=FullyShardedDataParallel)
        self._fsdp_wrapped_module = module
        with raise_together_over(self._groups.connecting()):
            self._own = own_params(
                module, stop_at=FullyShardedDataParallel, ignored=self._ignored, apart=apart, tensor=self._groups.tensor
            )
        if self._own.groups:
            warn_of_container(module)
        outside = dict.fromkeys(precision.modules_outside(module, stop_at=FullyShardedDataParallel))
        self._param_names = {inner: tuple(inner._parameters) for inner in outside}  # in the order of the plain model
        if sync_module_states:
            sync_values(self._own, self._comms(), self._groups)
        # Another module may take the place of the wrapped one later, say a checkpoint wrapper around it.
        self.__dict__["_flat_owner"] = module
        self._unit, self._differing = make_unit(self, apart, None if sync_module_states else frozenset(made))
        guard_modules(self)
        precision.keep_full_precision(in_full)
        self._apart = apart
        if self._groups.tensor is not None:
            for inner in self.fsdp_modules(module):  # those that have no part in it, and were made before
                if inner._groups.tensor is None:
                    inner._join(self._groups.tensor, sync_module_states=sync_module_states)
        if not isinstance(process_group, Groups):  # one warning for all units that this call has made
            self._differing = warn_of_units(self, stacklevel=3)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    # What follows has names with an underscore, for others are looked up in the wrapped module.

    @property
    def _comm(self) -> Communicator:
        """All ranks of this wrapper, replicas too; only the shards of hybrid groups that do not make up the world."""
        return self._groups.everyone or self._groups.shard

    @_compat.run_as_written
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Collective over the process group. Run the wrapped module with gathered parameters."""
        compiler = _compat.set_compiler(None)  # torch.compile may work on what is inside, not on the engine
        outermost = calls.begin(f'forward of "{self._unit.name}"')
        try:
            root = self._root or self._become_root()
            if self._full_in_eval and not root.is_busy:
                follow_eval_mode(self, self.fsdp_modules(self))
            return root.forward(self._unit, self._fsdp_wrapped_module, args, kwargs, compiler)
        finally:
            calls.end(outermost)
            _compat.set_compiler(compiler)

    @public_call("check_is_root")
    def check_is_root(self) -> bool:
        """Whether this wrapper is the outermost one; decides it, if nothing has been called yet."""
        if self._root is None:
            self._become_root()
        return self._is_root

    @contextlib.contextmanager
    @public_call("no_sync")
    def no_sync(self) -> Iterator[None]:
        """Keep gradients back without communication, until a backward outside of this context reduces their sum.

        Each rank holds whole gradients meanwhile, in at least float32, which parameters show as ``grad``: they may be
        read, changed in place, and thrown away (``zero_grad``, ``grad = None``), but neither clipped nor stepped. For
        the root only, around forward and backward.

        Raises:
            EngineError: called on a unit inside of another one, or during forward or backward.
        """
        with self._as_root("no_sync").no_sync():
            yield

    @public_call("clip_grad_norm_")
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Collective over all ranks. Clip the gradients of the whole model to a total norm; for the root only.

        Parameters that are ignored count once, as if they were the same on all ranks.

        Returns:
            The norm before clipping, a scalar, the same on every rank.

        Raises:
            EngineError: called on a unit inside of another one, or during forward or backward; ``no_sync`` holds
                gradients that have not been reduced.
        """
        root = self._as_root("clip_grad_norm_")
        if root.holds_grads:
            with raise_together_over(self._groups.connecting()):
                root.refuse_held("clip_grad_norm_")
        num_ranks = self._groups.shard.size * self._groups.num_replicas
        tensor = self._groups.tensor
        num_blocks = 1 if tensor is None else tensor.comm.size
        shares: dict[int, list[torch.Tensor]] = {}
        params: dict[nn.Parameter, None] = {}
        managed: set[nn.Parameter] = set()
        for wrapper in self.fsdp_modules(self):
            inner = wrapper._groups
            if inner.shard.size * inner.num_replicas > num_ranks:
                raise EngineError(
                    f"{wrapper._unit.name} is sharded over more ranks than the root ({num_ranks}), which cannot know "
                    "the norm of all gradients: wrap the root over all ranks"
                )
            for flat in wrapper._unit.flats:
                managed.update((flat.parameter, *flat.leaves))
                params.update(dict.fromkeys(flat.leaves if flat.use_orig_params else (flat.parameter,)))
                for copies, grad in flat.grad_parts(num_blocks):
                    shares.setdefault(inner.num_replicas * copies, []).append(grad)
        for param in self.parameters():
            if param not in managed:
                params[param] = None
                if param.grad is not None:
                    copies, grad = replicated_grad(param, tensor)
                    shares.setdefault(num_ranks * copies, []).append(grad)
        norm = clip_grad_norm(list(params), shares.items(), self._groups.connecting(), max_norm, norm_type)
        for param in params:
            note_unchanged(param.grad)
        return norm

    @public_call("register_comm_hook")
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have `hook` reduce gradients instead; for the root only, before training.

        It is called as ``hook(state, full_gradient, output)``, both 1-D in the dtype in which gradients travel, and has
        to fill `output` with this rank's segment of the average; under ``NO_SHARD`` as ``hook(state, gradient)``, to
        average in place.

        Raises:
            EngineError: called on a unit inside of another one, the strategy is hybrid, or there is a hook already.
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be a function, not {type(hook).__name__}")
        self._as_root("register_comm_hook")
        wrappers = self.fsdp_modules(self)
        if any(wrapper._groups.is_hybrid for wrapper in wrappers):
            raise EngineError("communication hooks are not supported under hybrid strategies, which reduce twice")
        grads = [grad for wrapper in wrappers for grad in wrapper._unit.grads]
        if any(grad.comm_hook is not None for grad in grads):
            raise EngineError("a communication hook is registered already")
        for grad in grads:
            grad.comm_hook = (state, hook)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers within `module`, itself included, outer ones first.

        Args:
            root_only: leave out wrappers that lie inside of another one.
        """
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return get_root_modules(found) if root_only else found

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Collective over the process group. A context in which parameters are whole, see ``api.unshard``."""
        return unshard.unshard_params(
            module,
            FullyShardedDataParallel,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    @staticmethod
    def walk_full_params(
        module: nn.Module,
        writeback: bool = False,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Collective over the process group, at each turn. The units one by one, whole, see ``api.unshard``."""
        return unshard.walk_full_params(
            module,
            FullyShardedDataParallel,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    @public_call("apply")
    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Collective over the process group. Call `fn` on every module, inner ones first, with whole parameters."""
        with self.summon_full_params(self, recurse=False, writeback=True):
            for child in self.children():
                _apply_below(child, fn)
        fn(self)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; within ``summon_full_params`` without the names of wrappers."""
        if kwargs.get("recurse") is False:
            refuse_ddp_around(self)
        return self._named(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; within ``summon_full_params`` without the names of wrappers."""
        return self._named(super().named_buffers(*args, **kwargs))

    def _named(self, found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        summoned = self._unit.phase is Phase.SUMMON
        for name, tensor in found:
            yield (name.replace(f"{WRAPPED}.", "") if summoned else name), tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for flat in (flat for wrapper in self.fsdp_modules(self) for flat in wrapper._unit.flats):
            probe = torch.empty(0, dtype=flat.parameter.dtype, device=flat.device)
            after = fn(probe)
            if after.device != probe.device or after.dtype != probe.dtype:
                raise EngineError(
                    f"a sharded model cannot be moved or cast as a whole (from {probe.device}, {probe.dtype} to "
                    f"{after.device}, {after.dtype}): move or cast the module before wrapping it, or pass device_id"
                )
        managed = {p for w in self.fsdp_modules(self) for flat in w._unit.flats for p in (flat.parameter, *flat.leaves)}
        for module in self.modules():
            if not isinstance(module, FullyShardedDataParallel):
                nn.Module._apply(module, lambda t: t if t in managed else fn(t), recurse=False)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # not set yet: an attribute is missing while the constructor runs
                raise
            found = getattr(self._fsdp_wrapped_module, name)
            return guarded(self, name, found) if name in PAST_FORWARD else found

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: the wrapped module's name is in no FQN, and ``module`` is not one in it."""
        refuse_mistakes(self)
        return {"module": WRAPPED}

    @public_call("copy.deepcopy")
    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Collective over the ranks of the model. A copy that shares process groups alone, see ``api.copying``."""
        return copying.copy_wrapper(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            "a sharded model cannot be pickled, nor copied by copy.copy: use copy.deepcopy on all ranks, or save it "
            "with hpcfsdp.checkpoint"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fsdp_wrapped_module)

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)

    def _comms(self) -> list[Communicator]:
        """The communicators that together connect all ranks."""
        return [comm for comm in (self._groups.shard, self._groups.replicate) if comm is not None and comm.size > 1]

    def _as_root(self, what: str) -> Root:
        """The units under this one, at rest.

        Raises:
            EngineError: it is not the root, or some unit is at work; with `what` the user has called.
        """
        if self._root is not None and not self._is_root:
            raise EngineError(f"{what} is to be called on the root FullyShardedDataParallel")
        root = self._root or self._become_root()
        root.recover()
        busy = [unit for unit in root.units if unit.phase is not Phase.IDLE]
        if busy:
            raise EngineError(f"{what} was called while {busy[0].name} is in {busy[0].phase.value}")
        return root

    def _wrap_children(self, module: nn.Module, policy: Any, **arguments: Any) -> None:
        if FullyShardedDataParallel.fsdp_modules(module):
            raise ValueError(
                f"auto_wrap_policy was given for a {type(module).__name__} that holds FullyShardedDataParallel modules "
                "already: wrap either by hand or by policy"
            )
        chosen = policies.choose_units(module, policy, self._ignored)
        policies.check_ties(module, chosen, self._ignored)
        for child, own_arguments in chosen.items():
            wrapped = FullyShardedDataParallel(child, **{**arguments, **own_arguments})
            # A module may be registered in several places: each of them gets the one wrapper.
            for parent in list(module.modules()):
                for name, registered in parent._modules.items():
                    if registered is child and parent is not wrapped:
                        parent._modules[name] = wrapped

    def _join(self, tensor: TensorRanks, *, sync_module_states: bool) -> None:
        """Collective over the unit's ranks, and over those that are parallel over tensors, which all have it whole."""
        groups, flats = replace(self._groups, tensor=tensor), self._unit.flats
        sharing = groups.all_global_ranks()
        with raise_together_over(groups.connecting()):
            check_apart(f"the unit around {self._unit.name}", tensor.mesh, self._unit.name, sharing)
        trained = [flat.requires_grad for flat in flats]
        with raise_together_over(self._groups.connecting()):
            names = groups.names_of(tensor.comm)
            check_same_model(tensor.comm, [flat.layout for flat in flats], trained, names)
        if sync_module_states:
            shards = [flat.parameter.data.clone() for flat in flats]  # where memory is shared nothing may be received
            sync_params_and_buffers(tensor.comm, [*shards, *self._own.buffers_alike])
            for flat, shard in zip(flats, shards, strict=True):
                flat.parameter.data.copy_(shard)
        self._groups = groups

    @torch.inference_mode(False)  # of the first call: what is made here is used in training, too
    @torch.no_grad()
    def _become_root(self) -> Root:
        wrappers = self.fsdp_modules(self)
        # Of blocks the largest counts: all ranks come to the same number.
        slots = [slot for wrapper in wrappers for flat in wrapper._unit.flats for slot in flat.layout.slots]
        numel = sum(slot.numel if slot.block is None else slot.block.largest_numel for slot in slots)
        if 0 < numel < self._groups.shard.size:
            raise EngineError(
                f"the model has {numel} parameter element(s) for {self._groups.shard.size} ranks: nothing to shard for "
                "some of them; start fewer ranks or use a larger model"
            )
        names = {inner: name for name, inner in self.named_modules()}
        cast_buffers: dict[torch.Tensor, torch.Tensor] = {}
        # A module in several units has its buffers cast once, and a unit may have been a root before.
        dtypes = {place: dtype for wrapper in wrappers for place, dtype in wrapper._buffer_dtypes.items()}
        for wrapper in wrappers:
            mixed, unit = wrapper.mixed_precision, wrapper._unit
            wrapper._is_root = wrapper is self
            unit.name = names[wrapper].replace(f"{WRAPPED}.", "").replace(WRAPPED, "") or unit.name
            unit.inside = frozenset(inner._unit for inner in self.fsdp_modules(wrapper) if inner is not wrapper)
            cast_inputs = mixed.cast_root_forward_inputs if wrapper is self else mixed.cast_forward_inputs
            unit.input_dtype = mixed.param_dtype if cast_inputs else None
            if mixed.buffer_dtype is not None:
                before = precision.cast_buffers(
                    wrapper.module,
                    mixed.buffer_dtype,
                    wrapper._apart,
                    stop_at=FullyShardedDataParallel,
                    ignored=wrapper._ignored.buffers,
                    cast=cast_buffers,
                )
                dtypes = {**before, **dtypes}
        label = self._comm.broadcast_object(uuid.uuid4().hex)
        root = Root([wrapper._unit for wrapper in wrappers], self._comm, label, host=_host_of(self._comm))
        watch_root(root)
        for wrapper in wrappers:
            wrapper._root = root
            wrapper._buffer_dtypes = dtypes
        return root


def _apply_below(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    """``Module.apply`` that leaves units inside of a summoned one to themselves."""
    if isinstance(module, FullyShardedDataParallel):
        module.apply(fn)
        return
    for child in module.children():
        _apply_below(child, fn)
    fn(module)


def _host_of(comm: Communicator) -> Communicator | None:
    """What connects the same ranks through host memory, None if there is nothing."""
    if comm.device.type == "cpu":
        return comm
    world = current_world()
    return world.host if world is not None and comm is world.communicator else None
