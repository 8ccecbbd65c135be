"""A simulated accelerator, the device type ``sim``: a device or several in a process, and the process group ``simccl``.

Kernels run later, in the order that a policy chooses, and freed memory becomes NaN: what a program does too early shows
as wrong values. See device/, which is compiled when this module is first imported (half a minute) and cached. Each
process has devices of its own, as if no two ranks shared a node's.
"""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from hpcfsdp import _compat
from tests.deadlock import Group

NAME, BACKEND = "sim", "simccl"
MOST_DEVICES = 8
scratch = None
"""The folder for the files of collectives; None for the system's temporary one."""
every_call = []
"""The collectives of all groups that this rank has called, oldest first: (``Group``, label)."""


def _build():
    """The compiled module. Several processes may ask for it: one compiles, the others wait."""
    sources = sorted(Path(__file__).with_name("device").iterdir())
    parts = (torch.__file__.encode(), *(source.read_bytes() for source in sources))
    digest = hashlib.sha256(b"".join(parts)).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "hpcfsdp-tests")
    folder = cache / f"sim-{torch.__version__}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    source = str(Path(__file__).with_name("device") / "device.cpp")
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
set_devices, contexts, forget_contexts, blocked = (
    _device.set_devices,
    _device.contexts,
    _device.forget_contexts,
    _device.blocked,
)


_patience_s = 20.0


def starve(*streams, seed=None, patience_s=None):
    """Have the device leave these streams alone until nothing else can run and the host waits.

    Args:
        seed: of the order in which all others run; None: the oldest stream first.
        patience_s: run them all the same after so long without a new kernel: the host may wait where nobody sees it.
    """
    patience_s = _patience_s if patience_s is None else patience_s
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


@contextlib.contextmanager
def hardware_queues(count):
    """A context in which all streams of a device share so few queues, whose first entry holds up the others."""
    _device.hardware_queues(count)
    try:
        yield
    finally:
        _device.hardware_queues(0)


@contextlib.contextmanager
def blocking(seed):
    """A context in which allocations and first launches wait for the device now and then, as those of drivers do.

    Streams are starved for a moment only: the program waits for devices of other ranks, which see nothing of it.
    """
    global _patience_s
    _device.set_blocking(seed)
    before, _patience_s = _patience_s, 0.02
    try:
        yield
    finally:
        _patience_s = before
        _device.set_blocking(None)


@contextlib.contextmanager
def log():
    """A context in which the device notes what the program does: entries of (kind, stream, key, label, count).

    The list that it returns is filled at the end. Kinds are "kernel", "record" and "wait" of an event with the name
    `key`, "drain", "collective" of the group `key`, "message", "alloc" and "free" of `count` bytes of the block `key`.
    The stream of the program is -1.
    """
    found = []
    _device.log(True)
    try:
        yield found
    finally:
        found += _device.log(False)


class Graph:
    """What was captured: see ``capturing``."""

    def __init__(self):
        self.captured = None

    def replay(self):
        """Run it on the current stream."""
        _device.replay(self.captured)


@contextlib.contextmanager
def capturing():
    """A context in which work of the current stream, and of those that wait for it, goes to a graph and does not run.

    No thread may ask an event meanwhile, or wait for the device: that raises, and ends the capture with an error.
    """
    graph = Graph()
    _device.begin_capture()
    try:
        yield graph
    except BaseException:
        with contextlib.suppress(RuntimeError):
            _device.end_capture()
        raise
    graph.captured = _device.end_capture()


# The device


def _device_module():
    module = types.ModuleType(f"torch.{NAME}")
    generator = _device.default_generator()
    module.is_available = module.is_initialized = lambda: True
    module.device_count = _device.devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(torch.device(device).index)
    module.is_current_stream_capturing = _device.is_capturing
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_device_properties = lambda device=NAME: types.SimpleNamespace(
        name="simulated", uuid=f"SIM-{os.getpid()}-{torch.device(device).index or 0}", total_memory=1 << 34
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
    # Autograd counts the devices once: tests may add some later.
    _device.set_devices(MOST_DEVICES)
    torch.zeros(1, device=NAME, requires_grad=True).sum().backward()
    _device.set_devices(1)


# Process groups


def _create_group(options, _):
    rank, size = options.group_rank, options.group_size
    if rank == 0:
        options.store.set("folder", tempfile.mkdtemp(prefix="simccl-", dir=scratch))
    ranks = options.global_ranks_in_group or range(size)
    known = Group(f"group {options.group_id} of ranks {', '.join(map(str, ranks))}", tuple(ranks))
    return SimulatedGroup(options.store.get("folder").decode(), rank, known)


_OPS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
]


class SimulatedGroup(dist.ProcessGroup):
    """A process group with the semantics of NCCL: collectives run on streams, and only barriers wait on the host."""

    def __init__(self, folder, rank, known):
        size = len(known.ranks)
        super().__init__(rank, size)
        self._folder, self._rank, self._size, self._known = folder, rank, size, known
        self._communicators = {}  # by device: made in the first call on it, which all ranks have to make
        self._streams = {}
        self._messages = None
        self.timeout_s = 600.0
        """How long a first call waits for other ranks."""
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
        folder = Path(self._folder)
        with contextlib.suppress(OSError):  # a second call
            # This rank has read what others wrote, and they may still read what it wrote: the last one removes it.
            (folder / f"left-{self._rank}").touch()
            if len(list(folder.glob("left-*"))) == self._size:
                shutil.rmtree(folder, ignore_errors=True)

    def abort(self):
        """End all calls of this group, also those that wait for other ranks. It takes no more."""
        for communicator in (*self._communicators.values(), self._messages):
            if communicator is not None:
                communicator.abort()

    @property
    def stream(self):
        """On which asynchronous collectives of the current device run."""
        index = torch.accelerator.current_device_index()
        if index not in self._streams:
            self._streams[index] = torch.Stream(torch.device(NAME, index))
        return self._streams[index]

    def _communicator(self):
        """Collective over the group the first time on a device. The communicator of the current device."""
        index = torch.accelerator.current_device_index()
        if index not in self._communicators:
            made = self._new_communicator(str(len(self._communicators)))
            made.connect(torch.get_device_module(NAME).get_device_properties(index).uuid, self.timeout_s)
            self._communicators[index] = made
        return self._communicators[index]

    @property
    def folders(self):
        """Of the communicators, by which the log knows them."""
        return [os.path.join(self._folder, str(number)) for number in range(len(self._communicators))]

    def _new_communicator(self, name):
        folder = os.path.join(self._folder, name)
        os.makedirs(folder, exist_ok=True)
        return _device.Communicator(folder, self._rank, self._size)

    # Collectives

    def allreduce(self, tensors, opts=None):
        op = _op(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return self._call(
            opts,
            tensors,
            [("reduce", f"all_reduce({op}) of {_describe(t)}", t, t, 0, op) for t in tensors],
            outputs=tensors,
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors, opts):
        op = _op(opts.reduceOp)
        outputs = tensors if opts.rootRank == self._rank else [torch.empty_like(t) for t in tensors]
        label = f"reduce({op}) to {opts.rootRank}"
        pairs = zip(tensors, outputs, strict=True)
        calls = [("reduce", f"{label} of {_describe(t)}", t, output, 0, op) for t, output in pairs]
        return self._call(opts, tensors, calls)

    def broadcast(self, tensors, opts):
        is_root = opts.rootRank == self._rank
        calls = []
        for tensor in tensors:
            label = f"broadcast from {opts.rootRank} of {_describe(tensor)}"
            received = [] if is_root else [(tensor, opts.rootRank, 0)]
            calls.append(("exchange", label, [tensor] if is_root else [], received))
        return self._call(opts, tensors, calls)

    def allgather(self, output_lists, inputs, opts=None):
        received = [(output, rank, 0) for rank, output in enumerate(output_lists[0])]
        call = "exchange", f"all_gather of {inputs[0].dtype}", list(inputs), received
        return self._call(opts, [*inputs, *output_lists[0]], [call], outputs=output_lists[0])

    def all_gather_single(self, output, mine, opts=None):
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        calls = []
        for output, mine in zip(outputs, inputs, strict=True):
            received = [(part, rank, 0) for rank, part in enumerate(output.view(-1).chunk(self._size))]
            calls.append(("exchange", f"all_gather of {_describe(mine)}", [mine], received))
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
            calls.append(("reduce", label, full, output, self._rank * output.numel(), op))
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
        call = "all_to_all", f"all_to_all of {inputs[0].dtype}", inputs, outputs
        return self._call(opts, used, [call])

    def gather(self, output_lists, inputs, opts):
        outputs = output_lists[0] if opts.rootRank == self._rank else []
        received = [(output, rank, 0) for rank, output in enumerate(outputs)]
        call = "exchange", f"gather to {opts.rootRank}", list(inputs), received
        return self._call(opts, [*inputs, *outputs], [call])

    def scatter(self, outputs, input_lists, opts):
        inputs = list(input_lists[0]) if opts.rootRank == self._rank else []
        offset = self._rank * outputs[0].nbytes
        call = "exchange", f"scatter from {opts.rootRank}", inputs, [(outputs[0], opts.rootRank, offset)]
        return self._call(opts, [*inputs, *outputs], [call])

    def barrier(self, opts=None):
        with torch.accelerator.device_index(self._device_for_barrier(opts)):
            work = self._call(opts, [], [("exchange", "barrier", [], [])])
        work.waits_on_host = True
        return work

    def _device_for_barrier(self, opts):
        """A barrier has no tensor: without an argument, and before any other call, its device is a guess."""
        if opts is not None and opts.device_ids:
            return opts.device_ids[0]
        if self.bound_device_id is not None:
            return self.bound_device_id.index
        return next(iter(self._communicators), dist.get_rank() % _device.devices())

    def send(self, tensors, dst, tag=0):
        return self._call(None, tensors, [("send", tensor, dst, tag) for tensor in tensors], is_message=True)

    def recv(self, tensors, src, tag=0):
        return self._call(None, tensors, [("recv", tensor, src, tag) for tensor in tensors], is_message=True)

    # The names of torch 2.11
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _call(self, opts, used, calls, outputs=(), *, is_message=False):
        """Queue calls: on the current stream, or asynchronous ones on the group's own after what is queued so far."""
        self.called += [str(call[1]) for call in calls]
        if not is_message:
            every_call.extend((self._known, call[1]) for call in calls)
        index = next((tensor.device.index for tensor in used if tensor.device.type == NAME), None)
        with torch.accelerator.device_index(index):
            if is_message:  # the two ranks alone need each other
                self._messages = self._messages or self._new_communicator("messages")
            communicator = self._messages if is_message else self._communicator()
            stream = torch.accelerator.current_stream()
            if opts is None or getattr(opts, "asyncOp", True):
                ready = stream.record_event()
                stream = self.stream
                stream.wait_event(ready)
            with stream, torch.no_grad():
                for name, *arguments in calls:
                    getattr(communicator, name)(*arguments)
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
