"""Units on streams that record what this rank puts there: as on an accelerator, without one, and without its messages.

Everything is done at once. Collectives of the device take this rank's values for those of all ranks; collectives of the
program itself, through host memory, are real. So a rank comes to the end of its trace also where devices would not.
"""

import contextlib
import itertools

import numpy as np
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.engine.streams import Stream
from hpcfsdp.fsdp import ShardingStrategy
from hpcfsdp.units.unit_mesh import GroupCache, UnitMesh
from tests.deadlock import HOST, Group, Step


class TracedStreams:
    """The streams of an accelerator, as ``DeviceStreams``.

    Attributes:
        trace: what has been put there.
    """

    overlap = True

    def __init__(self):
        self.trace = []
        self.current = Stream.COMPUTE
        self._events = itertools.count()

    def launch(self, stream, begin, finish=None, *, label=""):
        before, self.current = self.current, stream
        try:
            begin(False)
            if finish is not None:
                finish()
        finally:
            self.current = before
        return self.record(stream)

    def record(self, stream):
        event = next(self._events)
        self.trace.append(Step("record", stream.value, event))
        return event

    def wait(self, stream, event, why):
        if event is not None:
            self.trace.append(Step("wait", stream.value, event, why.name))

    def proceed(self):
        pass

    def refuse_capture(self, what):
        pass

    def drain(self):
        self.trace.append(Step("drain", HOST))


class TracedCommunicator(FakeCommunicator):
    """Collectives of a device, on the stream that is current. Those on objects are real, over `host`."""

    def __init__(self, name, host, streams):
        super().__init__(host.rank, host.size)
        self._name, self._host, self._streams = name, host, streams
        self.world_ranks = host.world_ranks
        self._for_reductions = None

    def _call(self, label):
        group = Group(self._name, tuple(self.world_ranks))
        self._streams.trace.append(Step("collective", self._streams.current.value, group, label))

    def for_reductions(self):
        """That over the same ranks, whose collectives do not wait for those of this one."""
        if self._for_reductions is None:
            self._for_reductions = TracedCommunicator(f"{self._name}, reductions", self._host, self._streams)
        return self._for_reductions

    def _all_gather_into_tensor(self, label, output, shard, async_op):
        self._call(label)
        super()._all_gather_into_tensor(label, output, shard, async_op)

    def _reduce_scatter_tensor(self, label, output, full, reduction, async_op):
        self._call(label)
        super()._reduce_scatter_tensor(label, output, full, reduction, async_op)

    def _all_reduce(self, label, tensor, reduction, async_op):
        self._call(label)
        super()._all_reduce(label, tensor, reduction, async_op)

    def _exchange(self, label, outputs, inputs, async_op):
        self._call(label)
        super()._exchange(label, outputs, inputs, async_op)

    def _labelled_barrier(self, label, flag):
        return self._host.labelled_barrier(label, flag)

    def _all_gather_object(self, value):
        return self._host.all_gather_object(value)

    def _broadcast_object(self, value, src):
        return self._host.broadcast_object(value, src)


@contextlib.contextmanager
def tracing(world):
    """Collective over all ranks. A context in which units over ``TracedCommunicator`` are traced: what it returns."""
    streams = TracedStreams()
    everyone = Group("the program", tuple(range(world.size)))
    operation = {name: getattr(MpiCommunicator, name) for name in ("_labelled_barrier", "_all_reduce")}

    def traced(name):
        def call(comm, label, *args):
            if comm is world.host:
                streams.trace.append(Step("collective", HOST, everyone, label))
            return operation[name](comm, label, *args)

        return call

    with torch.random.fork_rng(devices=[]), _patched() as patch:
        for name in operation:
            patch.setattr(MpiCommunicator, name, traced(name))
        patch.setattr("hpcfsdp.engine.root.streams_for", lambda device: streams)
        patch.setattr(GroupCache, "host_of", lambda self, comm: world.host)
        reductions = lambda self, comm, **_options: comm.for_reductions() if comm.size > 1 else comm  # noqa: E731
        patch.setattr(GroupCache, "for_reductions", reductions)
        yield streams


@contextlib.contextmanager
def _patched():
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch


def communicators(world, streams, replicas=1):
    """Collective over all ranks. Those over the ranks of the shards and of the replicas, of the world as a grid."""
    grid = np.arange(world.size).reshape(replicas, -1)
    place, column = divmod(world.rank, grid.shape[1])
    shards = TracedCommunicator(f"shards {place}", subgroup(world.host, grid[place]), streams)
    return shards, TracedCommunicator(f"replicas {column}", subgroup(world.host, grid[:, column]), streams)


_subgroups = {}


def subgroup(host, ranks):
    key = host, tuple(int(rank) for rank in ranks)
    if key not in _subgroups:
        _subgroups[key] = host if len(ranks) == host.size else host.subgroup(key[1])
    return _subgroups[key]


def mesh_over(world, shards, replicas):
    """Collective over all ranks, the first time. The mesh of units of ``fully_shard``."""
    grid = np.arange(world.size).reshape(replicas.size, -1)
    if replicas.size == 1:
        return UnitMesh(ShardingStrategy.FULL_SHARD, {"shard": shards}, shards, grid, world.mesh())
    names = {"replicate": replicas, "shard": shards}
    device_mesh = world.mesh(replicate=replicas.size, shard=shards.size)
    return UnitMesh(ShardingStrategy.HYBRID_SHARD, names, world.host, grid, device_mesh)
