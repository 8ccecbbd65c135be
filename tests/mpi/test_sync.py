import pytest
import torch
from torch import nn

from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError
from hpcfsdp.params.module_states import (
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.transport]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.bool,
]


class Net(nn.Module):
    """Tied weights, and buffers of many kinds."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed, self.norm = nn.Embedding(7, 5), nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 2))
        self.register_buffer("turned", torch.zeros(3, 4).t())
        self.register_buffer("scratch", torch.zeros(4, dtype=torch.bfloat16), persistent=False)
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.copy_(torch.randint(0, 100, tensor.shape, generator=generator) > 50)
                if tensor.is_floating_point():
                    tensor.add_(seed)

    def values(self):
        named = [*self.named_parameters(), *self.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(params=["mpi", "gloo"])
def each_comm(request, comm):
    """Communicators of both kinds."""
    if request.param == "mpi":
        return comm
    return TorchGroupCommunicator(torch.distributed.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_all_ranks_get_the_module_of_one(each_comm, bucket_bytes):
    src = each_comm.size - 1
    net = Net(each_comm.rank)
    if each_comm.rank == 0:
        net.conv.to(memory_format=torch.contiguous_format)  # strides are each rank's own business
    sync_module_states(net, each_comm, src=src, bucket_bytes=bucket_bytes)
    assert same(net.values(), Net(src).values())
    assert net.head.weight is net.embed.weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives(each_comm, dtype):
    tensors = [torch.full((size,), each_comm.rank + 1).to(dtype) for size in (3, 0, 1, 50)]
    tensors.append(torch.full((4, 2), each_comm.rank + 1).to(dtype).t())
    sync_params_and_buffers(each_comm, tensors, bucket_bytes=32)
    for tensor in tensors:
        assert torch.equal(tensor, torch.ones(tensor.shape).to(dtype))


def test_a_bucket_larger_than_a_message_arrives(comm):
    tensors = [torch.full((300_001,), float(comm.rank)), torch.full((200_000, 2), float(comm.rank)).t()]
    sync_params_and_buffers(comm, tensors)
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.parametrize("replicas_first", [True, False])
def test_two_dimensions_give_all_ranks_the_values_of_the_first(comm, replicas_first):
    """In hybrid sharding torch left buffers of most ranks as they were (pytorch#178569)."""
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    row, column = divmod(comm.rank, 2)
    shards = comm.subgroup([2 * row, 2 * row + 1])
    replicas = comm.subgroup(range(column, comm.size, 2))
    net = Net(comm.rank)
    for part in (replicas, shards) if replicas_first else (shards, replicas):
        sync_module_states(net, part)
    assert same(net.values(), Net(0).values())


def test_a_group_of_some_ranks_leaves_the_others_alone(comm):
    members = list(range(1, comm.size))
    net = Net(comm.rank)
    if comm.rank in members:
        sync_module_states(net, comm.subgroup(members), src=len(members) - 1)
    assert same(net.values(), Net(comm.size - 1 if comm.rank in members else 0).values())


def test_differences_are_raised_on_every_rank_and_the_communicator_goes_on(comm):
    if comm.size == 1:
        pytest.skip("needs several ranks")
    last = comm.size - 1
    net = nn.Linear(2, 3 if comm.rank == last else 4)
    before = net.weight.detach().clone()
    others = "rank 0" if last == 1 else f"ranks 0-{last - 1}"
    expected = (
        f"parameter 'weight' differs: torch.float32 of shape (4, 2) on {others}, torch.float32 of shape (3, 2) on rank "
        f"{last}; parameter 'bias' differs: torch.float32 of shape (4,) on {others}, torch.float32 of shape (3,) on "
        f"rank {last}"
    )
    for call in (
        lambda: sync_module_states(net, comm),
        lambda: verify_param_shape_across_processes(comm, net.named_parameters()),
    ):
        with pytest.raises(DisagreementError) as caught:
            call()
        assert str(caught.value) == expected
        assert caught.value.raised_on_all_ranks
    assert torch.equal(net.weight, before)
    value = torch.full((1,), float(comm.rank))
    sync_params_and_buffers(comm, [value], src=last)
    assert value.item() == last


def test_values_that_are_marked_as_conjugated_arrive_conjugated(each_comm):
    values = torch.tensor([1 + 2j, 3 - 4j])
    mine = values.conj() if each_comm.rank == 0 else torch.zeros_like(values)
    sync_params_and_buffers(each_comm, [mine], bucket_bytes=1)
    assert torch.equal(mine.resolve_conj(), torch.tensor([1 - 2j, 3 + 4j]))
