import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam


def make(*tensors, requires_grad=True):
    leaves = [nn.Parameter(tensor, requires_grad=requires_grad) for tensor in tensors]
    named = [(f"p{index}", leaf.shape, ()) for index, leaf in enumerate(leaves)]
    return FlatParam(leaves, FlatLayout.plan(named, leaves[0].dtype, 1), FakeCommunicator())


def test_the_shard_holds_the_values_and_zeros_between_them():
    flat = make(torch.ones(2, 3), torch.full((1,), 7.0))
    assert flat.parameter.tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 7, 0, 0, 0]


def test_unshard_and_reshard_give_and_take_the_leaves_values():
    flat = make(torch.arange(6.0).view(2, 3))
    assert flat.unsharded_bytes == 0
    flat.unshard()
    assert flat.is_unsharded
    assert flat.unsharded_bytes == 32
    assert flat.leaves[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    flat.reshard()
    assert not flat.is_unsharded
    assert flat.unsharded_bytes == 0
    assert flat.leaves[0].isnan().all()


def test_unsharded_leaves_follow_the_shard():
    flat = make(torch.zeros(3))
    flat.parameter.data[:3] = torch.tensor([1.0, 2.0, 3.0])
    flat.unshard()
    assert flat.leaves[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_leaves_read_nan_at_rest(dtype):
    flat = make(torch.ones(2, 2, dtype=dtype))
    assert flat.leaves[0].dtype == dtype
    assert flat.leaves[0].shape == (2, 2)
    assert flat.leaves[0].isnan().all()


def test_integer_leaves_read_zero_at_rest():
    flat = make(torch.ones(3, dtype=torch.int64), requires_grad=False)
    assert flat.leaves[0].tolist() == [0, 0, 0]


def test_owns_memory_of_its_gathered_values_alone():
    flat = make(torch.ones(4))
    assert not flat.owns_memory_of(flat.leaves[0])
    flat.unshard()
    assert flat.owns_memory_of(flat.leaves[0][1:])
    assert not flat.owns_memory_of(flat.parameter)
    assert not flat.owns_memory_of(flat.leaves[0].clone())


def test_gradients_of_leaves_add_up_in_the_shard_and_missing_ones_count_as_zero():
    flat = make(torch.zeros(2), torch.zeros(2))
    for _ in range(2):
        flat.leaves[0].grad = None
        flat.unshard()
        flat.alloc_grad()
        flat.leaves[1].grad = torch.tensor([1.0, 2.0])
        flat.take_grad(1)
        flat.leaves[1].grad = torch.tensor([10.0, 10.0])
        flat.take_grad(1)
        flat.reduce_grad()
        flat.reshard()
    assert flat.leaves[1].grad is None
    assert flat.parameter.grad.tolist() == [0, 0, 0, 0, 22, 24, 0, 0]
    assert flat.unsharded_bytes == 0


def test_dropped_gradients_leave_no_trace():
    flat = make(torch.zeros(2))
    flat.unshard()
    flat.leaves[0].grad = torch.ones(2)
    flat.take_grad(0)
    flat.drop_grad()
    flat.reduce_grad()
    assert flat.parameter.grad is None


def test_a_sparse_gradient_is_refused_by_name():
    flat = make(torch.zeros(4, 2))
    flat.unshard()
    flat.leaves[0].grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(EngineError) as caught:
        flat.take_grad(0)
    assert str(caught.value) == (
        "the gradient of 'p0' is torch.sparse_coo: sparse gradients cannot be sharded; use a dense one"
    )
