import gc

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.context import Reductions
from hpcfsdp.engine.streams import HostStreams
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.params.sharded_params import Dtypes
from tests.unit.params.gathering import grad_bytes


class Late:
    """A reduction that is done when someone waits for it, and not before."""

    def __init__(self, label, log, done):
        self._label, self._log, self._done = label, log, done

    def wait(self):
        self._log.append(f"{self._label} done")
        self._done()

    def is_completed(self):
        return False


class LateComm(FakeCommunicator):
    """Two ranks that hold the same, with reductions that end as late as they may."""

    def __init__(self, shares_memory=False):
        super().__init__(0, 2)
        self.shares_memory = shares_memory
        self.log, self.allocated, self.freed = [], [], []

    def alloc(self, numel, dtype, *, gathered=False):
        if not gathered:
            self.allocated.append((numel, dtype))
        return super().alloc(numel, dtype, gathered=gathered)

    def free(self, tensor):
        self.freed.append(tensor.numel())

    def reduce_scatter_tensor(self, output, full, op, *, label="", async_op=False, **how):
        reduce = super().reduce_scatter_tensor
        label = label.removeprefix("gradients of ").strip("'")
        self.log.append(label)
        return Late(label, self.log, lambda: reduce(output, full, op, **how))


class Setting:
    """Gradients a, b, c, ... of two parameters of so many elements each, on a rank that holds the first of them."""

    def __init__(self, comm, *numels, wire=None):
        self.comm, self.queue = comm, Reductions(HostStreams())
        self.grads = []
        for index, numel in enumerate(numels):
            leaves = [nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(numel))]
            layout = FlatLayout.plan([("p", (numel,), ()), ("q", (numel,), ())], torch.float32, comm.size)
            dtypes = Dtypes.plan(torch.float32, reduce=wire[index] if wire else None)
            self.grads.append(ShardedGrad(FlatParam(leaves, layout, comm, dtypes=dtypes)))
            self.grads[-1].name = "abcdef"[index]
            self.queue.plan(self.grads[-1], 0)
        self.queue.alloc()

    def keep_back(self, keeps_back):
        for grad in self.grads:
            grad.keeps_back = keeps_back

    def enqueue(self, *indices):
        """The backward of units begins: both of their leaves are to get a gradient."""
        for index in indices:
            self.grads[index].outstanding = 2
            self.queue.enqueue(self.grads[index])

    @torch.no_grad()
    def come(self, index, value, place=0):
        """A leaf gets a gradient."""
        grad = self.grads[index]
        leaf = grad.params.leaves[place]
        leaf.grad = torch.full_like(leaf, value) if leaf.grad is None else leaf.grad + value
        self.queue.move_from_leaf(grad, place)
        grad.outstanding -= 1
        self.queue.advance()

    def complete(self, *indices):
        """Both leaves get one."""
        for index in indices:
            self.come(index, index + 1.0)
            self.come(index, torch.nan, 1)  # on the other rank

    def buffers(self):
        return [None if grad.buffer is None else grad.buffer.data_ptr() for grad in self.grads]

    def settled(self):
        """This rank's part of each gradient at the end of the backward."""
        streams = self.queue._streams
        for queue in streams._pending:
            streams.wait(queue, streams.record(queue), None)
        self.queue.release()
        for grad in self.grads:
            grad.store([True, True])
        return [grad.params.parameter.grad.tolist() for grad in self.grads if grad.params.parameter.grad is not None]


def test_gradients_are_reduced_in_the_order_of_the_queue_whenever_they_are_complete():
    setting = Setting(LateComm(), 4, 4, 4)
    setting.enqueue(0, 1, 2)
    setting.complete(1, 2)
    assert setting.comm.log == []
    setting.come(0, 1.0)
    assert setting.comm.log == []
    setting.come(0, 1.0, 1)
    assert [name for name in setting.comm.log if "done" not in name] == ["a", "b", "c"]
    assert setting.settled() == [[1] * 4, [2] * 4, [3] * 4]


def test_a_gradient_without_contributions_is_reduced_in_order_too():
    setting = Setting(LateComm(), 4, 4)
    setting.enqueue(0, 1)
    setting.grads[0].outstanding = 0
    setting.complete(1)
    assert setting.comm.log == ["a", "b"]
    assert setting.settled() == [[0] * 4, [2] * 4]


def test_two_buffers_are_used_in_turn_and_a_third_gradient_waits_for_the_first():
    setting = Setting(LateComm(shares_memory=True), 4, 8, 4)
    places = []
    for index in range(3):
        setting.enqueue(index)
        setting.come(index, index + 1.0)
        places.append(setting.buffers()[index])
        setting.come(index, torch.nan, 1)
    assert places[0] == places[2] != places[1]
    assert setting.comm.log == ["a", "b", "a done", "c"]
    assert setting.comm.allocated == [(16, torch.float32)] * 2  # of the largest
    assert setting.settled() == [[1] * 4, [2] * 8, [3] * 4]
    for index in range(3):  # another backward
        setting.enqueue(index)
        setting.complete(index)
    assert len(setting.comm.allocated) == 2


def test_there_are_more_buffers_where_nodes_exchange_messages():
    comm = LateComm(shares_memory=True)
    comm.spans_nodes = True
    setting = Setting(comm, 4, 4, 4, 4, 4)
    for index in range(5):
        setting.enqueue(index)
        setting.complete(index)
    assert comm.log == ["a", "b", "c", "d", "a done", "e"]
    assert len(comm.allocated) == 4


def test_gradients_that_come_before_their_buffer_is_free_wait_on_their_leaves():
    setting = Setting(LateComm(shares_memory=True), 4, 4, 4)
    setting.enqueue(0, 1, 2)
    setting.come(0, 1.0)
    setting.come(2, 7.0)
    setting.come(2, torch.nan, 1)
    assert setting.buffers()[2] is None
    assert setting.grads[2].params.leaves[0].grad.tolist() == [7] * 4
    setting.come(0, torch.nan, 1)
    assert setting.comm.log == ["a", "a done"]  # and its buffer is c's now, complete as it is
    assert setting.buffers()[2] is not None
    assert setting.grads[2].params.leaves[0].grad is None
    setting.complete(1)
    assert setting.comm.log == ["a", "a done", "b", "c"]
    assert setting.settled() == [[1] * 4, [2] * 4, [7] * 4]


def test_gradients_of_a_leaf_that_is_used_twice_add_up_on_the_leaf_and_in_the_buffer():
    setting = Setting(LateComm(), 4, 4, 4)
    setting.enqueue(0, 1, 2)
    for index in (0, 2):
        setting.grads[index].outstanding = 4
        for value in (1.0, 20.0, 300.0):
            setting.come(index, value)
    setting.come(0, torch.nan, 1)
    setting.come(2, 4000.0)
    setting.complete(1)
    assert setting.settled() == [[321] * 4, [2] * 4, [4321] * 4]


def test_a_gradient_outside_of_the_queue_stays_on_its_leaf():
    setting = Setting(LateComm(), 4, 4)
    setting.come(1, 5.0)
    assert setting.grads[1].params.leaves[0].grad.tolist() == [5] * 4
    assert setting.buffers() == [None, None]
    setting.enqueue(1)
    setting.come(1, 1.0)
    setting.come(1, torch.nan, 1)
    assert setting.settled() == [[6] * 4]


def test_enqueueing_again_changes_nothing():
    setting = Setting(LateComm(shares_memory=True), 4, 4)
    setting.enqueue(0)
    setting.enqueue(0)
    setting.enqueue(1)
    setting.come(1, 1.0)
    setting.come(0, 1.0)
    assert None not in setting.buffers()
    assert len(set(setting.buffers())) == 2


def test_at_most_two_gradients_hold_memory_that_is_not_shared():
    setting = Setting(LateComm(), 4, 4, 4, 4)
    held = []
    for index in range(4):
        setting.enqueue(index)
        setting.complete(index)
        held.append([grad_bytes(grad) > 0 for grad in setting.grads])
    assert held == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]
    assert setting.comm.allocated == []
    setting.settled()
    assert not any(grad_bytes(grad) for grad in setting.grads)


def test_a_gradient_that_is_kept_back_holds_no_buffer_and_is_in_the_next_sum():
    setting = Setting(LateComm(shares_memory=True), 4, 4)
    setting.keep_back(True)
    for _ in range(2):
        setting.enqueue(0, 1)
        for index in (1, 0):
            for place in range(2):
                leaf = setting.grads[index].params.leaves[place]
                leaf.grad = torch.full_like(leaf, index + 1.0)
                setting.queue.move_from_leaf(setting.grads[index], place)
            setting.grads[index].outstanding = 0
            setting.queue.advance()
        assert setting.buffers() == [None, None]
    setting.keep_back(False)
    assert setting.comm.log == []
    setting.enqueue(0, 1)
    setting.complete(0, 1)
    assert setting.settled() == [[3] * 4, [6] * 4]


def test_a_gradient_that_waits_from_an_earlier_step_is_sent_without_a_new_one():
    setting = Setting(LateComm(shares_memory=True), 4)
    setting.enqueue(0)
    leaf = setting.grads[0].params.leaves[0]
    leaf.grad = torch.full_like(leaf, 3.0)
    setting.queue.move_from_leaf(setting.grads[0], 0)
    setting.grads[0].outstanding = 0
    setting.keep_back(True)
    setting.queue.advance()
    setting.keep_back(False)
    setting.queue.enqueue(setting.grads[0])
    setting.queue.advance()
    assert setting.comm.log == ["a"]
    assert setting.settled() == [[3] * 4]


def test_a_gradient_is_reduced_again_after_its_last_reduction_has_arrived():
    setting = Setting(LateComm(), 4)
    for _ in range(3):
        setting.enqueue(0)
        setting.complete(0)
    assert setting.comm.log == ["a", "a done", "a", "a done", "a"]
    assert setting.settled() == [[3] * 4]


def test_other_dtypes_have_other_buffers_and_share_the_queue():
    wire = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    setting = Setting(LateComm(shares_memory=True), 4, 16, 4, 4, wire=wire)
    setting.enqueue(0, 1, 2, 3)
    for index in (3, 2, 1, 0):
        setting.come(index, index + 1.0)
    assert len(set(setting.buffers()) - {None}) == 4
    assert [grad.buffer.dtype for grad in setting.grads] == wire
    assert [grad.buffer.numel() for grad in setting.grads] == [8, 32, 8, 8]
    assert sorted(setting.comm.allocated, key=str) == [(32, torch.bfloat16)] * 2 + [(8, torch.float32)] * 2
    for index in (3, 2, 1, 0):
        setting.come(index, torch.nan, 1)
    assert setting.comm.log == ["a", "b", "c", "d"]
    assert setting.settled() == [[1] * 4, [2] * 16, [3] * 4, [4] * 4]


def test_replicas_that_share_memory_reduce_in_it():
    comm = LateComm(shares_memory=True)
    leaf = nn.Parameter(torch.zeros(4))
    layout = FlatLayout.plan([("p", (4,), ())], torch.float32, 1)
    grad = ShardedGrad(FlatParam([leaf], layout, FakeCommunicator(), replicas=comm, always_whole=True))
    queue = Reductions(HostStreams())
    queue.plan(grad, 0)
    queue.alloc()
    queue.enqueue(grad)
    leaf.grad = torch.ones(4)
    queue.move_from_leaf(grad, 0)
    assert comm.allocated == [(4, torch.float32)] * 2
    buffer = grad.buffer
    queue.advance()
    queue.release()
    grad.store([True])
    buffer.fill_(torch.nan)  # others put theirs together there
    assert grad.params.parameter.grad.tolist() == [1] * 4


@pytest.mark.parametrize("shares_memory", [False, True])
def test_what_was_broken_off_holds_no_place_and_no_buffer(shares_memory):
    setting = Setting(LateComm(shares_memory), 4, 4, 4)
    setting.enqueue(0, 1)
    setting.come(1, 1.0)
    setting.queue.drop()
    for grad in setting.grads:
        grad.drop()
    setting.enqueue(2, 1)
    setting.complete(1, 2)
    assert [name for name in setting.comm.log if "done" not in name] == ["c", "b"]
    assert setting.settled() == [[2] * 4, [3] * 4]


def test_shared_memory_is_given_back_in_the_end():
    setting = Setting(LateComm(shares_memory=True), 4, 8)
    setting.enqueue(0, 1)
    setting.complete(0, 1)
    setting.settled()
    comm = setting.comm
    del setting
    gc.collect()
    assert comm.freed == [16, 16]
