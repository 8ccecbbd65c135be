"""``FullyShardedDataParallel``: a module with parameters, gradients and optimizer state sharded over ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp import _compat, env
from hpcfsdp.api.state_dicts import StateDictMethods
from hpcfsdp.comm import Communicator, raise_together_over
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.engine.nested import to_kwargs
from hpcfsdp.engine.root import Root
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.params.granularity import Granularity, GranularityOf, check_granularity
from hpcfsdp.params.module_states import get_root_modules
from hpcfsdp.state.load import load_when_known
from hpcfsdp.state.settings import default_settings
from hpcfsdp.units import arguments, build, clip, copying, guard, materialize, mixed_precision as precisions, summon
from hpcfsdp.units.flat_unit import WRAPPED, units_in
from hpcfsdp.units.groups import resolve_mesh, with_dtensors
from hpcfsdp.units.keepers import ReshardChoice, check_choice
from hpcfsdp.units.optimizer_check import watch_optimizers
from hpcfsdp.units.own import UnitOptions, label_modules, move_buffers, own_params
from hpcfsdp.units.unit_mesh import UnitMesh


class FullyShardedDataParallel(StateDictMethods):
    """Shards a module's parameters over ranks, gathers them while it computes, and reduces their gradients.

    Constructing one is collective over the ranks it shards over. Arguments are those of torch's class of the same
    name. Between steps each rank holds only its shard. Build the optimizer from ``model.parameters()`` *after*
    wrapping; it steps the shards. Without `use_orig_params`, ``model.parameters()`` are flat parameters; original
    parameters keep their name, shape and dtype, but hold NaN outside of forward and backward. With `use_orig_params`,
    ``model.parameters()`` are the original parameters; between steps each is 1-D and holds this rank's part of it,
    possibly empty.

    Args:
        module: the module to shard, in place. Every rank passes the same one, with the same values unless
            `sync_module_states` is set.
        process_group: the ranks to shard over; by default all of them. A torch ``ProcessGroup``, an hpcfsdp
            ``Communicator``, or for hybrid strategies a pair (shard, replicate).
        sharding_strategy: ``FULL_SHARD`` by default. ``SHARD_GRAD_OP`` keeps gathered parameters between forward and
            backward, ``NO_SHARD`` replicates; ``HYBRID_SHARD`` and ``_HYBRID_SHARD_ZERO2`` shard within each node and
            replicate across nodes, as MPI sees them.
        cpu_offload: keep shards and their gradients in host memory.
        auto_wrap_policy: chooses the submodules that become units of their own, see ``hpcfsdp.wrap``. Parameters are
            gathered one unit at a time, so memory and overlap depend on this choice.
        backward_prefetch: gather the next unit before (``BACKWARD_PRE``) or after (``BACKWARD_POST``) computing the
            gradients of the current one. Ranks of one CPU node share memory and need no gathering.
        mixed_precision: the dtypes to compute in, to reduce gradients in, and to cast buffers to.
        ignored_modules: modules whose parameters are not sharded.
        param_init_fn: a function that initialises a module that was built on the meta device. Default: the module's
            ``reset_parameters``.
        device_id: the device to compute on. Default: the device of the ranks; with a group on the CPU that is not the
            world's the module stays where it is, which must be the CPU. Units are moved one by one: the whole model
            need not fit.
        sync_module_states: broadcast rank 0's parameters and buffers.
        forward_prefetch: gather the next unit of the forward before computing with the current one.
        limit_all_gathers: has no effect, for compatibility with torch: at most one unit is gathered ahead.
        use_orig_params: let ``model.parameters()`` return the original parameters instead of flat ones.
        ignored_states: modules or parameters that are not sharded; use it instead of `ignored_modules`.
        device_mesh: a mesh of one dimension, or for hybrid strategies (replicate, shard); use it instead of
            `process_group`.
        granularity: what of a parameter stays on one rank; torch has no such argument. 1, an element; a number of
            elements, as for formats in blocks; "row", all but the first dimension; "whole"; or a function of its name
            in the unit and its whole shape that returns one of these. Parameters are placed so that shards end
            between blocks; shards keep equal sizes, so large blocks in small units cost padding, of which
            ``hpcfsdp plan --granularity`` shows how much. Checkpoints do not depend on it.
        comm_options: how ranks communicate on an accelerator, see ``CommOptions``; torch has no such argument.
        reshard_after_forward: whether values are freed between forward and backward, or over how many ranks, or on the
            "node", they stay, as in ``fully_shard``. Default: what the strategy says; torch has no such argument.

    Raises:
        ValueError: the module is already wrapped, has parameters on several devices, or has tied parameters that the
            policy puts into different units; two arguments exclude each other; or the backend of the ranks lacks an
            option of `comm_options`.
        ShardingError: a granularity does not divide a parameter.
        DisagreementError: ranks pass different models.

    Warns:
        DifferentValuesWarning: ranks pass different values without `sync_module_states`.
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
        granularity: Granularity | GranularityOf = 1,
        comm_options: CommOptions | None = None,
        reshard_after_forward: ReshardChoice | None = None,
    ) -> None:
        super().__init__()
        watch_optimizers()
        arguments.check_module(module)
        arguments.check_types(cpu_offload, mixed_precision, backward_prefetch)
        mesh = resolve_mesh(process_group, device_mesh, sharding_strategy)
        if reshard_after_forward is not None:
            reshard_after_forward = check_choice(reshard_after_forward, mesh.shard.size)
        ignored = arguments.resolve_ignored(module, ignored_modules, ignored_states)
        if granularity != 1 and not callable(granularity):  # before anything is wrapped
            managed = {param for unit in units_in(module) for flat in unit.sharded_params for param in flat.stepped}
            for name, param in module.named_parameters():
                if param not in managed and param not in ignored.params:
                    check_granularity(granularity, param.shape, name)
        is_outermost = not isinstance(process_group, UnitMesh)  # otherwise an outer wrapper's policy makes this one
        if is_outermost:
            mesh = with_dtensors(mesh, module, ignored.params)
        self._full_in_eval = env.full_precision_in_eval()
        self.register_load_state_dict_post_hook(load_when_known)  # type: ignore[no-untyped-call]
        options = UnitOptions(
            device=arguments.target_device(mesh, device_id),
            ignored=ignored,
            mixed_precision=mixed_precision or MixedPrecision(),
            cpu_offload=cpu_offload or CPUOffload(),
            backward_prefetch=backward_prefetch,
            forward_prefetch=bool(forward_prefetch),
            limit_all_gathers=bool(limit_all_gathers),
            use_orig_params=use_orig_params,
            granularity=granularity,
            comm_options=comm_options or CommOptions(),
            reshard_after_forward=reshard_after_forward,
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
        )
        if auto_wrap_policy is not None:
            self._wrap_children(module, auto_wrap_policy, mesh, options)
        if options.device is not None:
            move_buffers(module, options.device, ignored=ignored)
        with raise_together_over(mesh.subgroups()):
            mesh.refuse_options(options.comm_options)
            made = materialize.materialize(
                module,
                device=options.device or torch.device("cpu"),
                param_init_fn=param_init_fn,
                ignored=ignored,
                values_count=not sync_module_states or mesh.is_first(),  # whose values all others get
            )
        arguments.check_readers(module)
        in_full = precisions.find_full_precision(module, options.full_precision)
        self._fsdp_wrapped_module: Any = module  # which may be indexed, too
        with raise_together_over(mesh.subgroups()):
            own = own_params([module], options, mesh=mesh)
        if own.groups and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            warnings.warn(
                f"a {type(module).__name__} has no forward in which its parameters could be gathered: wrap the modules "
                "in it, or the module that calls them",
                stacklevel=2,
            )
        outside = dict.fromkeys(precisions.modules_outside(module))
        param_names = {inner: tuple(inner._parameters) for inner in outside}  # in the order of the plain model
        self._unit = build.make_unit(self, module, mesh, own, made, options)
        self._unit.param_names, self._unit.state_dict_settings = param_names, default_settings()
        label_modules(module, ignored.modules)
        guard.guard_modules(self._unit)
        precisions.keep_full_precision(in_full)
        for inner in units_in(module):  # inner units without DTensors
            if mesh.tensor_mesh is not None and inner.mesh.tensor is None:
                build.join_tp_group(inner, mesh.tensor_mesh, sync_module_states=sync_module_states)
        if is_outermost:  # one warning for all units of this call
            build.warn_of_units(self, stacklevel=3)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return cast(nn.Module, self._fsdp_wrapped_module)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The requested strategy, also on one rank; never None."""
        return self._unit.mesh.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The argument of this name; never None."""
        return self._unit.options.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """The argument of this name; never None."""
        return self._unit.options.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The argument of this name, as the two below."""
        return self._unit.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        return self._unit.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        return self._unit.options.limit_all_gathers

    @property
    @public_call("process_group")
    def process_group(self) -> dist.ProcessGroup:
        """The process group over which the unit is sharded, or replicated under ``NO_SHARD``.

        It is the given ``ProcessGroup``, or that of the mesh. For a ``Communicator``, and for hybrid strategies without
        groups, the first access makes one of the default backend, and is collective over its ranks.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return self._unit.mesh.process_group()

    @property
    def rank(self) -> int:
        """The rank of this process in `process_group`."""
        return self._unit.mesh.dtensor_ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self._unit.mesh.dtensor_ranks.size

    @property
    def compute_device(self) -> torch.device:
        """The device of the computation."""
        sharded_params = self._unit.sharded_params
        return sharded_params[0].device if sharded_params else self._unit.mesh.dtensor_ranks.device

    @property
    def training_state(self) -> Any:
        """One of torch's ``TrainingState``."""
        states = _compat.training_states()
        others = {TrainingState.IDLE: states.IDLE, TrainingState.SUMMON: states.SUMMON_FULL_PARAMS}
        return others.get(self._unit.training_state, states.FORWARD_BACKWARD)

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit, this rank's shards; with `use_orig_params` no optimizer steps them."""
        return [flat.parameter for flat in self._unit.sharded_params]

    # Own methods have a leading underscore: other names are looked up in the wrapped module.

    @_compat.run_as_written
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with gathered parameters. Collective over the process group.

        The outermost wrapper moves tensors in the arguments to the device of the computation.
        """
        unit = self._unit
        with build.Forward(unit) as compiler:
            root = unit.root or build.become_root(unit)
            if not root.is_busy:
                if self._full_in_eval:
                    precisions.follow_eval_mode(unit)
                if root.device.type != "cpu":  # a batch may be in host memory
                    args, kwargs = to_kwargs(args, kwargs, root.device)
            return root.forward(unit, self._fsdp_wrapped_module, args, kwargs, compiler)

    @public_call("check_is_root")
    def check_is_root(self) -> bool:
        """Return whether this wrapper is the outermost one; before the model's first call, make it so."""
        if self._unit.root is None:
            build.become_root(self._unit)
        return self._unit.is_root

    @contextlib.contextmanager
    @public_call("no_sync")
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication, until a backward outside of this context reduces their sum.

        Meanwhile each rank holds whole gradients, in at least float32, which parameters show as ``grad``. They may be
        read, changed in place, and discarded (``zero_grad``, ``grad = None``), but not clipped, and the optimizer must
        not step. Call it on the root, around forward and backward.

        Raises:
            EngineError: called on a unit inside of another one, or during forward or backward.
        """
        with self._as_root("no_sync").no_sync():
            yield

    @public_call("set_reshard_after_forward")
    def set_reshard_after_forward(self, reshard_after_forward: ReshardChoice, recurse: bool = True) -> None:
        """Choose whether the forward frees this unit. Collective over all ranks, between steps.

        If the forward frees the unit's parameters, the backward gathers them again, which costs one all-gather in each
        step. Otherwise they stay in memory from forward to backward. By default the strategy decides, and the outermost
        unit keeps its parameters. torch's ``FSDPModule`` has a method of the same name. The choice has no effect where
        all ranks share memory.

        Args:
            reshard_after_forward: True or False; or over how many ranks, or on the "node", they stay, as in
                ``fully_shard``.
            recurse: also set it for all units inside.

        Raises:
            ValueError: `reshard_after_forward` is none of these, or a number that does not divide the ranks that shard.
            EngineError: called during forward or backward.
        """
        units = units_in(self) if recurse else [self._unit]
        chosen = [check_choice(reshard_after_forward, unit.mesh.shard.size) for unit in units]
        for unit, choice in zip(units, chosen, strict=True):
            unit.check_at_rest("set_reshard_after_forward")
            unit.set_reshard(choice)

    @public_call("clip_grad_norm_")
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Clip the gradients of the whole model to a total norm. Collective over all ranks. Call it on the root.

        `max_norm` is the largest norm, `norm_type` the p of the p-norm, above 0 or inf; 0 counts elements other than 0.
        Parameters that are ignored count once, as if they were the same on all ranks.

        Returns:
            The norm before clipping, a scalar, the same on every rank.

        Raises:
            EngineError: called on a unit inside of another one, or during forward or backward; ``no_sync`` holds
                gradients that have not been reduced.
        """
        root = self._as_root("clip_grad_norm_")
        if root.holds_grads:
            with raise_together_over(self._unit.mesh.subgroups()):
                root.refuse_held("clip_grad_norm_")
        return clip.clip_model_grads(self._unit, max_norm, norm_type)

    @public_call("register_comm_hook")
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook` reduce gradients. Call it on the root, before training.

        It is called as ``hook(state, full_gradient, output)``, both 1-D in the reduce dtype, and must fill `output`
        with this rank's segment of the average; under ``NO_SHARD`` as ``hook(state, gradient)``, to average in place.

        Raises:
            EngineError: called on a unit inside of another one, the strategy is hybrid, or there is a hook already.
            TypeError: `hook` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook must be a function, not {type(hook).__name__}")
        self._as_root("register_comm_hook")
        units = units_in(self)
        if any(unit.mesh.is_hybrid for unit in units):
            raise EngineError(
                "communication hooks are not supported under hybrid strategies, which reduce gradients twice: use "
                "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
            )
        grads = [grad for unit in units for grad in unit.grads]
        if any(grad.comm_hook is not None for grad in grads):
            raise EngineError("a communication hook is already registered: a model has at most one")
        for grad in grads:
            grad.comm_hook = (state, hook)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all wrappers within `module`, outer ones first; `module` itself may be one.

        Args:
            root_only: leave out wrappers inside of another one.
        """
        found = [inner for inner in module.modules() if isinstance(inner, FullyShardedDataParallel)]
        return get_root_modules(found) if root_only else found

    summon_full_params = staticmethod(summon.unshard_params)
    walk_full_params = staticmethod(summon.walk_full_params)

    @public_call("apply")
    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Call `fn` on every module, inner ones first, with whole parameters. Collective over the process group."""
        with self.summon_full_params(self, recurse=False, writeback=True):
            for child in self.children():
                child.apply(fn)  # units inside gather their own parameters
        fn(self)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Do as for any module; within ``summon_full_params`` without the names of wrappers."""
        if kwargs.get("recurse") is False:
            guard.refuse_ddp_around(self._unit)
        if self._unit.root is not None:
            self._unit.root.recover()  # modules may hold what a broken backward needs
        for unit in units_in(self) if torch.is_grad_enabled() else ():
            if unit.is_idle:
                unit.leaves.list()
        return self._named(super().named_parameters(*args, **kwargs))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do as for any module; `set_to_none` is the same."""
        with torch.no_grad():  # the program is given no parameters
            super().zero_grad(set_to_none)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Do as for any module; within ``summon_full_params`` without the names of wrappers."""
        return self._named(super().named_buffers(*args, **kwargs))

    def _named(self, found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        summoned = self._unit.training_state is TrainingState.SUMMON
        for name, tensor in found:
            yield (name.replace(f"{WRAPPED}.", "") if summoned else name), tensor

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        sharded_params = [flat for unit in units_in(self) for flat in unit.sharded_params]
        for flat in sharded_params:
            probe = torch.empty(0, dtype=flat.parameter.dtype, device=flat.device)
            after = fn(probe)
            if after.device != probe.device or after.dtype != probe.dtype:
                raise EngineError(
                    f"a sharded model cannot be moved or cast as a whole (from {probe.device}, {probe.dtype} to "
                    f"{after.device}, {after.dtype}): move or cast the module before wrapping it, or pass device_id"
                )
        managed = {param for flat in sharded_params for param in (flat.parameter, *flat.leaves)}
        for module in self.modules():
            if not isinstance(module, FullyShardedDataParallel):
                _compat.apply_to_module(module, lambda t: t if t in managed else fn(t), recurse=False)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:  # an attribute is missing while the constructor runs
                raise
            found = getattr(self._fsdp_wrapped_module, name)
            return guard.guarded(self._unit, name, found) if name in guard.PAST_FORWARD else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the wrapped module alone has there: its forward reads it."""
        own = self.__dict__
        module = own.get("_modules", {}).get(WRAPPED)
        places = own, *(own.get(registry, {}) for registry in ("_parameters", "_buffers", "_modules"))
        is_own = hasattr(type(self), name) or any(name in place for place in places)
        if module is None or is_own or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    # Attributes that other libraries read before they wrap a module

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Read by torch's DistributedDataParallel before it changes anything. Always raises an ``EngineError``."""
        raise EngineError(
            "DistributedDataParallel, or Accelerator.prepare, was called with a model that is already wrapped in "
            "FullyShardedDataParallel, which reduces gradients itself: use the wrapped model as it is; with "
            "accelerate, prepare only the optimizer and the data loader; transformers' Trainer takes the plain model "
            "and trains replicas; hpcfsdp.integrations has a Trainer and an Accelerator that shard; for replicas of "
            "shards use sharding_strategy=ShardingStrategy.HYBRID_SHARD"
        )

    @functools.cached_property  # accelerate may set it
    def _is_accelerate_prepared(self) -> bool:
        """Read by ``Accelerator.prepare`` and ``prepare_model`` first. Warns if accelerate counts one process."""
        size = self._unit.mesh.dtensor_ranks.size
        accelerate = sys.modules.get("accelerate")
        if accelerate is not None and size > 1 and accelerate.PartialState().num_processes == 1:
            warnings.warn(
                f"the model is sharded over {size} ranks, but accelerate sees only one process and gives every rank "
                "the same data. Call hpcfsdp.init() before Accelerator() (on CPUs: Accelerator(cpu=True)), or divide "
                "the data yourself",
                stacklevel=4,
            )
        return False

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch.distributed.checkpoint: FQNs contain neither the wrapped module's name nor ``module``."""
        guard.refuse_mistakes(self._unit)
        return {"module": WRAPPED}

    @public_call("copy.deepcopy")
    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Return a copy of the shards; process groups are shared. Collective over the ranks of the model."""
        return cast(FullyShardedDataParallel, copying.copy_wrapper(self._unit, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineError(
            "a sharded model cannot be pickled or copied by copy.copy: use copy.deepcopy on all ranks, or save it "
            "with hpcfsdp.checkpoint"
        )

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = iter(self._fsdp_wrapped_module)
        return found

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)

    def __bool__(self) -> bool:
        return True  # as any module, also one without a length: programs write `reference or model`

    def _as_root(self, what: str) -> Root:
        """Return the units under this one, for the call `what`. Refuses inner units, and calls within a step."""
        unit = self._unit
        if unit.root is not None and not unit.is_root:
            raise EngineError(
                f"{what} was called on the inner unit {unit.name}: call it on the root (outermost) "
                "FullyShardedDataParallel"
            )
        root = unit.root or build.become_root(unit)
        root.recover()
        busy = [unit for unit in root.units if not unit.is_idle]
        if busy:
            raise EngineError(
                f"{what} was called while {busy[0].name} is in {busy[0].training_state.value}: call it before the "
                "forward or after the backward"
            )
        return root

    def _wrap_children(self, module: nn.Module, policy: Any, mesh: UnitMesh, options: UnitOptions) -> None:
        if units_in(module):
            raise ValueError(
                f"auto_wrap_policy was given for a {type(module).__name__} that already contains "
                "FullyShardedDataParallel modules: wrap either by hand or by policy"
            )
        chosen = arguments.choose_units(module, policy, options.ignored)
        arguments.check_ties(module, chosen, options.ignored)
        given = {"process_group": mesh, **options.arguments()}
        for child, own_arguments in chosen.items():
            wrapped = FullyShardedDataParallel(child, **{**given, **own_arguments})
            # A module may be registered in several places: each of them gets the one wrapper.
            for parent in list(module.modules()):
                for name, registered in parent._modules.items():
                    if registered is child and parent is not wrapped:
                        parent._modules[name] = wrapped
