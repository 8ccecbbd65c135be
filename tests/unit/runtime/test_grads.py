import gc

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.flat.gradient import FlatGrad
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.flat.precision import Dtypes
from hpcfsdp.runtime.grads import GradMemory
from hpcfsdp.runtime.streams import HostStreams


class Late:
    """A reduction that is done when someone waits for it, and not before."""

    def __init__(self, label, log, done):
        self._label, self._log, self._done = label, log, done

    def wait(self):
        self._log.append(f"{self._label} is done")
        self._done()

    def is_completed(self):
        return False


class LateComm(FakeCommunicator):
    """Two ranks that hold the same, whose reductions end as late as they may."""

    def __init__(self, shares_memory=False, size=2):
        super().__init__(0, size)
        self.shares_memory = shares_memory
        self.log, self.allocated, self.freed = [], [], []

    def alloc(self, numel, dtype, *, gathered=False):
        self.allocated.append((numel, dtype))
        return super().alloc(numel, dtype, gathered=gathered)

    def free(self, tensor):
        self.freed.append(tensor.numel())

    def reduce_scatter_tensor(self, output, full, op, *, label="", async_op=False, **how):
        reduce = super().reduce_scatter_tensor
        self.log.append(label)
        return Late(label, self.log, lambda: reduce(output, full, op, **how))


class Setting:
    """Gradients of parameters of so many elements, and the memory in which they are put together."""

    def __init__(self, comm, *numels, in_turn=True, wire=None):
        self.comm, self.memory, self.flushed = comm, GradMemory(HostStreams()), []
        self.grads = []
        for index, numel in enumerate(numels):
            leaves = [nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(numel))]
            layout = FlatLayout.plan([("p", (numel,), ()), ("q", (numel,), ())], torch.float32, comm.size)
            dtypes = Dtypes.plan(torch.float32, reduce=wire[index] if wire else None)
            self.grads.append(FlatGrad(FlatParam(leaves, layout, comm, dtypes=dtypes)))
            self.memory.plan(self.grads[-1], in_turn=in_turn if isinstance(in_turn, bool) else in_turn[index])

    def flush(self, grad):
        self.flushed.append(self.grads.index(grad))
        self.reduce(self.grads.index(grad))

    def acquire(self, index):
        """The memory that a gradient gets."""
        self.memory.acquire(self.grads[index], self.flush)
        return self.grads[index].buffer.data_ptr()

    @torch.no_grad()
    def take(self, index, place, value):
        grad = self.grads[index]
        grad.flat.unshard()
        leaf = grad.flat.leaves[place]
        leaf.grad = torch.full_like(leaf, value)
        grad.take(place)
        grad.flat.reshard()

    def reduce(self, index):
        self.memory.reduce(self.grads[index], f"g{index}")

    def settled(self):
        """This rank's part of each gradient at the end of the backward."""
        streams = self.memory._streams
        for queue in streams._pending:
            streams.wait(queue, streams.record(queue), None)
        self.memory.settle()
        for grad in self.grads:
            grad.settle([True, True])
        return [grad.flat.parameter.grad.tolist() for grad in self.grads if grad.flat.parameter.grad is not None]


def test_two_buffers_are_used_in_turn_and_a_third_gradient_waits_for_the_first():
    setting = Setting(LateComm(shares_memory=True), 4, 8, 4)
    places = []
    for index in range(3):
        places.append(setting.acquire(index))
        setting.take(index, 0, index + 1.0)
        setting.take(index, 1, index + 2.0)
        setting.reduce(index)
    assert places[0] == places[2] != places[1]
    assert setting.comm.log == ["g0", "g1", "g0 is done", "g2"]
    assert setting.comm.allocated == [(16, torch.float32)] * 2  # of the largest
    assert setting.flushed == []
    assert setting.settled() == [[1] * 4, [2] * 8, [3] * 4]
    for index in range(3):  # another backward
        setting.acquire(index)
        setting.reduce(index)
    assert len(setting.comm.allocated) == 2


def test_memory_that_nobody_shares_is_held_by_two_gradients_at_a_time():
    setting = Setting(LateComm(), 4, 4, 4, 4)
    held = []
    for index in range(4):
        setting.acquire(index)
        setting.reduce(index)
        held.append([grad.held_bytes > 0 for grad in setting.grads])
    assert held == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]
    assert setting.comm.allocated == []
    setting.settled()
    assert not any(grad.held_bytes for grad in setting.grads)


def test_a_buffer_that_is_still_held_is_flushed_and_what_comes_later_is_added():
    setting = Setting(LateComm(shares_memory=True), 4, 4, 4)
    first = setting.acquire(0)
    setting.take(0, 0, 1.0)
    setting.acquire(1)
    assert setting.acquire(2) == first
    assert setting.flushed == [0]
    assert setting.comm.log == ["g0", "g0 is done"]
    assert setting.grads[0].buffer is None
    assert setting.grads[0].flat.parameter.grad is None  # half of it is not there yet
    setting.take(2, 0, 7.0)
    setting.reduce(2)
    setting.reduce(1)
    assert setting.acquire(0) != first
    setting.take(0, 0, 20.0)
    setting.take(0, 1, 300.0)
    setting.reduce(0)
    assert setting.settled() == [[21] * 4, [0] * 4, [7] * 4]


def test_a_gradient_that_was_kept_back_holds_no_buffer():
    setting = Setting(LateComm(shares_memory=True), 4, 4)
    first = setting.acquire(0)
    setting.take(0, 0, 1.0)
    setting.memory.keep_back(setting.grads[0])
    setting.acquire(1)
    setting.memory.keep_back(setting.grads[1])
    assert setting.acquire(0) == first
    assert setting.flushed == setting.comm.log == []
    setting.take(0, 0, 2.0)
    setting.reduce(0)
    setting.acquire(1)
    setting.reduce(1)
    assert setting.settled() == [[3] * 4, [0] * 4]


def test_a_unit_that_holds_units_has_a_buffer_of_its_own():
    setting = Setting(LateComm(shares_memory=True), 4, 4, 4, 4, in_turn=[False, True, True, True])
    outer = setting.acquire(0)
    setting.take(0, 0, 5.0)
    places = []
    for index in (1, 2, 3):
        places.append(setting.acquire(index))
        setting.reduce(index)
    assert places[0] == places[2]
    assert len({outer, *places}) == 3
    assert setting.flushed == []
    setting.take(0, 0, 6.0)
    setting.reduce(0)
    assert setting.settled()[0] == [11] * 4


def test_a_gradient_is_reduced_again_after_its_last_reduction_has_arrived():
    setting = Setting(LateComm(), 4)
    for turn in range(3):
        setting.acquire(0)
        setting.take(0, 0, turn + 1.0)
        setting.reduce(0)
    assert setting.comm.log == ["g0", "g0 is done", "g0", "g0 is done", "g0"]
    assert setting.settled() == [[6] * 4]


def test_other_dtypes_have_other_buffers():
    wire = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    setting = Setting(LateComm(shares_memory=True), 4, 16, 4, 4, wire=wire)
    places = [setting.acquire(index) for index in range(4)]
    assert len(set(places)) == 4
    assert [grad.buffer.dtype for grad in setting.grads] == wire
    assert [grad.buffer.numel() for grad in setting.grads] == [8, 32, 8, 8]
    assert setting.comm.allocated == [(numel, dtype) for numel, dtype in zip((8, 32, 8, 32), wire, strict=True)]
    assert setting.flushed == []


def test_replicas_that_share_memory_reduce_in_it():
    comm = LateComm(shares_memory=True)
    leaf = nn.Parameter(torch.zeros(4))
    layout = FlatLayout.plan([("p", (4,), ())], torch.float32, 1)
    grad = FlatGrad(FlatParam([leaf], layout, FakeCommunicator(), replicas=comm, always_whole=True))
    memory = GradMemory(HostStreams())
    memory.plan(grad, in_turn=True)
    memory.acquire(grad, None)
    assert comm.allocated == [(4, torch.float32)]
    leaf.grad = torch.ones(4)
    grad.take(0)
    buffer = grad.buffer
    memory.reduce(grad, "g")
    memory.settle()
    grad.settle([True])
    buffer.fill_(torch.nan)  # others put theirs together there
    assert grad.flat.parameter.grad.tolist() == [1] * 4


@pytest.mark.parametrize("shares_memory", [False, True])
def test_what_was_broken_off_holds_no_buffer(shares_memory):
    setting = Setting(LateComm(shares_memory), 4, 4, 4)
    setting.acquire(0)
    setting.acquire(1)
    setting.take(1, 0, 1.0)
    setting.memory.drop()
    for grad in setting.grads:
        grad.drop()
    for index in (0, 1, 2):
        setting.acquire(index)
        setting.take(index, 1, 2.0)
        setting.reduce(index)
    assert setting.flushed == []
    assert setting.settled() == [[0] * 4] * 3  # this rank has the other half
    assert [grad.flat.layout.shard_numel for grad in setting.grads] == [4] * 3


def test_shared_memory_is_given_back_in_the_end():
    setting = Setting(LateComm(shares_memory=True), 4, 8)
    for index in range(2):
        setting.acquire(index)
        setting.reduce(index)
    setting.settled()
    comm = setting.comm
    del setting
    gc.collect()
    assert comm.freed == [16, 16]
