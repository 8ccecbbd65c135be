"""A simulated accelerator, the device type ``sim``: one device in each process, and the process group ``simccl``.

Kernels run later, in the order that a policy chooses, and freed memory becomes NaN: what a program does too early shows
as wrong values. See device.cpp, which is compiled when this module is first imported (half a minute) and cached.
"""

import atexit
import contextlib
import fcntl
import functools
import os
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from hpcfsdp import _compat

NAME, BACKEND = "sim", "simccl"
scratch = None
"""The folder for the files of collectives; None for the system's temporary one."""


def _build():
    """The compiled module. Several processes may ask for it: one compiles, the others wait."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hpcfsdp-tests", f"sim-{torch.__version__}")
    folder.mkdir(parents=True, exist_ok=True)
    source = str(Path(__file__).with_name("device.cpp"))
    with open(folder / "building", "w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)  # which ends with its process; torch's own lock file would not
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "hpcfsdp_simulated", [source], build_directory=str(folder), extra_cflags=["-O1", "-g0"], verbose=False
        )


_device = _build()
waits, launches, allocations, reset_counts = (
    _device.waits,
    _device.launches,
    _device.allocations,
    _device.reset_counts,
)


def starve(*streams, seed=None, patience_s=20.0):
    """Have the device leave these streams alone until nothing else can run and the host waits.

    Args:
        seed: of the order in which all others run; None: the oldest stream first.
        patience_s: run them all the same after so long without a new kernel: the host may wait where nobody sees it.
    """
    _device.set_policy([stream.stream_id for stream in streams], seed, patience_s)


@contextlib.contextmanager
def _switched_on(switch):
    switch(True)
    try:
        yield
    finally:
        switch(False)


def poison_when_freed():
    """A context in which memory becomes NaN when it is freed, and not when its stream uses it again."""
    return _switched_on(_device.poison_when_freed)


def unpinned_copies():
    """A context in which ``non_blocking`` copies of memory that is not pinned wait, as on a GPU, and raise nothing."""
    return _switched_on(_device.allow_unpinned)


# The device


def _device_module():
    module = types.ModuleType(f"torch.{NAME}")
    generator = _device.default_generator()
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_device_properties = lambda device=NAME: types.SimpleNamespace(
        name="simulated", uuid=f"SIM-{os.getpid()}", total_memory=1 << 34
    )
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.Stream = functools.partial(torch.Stream, NAME)
    module.Event = functools.partial(torch.Event, NAME)
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.set_stream = torch.accelerator.set_stream
    return module


def _register():
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=[NAME])
    atexit.register(_device.stop)


# Process groups


def _create_group(options, _):
    rank, size = options.group_rank, options.group_size
    if rank == 0:
        options.store.set("folder", tempfile.mkdtemp(prefix="simccl-", dir=scratch))
    return SimulatedGroup(options.store.get("folder").decode(), rank, size)


_OPS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
]


class SimulatedGroup(dist.ProcessGroup):
    """A process group with the semantics of NCCL: collectives run on streams, and only barriers wait on the host."""

    def __init__(self, folder, rank, size):
        super().__init__(rank, size)
        self._folder, self._rank, self._size = folder, rank, size
        self._group = _device.Communicator(folder, rank, size)
        self.stream = torch.Stream(NAME)
        """On which asynchronous collectives run."""
        self._name = self._desc = ""
        self.called = []
        """The labels of all calls, oldest first."""

    def size(self):
        return self._size

    def rank(self):
        return self._rank

    def getBackendName(self):
        return BACKEND

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = name

    def getGroupDesc(self):
        return self._desc

    def setGroupDesc(self, desc):
        self._desc = desc

    name = getBackendName
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    supports_splitting = supports_coalescing = supports_time_estimate = False

    @property
    def _device_types(self):
        return [torch.device(NAME)]

    def _get_backend(self, device):
        return self

    def supports_tensor_alloc(self, device):
        return False

    def set_timeout(self, timeout):
        pass

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return len(self.called)

    def shutdown(self):
        torch.accelerator.synchronize()
        with contextlib.suppress(OSError):  # other ranks still have files there, or have removed it
            for path in Path(self._folder).glob(f"*-{self._rank}"):
                path.unlink(missing_ok=True)
            Path(self._folder).rmdir()

    abort = shutdown

    # Collectives

    def allreduce(self, tensors, opts=None):
        op = _op(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return self._call(
            opts,
            tensors,
            [(self._group.reduce, f"all_reduce({op}) of {_describe(t)}", t, t, 0, op) for t in tensors],
            outputs=tensors,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts):
        op = _op(opts.reduceOp)
        outputs = tensors if opts.rootRank == self._rank else [torch.empty_like(t) for t in tensors]
        label = f"reduce({op}) to {opts.rootRank}"
        pairs = zip(tensors, outputs, strict=True)
        calls = [(self._group.reduce, f"{label} of {_describe(t)}", t, output, 0, op) for t, output in pairs]
        return self._call(opts, tensors, calls)

    def broadcast(self, tensors, opts):
        is_root = opts.rootRank == self._rank
        calls = []
        for tensor in tensors:
            label = f"broadcast from {opts.rootRank} of {_describe(tensor)}"
            received = [] if is_root else [(tensor, opts.rootRank, 0)]
            calls.append((self._group.exchange, label, [tensor] if is_root else [], received))
        return self._call(opts, tensors, calls)

    def allgather(self, output_lists, inputs, opts=None):
        received = [(output, rank, 0) for rank, output in enumerate(output_lists[0])]
        call = self._group.exchange, f"all_gather of {inputs[0].dtype}", list(inputs), received
        return self._call(opts, [*inputs, *output_lists[0]], [call], outputs=output_lists[0])

    def all_gather_single(self, output, mine, opts=None):
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        calls = []
        for output, mine in zip(outputs, inputs, strict=True):
            received = [(part, rank, 0) for rank, part in enumerate(output.view(-1).chunk(self._size))]
            calls.append((self._group.exchange, f"all_gather of {_describe(mine)}", [mine], received))
        return self._call(opts, [*inputs, *outputs], calls, outputs=outputs)

    def reduce_scatter(self, outputs, input_lists, opts):
        full = torch.cat([part.reshape(-1) for part in input_lists[0]])
        return self.reduce_scatter_single_coalesced(outputs, [full], opts)

    def reduce_scatter_single(self, output, full, opts):
        return self.reduce_scatter_single_coalesced([output], [full], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        op, calls = _op(opts.reduceOp), []
        for output, full in zip(outputs, inputs, strict=True):
            label = f"reduce_scatter({op}) of {_describe(full)}"
            calls.append((self._group.reduce, label, full, output, self._rank * output.numel(), op))
        return self._call(opts, [*inputs, *outputs], calls, outputs=outputs)

    def alltoall(self, outputs, inputs, opts=None):
        return self._all_to_all(list(outputs), list(inputs), [*inputs, *outputs], opts)

    def all_to_all_single(self, output, given, output_splits, input_splits, opts=None):
        parts = []
        for tensor, splits in ((output, output_splits), (given, input_splits)):
            rows = list(splits) or [tensor.shape[0] // self._size] * self._size
            parts.append(list(tensor.split(rows)))
        return self._all_to_all(parts[0], parts[1], [output, given], opts)

    def _all_to_all(self, outputs, inputs, used, opts):
        call = self._group.all_to_all, f"all_to_all of {inputs[0].dtype}", inputs, outputs
        return self._call(opts, used, [call])

    def gather(self, output_lists, inputs, opts):
        outputs = output_lists[0] if opts.rootRank == self._rank else []
        received = [(output, rank, 0) for rank, output in enumerate(outputs)]
        call = self._group.exchange, f"gather to {opts.rootRank}", list(inputs), received
        return self._call(opts, [*inputs, *outputs], [call])

    def scatter(self, outputs, input_lists, opts):
        inputs = list(input_lists[0]) if opts.rootRank == self._rank else []
        offset = self._rank * outputs[0].nbytes
        call = self._group.exchange, f"scatter from {opts.rootRank}", inputs, [(outputs[0], opts.rootRank, offset)]
        return self._call(opts, [*inputs, *outputs], [call])

    def barrier(self, opts=None):
        work = self._call(opts, [], [(self._group.exchange, "barrier", [], [])])
        work.waits_on_host = True
        return work

    def send(self, tensors, dst, tag=0):
        return self._call(None, tensors, [(self._group.send, tensor, dst, tag) for tensor in tensors])

    def recv(self, tensors, src, tag=0):
        return self._call(None, tensors, [(self._group.recv, tensor, src, tag) for tensor in tensors])

    # The names of torch 2.11
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _call(self, opts, used, calls, outputs=()):
        """Queue calls: on the current stream, or asynchronous ones on the group's own after what is queued so far."""
        self.called += [str(call[1]) for call in calls]
        stream = torch.accelerator.current_stream()
        if opts is None or getattr(opts, "asyncOp", True):
            ready = stream.record_event()
            stream = self.stream
            stream.wait_event(ready)
        with stream, torch.no_grad():
            for call, *arguments in calls:
                call(*arguments)
        return SimulatedWork(stream.record_event(), [*used], list(outputs))


class SimulatedWork(_compat.Work):
    """A collective on the device. ``wait`` has the current stream wait, and the host for barriers alone."""

    def __init__(self, ended, used, outputs):
        super().__init__()
        self.waits_on_host = False
        self._ended, self._used, self._outputs = ended, used, outputs

    def wait(self, timeout=None):
        torch.accelerator.current_stream().wait_event(self._ended)
        if self.waits_on_host:
            self._ended.synchronize()
        self._used = []  # from here on the allocator may reuse the memory: on the current stream, after the collective
        return True

    synchronize = wait

    def is_completed(self):
        return self._ended.query()

    def is_success(self):
        return self._ended.query()

    def result(self):
        return self._outputs

    def get_future(self):
        self.wait()
        future = torch.futures.Future(devices=[])
        future.set_result(self._outputs)
        return future


def _op(op):
    return next(name for known, name in _OPS if op == known)


def _describe(tensor):
    return f"{tensor.numel()} x {tensor.dtype}"


_register()
