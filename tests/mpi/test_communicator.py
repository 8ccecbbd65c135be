import pytest
import torch

from hpcfsdp.comm import assert_same, raise_together
from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.mpi import messages as mpi_messages
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.comm.reduce import accumulate_dtype, refuse_op
from hpcfsdp.errors import CommunicationError, DisagreementError, HpcfsdpError, UsageError
from hpcfsdp.launch.topology import Topology

pytestmark = [pytest.mark.ranks(3, 1, 2, more=(4,)), pytest.mark.transport]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
UNSIGNED = [torch.uint64, torch.uint32, torch.uint16, torch.uint8]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, *UNSIGNED, torch.bool]
DTYPES = [*FLOATS, torch.complex64, torch.complex128, *WHOLE]
OPS = ["sum", "average", "product", "min", "max", "band", "bor", "bxor"]
SIZES = [0, 1, 7, 1000]
BIG = (1 << 18) + 5
"""Elements of float32 that do not fit into one message of a reduction."""


class Carrier:
    """A communicator, and the memory on which it is to be tried."""

    def __init__(self, comm, shares):
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._shares = shares
        self._windows = {}

    def holding(self, values, gathered=False):
        """Memory that holds `values` (1-D); one window serves all tests that ask for its kind."""
        if not self._shares:
            return values.clone()
        kind = values.dtype, values.numel(), gathered
        if kind not in self._windows:
            self._windows[kind] = self.comm.alloc(values.numel(), values.dtype, gathered=gathered)
        memory = self._windows[kind]
        if not gathered:
            memory.copy_(values)
        return memory


@pytest.fixture(scope="module")
def dtensor_ranks(world, gloo):
    return {
        "messages": Carrier(MpiCommunicator(world.comm.Dup()), False),
        "shared memory": Carrier(MpiCommunicator(world.comm.Dup(), Topology.regular(1, world.size)), True),
        "gloo": Carrier(gloo, False),
    }


@pytest.fixture(params=["messages", "shared memory", "gloo"])
def carrier(request, dtensor_ranks):
    return dtensor_ranks[request.param]


@pytest.fixture(params=["messages", "gloo"])
def comm(request, dtensor_ranks):
    """For what does not depend on the memory."""
    return dtensor_ranks[request.param].comm


def numbers(rank, numel, dtype, seed=0):
    """What a rank holds: small numbers, exact in every dtype as are their sums and products over four ranks."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    made = torch.randint(0 if dtype in UNSIGNED else -2, 3, (numel,), generator=generator)
    if dtype.is_complex:
        made = torch.complex(made.double(), made.flip(0).double())
    return made.to(dtype)


def wide(tensor):
    """The same numbers in a dtype that torch can compute with."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor.to(torch.int64)


def same(got, expected):
    return got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(wide(got), wide(expected))


def reduced(op, tensors):
    """Their reduction, by other means than those under test."""
    dtype, stacked = tensors[0].dtype, torch.stack([wide(tensor) for tensor in tensors])
    if dtype is torch.bool and op != "bxor":
        return (stacked.any(0) if op in ("sum", "max", "bor") else stacked.all(0)).to(dtype)
    if op == "average":
        return (stacked.sum(0).to(accumulate_dtype(dtype)) / len(tensors)).to(dtype)
    if op in ("band", "bor", "bxor"):
        total = stacked[0]
        for other in stacked[1:]:
            total = {"band": total & other, "bor": total | other, "bxor": total ^ other}[op]
        return total.to(dtype)
    return {
        "sum": lambda: stacked.sum(0),
        "product": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
    }[op]().to(dtype)


# Gathering


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_are_gathered_in_rank_order(carrier, dtype):
    for numel in (*SIZES, BIG // dtype.itemsize):
        shards = [numbers(rank, numel, dtype) for rank in range(carrier.size)]
        expected, mine = torch.cat(shards), shards[carrier.rank].clone()
        output = carrier.holding(torch.empty_like(expected), gathered=True)
        carrier.comm.all_gather_into_tensor(output, mine)
        assert same(output, expected), numel
        assert same(mine, shards[carrier.rank])
        if numel == 7:
            carrier.comm.labelled_barrier("read")
            own = segment(output, carrier.comm)
            own.copy_(numbers(carrier.rank, numel, dtype, seed=1))
            carrier.comm.all_gather_into_tensor(output, own)
            assert same(output, torch.cat([numbers(rank, numel, dtype, seed=1) for rank in range(carrier.size)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_tensors_of_different_sizes_are_gathered(comm, dtype):
    for counts in ([0] * comm.size, [3 * rank for rank in range(comm.size)], [5] + [0] * (comm.size - 1)):
        given = [numbers(rank, count, dtype) for rank, count in enumerate(counts)]
        outputs = [torch.empty_like(tensor) for tensor in given]
        comm.all_gather(outputs, given[comm.rank])
        assert all(same(output, tensor) for output, tensor in zip(outputs, given, strict=True)), counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e5m2, torch.int16], ids=str)
def test_every_pair_of_ranks_may_exchange_another_number_of_elements(comm, dtype):
    def sent(source, to, factor):
        return numbers(source, factor * ((source + 2 * to) % 3), dtype, seed=to)

    for factor in (0, 1, 11, 40000):
        inputs = [sent(comm.rank, to, factor) for to in range(comm.size)]
        expected = [sent(source, comm.rank, factor) for source in range(comm.size)]
        outputs = [torch.empty_like(tensor) for tensor in expected]
        comm.all_to_all(outputs, inputs)
        assert all(same(output, tensor) for output, tensor in zip(outputs, expected, strict=True)), factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.bool], ids=str)
def test_one_rank_collects_from_all_and_deals_out_to_all(comm, dtype):
    for root in range(comm.size):
        for factor in (0, 1, 7, 30000):
            given = [numbers(rank, factor * rank, dtype) for rank in range(comm.size)]
            outputs = [torch.empty_like(tensor) for tensor in given]
            comm.gather(outputs if comm.rank == root else None, given[comm.rank], root)
            if comm.rank == root:
                assert all(same(output, tensor) for output, tensor in zip(outputs, given, strict=True))
            output = torch.empty_like(given[comm.rank])
            comm.scatter(output, given if comm.rank == root else None, root)
            assert same(output, given[comm.rank])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rank_can_be_the_source_of_a_broadcast(comm, dtype):
    for src in range(comm.size):
        for numel in (*SIZES, BIG if src == comm.size - 1 else 2):
            tensor = numbers(comm.rank, numel, dtype)
            comm.broadcast(tensor, src)
            assert same(tensor, numbers(src, numel, dtype))


# Reducing


@pytest.mark.parametrize("op", OPS)
def test_reductions_agree_with_arithmetic_on_what_all_ranks_hold(carrier, op):
    for dtype in DTYPES:
        if refuse_op(op, dtype):
            continue
        for numel in (0, 1, 13):
            given = [numbers(rank, carrier.size * numel, dtype) for rank in range(carrier.size)]
            expected, full = reduced(op, given), carrier.holding(given[carrier.rank])
            output = torch.empty(numel, dtype=dtype)
            carrier.comm.reduce_scatter_tensor(output, full, op)
            assert same(output, expected.view(carrier.size, numel)[carrier.rank]), (dtype, numel)
            assert same(full, given[carrier.rank])
            carrier.comm.all_reduce(full, op)
            assert same(full, expected), (dtype, numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.uint16, torch.bool], ids=str)
def test_reductions_go_through_in_pieces_where_they_are_long(carrier, dtype):
    op = "sum"
    for numel in (BIG, 1 << 18, 66000):
        given = [numbers(rank, carrier.size * numel, dtype) for rank in range(carrier.size)]
        expected, full = reduced(op, given), carrier.holding(given[carrier.rank])
        output = torch.empty(numel, dtype=dtype)
        carrier.comm.reduce_scatter_tensor(output, full, op)
        assert same(output, expected.view(carrier.size, numel)[carrier.rank]), numel
        carrier.comm.all_reduce(full, op)
        assert same(full, expected), numel


def test_an_all_reduce_need_not_divide_by_the_ranks(carrier):
    for numel in (1, 2, 3, 5, 40001):
        given = [numbers(rank, numel, torch.float32) for rank in range(carrier.size)]
        tensor = carrier.holding(given[carrier.rank])
        carrier.comm.all_reduce(tensor, "average")
        assert same(tensor, reduced("average", given)), numel


def test_a_part_of_the_memory_can_be_reduced(carrier):
    given = [numbers(rank, 64, torch.float32) for rank in range(carrier.size)]
    memory = carrier.holding(given[carrier.rank])
    carrier.comm.all_reduce(memory[8:21], "sum")
    expected = given[carrier.rank].clone()
    expected[8:21] = reduced("sum", given)[8:21]
    assert same(memory, expected)
    output = torch.empty(3)
    carrier.comm.reduce_scatter_tensor(output, memory[32 : 32 + 3 * carrier.size], "sum")
    assert same(output, reduced("sum", given)[32 + 3 * carrier.rank : 35 + 3 * carrier.rank])


def test_shapes_do_not_matter(carrier):
    given = [numbers(rank, carrier.size * 6, torch.float32).view(-1, 3) for rank in range(carrier.size)]
    full = carrier.holding(given[carrier.rank].view(-1)).view(-1, 3)
    output = torch.empty(3, 2)
    carrier.comm.reduce_scatter_tensor(output, full, "sum")
    assert same(output.view(-1), reduced("sum", given).view(carrier.size, -1)[carrier.rank])
    carrier.comm.all_reduce(full, "max")
    assert same(full, reduced("max", given))
    scalar = torch.tensor(carrier.rank)
    carrier.comm.all_reduce(scalar, "sum")
    assert scalar.item() == sum(range(carrier.size))


def test_a_list_of_unequal_pieces_is_reduced_to_one_each(dtensor_ranks):
    comm = dtensor_ranks["messages"].comm
    for factor in (1, 150000):
        given = [
            [numbers(rank, factor * piece, torch.float32, piece) for piece in range(comm.size)]
            for rank in range(comm.size)
        ]
        output = torch.empty(factor * comm.rank)
        comm.reduce_scatter(output, given[comm.rank], "sum")
        assert same(output, reduced("sum", [pieces[comm.rank] for pieces in given]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [3, BIG])
def test_the_result_may_be_a_part_of_the_input(carrier, dtype, numel):
    given = [numbers(rank, carrier.size * numel, dtype) for rank in range(carrier.size)]
    full = carrier.holding(given[carrier.rank])
    carrier.comm.reduce_scatter_tensor(segment(full, carrier.comm), full, "sum")
    expected = given[carrier.rank].clone()
    segment(expected, carrier.comm).copy_(segment(reduced("sum", given), carrier.comm))
    assert same(full, expected)
    plain = torch.cat([torch.full((numel,), -1.0), *([torch.zeros(numel)] * carrier.size)])[: carrier.size * numel]
    segment(plain, carrier.comm).fill_(carrier.rank)
    carrier.comm.all_gather_into_tensor(plain, segment(plain, carrier.comm))
    assert torch.equal(plain, torch.arange(carrier.size).float().repeat_interleave(numel))


# Dtypes on the way


@pytest.mark.parametrize("numel", [1, BIG])
def test_values_travel_in_one_dtype_are_summed_in_another_and_kept_in_a_third(carrier, numel):
    full = carrier.holding(torch.full((carrier.size * numel,), 257.0 if carrier.rank == 0 else 1.0))
    ones = carrier.size - 1

    def total(dtype, **dtypes):
        output = torch.empty(numel, dtype=dtype)
        carrier.comm.reduce_scatter_tensor(output, full, "sum", **dtypes)
        assert (output == output[0]).all()
        return output[0].item()

    assert total(torch.float32) == 257.0 + ones
    assert total(torch.float64, accumulate=torch.float64) == 257.0 + ones
    assert total(torch.bfloat16) == torch.tensor(257.0 + ones).bfloat16().item()
    assert total(torch.int32, accumulate=torch.float64) == 257 + ones
    full.fill_(40000.0)
    assert total(torch.float32, accumulate=torch.float16) == (40000.0 if carrier.size == 1 else float("inf"))


@pytest.mark.parametrize("numel", [1, 60000])
@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0), (torch.float8_e5m2, 8.0)], ids=str
)
def test_narrow_values_are_summed_in_float32(carrier, dtype, large, numel):
    # `large` + 1 is `large` in this dtype: summed there, the ones would vanish.
    full = carrier.holding(torch.full((carrier.size * numel,), large if carrier.rank == 0 else 1.0).to(dtype))
    exact = torch.tensor(large + carrier.size - 1)
    output, wider = torch.empty(numel, dtype=dtype), torch.empty(numel)
    carrier.comm.reduce_scatter_tensor(output, full, "sum")
    carrier.comm.reduce_scatter_tensor(wider, full, "sum")
    assert set(output.tolist()) == {exact.to(dtype).item()}
    assert set(wider.tolist()) == {exact.item()}
    carrier.comm.all_reduce(full, "sum")
    assert set(full.tolist()) == {exact.to(dtype).item()}


def test_an_average_keeps_the_fraction_where_the_output_is_wider(carrier):
    full = carrier.holding(torch.full((carrier.size,), 256.0 + (carrier.rank == 0), dtype=torch.float16))
    output = torch.empty(1, dtype=torch.float64)
    carrier.comm.reduce_scatter_tensor(output, full, "average", accumulate=torch.float64)
    assert output.item() == 256 + 1 / carrier.size


# Equality


def everyones(world, tensor):
    return world.comm.allgather(wide(tensor).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["sum", "average", "product"])
def test_results_are_bitwise_the_same_on_all_ranks_and_each_time(world, carrier, dtype, op):
    for numel in (1001, 70001):
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(carrier.rank)).to(dtype)
        results = []
        for _ in range(3):
            tensor = carrier.holding(mine)
            carrier.comm.all_reduce(tensor, op)
            results.append(tensor.clone())
        assert len(set(everyones(world, results[0]))) == 1
        assert same(results[0], results[1])
        assert same(results[0], results[2])


def test_a_scattered_reduction_is_bitwise_the_same_each_time(carrier):
    full = carrier.holding(torch.randn(carrier.size * 1001, generator=torch.Generator().manual_seed(carrier.rank)))
    outputs = [torch.empty(1001) for _ in range(3)]
    for output in outputs:
        carrier.comm.reduce_scatter_tensor(output, full, "average")
    assert same(outputs[0], outputs[1])
    assert same(outputs[0], outputs[2])


@pytest.mark.parametrize("op", OPS)
def test_ranks_that_hold_the_same_get_what_the_imagined_communicator_gives(carrier, op):
    fake = FakeCommunicator(carrier.rank, carrier.size)
    for dtype in DTYPES:
        if refuse_op(op, dtype):
            continue
        given = numbers(7, carrier.size * 5, dtype)
        results = []
        for comm, full in ((fake, given.clone()), (carrier.comm, carrier.holding(given))):
            shard = torch.empty(5, dtype=dtype)
            comm.reduce_scatter_tensor(shard, full, op)
            comm.all_reduce(full, op)
            results.append((shard, full))
        assert same(results[0][0], results[1][0]), dtype
        assert same(results[0][1], results[1][1]), dtype


# Tensors of the caller


def test_tensors_that_require_grad_are_carried_and_nothing_is_recorded(carrier):
    size, rank = carrier.size, carrier.rank
    leaf = torch.full((4,), float(rank), requires_grad=True)
    output = carrier.holding(torch.empty(4 * size), gathered=True)
    carrier.comm.all_gather_into_tensor(output, leaf)
    assert not output.requires_grad
    assert output.tolist() == [float(r) for r in range(size) for _ in range(4)]

    full = carrier.holding(torch.full((4 * size,), float(rank))).detach().requires_grad_()
    shard = torch.empty(4)
    carrier.comm.reduce_scatter_tensor(shard, full, "sum")
    assert not shard.requires_grad
    carrier.comm.all_reduce(full, "sum")
    assert full.is_leaf
    assert set(shard.tolist()) == set(full.tolist()) == {float(sum(range(size)))}
    for numel in (4, BIG):
        big = torch.full((numel,), float(rank), requires_grad=True)
        carrier.comm.all_reduce(big, "max")
        carrier.comm.broadcast(big, size - 1)
        assert big.is_leaf
        assert big.unique().tolist() == [size - 1.0]
    outputs = [torch.empty(4) for _ in range(size)]
    for call in (
        lambda: carrier.comm.all_gather(outputs, leaf),
        lambda: carrier.comm.all_to_all(outputs, [leaf] * size),
        lambda: carrier.comm.gather(outputs if rank == 0 else None, leaf, 0),
        lambda: carrier.comm.scatter(outputs[0], [leaf] * size if rank == 0 else None, 0),
    ):
        call()
        assert not any(output.requires_grad for output in outputs)
    assert leaf.grad_fn is None
    assert leaf.tolist() == [float(rank)] * 4


def test_buffers_stay_resizable_after_a_collective(comm):
    # numpy() would mark the storage as shared, and freeing it by resizing would fail from then on.
    output, shard = torch.empty(comm.size * 4), torch.ones(4)
    comm.all_gather_into_tensor(output, shard)
    comm.all_reduce(shard, "sum")
    for tensor in (output, shard):
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().size() == 0


@pytest.mark.parametrize("numel", [0, 7, 10, 11])
def test_long_messages_go_in_parts(dtensor_ranks, monkeypatch, numel):
    monkeypatch.setattr(mpi_messages, "_INLINE_BYTES", 0)
    monkeypatch.setattr(mpi_messages, "_PART_BYTES", 10)
    comm = dtensor_ranks["messages"].comm
    output, mine = torch.empty(numel * comm.size, dtype=torch.int16), torch.full((numel,), comm.rank, dtype=torch.int16)
    comm.all_gather_into_tensor(output, mine)
    assert output.tolist() == [rank for rank in range(comm.size) for _ in range(numel)]


# Several at a time


def test_collectives_under_way_are_waited_for_in_any_order(carrier):
    size, rank, comm = carrier.size, carrier.rank, carrier.comm
    for turn in range(6):
        gathered, shard, pieces = torch.empty(5 * size), torch.empty(3), [torch.empty(2) for _ in range(size)]
        total, small, word = torch.full((BIG,), 1.0 + rank), torch.full((2,), 1.0 + rank), torch.full((9,), rank)
        full = carrier.holding(torch.full((3 * size,), float(rank + turn)))
        works = [
            comm.all_gather_into_tensor(gathered, torch.full((5,), float(rank)), async_op=True),
            comm.all_reduce(total, "sum", async_op=True),
            comm.reduce_scatter_tensor(shard, full, "sum", async_op=True),
            comm.broadcast(word, size - 1, async_op=True),
            comm.barrier(async_op=True),
            comm.all_reduce(small, "max", async_op=True),
            comm.all_to_all(pieces, [torch.full((2,), float(rank))] * size, async_op=True),
        ]
        order = torch.randperm(len(works), generator=torch.Generator().manual_seed(10 * turn + rank)).tolist()
        for place in order:
            works[place].wait()
            assert works[place].is_completed()
            works[place].wait()
        assert gathered.tolist() == [float(r) for r in range(size) for _ in range(5)]
        assert total.unique().tolist() == [size * (size + 1) / 2]
        assert shard.tolist() == [float(sum(range(size)) + turn * size)] * 3
        assert word.tolist() == [size - 1] * 9
        assert small.tolist() == [size] * 2
        assert torch.cat(pieces).tolist() == [float(r) for r in range(size) for _ in range(2)]


def test_looking_is_enough_to_complete_a_collective(carrier):
    tensor = torch.full((BIG,), float(carrier.rank))
    work = carrier.comm.all_reduce(tensor, "sum", async_op=True)
    while not work.is_completed():
        pass
    assert tensor.unique().tolist() == [sum(range(carrier.size))]
    carrier.comm.barrier()


def test_work_that_one_rank_never_waits_for_is_completed_by_later_calls(carrier):
    for culprit in range(carrier.size):
        tensor = torch.full((BIG,), float(carrier.rank))
        work = carrier.comm.all_reduce(tensor, "sum", async_op=True)
        if carrier.rank != culprit:
            work.wait()
            assert tensor.unique().tolist() == [sum(range(carrier.size))]
        carrier.comm.barrier()
        carrier.comm.all_reduce(torch.ones(1), "sum")


def test_collectives_of_several_communicators_move_each_other_along(make_comm):
    one, other = make_comm(), make_comm()
    first, second = torch.ones(BIG), torch.ones(BIG)
    works = [one.all_reduce(first, "sum", async_op=True), other.all_reduce(second, "sum", async_op=True)]
    for work in works if one.rank % 2 else reversed(works):
        work.wait()
    assert first.unique().tolist() == second.unique().tolist() == [one.size]


def test_memory_and_groups_may_be_made_while_a_collective_is_under_way(make_comm):
    comm = make_comm()
    for create in (
        lambda: comm.alloc(10, torch.float32),
        lambda: comm.subgroup(range(comm.size)),
        lambda: comm.all_gather_object(1),
    ):
        tensor = torch.ones(BIG * comm.size)
        work = comm.all_reduce(tensor, "sum", async_op=True)
        if comm.rank == 0:
            create()
            work.wait()
        else:
            work.wait()
            create()
        assert tensor.unique().tolist() == [comm.size]


def test_a_communicator_completes_what_is_under_way_before_it_closes(make_comm):
    comm = make_comm()
    tensor = torch.ones(BIG)
    comm.all_reduce(tensor, "sum", async_op=True)
    comm.close()
    assert tensor.unique().tolist() == [comm.size]
    comm.close()


# Messages between two ranks


def test_messages_are_matched_by_tag_and_name_their_source(dtensor_ranks):
    comm = dtensor_ranks["messages"].comm
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        right = left = 0
    works = [comm.send(torch.full((3,), 10.0 * tag + comm.rank), right, tag, async_op=True) for tag in (0, 5)]
    for tag, source in ((5, left), (0, None)):
        tensor = torch.empty(3)
        requests, work = comm.recv(tensor, source, tag, async_op=True)
        work.wait()
        assert tensor.tolist() == [10.0 * tag + left] * 3
        assert requests.source == left
    for work in works:
        work.wait()
    with pytest.raises(CommunicationError, match=r"tag -1 is not in 0 to \d+"):
        comm.send(torch.empty(1), 0, -1)


# Objects


def test_objects_are_gathered_in_rank_order(comm):
    assert comm.all_gather_object(("rank", comm.rank)) == [("rank", rank) for rank in range(comm.size)]
    assert comm.all_gather_object(None) == [None] * comm.size


def test_large_objects_of_different_sizes_are_gathered_and_broadcast(comm):
    values = comm.all_gather_object("x" * (comm.rank * 1_500_000))
    assert [len(value) for value in values] == [rank * 1_500_000 for rank in range(comm.size)]
    for src in range(comm.size):
        value = comm.broadcast_object({"from": comm.rank, "bytes": bytes(2_000_000)}, src)
        assert (value["from"], len(value["bytes"])) == (src, 2_000_000)


# Groups


def test_disjoint_groups_work_at_the_same_time(comm):
    mine = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    group = comm.subgroup(mine)
    assert (group.rank, group.size) == (mine.index(comm.rank), len(mine))
    for _ in range(20 if comm.rank % 2 else 5):
        tensor = torch.full((100,), float(comm.rank))
        group.all_reduce(tensor, "sum")
        assert tensor.unique().tolist() == [sum(mine)]
    assert group.all_gather_object(comm.rank) == mine


def test_groups_are_made_within_groups_by_ranks_of_the_group(comm):
    outer = comm.subgroup([0] if comm.rank == 0 else range(1, comm.size))
    inner = outer.subgroup([outer.rank])
    assert (inner.rank, inner.size) == (0, 1)
    assert inner.all_gather_object(comm.rank) == [comm.rank]
    outer.barrier()


def test_a_rank_may_be_in_groups_that_overlap(several, make_comm):
    comm = make_comm()
    ring = sorted({tuple(sorted({rank, (rank + 1) % comm.size})) for rank in range(comm.size)})
    groups = [(pair, comm.subgroup(pair)) for pair in ring if comm.rank in pair]
    works = []
    for pair, group in groups:
        tensor = torch.full((3,), float(comm.rank))
        works.append((pair, tensor, group.all_reduce(tensor, "sum", async_op=True)))
    for pair, tensor, work in reversed(works):
        work.wait()
        assert tensor.tolist() == [float(sum(pair))] * 3


@pytest.mark.parametrize("ranks", [[], [1, 0], [0, 0, 1], [0, 99], [-1, 0]], ids=str)
def test_a_group_is_of_ascending_ranks_of_the_communicator(several, dtensor_ranks, ranks):
    comm = dtensor_ranks["messages"].comm
    with pytest.raises(CommunicationError, match=rf"subgroup on rank {comm.rank} of {comm.size}: .* ascending ranks"):
        comm.subgroup(ranks)


def test_a_group_shares_memory_with_the_members_on_its_node(several, make_comm):
    comm = make_comm(Topology.from_labels([rank % 2 for rank in range(make_comm().size)]))
    group = comm.subgroup(range(1, comm.size)) if comm.rank else None
    if group:
        assert group.topology == comm.topology.restrict(range(1, comm.size))
        full = group.alloc(2 * group.size, torch.float32, gathered=True)
        group.all_gather_into_tensor(full, torch.full((2,), float(comm.rank)))
        assert full.tolist() == [float(rank) for rank in range(1, comm.size) for _ in range(2)]


# Refusals


@pytest.mark.parametrize(
    ("full", "shard"),
    [
        (lambda n: torch.empty(n * 3 + 1), lambda: torch.empty(3)),
        (lambda n: torch.empty(n * 3, dtype=torch.float64), lambda: torch.empty(3)),
        (lambda n: torch.empty(n * 6)[::2], lambda: torch.empty(3)),
        (lambda n: torch.empty(n * 3, device="meta"), lambda: torch.empty(3)),
    ],
    ids=["size", "dtype", "stride", "device"],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(comm, full, shard):
    with pytest.raises(CommunicationError, match=rf"on rank {comm.rank}"):
        comm.all_gather_into_tensor(full(comm.size), shard())
    if full(comm.size).dtype == shard().dtype:  # a reduction may keep its result in another dtype
        with pytest.raises(CommunicationError, match=rf"on rank {comm.rank}"):
            comm.reduce_scatter_tensor(shard(), full(comm.size), "sum")


def test_a_rank_that_is_not_there_is_refused_by_every_operation(comm):
    one, many = torch.empty(1), [torch.empty(1)] * comm.size
    for call in (
        lambda: comm.broadcast(one, comm.size),
        lambda: comm.gather(many, one, -1),
        lambda: comm.scatter(one, many, comm.size),
    ):
        with pytest.raises(CommunicationError, match=f"on rank {comm.rank}: there is no rank (-1|{comm.size}), they"):
            call()
    for call in (
        lambda: comm.all_gather(many[1:], one),
        lambda: comm.all_to_all([*many, one], many),
        lambda: comm.gather(None, one, comm.rank),
        lambda: comm.scatter(one, None, comm.rank),
    ):
        with pytest.raises(CommunicationError, match="must hold one tensor for each rank, got"):
            call()


def test_an_own_part_of_another_size_is_refused_by_messages(dtensor_ranks):
    comm = dtensor_ranks["messages"].comm
    outputs, one = [torch.empty(2)] * comm.size, torch.empty(1)
    for call in (
        lambda: comm.all_gather(outputs, one),
        lambda: comm.all_to_all(outputs, [one] * comm.size),
        lambda: comm.gather(outputs, one, comm.rank),
        lambda: comm.scatter(one, outputs, comm.rank),
        lambda: comm.reduce_scatter(one, outputs, "sum"),
    ):
        with pytest.raises(
            CommunicationError, match=r"its own output has (2 elements, its input 1|1 elements, its input 2)"
        ):
            call()


def test_a_closed_communicator_raises(make_comm):
    comm = make_comm()
    comm.close()
    one, many = torch.empty(1), [torch.empty(1)] * comm.size
    for call in (
        lambda: comm.alloc(1, torch.float32),
        comm.barrier,
        lambda: comm.all_reduce(one, "sum"),
        lambda: comm.all_gather_into_tensor(torch.empty(comm.size), one),
        lambda: comm.reduce_scatter_tensor(one, torch.empty(comm.size), "sum"),
        lambda: comm.reduce_scatter(one, many, "sum"),
        lambda: comm.broadcast(one, 0),
        lambda: comm.all_gather(many, one),
        lambda: comm.all_to_all(many, many),
        lambda: comm.gather(many, one, 0),
        lambda: comm.scatter(one, many, 0),
        lambda: comm.send(one, 0),
        lambda: comm.recv(one, 0),
        lambda: comm.all_gather_object(1),
        lambda: comm.broadcast_object(1),
        lambda: comm.subgroup([comm.rank]),
    ):
        with pytest.raises(CommunicationError, match=f"on rank {comm.rank}: the communicator has been closed"):
            call()


def test_a_topology_of_other_ranks_is_refused(world):
    with pytest.raises(CommunicationError) as caught:
        MpiCommunicator(world.comm, Topology.regular(2, world.size))
    assert str(caught.value) == (
        f"a topology of {2 * world.size} ranks (2 node(s) of {world.size} rank(s)) was given for {world.size} ranks"
    )


# One rank's error is everyone's


@pytest.mark.parametrize("culprit", ["first", "last"])
def test_one_ranks_error_is_everyones(comm, culprit):
    failing = 0 if culprit == "first" else comm.size - 1
    with pytest.raises(UsageError, match="no such thing") as caught, raise_together(comm):
        if comm.rank == failing:
            raise UsageError("no such thing")
    assert caught.value.raised_on_all_ranks
    assert comm.rank == failing or f"rank {failing}: " in str(caught.value)


def test_foreign_errors_reach_the_others_too(comm):
    failing = comm.size - 1
    kind = ZeroDivisionError if comm.rank == failing else HpcfsdpError
    with pytest.raises(kind), raise_together(comm):
        assert comm.rank != failing or 1 / 0


def test_assert_same_names_the_rank_that_differs(comm):
    assert_same(comm, 7, "the number")
    if comm.size > 1:
        with pytest.raises(DisagreementError, match=rf"the number .* rank 0 has 7, rank {comm.size - 1} has 8"):
            assert_same(comm, 7 + (comm.rank == comm.size - 1), "the number")
