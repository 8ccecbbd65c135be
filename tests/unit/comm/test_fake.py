import pytest
import torch

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.reduce import accumulate_dtype, reduce_into, refuse_op
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool),
]
OPS = ["sum", "average", "product", "min", "max", "band", "bor", "bxor"]
alone = FakeCommunicator()


def test_it_is_rank_0_of_1_by_default():
    assert (alone.rank, alone.size, repr(alone)) == (0, 1, "FakeCommunicator(rank=0, size=1)")
    many = FakeCommunicator(3, 8, topology=Topology.regular(2, 4))
    assert (many.rank, many.size, repr(many)) == (3, 8, "FakeCommunicator(rank=3, size=8)")


@pytest.mark.parametrize(
    ("rank", "size", "topology"), [(2, 2, None), (-1, 2, None), (0, 0, None), (0, 2, Topology.regular(1, 3))]
)
def test_a_rank_or_a_machine_that_does_not_fit_is_refused(rank, size, topology):
    with pytest.raises((CommunicationError, ValueError)):
        FakeCommunicator(rank, size, topology=topology)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 3])
def test_gathering_repeats_the_shard(dtype, size):
    shard = torch.tensor([0, 1, 1]).to(dtype)
    output = torch.empty(3 * size, dtype=dtype)
    FakeCommunicator(0, size).all_gather_into_tensor(output, shard)
    assert torch.equal(output, shard.repeat(size))


def test_a_shard_within_the_output_is_gathered_in_place():
    full = torch.arange(6.0)
    FakeCommunicator(1, 3).all_gather_into_tensor(full, full[2:4])
    assert full.tolist() == [2, 3, 2, 3, 2, 3]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_reductions_are_those_of_ranks_that_hold_the_same(dtype, op, size):
    if refuse_op(op, dtype):
        return
    comm = FakeCommunicator(size - 1, size)
    values = torch.tensor([0, 1, 2, 1] * size).to(dtype)
    expected = torch.empty_like(values)
    divisor = size if op == "average" else 1
    reduce_into(expected, [values] * size, op, accumulate_dtype(dtype, op), divisor=divisor)
    total, output = values.clone(), torch.empty(4, dtype=dtype)
    comm.all_reduce(total, op)
    comm.reduce_scatter_tensor(output, values, op)
    assert torch.equal(total, expected)
    assert torch.equal(output, expected[-4:])


def test_whole_numbers_wrap_around_for_more_ranks_than_they_can_count():
    comm = FakeCommunicator(0, 300)
    tensor = torch.tensor([1, 100], dtype=torch.int8)
    comm.all_reduce(tensor, "sum")
    assert [value % 256 for value in tensor.tolist()] == [300 % 256, 30000 % 256]


def test_the_sum_is_made_in_its_dtype_and_the_output_keeps_its_own():
    output = torch.empty(1)
    full = torch.tensor([257.0, 257.0])
    comm = FakeCommunicator(1, 2)
    comm.reduce_scatter_tensor(output, full, "sum", accumulate=torch.bfloat16)  # 256 in bfloat16
    assert output.item() == 512.0
    comm.reduce_scatter_tensor(output, full, "sum")
    assert output.item() == 514.0


def test_every_operation_takes_tensors_that_require_grad_and_records_nothing():
    comm = FakeCommunicator(0, 2)
    leaf, output = torch.ones(2, requires_grad=True), torch.empty(4)
    comm.all_gather_into_tensor(output, leaf)
    comm.all_reduce(leaf, "sum")
    comm.broadcast(leaf, 1)
    assert not output.requires_grad
    assert leaf.tolist() == [2.0, 2.0]
    assert leaf.is_leaf


def test_lists_are_filled_with_what_this_rank_would_send_to_itself():
    comm = FakeCommunicator(1, 2)
    given, outputs = [torch.tensor([1.0]), torch.tensor([2.0])], [torch.empty(1), torch.empty(1)]
    comm.all_to_all(outputs, given)
    assert torch.cat(outputs).tolist() == [2, 2]
    comm.all_gather(outputs, given[0])
    assert torch.cat(outputs).tolist() == [1, 1]
    comm.gather(outputs, given[1], 1)
    assert torch.cat(outputs).tolist() == [2, 2]
    comm.gather(None, given[1], 0)
    comm.scatter(outputs[0], given, 1)
    assert outputs[0].tolist() == [2]


def test_asynchronous_work_is_complete_at_once():
    work = alone.all_reduce(torch.ones(1), "sum", async_op=True)
    assert work.is_completed()
    work.wait()
    assert alone.barrier() is None
    assert alone.barrier(async_op=True).is_completed()


def test_objects_and_broadcasts_come_back():
    value = {"a": [1]}
    assert FakeCommunicator(0, 3).all_gather_object(value) == [value] * 3
    assert alone.broadcast_object(value) is value
    tensor = torch.tensor([5.0])
    alone.broadcast(tensor, 0)
    assert tensor.tolist() == [5]


def test_memory_is_plain_memory():
    full = alone.alloc(4, torch.bfloat16, gathered=True)
    assert (full.tolist(), full.dtype) == ([0.0] * 4, torch.bfloat16)
    alone.free(full)


def test_a_sub_group_has_its_place_and_its_part_of_the_machine():
    comm = FakeCommunicator(3, 4, topology=Topology.regular(2, 2))
    part = comm.subgroup([1, 3])
    assert (part.rank, part.size, part.topology.nodes) == (1, 2, ((0,), (1,)))
    with pytest.raises(
        CommunicationError, match=r"subgroup on rank 3 of 4: \[0, 1\] must be ascending ranks of this communicator"
    ):
        comm.subgroup([0, 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_gather_into_tensor(torch.empty(5), torch.empty(2)),
        lambda comm: comm.reduce_scatter_tensor(torch.empty(2), torch.empty(5), "sum"),
        lambda comm: comm.broadcast(torch.empty(1), 2),
        lambda comm: comm.gather(None, torch.empty(1), 2),
        lambda comm: comm.scatter(torch.empty(1), None, 0),
        lambda comm: comm.all_gather([torch.empty(1)], torch.empty(1)),
        lambda comm: comm.all_gather([torch.empty(1), torch.empty(2)], torch.empty(1)),
        lambda comm: comm.all_to_all([torch.empty(1)] * 2, [torch.empty(1)]),
        lambda comm: comm.broadcast_object(1, 5),
        lambda comm: comm.all_reduce(torch.empty(1, device="meta"), "sum"),
    ],
)
def test_what_mpi_would_refuse_is_refused_here_too(call):
    with pytest.raises(CommunicationError):
        call(FakeCommunicator(0, 2))
