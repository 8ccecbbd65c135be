"""Private parts of torch, and differences between its versions. No other module imports private names of torch."""

import contextlib
import datetime
import functools
import hashlib
import inspect
import json
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn, overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import rpc
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
    custom_sharded_op_impl,
)
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import DataLoader

from hpcfsdp import accelerator

__all__ = [  # torch has no public place for these
    "ChunkShardingSpec",
    "IncompatibleKeys",
    "Shard",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "TensorProperties",
    "TorchDispatchMode",
]

READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""The operation behind ``Tensor.item()``, and behind the truth value of a tensor."""

GROUPED_MM = torch.ops.aten._grouped_mm  # the operation behind ``torch.nn.functional.grouped_mm``

CLIPPING = (
    torch.ops.aten._foreach_norm.Scalar,
    torch.ops.aten._foreach_mul_.Tensor,
    torch.ops.aten._foreach_clamp_min_.Scalar,
    torch.ops.aten._foreach_clamp_max_.Scalar,
)
"""The operations behind ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``."""

Function = TypeVar("Function", bound=Callable[..., Any])
_num_function_modes = torch._C._len_torch_function_stack
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def in_transform() -> bool:
    """Return whether a function of ``torch.func`` (``grad``, ``vmap``, ...) transforms what runs."""
    return _innermost_transform() is not None


def records_backward() -> bool:
    """Return whether a backward may follow that runs hooks of tensors; derivatives of ``torch.func`` are functions."""
    return torch.is_grad_enabled() and not in_transform()


def outside_of_modes(function: Function) -> Function:
    """Decorate a function that makes tensors of its own: they are plain, and in host memory if it names no device.

    In the function the program's default device, its modes (those of torch functions, FakeTensorMode and the like) and
    its transforms of ``torch.func`` have no effect. All tensors that no user sees are made so. Not for functions that
    call the user's.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (_num_function_modes() or _num_dispatch_modes() or _innermost_transform()):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as left:
            for mode in [overrides._pop_mode() for _ in range(_num_function_modes())]:
                left.callback(overrides._push_mode, mode)  # the innermost comes back last
            if _num_dispatch_modes():
                left.enter_context(_disable_current_modes())
            left.enter_context(temporarily_clear_interpreter_stack())
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


# torch's FSDP and DTensor load sympy, for a second or more. Functions import them: programs that shard nothing do
# without.


def hybrid_shard_zero2() -> Any:
    """Return the sharding strategy that torch has under a private name alone."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy._HYBRID_SHARD_ZERO2


def checkpoint_activations(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> None:
    """Put the chosen modules into torch's wrapper that computes their forward again in the backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=chosen)


def training_states() -> Any:
    """Return the enumeration of the states of torch's FSDP."""
    from torch.distributed.fsdp._common_utils import TrainingState

    return TrainingState


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` has been applied to a module."""
    contract = sys.modules.get("torch.distributed._composable.contract")  # which is not loaded otherwise
    return contract is not None and "replicate" in (contract._get_registry(module) or ())


def mark_as_flattened(tensor: torch.Tensor) -> None:
    """Have torch's FSDP take a tensor for a flattened one."""
    from torch.distributed.fsdp._common_utils import _set_fsdp_flattened

    _set_fsdp_flattened(tensor)


call_module: Callable[..., Any] = nn.Module._call_impl  # calls a module, with its hooks


def set_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have a call of this very module, which keeps its class, be one of `call`."""
    module.__dict__["_call_impl"] = call


# What modules inherit and may override.
apply_to_module = nn.Module._apply
save_to_state_dict = nn.Module._save_to_state_dict
load_from_state_dict = nn.Module._load_from_state_dict

# A ShardedTensor with other blocks than torch's chunks has their offsets and sizes in this class. A program that allows
# the classes of torch's own LOCAL_STATE_DICT can then read ours with torch.load(weights_only=True).
torch.serialization.add_safe_globals([EnumerableShardingSpec])

# torch 2.13 renames the two collectives and deprecates the older names, the only ones in 2.11.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()
"""For each default group: the number of groups of the same ranks, by the prefix of their names."""


def new_group_of(ranks: Sequence[int], backend: str | None = None, options: Any = None) -> dist.ProcessGroup:
    """Create their process group, in ascending order. Collective over `ranks`, global ranks in any order.

    As ``dist.new_group(ranks, use_local_synchronization=True)``. That names a group by the number of groups of a rank:
    members with different numbers would wait for each other under different names, without end. Here the name counts
    the groups of the same ranks, also destroyed ones: keys of a group in the store would mislead another group of its
    name. The `backend` is by default that of the default group, and `options` are an object of the backend's.
    """
    c10d, members = dist.distributed_c10d, sorted(ranks)
    everyone = c10d._get_default_group()
    default_backend, store = c10d._world.pg_map[everyone]
    backend = dist.Backend(backend or default_backend)
    name = f"hpcfsdp-{hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()}-"
    turns = _groups_made.setdefault(everyone, {})
    turn = turns[name] = turns.get(name, -1) + 1
    timeout = _timeout_of(everyone, backend)
    if options is not None:
        options._timeout = timeout  # torch warns of another one
    bound = everyone.bound_device_id
    everyone.bound_device_id = None  # NCCL would split the default group, and wait for its other ranks
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(dist.get_rank()),
            members,
            backend,
            store,
            f"{name}{turn}",
            options,
            timeout=timeout,
            device_id=bound,
        )
    finally:
        everyone.bound_device_id = bound
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}
    return group


def _timeout_of(group: dist.ProcessGroup, backend: str) -> datetime.timedelta:
    """Return the timeout of a group, or torch's default for the backend. NCCL's is 10 minutes."""
    with contextlib.suppress(RuntimeError, AttributeError):  # other backends do not say
        return group._get_backend(accelerator.current_device()).options._timeout
    return dist.distributed_c10d._get_default_timeout(backend)


def release_default_group() -> None:
    """Have torch make further groups without splitting the default group, which was bound to its device.

    All ranks take part in a split, but the members of a group of another backend make none: a smaller group of gloo
    would never be complete (pytorch#145376). In a process that has destroyed a default group a split crashes (2.13),
    and ``DeviceMesh`` refuses backends that cannot split.
    """
    group = dist.distributed_c10d._get_default_group()
    if getattr(group, "bound_device_id", None) is not None:
        group.bound_device_id = None


def init_fake_group(ranks: int, device: torch.device) -> None:
    """Make torch's default group one that moves no bytes: this process is rank 0 of so many."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it for torch's own devices

    known = dist.Backend.backend_capability["fake"]
    known += [] if device.type in known else [device.type]
    dist.init_process_group("fake", rank=0, world_size=ranks)


def members_of(group: dist.ProcessGroup | None) -> list[int] | None:
    """Return the global ranks of a process group, None for the default one; None if this rank is not in it."""
    return None if dist.distributed_c10d._rank_not_in_group(group) else dist.get_process_group_ranks(group)


def id_of_worker(name: str) -> int:
    """Return the id of an RPC worker of torch. Raises RuntimeError without RPC, ValueError for an unknown worker."""
    if not rpc.is_available() or not rpc._is_current_rpc_agent_set():
        raise RuntimeError(f"a shard is placed on the worker {name!r}, and torch.distributed.rpc is not initialised")
    workers = {worker.name: worker.id for worker in rpc._get_current_rpc_agent().get_worker_infos()}
    if name not in workers:
        raise ValueError(f"a shard is placed on the worker {name!r}, and there are only {sorted(workers)}")
    return workers[name]


Work = dist._Work  # base class of work handles in Python


def premultiplier(op: Any) -> Any | None:
    """Return the factor by which ``ReduceOp.PREMUL_SUM`` multiplies values before the sum; None for any other op."""
    return op.__getstate__()[1] if op == dist.ReduceOp.PREMUL_SUM else None


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """Return the device of a process group: the current accelerator if the group supports it, else the CPU."""
    kinds = {device.type for device in getattr(group, "_device_types", [])}
    return accelerator.current_device() if accelerator.device_type() in kinds else torch.device("cpu")


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend of a process group for tensors of a device."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # it has none for them
        return str(dist.get_backend(group))


def group_options(chosen: Mapping[str, Any]) -> Any:
    """Return options of NCCL's process groups, by the names of ``CommOptions``. Raises ValueError for one it lacks."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=chosen.get("high_priority", False))
    for name in chosen.keys() - {"high_priority"}:
        if not hasattr(options.config, name):
            raise ValueError(f"comm_options: the NCCL of this torch has no {name}={chosen[name]!r}: leave it out")
        setattr(options.config, name, chosen[name])
    return options


def has_registered_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend of a group registers memory of a device."""
    try:
        return hasattr(group._get_backend(device), "register_mem_pool")
    except RuntimeError:  # for tensors of another device
        return False


def has_symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether torch has symmetric memory for gathers of a group: NCCL's, since torch 2.13."""
    try:
        return hasattr(_symmetric(device), "get_mem_pool") and backend_name(group, device) == "nccl"
    except (ImportError, RuntimeError, AttributeError):  # another build, or others have taken another backend
        return False


def _symmetric(device: torch.device) -> Any:
    from torch.distributed import _symmetric_memory as symmetric

    if symmetric.get_backend(device) != "NCCL":
        symmetric.set_backend("NCCL")
    return symmetric


def symmetric_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return torch's pool of symmetric memory. Collective over the group, which NCCL connects first."""
    dist.barrier(group)  # a rendezvous reads the communicator, which is made at the first collective
    return _symmetric(device).get_mem_pool(device)


def rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Have all ranks know each other's symmetric memory of a tensor. Collective over the group."""
    _symmetric(tensor.device).rendezvous(tensor, group.group_name)


def registered_pool(group: dist.ProcessGroup, device: torch.device) -> Any | None:
    """Return a new pool of device memory that is registered with the backend of a group; None if it has none.

    NCCL reads and writes that memory without copies of its own. What the pool allocates later is registered, too.
    Collective if the group has sent nothing yet: NCCL then connects its ranks.
    """
    if not has_registered_memory(group, device):
        return None
    backend = group._get_backend(device)
    pool = accelerator.new_pool(device, backend.mem_allocator)
    backend.register_mem_pool(pool)
    return pool


# The engine calls these directly in each step.

run_of_autograd: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the autograd run that the calling thread is in, -1 outside of any."""
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward will execute a node of the graph. Raises a RuntimeError for a leaf among the inputs of
torch.autograd.grad."""
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function at the end of the running backward."""
hooks_after_accumulation: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The hooks of a leaf that run after autograd has accumulated its gradient."""
hooks_on_gradient: Callable[[torch.Tensor], dict[int, Any] | None] = operator.attrgetter("_backward_hooks")
"""The hooks of a tensor that run on its gradient."""
inputs_of_node: Callable[[Any], list[Any]] = operator.attrgetter("_input_metadata")
"""The input metadata of a node. That of a leaf's accumulator has the shape of the leaf at its creation."""
STEPPED_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute with the optimizers that step a parameter in the backward."""


norm_of_each: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
"""The norms of a list of tensors of one device and dtype. On a GPU the number of kernels hardly grows with the list."""
multiply_each_: Callable[[Sequence[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_
"""Multiplies all tensors of such a list by a scalar tensor, in place."""


def copy_to_each_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy a list of tensors, which may be empty, into another one, of any dtypes."""
    if targets:
        torch._foreach_copy_(targets, sources)


def zero_each_(tensors: Sequence[torch.Tensor]) -> None:
    """Set a list of tensors, which may be empty, to zero."""
    if tensors:
        torch._foreach_zero_(tensors)


def cat_chunks(tensors: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Chunk tensors of one dtype along their first dimension, as many as `output` (n x m) has rows, and fill these.

    Row i becomes chunk i of each tensor, flattened; missing rows of a tensor are zeros. On a GPU it is one kernel if
    all are contiguous and ``cats_fused`` of the dtypes.
    """
    torch._chunk_cat(tensors, 0, output.shape[0], out=output)


def cats_fused(given: torch.dtype, output: torch.dtype) -> bool:
    """Return whether ``cat_chunks`` of these dtypes is one kernel: others take a kernel and a copy for each tensor."""
    return given == output or (given, output) == (torch.bfloat16, torch.float32)


def in_backward() -> bool:
    """Return whether the calling thread is in an autograd run."""
    return run_of_autograd() != -1


def forget_accumulator(leaf: torch.Tensor) -> None:
    """Give a leaf a new accumulator node, without the hooks of the present one."""
    data = leaf.data
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    leaf.data = torch.empty(0, dtype=other, device=data.device)  # of another dtype: autograd drops the node
    leaf.data = data


def has_hooks(node: Any) -> bool:
    """Return whether a program has registered hooks on a node of the graph."""
    handle = node.register_hook(lambda *_: None)
    hooks = handle.hooks_dict_ref()  # of the node, with this one
    handle.remove()
    return bool(hooks)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Have hooks on the gradient of a leaf, before and after its accumulation, be those of another; handles stay."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(source, name):
            setattr(target, name, hooks)
            setattr(source, name, None)


def replace_data(leaf: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Replace the data of a parameter, whatever its device is. It stays the same object."""
    if torch._has_compatible_shallow_copy_type(leaf, values):
        leaf.data = values
        return
    # Between the host and the device of a plug-in torch copies no metadata, but exchanges what two objects refer to.
    other = torch.nn.Parameter.__new__(type(leaf), values, leaf.requires_grad)
    other.__dict__.update(leaf.__dict__)
    torch.utils.swap_tensors(leaf, other)


def flight_record() -> str:
    """Return what torch's flight recorder knows of NCCL's collectives, as JSON; "" where it is off or there is none.

    TORCH_NCCL_TRACE_BUFFER_SIZE (in newer versions TORCH_FR_BUFFER_SIZE) turns it on.
    """
    bindings = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(bindings, "_dump_fr_trace_json", None) or getattr(bindings, "_dump_nccl_trace_json", None)
    text = dump() if dump is not None else "{}"
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return text if json.loads(text).get("entries") else ""


def default_store() -> Any:
    """Return the store of torch.distributed's default process group, None where there is none."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups of torch.distributed that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


set_compiler = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets the compiler of called functions, None for none. Returns the compiler before."""


def run_as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from torch.compile, but not the functions that it calls."""
    # As torch.compiler.disable(recursive=False), which would load the compiler when this package is imported.
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def hook_behind_torch(hook: Any) -> Any:
    """Return the exception hook that torch.distributed's hook has replaced and calls; None for any other hook."""
    if getattr(hook, "__module__", "") != "torch.distributed.distributed_c10d":
        return None
    return inspect.getclosurevars(hook).nonlocals.get("old_hook")


def run_wrap_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]] | None:
    """Return the modules that one of torch's policy objects wraps, with keyword arguments; None for another policy."""
    from torch.distributed.fsdp.wrap import _Policy

    return policy._run_policy(root, ignored_modules=ignored, root_kwargs={}) if isinstance(policy, _Policy) else None


def is_registered(kind: type) -> bool:
    """Return whether torch's pytree registry knows a type."""
    return kind in _pytree.SUPPORTED_NODES


def flatten_one_level(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container that torch's pytree registry knows, and a function that rebuilds it.

    One level only: children may be containers. None for other types.
    """
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda others: node.unflatten_fn(others, context)


@contextlib.contextmanager
def assigning_without_swaps() -> Iterator[None]:
    """Return a context in which modules that load a state dict assign its tensors instead of swapping them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def loading_module() -> nn.Module | None:
    """Return the module with the ``nn.Module.load_state_dict`` call that the caller runs in, or None."""
    frame = _find_frame(lambda code: code is nn.Module.load_state_dict.__code__)
    return None if frame is None else frame.f_locals.get("self")


def is_initialising() -> bool:
    """Return whether the caller runs in a function of ``torch.nn.init``."""
    return _find_frame(lambda code: code.co_filename == nn.init.__file__) is not None


def _find_frame(is_wanted: Callable[[CodeType], bool], frame: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame on the stack with such a code, or from `frame` outwards."""
    frame = frame or sys._getframe(1)
    while frame is not None and not is_wanted(frame.f_code):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def calling_optimizers() -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers in whose methods the caller runs, the innermost first. One may step for another."""
    kinds = [torch.optim.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    functions = (each for kind in kinds for each in vars(kind).values() if inspect.isfunction(each))
    methods = {inspect.unwrap(each).__code__ for each in functions}
    frame = _find_frame(methods.__contains__)
    while frame is not None:  # a frame whose variables are read keeps what they were then
        yield frame.f_locals[frame.f_code.co_varnames[0]]
        frame = _find_frame(methods.__contains__, frame.f_back) if frame.f_back else None


def is_in_step() -> bool:
    """Return whether the caller runs in ``torch.optim.Optimizer.step``."""
    step = sys.modules[torch.optim.Optimizer.__module__].__file__, "wrapper"
    return _find_frame(lambda code: (code.co_filename, code.co_name) == step) is not None


def is_step_for_state() -> bool:
    """Return whether torch's functions of state dicts step an optimizer now, for nothing but its state."""
    return _find_frame(lambda code: code.co_name == "_init_optim_state") is not None


def is_in_stage_backward() -> bool:
    """Return whether a stage of a pipeline has called the caller, for the gradients of its parameters."""
    frame = sys._getframe(1).f_back
    if frame is None or frame.f_code.co_name != "<lambda>":
        return False
    return frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage"


class StockCall(NamedTuple):
    """A call of one of the functions of ``torch.distributed.checkpoint.state_dict``."""

    function: str
    has_optimizers: bool
    has_submodules: bool
    options: Any


def stock_state_dict_call() -> StockCall | None:
    """Return the call that checks its arguments against the modules of a model now, or None."""
    place = "_verify_options", "checkpoint/state_dict.py"
    frame = _find_frame(lambda code: code.co_name == place[0] and code.co_filename.endswith(place[1]))
    if frame is None:
        return None
    given, function = frame.f_locals, frame.f_back.f_code.co_name  # type: ignore[union-attr]
    return StockCall(function, bool(given["optims"]), bool(given["submodules"]), given["options"])


hooks_before_forward: Callable[[nn.Module], dict[Any, Callable[..., Any]]] = operator.attrgetter("_forward_pre_hooks")
"""The hooks that a module calls before its forward, by their keys."""


def ddp_in_construction() -> tuple[nn.Module, set[str]] | None:
    """Return the model in which a DistributedDataParallel searches parameters now, and the names that it ignores.

    It searches while it is built, before its first message.
    """
    frame = _find_frame(lambda code: code is DistributedDataParallel._build_params_for_reducer.__code__)
    return frame and (frame.f_locals["self"].module, frame.f_locals["self"].parameters_to_ignore)


@functools.cache
def _register_device_of_sharded_tensors() -> None:
    """Define the device of a ``ShardedTensor`` on a rank without shards.

    torch returns a GPU unless the backend is gloo, and loading checkpoints over MPI would fail.
    """

    @custom_sharded_op_impl(torch.Tensor.device.__get__)
    def device(_types: Any, args: Any, _kwargs: Any, group: dist.ProcessGroup) -> torch.device:
        shards = args[0].local_shards()
        return shards[0].tensor.device if shards else device_of_group(group)


def sharded_tensor(shards: list[Shard], metadata: ShardedTensorMetadata, group: dist.ProcessGroup) -> ShardedTensor:
    """Not collective. A ``ShardedTensor`` with the shards of this rank, and `metadata` of all ranks."""
    _register_device_of_sharded_tensors()
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=group
    )


group_of_shards: Callable[[ShardedTensor], dist.ProcessGroup] = operator.attrgetter("_process_group")
"""The process group of a ``ShardedTensor``."""


def dtensor(
    local: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int], strides: Sequence[int]
) -> Any:
    """Not collective. A ``DTensor`` of a whole `shape` with `local` on this rank, on its device.

    ``DTensor.from_local`` would move `local` from host memory to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    described = TensorMeta(torch.Size(shape), tuple(strides), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=described)
    return DTensor(local.detach(), spec, requires_grad=False)


def dtensor_like(tensor: Any, local: torch.Tensor) -> Any:
    """Not collective. A ``DTensor`` with `local` on this rank, for the rest like `tensor`."""
    kind = type(tensor)
    # Without torch's decorator, which keeps its compiler out of here and takes as long as the function.
    make = getattr(kind.__new__, "__wrapped__", kind.__new__)
    return make(kind, local, tensor._spec, requires_grad=False)


def identity_of(param: torch.Tensor) -> int:
    """Return a number that changes when ``.data`` of a ``DTensor`` is assigned (its local tensor does not)."""
    return param.untyped_storage()._cdata


def set_local(tensor: Any, local: torch.Tensor) -> None:
    """Not collective. Exchange the local tensor of a ``DTensor`` for one of the same shape, dtype and device."""
    tensor._local_tensor = local


def handle_dtensor_ops(handlers: Mapping[Any, Callable[..., Any]]) -> None:
    """Have functions compute operations on ``DTensor``s.

    They are called with the operation, its arguments and its keyword arguments, and may return NotImplemented.
    """
    from torch.distributed.tensor import DTensor

    table = DTensor._op_dispatcher._custom_op_handlers

    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        result = handlers[op](op, args, kwargs)
        if result is not NotImplemented:
            return result
        table.pop(op, None)
        try:
            return op(*args, **kwargs)  # by torch
        finally:
            table[op] = handle

    table.update(dict.fromkeys(handlers, handle))


def shard_of_rows(dim: int, factor: int) -> Any:
    """Return the placement in which each of `factor` blocks along `dim` is sharded once more, along the same one."""
    from torch.distributed.tensor import Shard as ShardAlong
    from torch.distributed.tensor.placement_types import _StridedShard

    return ShardAlong(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def refuse_parallelizing(module: nn.Module, make_error: Callable[[], Exception]) -> None:
    """Have torch's ``parallelize_module`` and ``distribute_module`` raise an error before they change a module.

    They read this attribute to refuse modules that they have changed before, which have the attribute already.
    """
    module.__dict__.setdefault("_distribute_module_applied", _Refusal(make_error))


class _Refusal:
    """Raises an error instead of having a truth value."""

    def __init__(self, make_error: Callable[[], Exception]) -> None:
        self._make_error = make_error

    def __bool__(self) -> bool:
        raise self._make_error()


def show_state(fully_shard: Callable[..., Any], module: nn.Module, state: Any) -> None:
    """Have functions that read the state of torch's `fully_shard` of a module read `state`."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = None  # so that ``replicate`` leaves it alone


root_mesh: Callable[[Any], Any] = operator.methodcaller("_get_root_mesh")
"""The mesh that a mesh was sliced from, or the mesh itself."""


def flattened(mesh: Any, name: str) -> Any:
    """Return a mesh as one dimension; collective over it the first time."""
    return mesh._flatten(name)


def joined_meshes(meshes: Sequence[Any]) -> Any:
    """Return one mesh with the dimensions of slices of a mesh, in their order."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def group_of_mesh(mesh: Any) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh; collective over them the first time, for several dimensions."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a ``DTensor``; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result of torch's functional collectives, complete on the current stream; any other tensor itself.

    Autograd may give an incomplete one to a leaf as its gradient.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def at_its_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory with a storage offset of 0, if one can be made.

    A ``DTensor`` copies the offset of its local tensor, and torch then copies and pickles it as if it had that storage.
    """
    if not tensor.storage_offset():
        return tensor
    try:
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))
    except (BufferError, RuntimeError):  # DLPack does not have the dtype
        return tensor


def set_grad_of_any_dtype(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Give a ``DTensor`` parameter a gradient, in the dtype of the gradient if torch can, else in its own."""
    if grad is not None and grad.dtype != param.dtype:
        if hasattr(param, "grad_dtype"):
            param.grad_dtype = None
        else:
            grad = grad.to(param.dtype)
    param.grad = grad


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors within nested wrapper subclasses, such as ``DTensor``; any other tensor itself."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(inner := getattr(tensor, name), torch.Tensor):
            yield from inner_tensors(inner)


def common_mesh(outer: Any, inner: Any) -> Any | None:
    """Return the slice with the dimensions of both meshes of the mesh that `outer` was sliced from; None without one.

    `inner` must equal a slice of it. Operators return tensors on any equal mesh, which may be a slice of another mesh.
    """
    root, own = root_mesh(outer), inner.mesh_dim_names or ()
    names, known = {*(outer.mesh_dim_names or ()), *own}, {*(root.mesh_dim_names or ())}
    if len(names) != outer.ndim + inner.ndim or not names <= known or root[tuple(own)] != inner:
        return None
    in_order = tuple(name for name in root.mesh_dim_names if name in names)
    return root if len(in_order) == root.ndim else root[in_order]


_LOADERS = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")


def loader_that_asks() -> DataLoader[Any] | None:
    """Return the ``DataLoader`` in whose iterator this is called, over a few frames; None outside of one."""
    # Only its iterator asks a batch sampler, which does not know who reads it; how far it reads ahead is in the loader.
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        found = frame.f_locals.get("loader") if frame.f_globals.get("__name__") in _LOADERS else None
        if isinstance(found, DataLoader):
            return found
        frame = frame.f_back
    return None
