"""The functions of torch.distributed over hpcmpi, each against gloo, or against values made by hand."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils import _pytree as pytree

from hpcfsdp.errors import CommunicationError
from hpcfsdp.hang import waits

pytestmark = [pytest.mark.ranks(3, 1, 2, more=(4,)), pytest.mark.transport]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
OPS = dist.ReduceOp
LARGE = 30_001  # elements: over the size up to which a reduction is one round of messages
SHORT = datetime.timedelta(seconds=0.3)

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames these
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

old_names = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of functions that it is about to rename


@pytest.fixture(scope="module")
def gloo(world):
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def group(world):
    """A group of its own for tests that leave calls unmatched."""
    made = dist.new_group()
    yield made
    dist.barrier()
    dist.destroy_process_group(made)


def numbers(rank, *shape, dtype=torch.float32, seed=0):
    """Whole numbers so small that any order of summation gives the same, in any dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def stacked(world, *shape, **options):
    return torch.stack([numbers(rank, *shape, **options) for rank in range(world.size)])


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def tied(dtype):
    """What each rank adds, and the sum: in `dtype` the ones would vanish one by one, in float32 they do not."""
    return lambda rank: (torch.tensor(2.0 / torch.finfo(dtype).eps) if rank == 0 else torch.tensor(1.0)).to(dtype)


# Reductions


@pytest.mark.parametrize("numel", [7, LARGE])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE], ids=str)
@pytest.mark.parametrize(
    ("op", "by_hand"),
    [
        (OPS.SUM, lambda t: t.sum(0, dtype=t.dtype)),
        (OPS.PRODUCT, lambda t: t.prod(0, dtype=t.dtype)),
        (OPS.MIN, lambda t: t.amin(0)),
        (OPS.MAX, lambda t: t.amax(0)),
    ],
    ids=["sum", "product", "min", "max"],
)
def test_all_reduce_gives_what_gloo_gives(world, gloo, op, by_hand, dtype, numel):
    over_mpi, over_gloo = (numbers(world.rank, numel, dtype=dtype) for _ in range(2))
    dist.all_reduce(over_mpi, op)
    same(over_mpi, by_hand(stacked(world, numel, dtype=dtype)))
    if dtype is not torch.int16:  # which gloo does not have
        dist.all_reduce(over_gloo, op, group=gloo)
        same(over_mpi, over_gloo)


@pytest.mark.parametrize("dtype", [*WHOLE, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("op", "combine"),
    [(OPS.BAND, torch.bitwise_and), (OPS.BOR, torch.bitwise_or), (OPS.BXOR, torch.bitwise_xor)],
    ids=["and", "or", "xor"],
)
def test_all_reduce_by_bits(world, op, combine, dtype):
    tensors = (stacked(world, 9, dtype=torch.int64) - 1).to(dtype)
    got = tensors[world.rank].clone()
    dist.all_reduce(got, op)
    expected = tensors[0]
    for tensor in tensors[1:]:
        expected = combine(expected, tensor)
    same(got, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_an_average_is_the_sum_divided_by_the_ranks(world, dtype):
    value = (numbers(world.rank, 5) * world.size).to(dtype)
    dist.all_reduce(value, OPS.AVG)
    same(value, stacked(world, 5).sum(0).to(dtype))


@pytest.mark.parametrize("numel", [5, LARGE])
@pytest.mark.parametrize("dtype", [*WHOLE, torch.uint16, torch.uint32], ids=str)
def test_an_average_of_integers_is_rounded_towards_zero(world, dtype, numel):
    sign = -1 if dtype.is_signed else 1
    columns = torch.stack(
        [sign * (torch.arange(numel) % 50 + 70 + rank) for rank in range(world.size)]
    )  # int8 sums wrap
    expected = columns.sum(0).div(world.size, rounding_mode="trunc").to(dtype)
    mine = columns[world.rank].to(dtype)
    reduced, at_root, part, part_too = mine.clone(), mine.clone(), torch.empty_like(mine), torch.empty_like(mine)
    dist.all_reduce(reduced, OPS.AVG)
    dist.reduce(at_root, 0, OPS.AVG)
    reduce_scatter_single(part, torch.cat([mine] * world.size), OPS.AVG)
    dist.reduce_scatter(part_too, [mine] * world.size, OPS.AVG)
    for got in (reduced, part, part_too, *([at_root] if world.rank == 0 else [])):
        assert torch.equal(got.long(), expected.long())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64], ids=str)
def test_what_has_no_average_is_refused(world, dtype):
    with pytest.raises(CommunicationError, match=rf"{dtype} has no average"):
        dist.all_reduce(torch.ones(3, dtype=dtype), OPS.AVG)


@pytest.mark.parametrize(
    ("op", "expected"), [(OPS.SUM, any), (OPS.MAX, any), (OPS.PRODUCT, all), (OPS.MIN, all)], ids=str
)
def test_bools_are_any_or_all(world, op, expected):
    columns = [[rank == 0, True, False, rank != 0] for rank in range(world.size)]
    got = torch.tensor(columns[world.rank])
    dist.all_reduce(got, op)
    assert got.tolist() == [expected(column) for column in zip(*columns, strict=True)]


def test_complex_numbers_are_summed_and_have_no_product(world, gloo):
    value = torch.complex(numbers(world.rank, 4), numbers(world.rank, 4, seed=1))
    over_gloo = value.clone()
    dist.all_reduce(value)
    dist.all_reduce(over_gloo, group=gloo)
    same(value, over_gloo)
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(value, OPS.PRODUCT)


@pytest.mark.parametrize("numel", [1, LARGE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8], ids=str)
def test_narrow_floats_are_summed_in_float32(world, dtype, numel):
    parts = [tied(dtype)(rank).expand(numel) for rank in range(world.size)]
    total = torch.stack([part.float() for part in parts]).sum(0).to(dtype)
    reduced, at_root, mine, mine_too = (torch.empty(numel, dtype=dtype) for _ in range(4))
    reduced.copy_(parts[world.rank])
    at_root.copy_(parts[world.rank])
    dist.all_reduce(reduced)
    dist.reduce(at_root, dst=world.size - 1)
    reduce_scatter_single(mine, parts[world.rank].repeat(world.size))
    dist.reduce_scatter(mine_too, [parts[world.rank].contiguous()] * world.size)
    for got in (reduced, mine, mine_too, *([at_root] if world.rank == world.size - 1 else [])):
        same(got.float(), total.float())


def test_all_ranks_get_the_same_bits(world):
    value = torch.randn(LARGE, generator=torch.Generator().manual_seed(world.rank))
    again = value.clone()
    dist.all_reduce(value, OPS.AVG)
    dist.all_reduce(again, OPS.AVG)
    everyone = [torch.empty_like(value) for _ in range(world.size)]
    dist.all_gather(everyone, value)
    assert all(torch.equal(other, again) for other in everyone)


def test_reduce_leaves_the_tensors_of_all_but_the_root_alone(world, gloo):
    for root in range(world.size):
        value, over_gloo = numbers(world.rank, 6), numbers(world.rank, 6)
        dist.reduce(value, root, OPS.MAX)
        dist.reduce(over_gloo, root, OPS.MAX, group=gloo)
        same(value, over_gloo if world.rank == root else numbers(world.rank, 6))


def test_reduce_scatter_of_lists_and_of_one_tensor_give_the_same(world, gloo):
    full = numbers(world.rank, 3 * world.size, 2)
    from_list, from_one, over_gloo = (torch.empty(3, 2) for _ in range(3))
    dist.reduce_scatter(from_list, list(full.chunk(world.size)))
    reduce_scatter_single(from_one, full)
    reduce_scatter_single(over_gloo, full, group=gloo)
    same(from_list, over_gloo)
    same(from_one, over_gloo)
    same(full, numbers(world.rank, 3 * world.size, 2))


@old_names
def test_the_older_names_do_the_same(world):
    gathered, mine = torch.empty(2 * world.size), torch.empty(2)
    dist.all_gather_into_tensor(gathered, numbers(world.rank, 2))
    dist.reduce_scatter_tensor(mine, gathered)
    same(gathered, stacked(world, 2).flatten())
    same(mine, gathered.view(world.size, 2)[world.rank] * world.size)
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(world.size)]
    dist.all_gather_coalesced(lists, [numbers(world.rank, 2), numbers(world.rank, 3)])
    same(lists, [[numbers(rank, 2), numbers(rank, 3)] for rank in range(world.size)])
    several = [numbers(world.rank, 2), numbers(world.rank, 3)]
    dist.all_reduce_coalesced(several)
    same(several, [stacked(world, 2).sum(0), stacked(world, 3).sum(0)])


def test_values_may_be_multiplied_before_they_are_summed(world):
    times_three, total = dist._make_nccl_premul_sum(3.0), stacked(world, world.size).sum(0) * 3
    reduced, at_root, full = (numbers(world.rank, world.size) for _ in range(3))
    mine, mine_too = torch.empty(1), torch.empty(1)
    dist.all_reduce(reduced, times_three)
    dist.reduce(at_root, 0, times_three)
    reduce_scatter_single(mine, full, times_three)
    dist.reduce_scatter(mine_too, list(full.chunk(world.size)), times_three)
    same(reduced, total)
    same(at_root, total if world.rank == 0 else numbers(world.rank, world.size))
    same([mine, mine_too], [total[world.rank : world.rank + 1]] * 2)
    same(full, numbers(world.rank, world.size))


# Moving values


ANY = [*FLOATS, *WHOLE, *FP8, torch.bool, torch.complex64, torch.uint16]


@pytest.mark.parametrize("dtype", ANY, ids=str)
def test_values_of_every_dtype_move_unchanged(world, dtype):
    n, everyone = world.size, [numbers(rank, 5).to(dtype) for rank in range(world.size)]
    mine = everyone[world.rank]

    def equal(got, expected):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))

    copy, whole = mine.clone(), torch.empty(n * 5, dtype=dtype)
    dist.broadcast(copy, n - 1)
    equal(copy, everyone[-1])
    all_gather_single(whole, mine)
    equal(whole, torch.cat([one.view(torch.uint8) for one in everyone]).view(dtype))
    outputs = [torch.empty(5, dtype=dtype) for _ in range(n)]
    dist.all_gather(outputs, mine)
    for got, expected in zip(outputs, everyone, strict=True):
        equal(got, expected)
    dist.all_to_all(outputs, [mine] * n)
    for got, expected in zip(outputs, everyone, strict=True):
        equal(got, expected)
    dist.all_to_all_single(whole, torch.cat([mine.view(torch.uint8)] * n).view(dtype))
    equal(whole, torch.cat([one.view(torch.uint8) for one in everyone]).view(dtype))
    dist.scatter(copy, everyone if world.rank == 0 else None, src=0)
    equal(copy, mine)
    dist.gather(mine, outputs if world.rank == n - 1 else None, dst=n - 1)
    if world.rank == n - 1:
        for got, expected in zip(outputs, everyone, strict=True):
            equal(got, expected)


def broadcast(group, rank, size):
    value = numbers(rank, 3, 2)
    dist.broadcast(value, size - 1, group=group)
    return value


def all_gather(group, rank, size):
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(outputs, numbers(rank, 2, 3), group=group)
    return outputs


def all_gather_along_rows(group, rank, size):
    output = torch.empty(size * 2, 3)
    all_gather_single(output, numbers(rank, 2, 3), group=group)
    return output


def all_to_all(group, rank, size):
    outputs = [torch.empty(2, 3) for _ in range(size)]
    dist.all_to_all(outputs, list(numbers(rank, size, 2, 3)), group=group)
    return outputs


def all_to_all_single(group, rank, size):
    output = torch.empty(size * 2, 3)
    dist.all_to_all_single(output, numbers(rank, size * 2, 3), group=group)
    return output


def all_to_all_single_with_splits(group, rank, size):
    """Rank r sends r + 1 + p rows to rank p, and none to itself."""
    sends = [0 if peer == rank else rank + 1 + peer for peer in range(size)]
    takes = [0 if peer == rank else peer + 1 + rank for peer in range(size)]
    output = torch.empty(sum(takes), 2)
    dist.all_to_all_single(output, numbers(rank, sum(sends), 2), takes, sends, group=group)
    return output


def gather(group, rank, size):
    outputs = [torch.empty(4) for _ in range(size)] if rank == size - 1 else None
    dist.gather(numbers(rank, 4), outputs, dst=size - 1, group=group)
    return outputs or []


def scatter(group, rank, size):
    output = torch.empty(4)
    dist.scatter(output, list(numbers(rank, size, 4)) if rank == 0 else None, src=0, group=group)
    return output


def all_gather_object(group, rank, size):
    outputs = [None] * size
    dist.all_gather_object(outputs, {"rank": rank, "text": "x" * 10**rank}, group=group)
    return outputs


def broadcast_object_list(group, rank, size):
    values = [f"from {rank}", rank, None] if rank == 0 else [None] * 3
    dist.broadcast_object_list(values, src=0, group=group)
    return values


def gather_object(group, rank, size):
    outputs = [None] * size if rank == 0 else None
    dist.gather_object(("rank", rank), outputs, dst=0, group=group)
    return outputs


def scatter_object_list(group, rank, size):
    output = [None]
    dist.scatter_object_list(output, [{"to": peer} for peer in range(size)] if rank == 0 else None, src=0, group=group)
    return output


def one_to_the_next(group, rank, size):
    """Every rank sends to the next one, with two tags that are received in the other order."""
    works = [dist.isend(numbers(rank, 3, seed=tag), (rank + 1) % size, group=group, tag=tag) for tag in (1, 2)]
    first, second = torch.empty(3), torch.empty(3)
    for value, tag in ((second, 2), (first, 1)):
        dist.irecv(value, (rank - 1) % size, group=group, tag=tag).wait()
    for work in works:
        work.wait()
    return first, second


def batch_isend_irecv(group, rank, size):
    given, taken = numbers(rank, 3), torch.empty(3)
    sends = dist.P2POp(dist.isend, given, (rank + 1) % size, group)
    receives = dist.P2POp(dist.irecv, taken, (rank - 1) % size, group)
    for work in dist.batch_isend_irecv([receives, sends]):
        work.wait()
    return taken


def blocking_messages(group, rank, size):
    """A relay: each rank but the first waits for the one before it."""
    value = numbers(0, 3)
    if rank > 0:
        value = torch.empty(3)
        assert dist.recv(value, rank - 1, group=group) == rank - 1
    if rank < size - 1:
        dist.send(value + 1, rank + 1, group=group)
    return value


def from_any_rank(group, rank, size):
    if rank != 0:
        dist.send(torch.tensor([float(rank)]), 0, group=group)
        return set()
    found = set()
    for _ in range(size - 1):
        value = torch.empty(1)
        found.add((dist.recv(value, group=group), value.item()))
    return found


def objects_from_one_to_one(group, rank, size):
    values = [{"rank": 0}, "text"] if rank == 0 else [None, None]
    if size > 1 and rank == 0:
        dist.send_object_list(values, dst=size - 1, group=group)
    elif size > 1 and rank == size - 1:
        assert dist.recv_object_list(values, src=0, group=group) == 0
    return values


def all_reduces_put_together(group, rank, size):
    values = [numbers(rank, 3), numbers(rank, 2, 2, seed=1)]
    with dist._coalescing_manager(group=group):
        for value in values:
            dist.all_reduce(value, group=group)
    return values


def gathers_put_together(group, rank, size):
    outputs = [torch.empty(3 * size), torch.empty(2 * size)]
    with dist._coalescing_manager(group=group, async_ops=True) as works:
        for output in outputs:
            all_gather_single(output, numbers(rank, output.numel() // size), group=group)
    works.wait()
    return outputs


def reduce_scatters_put_together(group, rank, size):
    outputs = [torch.empty(3), torch.empty(2)]
    with dist._coalescing_manager(group=group):
        for output in outputs:
            reduce_scatter_single(output, numbers(rank, output.numel() * size), group=group)
    return outputs


def functional(group, rank, size):
    value = numbers(rank, 2 * size, 3)
    return [
        funcol.all_reduce(value, "sum", group),
        funcol.all_reduce(value, "max", group),
        funcol.broadcast(value, 0, group),
        funcol.all_gather_tensor(value, gather_dim=1, group=group),
        funcol.reduce_scatter_tensor(value, "sum", scatter_dim=0, group=group),
        funcol.all_to_all_single(value, None, None, group),
        *funcol.all_reduce_coalesced([value, value + 1], "sum", group),
    ]


CALLS = [
    broadcast,
    all_gather,
    all_gather_along_rows,
    all_to_all,
    all_to_all_single,
    all_to_all_single_with_splits,
    gather,
    scatter,
    all_gather_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
    one_to_the_next,
    batch_isend_irecv,
    blocking_messages,
    from_any_rank,
    objects_from_one_to_one,
    all_reduces_put_together,
    gathers_put_together,
    reduce_scatters_put_together,
    functional,
]


@old_names
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_over_mpi_it_gives_what_it_gives_over_gloo(world, gloo, call):
    if call.__name__ in ("one_to_the_next", "batch_isend_irecv") and world.size == 1:
        pytest.skip("gloo sends nothing to the rank itself; a test of its own has hpcmpi do it")
    over_mpi = call(dist.group.WORLD, world.rank, world.size)
    over_gloo = call(gloo, world.rank, world.size)
    leaves, others = (pytree.tree_leaves(result) for result in (over_mpi, over_gloo))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    same(tensors, [leaf for leaf in others if isinstance(leaf, torch.Tensor)])
    assert bool(tensors) or over_mpi == over_gloo


def test_a_rank_sends_to_itself(world):
    value = torch.empty(3)
    work = dist.isend(numbers(7, 3), world.rank)
    dist.irecv(value, world.rank).wait()
    work.wait()
    same(value, numbers(7, 3))


def test_ranks_may_contribute_tensors_of_different_sizes(world):
    outputs = [torch.empty(rank, 2) for rank in range(world.size)]  # rank 0 nothing at all
    dist.all_gather(outputs, numbers(world.rank, world.rank, 2))
    same(outputs, [numbers(rank, rank, 2) for rank in range(world.size)])
    outputs = [torch.empty(peer, world.rank) for peer in range(world.size)]
    dist.all_to_all(outputs, [numbers(world.rank, world.rank, peer, seed=peer) for peer in range(world.size)])
    same(outputs, [numbers(peer, peer, world.rank, seed=world.rank) for peer in range(world.size)])
    mine = torch.empty(world.rank)
    dist.reduce_scatter(mine, [numbers(world.rank, piece) for piece in range(world.size)])
    same(mine, stacked(world, world.rank).sum(0))


def test_rows_that_cannot_be_split_equally_are_refused(world):
    if world.size == 1:
        pytest.skip("one rank takes any number of rows")
    with pytest.raises(CommunicationError, match=rf"{world.size + 1} rows do not divide by {world.size} ranks"):
        dist.all_to_all_single(torch.empty(world.size + 1), torch.empty(world.size + 1))


def test_a_size_that_does_not_fit_is_refused_on_this_rank(world):
    with pytest.raises(CommunicationError, match=rf"on rank {world.rank}"):
        all_gather_single(torch.empty(world.size * 3 + 1), torch.empty(3))


# Tensors of all kinds


def test_tensors_that_are_not_contiguous_keep_their_strides(world):
    columns = numbers(world.rank, 4, 6).t()
    dist.all_reduce(columns)
    same(columns, stacked(world, 4, 6).sum(0).t())
    holes = torch.zeros(8)
    dist.broadcast(holes[::2].copy_(numbers(world.rank, 4)), 0)
    same(holes, torch.stack([numbers(0, 4), torch.zeros(4)], 1).flatten())
    whole = torch.zeros(3, 2 * world.size).t()
    all_gather_single(whole, numbers(world.rank, 3, 2).t())
    same(whole, torch.cat([numbers(rank, 3, 2).t() for rank in range(world.size)]))
    piece = torch.zeros(3, 2).t()
    reduce_scatter_single(piece, whole)
    same(piece, numbers(world.rank, 3, 2).t() * world.size)
    work = dist.isend(numbers(world.rank, 3, 2).t(), (world.rank + 1) % world.size)
    dist.recv(whole[:2], (world.rank - 1) % world.size) if world.size > 1 else dist.irecv(whole[:2], 0).wait()
    work.wait()
    same(whole[:2], numbers((world.rank - 1) % world.size, 3, 2).t())


def test_tensors_without_dimensions(world):
    value = torch.tensor(world.rank + 1.0)
    dist.all_reduce(value)
    same(value, torch.tensor(world.size * (world.size + 1) / 2))
    outputs = [torch.empty(()) for _ in range(world.size)]
    dist.all_gather(outputs, torch.tensor(float(world.rank)))
    same(outputs, [torch.tensor(float(rank)) for rank in range(world.size)])
    whole = torch.empty(world.size)
    all_gather_single(whole, torch.tensor(float(world.rank)))
    assert whole.tolist() == list(range(world.size))


def test_a_gathered_tensor_may_have_a_dimension_for_the_ranks(world):
    whole = torch.empty(world.size, 2, 3)
    all_gather_single(whole, numbers(world.rank, 2, 3))
    same(whole, stacked(world, 2, 3))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_tensors_without_elements(world, shape):
    nothing = torch.empty(shape)
    dist.all_reduce(nothing)
    dist.all_reduce(nothing, OPS.AVG)
    dist.broadcast(nothing, 0)
    dist.reduce(nothing, 0)
    all_gather_single(torch.empty(world.size * shape[0], *shape[1:]), nothing)
    reduce_scatter_single(nothing, torch.empty(world.size * shape[0], *shape[1:]))
    dist.all_gather([torch.empty(shape) for _ in range(world.size)], nothing)
    work = dist.isend(nothing, (world.rank + 1) % world.size)
    dist.irecv(nothing, (world.rank - 1) % world.size).wait()
    work.wait()


def test_parameters_are_written_without_autograd(world):
    weight = torch.nn.Parameter(numbers(world.rank, 3))
    dist.all_reduce(weight)
    dist.broadcast(weight, 0)
    same(weight.detach(), stacked(world, 3).sum(0))
    assert weight.is_leaf and weight.requires_grad and weight.grad_fn is None
    strided = torch.nn.Parameter(numbers(world.rank, 3, 2).t())
    dist.all_reduce(strided)
    same(strided.detach(), stacked(world, 3, 2).sum(0).t())
    outputs = [torch.empty(3) for _ in range(world.size)]
    dist.all_gather(outputs, weight)
    assert not any(output.requires_grad for output in outputs)


@old_names
def test_functional_collectives_are_differentiable(world):
    value = numbers(world.rank, 3).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(value, gather_dim=0, group=dist.group.WORLD)
    (gathered * torch.arange(1.0, 3 * world.size + 1)).sum().backward()
    same(value.grad, torch.arange(1.0, 3 * world.size + 1).view(world.size, 3)[world.rank] * world.size)


def test_a_compiled_function_calls_collectives(world):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def total(value):
        value = value * 2
        dist.all_reduce(value)
        return value + funcol.all_reduce(value, "max", dist.group.WORLD)

    both = stacked(world, 3) * 2
    same(total(numbers(world.rank, 3)), both.sum(0) * 2)


# Work


def test_works_may_be_waited_for_in_any_order(world):
    values = [numbers(world.rank, numel, seed=numel) for numel in (3, LARGE, 1, 500)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    works.append(dist.barrier(async_op=True))
    order = works if world.rank % 2 else reversed(works)
    for work in order:
        assert work.wait()
    same(values, [stacked(world, numel, seed=numel).sum(0) for numel in (3, LARGE, 1, 500)])


def test_a_work_completes_while_it_is_looked_at(world):
    value = numbers(world.rank, LARGE)
    work = dist.all_reduce(value, async_op=True)
    while not work.is_completed():
        pass
    assert work.is_success()
    same(value, stacked(world, LARGE).sum(0))
    assert work.result()[0] is value


def test_work_that_is_never_waited_for_is_completed_by_later_calls(world):
    values = [numbers(world.rank, LARGE, seed=seed) for seed in range(3)]
    for value in values:
        dist.all_reduce(value, async_op=True)
    dist.barrier()
    dist.all_reduce(torch.ones(LARGE))
    last = dist.all_reduce(values[0], async_op=True)
    last.wait()
    same(values[0], stacked(world, LARGE, seed=0).sum(0) * world.size)


def test_calls_on_the_same_memory_see_the_results_of_earlier_calls(world):
    value = numbers(world.rank, LARGE)
    columns = value.view(19, -1).t()
    dist.all_reduce(value, async_op=True)
    dist.all_reduce(columns, async_op=True)  # not contiguous
    gathered = torch.empty(world.size * LARGE)
    all_gather_single(gathered, value, async_op=True)
    dist.all_reduce(value[1:])  # while the others read it
    expected = stacked(world, LARGE).sum(0) * world.size
    same(gathered, expected.repeat(world.size))
    same(value[1:], expected[1:] * world.size)


def test_tensors_that_are_only_read_may_be_read_by_several_calls(world):
    value, outputs = numbers(world.rank, LARGE), [torch.empty(world.size * LARGE) for _ in range(2)]
    works = [all_gather_single(output, value, async_op=True) for output in outputs]
    for work in reversed(works):
        work.wait()
    same(outputs, [stacked(world, LARGE).flatten()] * 2)


def test_a_future_holds_the_result(world):
    value = numbers(world.rank, 4)
    future = dist.all_reduce(value, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), stacked(world, 4).sum(0) * 2)


def test_a_message_from_any_rank_has_its_source(world):
    if world.size == 1:
        pytest.skip("needs a rank to send")
    if world.rank == world.size - 1:
        dist.send(torch.ones(1), 0, tag=5)
    elif world.rank == 0:
        work = dist.irecv(torch.empty(1), tag=5)
        work.wait()
        assert work.source_rank() == world.size - 1


@pytest.mark.parametrize("how", ["wait", "barrier"])
def test_a_wait_that_is_given_a_time_names_who_does_not_come(world, group, how):
    if world.size == 1:
        pytest.skip("there is no other rank to wait for")
    if world.rank == 0:
        missing = ", ".join(map(str, range(1, world.size)))
        with pytest.raises(CommunicationError, match=rf"barrier on rank 0: waited 0\.3 s for rank\(s\) {missing},"):
            if how == "barrier":
                dist.barrier(group=group, timeout=SHORT)
            else:
                dist.barrier(group=group, async_op=True).wait(SHORT)
    world.comm.Barrier()
    if world.rank != 0:
        dist.barrier(group=group)  # takes what rank 0 has sent


def test_a_message_that_arrives_while_missing_ranks_are_polled_is_received(world, monkeypatch):
    monkeypatch.setattr(waits, "LOOK_AFTER_S", 0.0)  # as after a long wait
    for late in range(12):
        if world.rank == late % world.size:
            time.sleep(0.02)
        value = numbers(world.rank, 1500)
        dist.all_reduce(value)
        same(value, stacked(world, 1500).sum(0))


def test_a_monitored_barrier_is_refused_by_torch(world):
    with pytest.raises(ValueError, match="only implemented for GLOO"):
        dist.monitored_barrier()
