import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator

comm = FakeCommunicator()


def test_it_is_rank_0_of_1():
    assert (comm.rank, comm.size, repr(comm)) == (0, 1, "FakeCommunicator(rank=0, size=1)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_gathering_copies_the_shard(dtype):
    shard = torch.tensor([0, 1, 1]).to(dtype)
    output = torch.empty_like(shard)
    comm.all_gather_into_tensor(output, shard)
    assert torch.equal(output, shard)
    assert output.data_ptr() != shard.data_ptr()


@pytest.mark.parametrize("op", ["sum", "average", "max"])
def test_every_reduction_is_the_value_itself(op):
    full = torch.tensor([3.0, -4.0])
    output = torch.empty(2)
    comm.reduce_scatter_tensor(output, full, op)
    assert output.tolist() == [3, -4]
    comm.all_reduce(full, op)
    assert full.tolist() == [3, -4]


def test_objects_and_broadcasts_come_back():
    value = {"a": [1]}
    assert comm.all_gather_object(value) == [value]
    assert comm.broadcast_object(value) is value
    tensor = torch.tensor([5.0])
    comm.broadcast(tensor, 0)
    assert tensor.tolist() == [5]
