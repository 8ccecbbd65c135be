"""Tensors of every kind and dtype under the calls of torch.distributed over hpcmpi, each against gloo."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp.errors import CommunicationError

pytestmark = [pytest.mark.ranks(3, 1, 2), pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

OPS = dist.ReduceOp
SMALL = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames these
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(scope="module")
def gloo(world):
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Sparse tensors


def sparse(rank, dtype=torch.float32):
    """What a rank holds: other rows on each, one of them twice, one on all ranks, none on the last of three."""
    rows = torch.tensor([rank, 3, rank, 5]) if rank != 2 else torch.empty(0, dtype=torch.int64)
    values = (torch.arange(float(2 * len(rows))).view(-1, 2) + rank).to(dtype)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (7, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_sparse_tensors_are_summed_as_gloo_sums_them(world, gloo, dtype):
    over_mpi, over_gloo = (sparse(world.rank, dtype) for _ in range(2))
    work = dist.all_reduce(over_mpi, async_op=True)
    dist.all_reduce(over_gloo, group=gloo)
    assert work.get_future().wait()[0] is over_mpi
    assert over_mpi.is_coalesced() == over_gloo.is_coalesced()
    same(over_mpi, over_gloo)


def test_averages_of_sparse_tensors_and_narrow_ones(world):
    mean, narrow = sparse(world.rank), sparse(world.rank, torch.bfloat16)
    dist.all_reduce(mean, OPS.AVG)
    dist.all_reduce(narrow)
    total = torch.stack([sparse(rank).to_dense() for rank in range(world.size)]).sum(0)
    same(mean.to_dense(), total / world.size)
    same(narrow.to_dense(), total.bfloat16())
    matrix = torch.eye(3).mul(world.rank).to_sparse()  # sparse in both dimensions
    dist.all_reduce(matrix)
    same(matrix.to_dense(), torch.eye(3) * sum(range(world.size)))


def test_what_sparse_tensors_do_not_have_is_refused(world):
    with pytest.raises(CommunicationError, match=r"sparse tensors support only 'sum' and 'average'"):
        dist.all_reduce(sparse(world.rank), OPS.MAX)
    with pytest.raises(CommunicationError, match=r"not contiguous \(torch\.sparse_coo\)"):
        dist.broadcast(sparse(world.rank), 0)


def test_sparse_tensors_of_different_shapes_are_refused_on_every_rank(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    group, wide = dist.new_group(), world.rank == 0
    with pytest.raises(
        CommunicationError, match=r"calls all_reduce\(sum\) of a sparse tensor of .*, but rank \d calls"
    ):
        dist.all_reduce(torch.eye(4 if wide else 3).to_sparse(), group=group)
    world.comm.Barrier()
    group.abort()


def test_a_model_with_a_sparse_embedding_trains_as_over_gloo(world, gloo):
    weights = []
    for group in (None, gloo):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 1))
        model = DistributedDataParallel(model, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([world.rank, 7, step, world.rank + step])).pow(2).sum().backward()
            assert model.module[0].weight.grad.is_sparse
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*weights)


# Expanded tensors


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1, 1)], ids=str)
def test_an_expanded_tensor_is_reduced_as_gloo_reduces_it(world, gloo, shape):
    results = []
    for group in (None, gloo):
        one = torch.full((shape[0],) if len(shape) > 1 else (1,), world.rank + 1.0)
        expanded = one.unsqueeze(1).expand(shape) if len(shape) > 1 else one.expand(shape)
        dist.all_reduce(expanded, group=group)
        results.append(expanded.clone())
        assert expanded.stride() == (one.unsqueeze(1).expand(shape) if len(shape) > 1 else one.expand(shape)).stride()
    same(*results)
    flag = torch.tensor(float("nan")).expand(3)
    dist.all_reduce(flag)
    assert flag.isnan().all()


def test_an_expanded_tensor_that_would_hold_several_values_is_refused(world):
    if world.size == 1:
        pytest.skip("what one rank reduces is what it has")
    tensor = torch.zeros(1).expand(3) if world.rank == 0 else torch.arange(3.0)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="single memory location"):
            dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)


# Dtypes


def filled(rank, numel, dtype):
    return ((torch.arange(numel) + rank) % 2).to(dtype)


def moves(group, rank, size, dtype):
    """What each call that moves values gives."""
    mine, n = filled(rank, 6, dtype), 6
    gathered = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=group)
    single = torch.zeros(n * size, dtype=dtype)
    all_gather_single(single, mine, group=group)
    from_0 = mine.clone()
    dist.broadcast(from_0, 0, group=group)
    swapped = torch.zeros(size, dtype=dtype)
    dist.all_to_all_single(swapped, filled(rank, size, dtype), group=group)
    at_0 = [torch.zeros_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, at_0, 0, group=group)
    scattered = torch.zeros_like(mine)
    dist.scatter(scattered, [filled(r, 6, dtype) for r in range(size)] if rank == 0 else None, 0, group=group)
    passed = torch.zeros_like(mine)
    if size > 1:
        work = dist.isend(mine, (rank + 1) % size, group=group)
        dist.recv(passed, (rank - 1) % size, group=group)
        work.wait()
    return [*gathered, single, from_0, swapped, *(at_0 or []), scattered, passed]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_values_are_moved_as_gloo_moves_them(world, gloo, dtype):
    over_mpi = moves(None, world.rank, world.size, dtype)
    try:
        expected = moves(gloo, world.rank, world.size, dtype)
    except RuntimeError:  # gloo has no such dtype; nor does it begin to send anything
        assert dtype not in (torch.bool, torch.uint8)
        expected = [tensor.to(dtype) for tensor in moves(gloo, world.rank, world.size, torch.int64)]
    assert all(torch.equal(got.long(), other.long()) for got, other in zip(over_mpi, expected, strict=True))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("op", [OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BAND, OPS.BOR, OPS.BXOR], ids=str)
def test_values_are_reduced_as_integers_are(world, dtype, op):
    if dtype is torch.uint64 and op in (OPS.MIN, OPS.MAX):
        with pytest.raises(CommunicationError, match=r"torch\.uint64 has no order"):
            dist.all_reduce(torch.ones(3, dtype=dtype), op)
        return

    def reduced_by(call, kind):
        mine = filled(world.rank, 3 * world.size, kind)
        if call == "all_reduce":
            dist.all_reduce(mine, op)
        elif call == "reduce":
            dist.reduce(mine, 0, op)
        else:
            part = torch.zeros(3, dtype=kind)
            reduce_scatter_single(part, mine, op)
            return part
        return mine if call == "all_reduce" or world.rank == 0 else None

    for call in ("all_reduce", "reduce", "reduce_scatter"):
        got, expected = reduced_by(call, dtype), reduced_by(call, torch.int64)
        if got is not None:
            assert torch.equal(got.long(), expected.to(dtype).long()), call


# What torch asks of works and groups


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_results_have_the_shape_that_those_of_gloo_have(world, gloo):
    ones, size = torch.ones(2, 3), world.size
    calls = [
        lambda group: dist.all_reduce(ones.clone(), group=group, async_op=True),
        lambda group: dist.broadcast(ones.clone(), 0, group=group, async_op=True),
        lambda group: dist.all_gather([torch.ones(2, 3) for _ in range(size)], ones, group=group, async_op=True),
        lambda group: all_gather_single(torch.ones(2 * size, 3), ones, group=group, async_op=True),
        lambda group: dist.all_to_all_single(torch.ones(size), torch.ones(size), group=group, async_op=True),
        lambda group: dist.barrier(group=group, async_op=True),
    ]
    for number, call in enumerate(calls):
        over_mpi, over_gloo = ([value.shape for value in call(group).get_future().wait()] for group in (None, gloo))
        assert over_mpi == over_gloo, number


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("many", [1, 1 << 16], ids=["small", "large"])
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_autograd_sees_no_change_of_a_tensor_as_with_gloo(world, asynchronous, many, is_contiguous):
    """A version that rose would fail the backward of whatever has saved the tensor. gloo's rise where it copies."""
    size, peer = world.size, (world.rank + 1) % world.size

    def new(rows):
        values = torch.randn(rows, many, requires_grad=True).relu()
        return values if is_contiguous else values.t()

    def wait_for(*works):
        for work in works:
            if work is not None:
                work.wait()

    def coalesced(tensors):
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        return manager if asynchronous else None

    named, root = {"async_op": asynchronous}, world.rank == 0
    calls = {
        "all_reduce": lambda x, xs, whole: dist.all_reduce(x, **named),
        "reduce": lambda x, xs, whole: dist.reduce(x, 0, **named),
        "broadcast": lambda x, xs, whole: dist.broadcast(x, 0, **named),
        "all_gather": lambda x, xs, whole: dist.all_gather(xs, x, **named),
        "gather": lambda x, xs, whole: dist.gather(x, xs if root else None, 0, **named),
        "scatter": lambda x, xs, whole: dist.scatter(x, xs if root else None, 0, **named),
        "reduce_scatter": lambda x, xs, whole: dist.reduce_scatter(x, xs, **named),
        "all_to_all": lambda x, xs, whole: dist.all_to_all(xs, [x] * size, **named),
        "send and recv": lambda x, xs, whole: wait_for(dist.isend(x, peer), dist.irecv(xs[0], (world.rank - 1) % size)),
        "coalesced": lambda x, xs, whole: coalesced([x, *xs]),
    }
    if is_contiguous:
        calls["all_to_all_single"] = lambda x, xs, whole: dist.all_to_all_single(xs[0], x, **named)
        calls["all_gather_single"] = lambda x, xs, whole: all_gather_single(whole, x, **named)
        calls["reduce_scatter_single"] = lambda x, xs, whole: reduce_scatter_single(x, whole, **named)
    for name, call in calls.items():
        x, *xs = (new(2 * size) for _ in range(1 + size))
        given = [x, *xs, new(2 * size * size)]
        wait_for(call(x, xs, given[-1]))
        assert [value._version for value in given] == [0] * len(given), name
        sum(value.sum() for value in given).backward()


def test_a_group_counts_its_collectives(world):
    group = dist.new_group()
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    assert group._get_sequence_number_for_group() == before + 3
    dist.destroy_process_group(group)


def test_ranks_that_reduce_to_different_roots_raise(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    group = dist.new_group()
    with pytest.raises(CommunicationError, match=r"calls reduce to \d: .*, but rank \d calls reduce to \d: "):
        dist.reduce(torch.ones(3), int(world.rank == 0), group=group)
    world.comm.Barrier()
    group.abort()
