"""``FSDPModule``: what ``fully_shard`` adds to the class of a module."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import nn

from hpcfsdp import _compat, accelerator
from hpcfsdp.api.torch_state import FullyShardState
from hpcfsdp.engine.nested import apply_to_tensors, to_kwargs
from hpcfsdp.engine.root import Root
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.units.build import Forward, become_root
from hpcfsdp.units.copying import copy_fully_sharded
from hpcfsdp.units.dtensor_unit import DTensorUnit, dtensor_unit_of, dtensor_units_in
from hpcfsdp.units.keepers import ReshardChoice, check_choice
from hpcfsdp.units.materialize import FillEmpty, tensors_on_meta
from hpcfsdp.units.own import UNIT


class UnshardHandle(stock.UnshardHandle):
    """What ``FSDPModule.unshard`` of a unit has begun."""

    def __init__(self, unit: DTensorUnit) -> None:
        self._unit: DTensorUnit | None = unit

    def wait(self) -> None:
        """Have the module hold whole parameters, which may be used afterwards."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.root is not None:
            unit.root.await_unshard(unit)


class FSDPModule(stock.FSDPModule):
    """The base that ``fully_shard`` gives to the class of a module. Its methods are those of torch's class.

    Calls of the module gather its parameters; they are collective over the ranks of its mesh. Methods that set
    something are called by all ranks alike, between steps. Those with `recurse` set it for units inside of the module,
    too, unless it is False. A value of another type is a ``ValueError``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new module of the original class, as for the slice of a container."""
        original = cls.__mro__[cls.__mro__.index(stock.FSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    @_compat.run_as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with whole parameters. Collective over the ranks of the mesh."""
        return self._run(super().__call__, args, kwargs)  # type: ignore[misc]

    @_compat.run_as_written
    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that computes with the module's parameters. Collective over the ranks of the mesh."""
        unit = self._unit_here
        with Forward(unit) as compiler:
            if unit.training_state in (TrainingState.FORWARD, TrainingState.RECOMPUTE):
                _compat.set_compiler(compiler)
                return function(*args, **kwargs)  # a method that computes calls the module itself
            if len(unit.modules) > 1 and (unit.root is None or unit.is_root):
                raise RuntimeError(
                    f"{unit.name}: one unit of several modules was called first: call the module around them, which "
                    "has to be given to fully_shard, too"
                )
            root = _root_of(unit)
            if not root.is_busy and root.device.type != "cpu":  # a batch may be in host memory
                args, kwargs = to_kwargs(args, kwargs, root.device)
            if unit.training_state is TrainingState.IDLE:
                unit.enter(cast(nn.Module, self))
            if unit.mp_policy.output_dtype is not None:
                function = functools.partial(_call_and_cast, function, unit.mp_policy.output_dtype)
            return root.forward(unit, function, args, kwargs, compiler)

    # Values

    @public_call("unshard")
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters, until ``reshard`` or a forward. Collective over the ranks of the mesh.

        Units inside stay sharded.

        Args:
            async_op: return at once; the module holds whole parameters after ``wait`` of the result, or in its forward.
        """
        unit = self._unit_here
        _root_of(unit).unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @public_call("reshard")
    def reshard(self) -> None:
        """Free its whole parameters. Collective over the ranks of the mesh if the module is unsharded.

        Units inside stay as they are. It does nothing while the module computes.
        """
        unit = self._unit_here
        if unit.root is not None:
            unit.root.recover()
            unit.root.reshard([unit])

    @public_call("set_reshard_after_forward")
    def set_reshard_after_forward(self, reshard_after_forward: ReshardChoice, recurse: bool = True) -> None:
        """Have the forward free whole parameters if `reshard_after_forward`, and the backward gather them again.

        Collective over the ranks of the mesh if `reshard_after_forward` is a number of ranks or "node", which torch
        takes in ``fully_shard`` alone.
        """
        units = self._units(recurse)
        chosen = [check_choice(reshard_after_forward, unit.mesh.shard.size) for unit in units]
        for unit, choice in zip(units, chosen, strict=True):
            unit.set_reshard(choice)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Have the backward free whole parameters if `reshard_after_backward`; an optimizer's step does in any case."""
        for unit in self._units(recurse, reshard_after_backward=reshard_after_backward):
            unit.reshard_after_backward = reshard_after_backward

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accept `async_op`, without effect: gathers run beside the computation where they can."""
        _check_bool("async_op", async_op)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Have the backward gather the module's parameters if `unshard_in_backward`; an embedding needs none there."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        self._unit_here.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[Any]) -> None:
        """Have the forward of this module begin to gather the parameters of `modules`, given to ``fully_shard``."""
        self._unit_here.prefetched["forward"] = units_of_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: Iterable[Any]) -> None:
        """Have the backward of this module begin to gather the parameters of `modules`, instead of the next one's."""
        self._unit_here.prefetched["backward"] = units_of_modules(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward gather as soon as `event` has occurred, and not after all that was enqueued.

        Call it on the outermost module, for one forward. On a CPU the optimizer has finished anyway.
        """
        root = _root_of(self._unit_here)
        if accelerator.is_accelerator(root.device):
            root.context.user_event = event

    # Gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Have backwards reduce gradients over ranks if `requires_gradient_sync`; otherwise each rank adds up its own.

        The next backward that reduces them reduces the sum. ``grad`` shows reduced gradients alone.
        """
        for unit in self._units(recurse, requires_gradient_sync=requires_gradient_sync):
            unit.keeps_back = not requires_gradient_sync
            unit.reduce_options.over_replicas = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Have backwards reduce over replicas, too, if `requires_all_reduce`; otherwise add up sums over shards."""
        for unit in self._units(recurse, requires_all_reduce=requires_all_reduce):
            unit.reduce_options.over_replicas = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept `is_last_backward`, without effect: each backward completes its reductions."""
        _check_bool("is_last_backward", is_last_backward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients over all ranks by `factor`, and not by the number of ranks.

        Raises:
            ValueError: `factor` is zero, or no number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not abs(factor) > 0:
            raise ValueError(f"the divide factor must be a number other than 0, not {factor!r}")
        self._unit_here.reduce_options.divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept `enable`, without effect: transports sum, and divide themselves where that is exact and fast."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Give parameters that no rank has used in a step a gradient of zeros if `reduce_scatter_unused_params`.

        Otherwise they get none. A parameter that some ranks have used gets the average over all ranks in any case.
        """
        for unit in self._units(recurse, reduce_scatter_unused_params=reduce_scatter_unused_params):
            unit.reduce_options.fills_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Have at most `max_input_buffers` buffers of gradients of a unit in flight on a device.

        Raises:
            TypeError, ValueError: `max_input_buffers` is no number of 1 or more.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be >= 1, got {max_input_buffers}")
        for unit in self._units(recurse):
            unit.reduce_options.num_buffers = max_input_buffers
            if unit.context is not None:
                for index, grad in enumerate(unit.grads):
                    unit.context.reductions.plan(grad, index)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None) -> None:
        """Have `hook` change this rank's part of each reduced gradient in place, for instance by an all-reduce.

        It is called with a 1-D tensor of the rows of all parameters of one dtype and ``requires_grad``, with gaps
        between them, after the division. `stream`, of the device, is the one to call it on, for a mesh of one
        dimension.

        Raises:
            ValueError: `stream` was given for hybrid sharding.
        """
        unit = self._unit_on_one_mesh("set_all_reduce_hook")
        if stream is not None and unit.mesh.is_hybrid:
            raise ValueError("stream= cannot be set for hybrid sharding, which reduces on streams of its own")
        unit.reduce_options.hook = hook if stream is None else functools.partial(_call_on, stream, hook)
        unit.remake()  # gradients are not divided by size then

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather the module's parameters with torch's ``AllGather`` object `comm`."""
        unit = self._unit_on_one_mesh("set_custom_all_gather")
        group, size = unit.mesh.process_group(), unit.mesh.shard.size

        def gather(shard: torch.Tensor) -> torch.Tensor:
            output = comm.allocate((size * shard.numel(),), dtype=shard.dtype, device=shard.device)
            _await(comm(output_tensor=output, input_tensor=shard, group=group, async_op=False))
            return cast(torch.Tensor, output)

        unit.gather = gather
        unit.remake()

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce the module's gradients over the shards' ranks with torch's ``ReduceScatter`` object `comm`."""
        unit = self._unit_on_one_mesh("set_custom_reduce_scatter")
        group, size = unit.mesh.process_group(), unit.mesh.shard.size

        def scatter(full: torch.Tensor) -> torch.Tensor:
            output = comm.allocate((full.numel() // size,), dtype=full.dtype, device=full.device)
            _await(comm(output_tensor=output, input_tensor=full, group=group, op=dist.ReduceOp.SUM, async_op=False))
            return cast(torch.Tensor, output.div_(size))

        unit.reduce_options.scatter = scatter

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients by a communicator of their own on a device if `enable`. Collective over the ranks.

        See ``CommOptions.separate_reductions``.
        """
        for unit in self._units(recurse, enable=enable):
            unit.choose(separate_reductions=enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Gather the module's parameters into memory that is registered with the backend. Collective over the ranks.

        Raises:
            ValueError: the backend registers no memory.
            AssertionError: functions of the program gather or reduce, see ``set_custom_all_gather``.
        """
        _check_bool("enable", enable)
        self._unit_here.choose(memory="registered" if enable else "plain")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather the module's parameters into torch's symmetric memory. Collective over the ranks of the mesh.

        Raises:
            ValueError: `backend` is not "NCCL", or torch has no symmetric memory for it.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm: the backend is 'NCCL', not {backend!r}")
        self._unit_here.choose(memory="symmetric")

    # The rest

    @public_call("reset_iter_state")
    def reset_iter_state(self) -> None:
        """Forget a step that an exception has ended, with its gradients. Collective over the ranks of the mesh.

        The next forward does so by itself after an exception. This also drops gradients that
        ``set_requires_gradient_sync(False)`` holds.

        Raises:
            RuntimeError: called on a module inside of the outermost one.
        """
        unit = self._unit_here
        if unit.root is not None and not unit.is_root:
            raise RuntimeError(f"reset_iter_state was called on the inner unit {unit.name}: call it on the outermost")
        if unit.root is not None:
            unit.root.recover()
            unit.root.forget_step()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the parameters; those that get whole gradients for a stage of a pipeline that computes these apart."""
        found = super().parameters(recurse)  # type: ignore[misc]
        if not _compat.is_in_stage_backward():
            return cast(Iterator[nn.Parameter], found)
        units = dtensor_units_in(cast(nn.Module, self))
        leaves = {each.param.sharded: each.param.leaf for unit in units for each in unit.own}
        return (leaves.get(param, param) for param in found)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit_here
        if unit.root is not None:
            unit.root.reshard([unit], meet=False)
        unit.uninitialised += tensors_on_meta(cast(nn.Module, self))
        with FillEmpty() if unit.uninitialised else contextlib.nullcontext():
            # Not torch's, which expects its own state.
            result = super(stock.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        unit.label_params()
        unit.refresh()
        return result

    @public_call("copy.deepcopy")
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Not collective. Return a copy of this rank's rows, which trains by itself; process groups are shared."""
        return copy_fully_sharded(cast(nn.Module, self), memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise EngineError(
            "a module that fully_shard has sharded cannot be pickled or copied by copy.copy: use copy.deepcopy, save "
            "its state_dict(), or use hpcfsdp.checkpoint"
        )

    @property
    def _unit_here(self) -> DTensorUnit:
        return cast(DTensorUnit, self.__dict__[UNIT])

    def _units(self, recurse: bool, **switches: bool) -> Sequence[DTensorUnit]:
        """Return the units that a method sets. Refuses switches that are no bool."""
        for name, value in switches.items():
            _check_bool(name, value)
        return dtensor_units_in(cast(nn.Module, self)) if recurse else [self._unit_here]

    def _unit_on_one_mesh(self, what: str) -> DTensorUnit:
        unit = self._unit_here
        if any(each.mesh is not unit.mesh for each in unit.own):
            raise ValueError(f"{what} cannot be used where parameters of a module are sharded over several meshes")
        return unit

    def _get_fsdp_state(self) -> Any:
        """Return the ``FullyShardState``: what torch's own tools read."""
        return FullyShardState(cast(nn.Module, self))


@functools.cache
def extended_class(original: type) -> type:
    """Return a subclass of `original`, a module's class, and of ``FSDPModule``, always the same one."""
    return type(f"FSDP{original.__name__}", (FSDPModule, original), {"__module__": original.__module__})


def _root_of(unit: DTensorUnit) -> Root:
    """Return the root. Collective where there is none yet, or where the program has replaced parameters by others."""
    root = unit.root
    if root is None:
        return become_root(unit)
    units = cast(Sequence[DTensorUnit], root.units)
    if root.is_busy or all(each.root is root and not each.uninitialised and each.fits() for each in units):
        return root
    root.recover()
    return become_root(units[0])


def units_of_modules(modules: Iterable[FSDPModule]) -> list[DTensorUnit]:
    """Return the units of modules, which ``fully_shard`` must have sharded."""
    units = []
    for module in modules:
        unit = dtensor_unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"the module was not given to fully_shard, a {type(module).__name__}: shard it first")
        units.append(unit)
    return units


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")


def _call_and_cast(function: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    outputs = function(*args, **kwargs)
    return apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, outputs)


def _call_on(stream: torch.Stream, hook: Callable[[torch.Tensor], None], grad: torch.Tensor) -> None:
    now = accelerator.current_stream(grad.device)
    stream.wait_stream(now)
    with accelerator.on(stream):
        hook(grad)
    now.wait_stream(stream)


def _await(work: Any) -> None:
    if work is not None:
        work.wait()
