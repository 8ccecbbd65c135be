"""What differs between versions of torch, and the private parts of torch that the engine stands on, in one place."""

import contextlib
import functools
import hashlib
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
    custom_sharded_op_impl,
)
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp._common_utils import TrainingState
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel

__all__ = [  # have no other home
    "ChunkShardingSpec",
    "IncompatibleKeys",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "TrainingState",
]

HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2

# What modules inherit and may override.
apply_to_module = nn.Module._apply
save_to_state_dict = nn.Module._save_to_state_dict
load_from_state_dict = nn.Module._load_from_state_dict

# A ShardedTensor whose blocks are not those of torch's chunks has their offsets and sizes in this class: with what
# torch's own LOCAL_STATE_DICT needs allowed, torch.load(weights_only=True) takes ours.
torch.serialization.add_safe_globals([EnumerableShardingSpec])

# torch 2.13 renames the two collectives and deprecates the older names, which are all that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()
"""Of each default group, how many groups of the same ranks have been made beside it, by what their names begin with."""


def new_group_of(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Collective over `ranks`, global ones in any order. A process group of them, in ascending order.

    As ``dist.new_group(ranks, use_local_synchronization=True)``. That names a group after the number of groups that a
    rank is in: members that differ in it would wait for each other under different names, without end. Here the name
    counts the groups of the same ranks, those that have been destroyed too: what a group has left in the store would
    mislead another one of its name.

    Args:
        backend: None for that of the default group.
    """
    c10d, members = dist.distributed_c10d, sorted(ranks)
    everyone = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[everyone]
    backend = dist.Backend(backend or default_backend)
    name = f"hpcfsdp-{hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()}-"
    turns = _groups_made.setdefault(everyone, {})
    turn = turns[name] = turns.get(name, -1) + 1
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        store,
        f"{name}{turn}",
        timeout=c10d._get_default_timeout(backend),
        device_id=everyone.bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def members_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """The global ranks of a process group, None for the default one; None if this rank is not in it."""
    return None if dist.distributed_c10d._rank_not_in_group(group) else dist.get_process_group_ranks(group)


def id_of_worker(name: str) -> int:
    """The id of a worker of torch's RPC.

    Raises:
        RuntimeError: RPC has not been initialised.
        ValueError: there is no such worker.
    """
    from torch.distributed import rpc

    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():
        raise RuntimeError(f"a shard is placed on the worker {name!r}, and torch.distributed.rpc is not initialised")
    workers = {worker.name: worker.id for worker in rpc._get_current_rpc_agent().get_worker_infos()}
    if name not in workers:
        raise ValueError(f"a shard is placed on the worker {name!r}, and there are only {sorted(workers)}")
    return workers[name]


Work = dist._Work
"""Base of work handles that are written in Python."""


def all_gather_single(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``dist.all_gather_into_tensor`` by the name that this torch has for it."""
    return _all_gather(output, shard, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, full: torch.Tensor, op: Any, group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """``dist.reduce_scatter_tensor`` by the name that this torch has for it."""
    return _reduce_scatter(output, full, op=op, group=group, async_op=async_op)


def premultiplier(op: Any) -> Any | None:
    """What ``ReduceOp.PREMUL_SUM`` multiplies each rank's values by before it sums them; None for any other op."""
    return op.__getstate__()[1] if op == dist.ReduceOp.PREMUL_SUM else None


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """The device on which a process group works: a GPU if it can, with the index that is current."""
    kinds = {device.type for device in getattr(group, "_device_types", [])}
    if "cuda" in kinds and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# The engine calls these in each step, straight.

run_of_autograd: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the run of the autograd engine that the calling thread is inside of, -1 outside of any."""
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward that is running will come to a node of the graph. A RuntimeError for a leaf whose gradient goes
to the caller of torch.autograd.grad."""
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Has the autograd engine call a function at the end of the backward pass that is running."""
hooks_after_accumulation: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks of a leaf that run when autograd has added to its gradient."""
hooks_on_gradient: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")
"""The hooks of a tensor that run when a gradient comes to it."""
inputs_of_node: Callable[[Any], list[Any]] = operator.attrgetter("_input_metadata")
"""What a node of the graph takes; the one that adds to a leaf has kept the shape that the leaf had at the time."""
STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute in which torch notes the optimizers that step a parameter as soon as it has its gradient."""


def in_backward() -> bool:
    """Whether the calling thread is inside a run of the autograd engine."""
    return run_of_autograd() != -1


def forget_accumulator(leaf: torch.Tensor) -> None:
    """Have a leaf get another node that adds to its gradient, and with it none of the hooks of the one that it has."""
    data = leaf.data
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    leaf.data = torch.empty(0, dtype=other, device=data.device)  # of another dtype: autograd has no use for the node
    leaf.data = data


def default_store() -> Any:
    """The store of torch.distributed's default process group, None where there is none."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


set_compiler = torch._C._dynamo.eval_frame.set_eval_frame
"""What compiles functions when they are called, None for nothing; returns what did so before."""


def run_as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile leaves alone, while it compiles those that this one calls."""
    # What torch.compiler.disable(recursive=False) does; that would load the compiler when this package is imported.
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def hook_behind_torch(hook: Any) -> Any:
    """The exception hook that torch.distributed's own one has replaced and calls, None for any other hook."""
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return None
    return inspect.getclosurevars(hook).nonlocals.get("old_hook")


def run_wrap_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """The modules that one of torch's policy objects wants wrapped, each with keyword arguments of its own."""
    return policy._run_policy(root, ignored_modules=ignored, root_kwargs={})


def is_policy_object(policy: Any) -> bool:
    """Whether `policy` is one of torch's policy objects (``ModuleWrapPolicy``, ``CustomPolicy``)."""
    from torch.distributed.fsdp.wrap import _Policy

    return isinstance(policy, _Policy)


def tensors_of(value: Any) -> Iterable[torch.Tensor] | None:
    """The tensors of a container that torch's pytree registry knows, None for a type it does not know."""
    from torch.utils import _pytree

    if type(value) not in _pytree.SUPPORTED_NODES:
        return None
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_registered(kind: type) -> bool:
    """Whether torch's pytree registry knows a type."""
    from torch.utils import _pytree

    return kind in _pytree.SUPPORTED_NODES


def take_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """The children of a container that torch's pytree registry knows, and how to rebuild it from others.

    One level only: children may be containers. None for a type that the registry does not know.
    """
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda others: node.unflatten_fn(others, context)


@contextlib.contextmanager
def assigning_without_swaps() -> Iterator[None]:
    """A context in which modules that load a state dict put its tensors in place of their own, whatever is set."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def loading_module() -> nn.Module | None:
    """The module whose ``nn.Module.load_state_dict`` has called the caller, through modules inside of it; or None."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module.load_state_dict.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get("self")


class StockCall(NamedTuple):
    """A call of one of the functions of ``torch.distributed.checkpoint.state_dict``."""

    function: str
    has_optimizers: bool
    has_submodules: bool
    options: Any


def stock_state_dict_call() -> StockCall | None:
    """The call that looks at the modules of a model now, if there is one: it checks its arguments against them."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_verify_options" and frame.f_globals["__name__"].endswith("checkpoint.state_dict"):
            given = frame.f_locals
            function = frame.f_back.f_code.co_name  # type: ignore[union-attr]
            return StockCall(function, bool(given["optims"]), bool(given["submodules"]), given["options"])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def hooks_before_forward(module: nn.Module) -> dict[Any, Callable[..., Any]]:
    """The hooks that a module calls before its forward, by keys that may be anything."""
    return module._forward_pre_hooks  # type: ignore[return-value]


def ddp_in_construction() -> tuple[nn.Module, set[str]] | None:
    """The model that a DistributedDataParallel looks at for gradients to average, and the names that it leaves out.

    It does so while it is built, before its first message.
    """
    build = DistributedDataParallel._build_params_for_reducer.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not build:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    made = frame.f_locals["self"]
    return made.module, made.parameters_to_ignore


@functools.cache
def _let_sharded_tensors_know_their_device() -> None:
    """Have a rank that holds nothing of a ``ShardedTensor`` say where it would.

    Torch has it ask for a GPU unless the group is gloo's, which ends the loading of checkpoints over MPI.
    """

    @custom_sharded_op_impl(torch.Tensor.device.__get__)
    def device(_types: Any, args: Any, _kwargs: Any, group: dist.ProcessGroup) -> torch.device:
        shards = args[0].local_shards()
        return shards[0].tensor.device if shards else device_of_group(group)


def sharded_tensor(shards: list[Shard], metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> ShardedTensor:
    """A ``ShardedTensor`` of which this rank holds `shards`, and all ranks know `metadata`. Not collective."""
    _let_sharded_tensors_know_their_device()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=group
    )


def group_of_shards(tensor: ShardedTensor) -> dist.ProcessGroup:
    """The process group over which a ``ShardedTensor`` lies."""
    return tensor._process_group


def dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """A ``DTensor`` of which this rank holds `local`, where that lies. Not collective.

    ``DTensor.from_local`` would move it to the device of the mesh, back from the host memory that it was put into.

    Args:
        shape, strides: of the whole tensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    described = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=described)
    return DTensor(local.detach(), spec, requires_grad=False)


def refuse_parallelizing(module: nn.Module, make_error: Callable[[], Exception]) -> None:
    """Have torch's ``parallelize_module`` and ``distribute_module`` raise an error before they change a module.

    They look at this attribute to refuse modules that they have been at, for which it is there already.
    """
    module.__dict__.setdefault("_distribute_module_applied", _Refusal(make_error))


class _Refusal:
    """Raises when it is asked whether it is true."""

    def __init__(self, make_error: Callable[[], Exception]) -> None:
        self._make_error = make_error

    def __bool__(self) -> bool:
        raise self._make_error()


def root_mesh(mesh: Any) -> Any:
    """The mesh that a mesh was taken from, itself if it is none's part."""
    return mesh._get_root_mesh()


def group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh. Collective over them the first time if it has several dimensions."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a ``DTensor``, as it is; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """What a collective of torch's functions is to bring, once it is there; any other tensor as it is.

    The current stream waits for it. Autograd may give it to a leaf as the gradient, before it is there.
    """
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def mark_as_parts(tensor: torch.Tensor) -> None:
    """Have torch's FSDP know a tensor as a part of a flat parameter, which is not to be flattened again."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(tensor)


def at_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that begins where its storage does, where there is a way to make one.

    A ``DTensor`` takes over the offset of what it holds, and then torch takes it for a tensor with memory of its own
    when it is copied or pickled.
    """
    if not tensor.storage_offset():
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
    except (BufferError, RuntimeError):  # a dtype that the exchange does not know
        return tensor


def set_grad_of_any_dtype(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a ``DTensor`` parameter a gradient, in the dtype of the gradient if torch can, else in its own."""
    if grad is not None and grad.dtype != param.dtype:
        if hasattr(param, "grad_dtype"):
            param.grad_dtype = None
        else:
            grad = grad.to(param.dtype)
    param.grad = grad


def within(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that a wrapper subclass holds (``DTensor``, what a collective is still to fill, and so
    on, one in the other); any other tensor itself."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from within(inner)


def common_mesh(outer: Any, inner: Any) -> Any | None:
    """The mesh that `outer` was taken from, and that `inner` equals a part of, without other dimensions; None if there
    is none. What operators return lies on any mesh that is equal, which may be a part of another one."""
    root, own = root_mesh(outer), inner.mesh_dim_names or ()
    names, known = {*(outer.mesh_dim_names or ()), *own}, {*(root.mesh_dim_names or ())}
    if len(names) != outer.ndim + inner.ndim or not names <= known or root[tuple(own)] != inner:
        return None
    in_order = tuple(name for name in root.mesh_dim_names if name in names)
    return root if len(in_order) == root.ndim else root[in_order]
