import pytest
import torch

from hpcfsdp.comm.solo import SoloCommunicator
from hpcfsdp.errors import EngineError

comm = SoloCommunicator()


def test_it_is_rank_0_of_1():
    assert (comm.rank, comm.size, repr(comm)) == (0, 1, "SoloCommunicator()")


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


@pytest.mark.parametrize(
    ("full", "shard"),
    [
        (torch.zeros(3), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, device="meta")),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_sizes_dtypes_and_devices(full, shard):
    rule = "it must have 1 times the shard's elements, the same dtype and device"
    text = (
        f"rank 0 of 1: the full tensor has {full.numel()} elements of torch.float32 on cpu, the shard {shard.numel()} "
        f"of {shard.dtype} on {shard.device}; {rule}"
    )
    with pytest.raises(EngineError) as caught:
        comm.all_gather_into_tensor(full, shard)
    assert str(caught.value) == f"all_gather_into_tensor on {text}"
    with pytest.raises(EngineError) as caught:
        comm.reduce_scatter_tensor(shard, full, "sum")
    assert str(caught.value) == f"reduce_scatter_tensor on {text}"


def test_tensors_with_holes_are_refused_by_name_and_stride():
    holes = torch.zeros(8)[::2]
    with pytest.raises(EngineError) as caught:
        comm.all_gather_into_tensor(torch.zeros(4), holes)
    assert str(caught.value) == "all_gather_into_tensor on rank 0: the shard is not contiguous (stride (2,))"
    with pytest.raises(EngineError) as caught:
        comm.all_gather_into_tensor(holes, torch.zeros(4))
    assert str(caught.value) == "all_gather_into_tensor on rank 0: the full tensor is not contiguous (stride (2,))"
