import pytest
import torch

from hpcfsdp.comm.mpi import MpiCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import CommunicationError, DisagreementError, HpcfsdpError, UsageError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.fixture(params=["mpi", "gloo"])
def carrier(request, world):
    return MpiCommunicator(world.comm) if request.param == "mpi" else TorchGroupCommunicator(world.process_group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 4096])
def test_all_gather_puts_shards_in_rank_order(world, dtype, numel):
    comm = MpiCommunicator(world.comm)
    shards = [(torch.arange(numel) * 3 + rank * 5).remainder(100).to(dtype) for rank in range(comm.size)]
    output = torch.empty(comm.size * numel, dtype=dtype)
    comm.all_gather_into_tensor(output, shards[comm.rank])
    assert torch.equal(output, torch.cat(shards))


def test_all_gather_over_a_process_group(carrier):
    output = torch.empty(carrier.size * 3)
    carrier.all_gather_into_tensor(output, torch.full((3,), float(carrier.rank)))
    assert output.tolist() == [float(rank) for rank in range(carrier.size) for _ in range(3)]


@pytest.mark.parametrize("op", ["sum", "average", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reduce_scatter_gives_each_rank_its_segment(carrier, dtype, op):
    n = 33
    everyone = [
        torch.randn(carrier.size * n, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(carrier.size)
    ]
    output = torch.empty(n, dtype=dtype)
    mine = everyone[carrier.rank].clone()
    carrier.reduce_scatter_tensor(output, mine, op)
    stacked = torch.stack(everyone).double()
    expected = {"sum": stacked.sum(0), "average": stacked.mean(0), "max": stacked.amax(0)}[op]
    tolerance = {"rtol": torch.finfo(dtype).eps * 2, "atol": torch.finfo(dtype).eps * 4}
    torch.testing.assert_close(output.double(), expected.view(carrier.size, n)[carrier.rank], **tolerance)
    assert torch.equal(mine, everyone[carrier.rank])


def test_bfloat16_is_summed_in_float32(carrier):
    # 256 + 1 is 256 in bfloat16: summed there, the ones would vanish.
    value = 256.0 if carrier.rank == 0 else 1.0
    output = torch.empty(1, dtype=torch.bfloat16)
    carrier.reduce_scatter_tensor(output, torch.full((carrier.size,), value, dtype=torch.bfloat16), "sum")
    assert output.item() == torch.tensor(256.0 + carrier.size - 1).bfloat16().item()


def test_reduce_scatter_is_the_same_bit_by_bit_each_time(carrier):
    full = torch.randn(carrier.size * 1001, generator=torch.Generator().manual_seed(carrier.rank))
    outputs = [torch.empty(1001) for _ in range(3)]
    for output in outputs:
        carrier.reduce_scatter_tensor(output, full, "average")
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_all_reduce(carrier, dtype):
    total, largest = torch.full((2, 2), carrier.rank + 1).to(dtype), torch.full((2, 2), carrier.rank + 1).to(dtype)
    carrier.all_reduce(total, "sum")
    carrier.all_reduce(largest, "max")
    assert total.tolist() == [[carrier.size * (carrier.size + 1) / 2] * 2] * 2
    assert largest.tolist() == [[carrier.size] * 2] * 2


@pytest.mark.parametrize("src", ["first", "last"])
def test_broadcast(carrier, src):
    source = 0 if src == "first" else carrier.size - 1
    tensor = torch.full((5,), float(carrier.rank))
    carrier.broadcast(tensor, source)
    assert tensor.tolist() == [float(source)] * 5
    assert carrier.broadcast_object({"from": carrier.rank}, source) == {"from": source}


def test_objects_are_gathered_in_rank_order(carrier):
    assert carrier.all_gather_object(("rank", carrier.rank)) == [("rank", r) for r in range(carrier.size)]


def test_buffers_stay_resizable_after_a_collective(world):
    # numpy() would mark the storage as shared, and freeing it by resizing would fail from then on.
    comm = MpiCommunicator(world.comm)
    output, shard = torch.empty(comm.size * 4), torch.ones(4)
    comm.all_gather_into_tensor(output, shard)
    output.untyped_storage().resize_(0)
    assert output.untyped_storage().size() == 0


@pytest.mark.parametrize(
    ("full", "shard"),
    [
        (lambda n: torch.empty(n * 3 + 1), lambda: torch.empty(3)),
        (lambda n: torch.empty(n * 3, dtype=torch.float64), lambda: torch.empty(3)),
        (lambda n: torch.empty(n * 6)[::2], lambda: torch.empty(3)),
    ],
    ids=["size", "dtype", "stride"],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(carrier, full, shard):
    with pytest.raises(CommunicationError, match=rf"on rank {carrier.rank}"):
        carrier.all_gather_into_tensor(full(carrier.size), shard())
    if full(carrier.size).dtype == shard().dtype:  # a reduction may keep its result in another dtype
        with pytest.raises(CommunicationError, match=rf"on rank {carrier.rank}"):
            carrier.reduce_scatter_tensor(shard(), full(carrier.size), "sum")


@pytest.mark.parametrize("culprit", ["first", "last"])
def test_one_ranks_error_is_everyones(carrier, culprit):
    from hpcfsdp.comm import raise_together

    failing = 0 if culprit == "first" else carrier.size - 1
    with pytest.raises(UsageError, match="no such thing") as caught, raise_together(carrier):
        if carrier.rank == failing:
            raise UsageError("no such thing")
    assert caught.value.collective
    assert carrier.rank == failing or f"rank {failing}: " in str(caught.value)


def test_foreign_errors_reach_the_others_too(carrier):
    from hpcfsdp.comm import raise_together

    failing = carrier.size - 1
    kind = ZeroDivisionError if carrier.rank == failing else HpcfsdpError
    with pytest.raises(kind), raise_together(carrier):
        assert carrier.rank != failing or 1 / 0


def test_assert_same_names_the_rank_that_differs(carrier):
    from hpcfsdp.comm import assert_same

    assert_same(carrier, 7, "the number")
    if carrier.size > 1:
        with pytest.raises(DisagreementError, match=rf"the number .* rank 0 has 7, rank {carrier.size - 1} has 8"):
            assert_same(carrier, 7 + (carrier.rank == carrier.size - 1), "the number")
