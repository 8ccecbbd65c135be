import pytest
import torch

from hpcfsdp.comm.communicator import Grid, check_list, check_peer, check_sizes, segment
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.reduce import accumulate_dtype, refuse_op
from hpcfsdp.errors import CommunicationError
from tests.unit.conftest import NUM_REPLICAS, NUM_SHARDS

comm = FakeCommunicator(1, 3)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.complex32, torch.complex64),
        (torch.int32, torch.int32),
        (torch.uint8, torch.uint8),
        (torch.uint16, torch.int32),
        (torch.uint32, torch.int64),
        (torch.uint64, torch.int64),
        (torch.bool, torch.bool),
    ],
)
def test_narrow_floats_are_summed_in_float32_and_others_in_what_torch_can_compute_with(dtype, wide):
    assert accumulate_dtype(dtype) == wide


def test_averages_of_integers_are_made_of_sums_that_do_not_wrap_around():
    assert accumulate_dtype(torch.int8, "average") == torch.int64
    assert accumulate_dtype(torch.bfloat16, "average") == torch.float32


@pytest.mark.parametrize(
    ("op", "dtype", "problem"),
    [
        ("mean", torch.float32, "unknown reduction 'mean'"),
        ("average", torch.uint64, "torch.uint64 has no average: sum, and divide in a dtype of your choice"),
        ("average", torch.bool, "torch.bool has no average: sum, and divide in a dtype of your choice"),
        ("band", torch.float32, "band needs whole numbers or bool, not torch.float32"),
        ("bor", torch.complex64, "bor needs whole numbers or bool, not torch.complex64"),
        ("bxor", torch.bfloat16, "bxor needs whole numbers or bool, not torch.bfloat16"),
        ("min", torch.complex128, "torch.complex128 has no order that torch can compute with: min is not defined"),
        ("max", torch.uint64, "torch.uint64 has no order that torch can compute with: max is not defined"),
    ],
)
def test_a_reduction_that_makes_no_sense_is_refused(op, dtype, problem):
    assert refuse_op(op, dtype) == problem
    for call in (
        lambda: comm.all_reduce(torch.zeros(3, dtype=dtype), op),
        lambda: comm.reduce_scatter_tensor(torch.zeros(1, dtype=dtype), torch.zeros(3, dtype=dtype), op),
    ):
        with pytest.raises(CommunicationError) as caught:
            call()
        assert str(caught.value).endswith(f" on rank 1: {problem}")


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("average", torch.complex64),
        ("average", torch.int8),
        ("bxor", torch.bool),
        ("min", torch.uint32),
        ("product", torch.uint64),
    ],
)
def test_a_reduction_that_can_be_computed_is_not_refused(op, dtype):
    assert refuse_op(op, dtype) is None


def test_the_segment_of_a_rank_is_a_view():
    full = torch.arange(6)
    part = segment(full, comm)
    assert part.tolist() == [2, 3]
    part.zero_()
    assert full.tolist() == [0, 1, 0, 0, 4, 5]


def test_sizes_that_do_not_fit_are_named():
    check_sizes("gathering", comm, torch.empty(6), torch.empty(2))
    with pytest.raises(CommunicationError) as caught:
        check_sizes("gathering", comm, torch.empty(7), torch.empty(2))
    assert str(caught.value) == (
        "gathering on rank 1 of 3: the full tensor has 7 elements, the shard 2; it must have 3 times the shard's"
    )


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ([3.0], "expected tensors, got float"),
        (
            [torch.empty(2, device="meta")],
            "the tensor is on meta, this communicator works on cpu; move it with .to('cpu')",
        ),
        ([torch.empty(4, 2)[:, 0]], "the tensor of shape (4,) is not contiguous (stride (2,))"),
        ([torch.eye(2).to_sparse()], "the tensor of shape (2, 2) is not contiguous (torch.sparse_coo)"),
        ([torch.empty(1), torch.empty(1).half()], "the tensors differ in dtype: torch.float32 and torch.float16"),
    ],
    ids=["type", "device", "stride", "layout", "dtype"],
)
def test_tensors_that_no_transport_accepts_are_refused(tensors, text):
    with pytest.raises(CommunicationError) as caught:
        comm._check("gathering", *tensors)
    assert str(caught.value) == f"gathering on rank 1 of 3: {text}"


@pytest.mark.parametrize("peer", [-1, 3])
def test_a_rank_that_does_not_exist_is_refused(peer):
    with pytest.raises(CommunicationError) as caught:
        check_peer("sending", comm, peer)
    assert str(caught.value) == f"sending on rank 1: there is no rank {peer}, they are 0 to 2"


@pytest.mark.parametrize(("tensors", "given"), [(None, "None"), ([torch.zeros(1)] * 2, "2 tensor(s)")], ids=str)
def test_a_list_without_a_tensor_for_each_rank_is_refused(tensors, given):
    with pytest.raises(CommunicationError) as caught:
        check_list("gathering", comm, "outputs", tensors)
    assert str(caught.value) == (f"gathering on rank 1 of 3: outputs must hold one tensor for each rank, got {given}")


def test_ranks_of_a_grid_are_numbered_replica_after_replica(run_grid):
    def body(shard, replicate):
        grid = Grid(shard, replicate)
        return grid.rank, grid.size, grid.device, grid.all_gather_object((replicate.rank, shard.rank))

    everyone = [(replica, part) for replica in range(NUM_REPLICAS) for part in range(NUM_SHARDS)]
    expected = [(rank, 6, torch.device("cpu"), everyone) for rank in range(6)]
    assert run_grid(body) == expected


@pytest.mark.parametrize("src", range(NUM_SHARDS * NUM_REPLICAS))
def test_all_ranks_of_a_grid_get_what_one_has(run_grid, src):
    def body(shard, replicate):
        grid = Grid(shard, replicate)
        tensor = torch.full((2,), float(grid.rank))
        grid.broadcast(tensor, src)
        return grid.broadcast_object({"rank": grid.rank}, src), tensor.tolist()

    assert run_grid(body) == [({"rank": src}, [src, src])] * 6


def test_by_default_the_first_rank_speaks(run_grid):
    assert (
        run_grid(lambda shard, replicate: Grid(shard, replicate).broadcast_object((shard.rank, replicate.rank)))
        == [(0, 0)] * 6
    )
