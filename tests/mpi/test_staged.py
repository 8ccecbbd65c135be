"""Collectives of plain tensors through the memory of a node."""

import random
import time

import pytest
import torch

from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.mpi import staged
from hpcfsdp.errors import CommunicationError, DifferentCallsError
from hpcfsdp.launch.topology import Topology
from tests.mpi.test_communicator import DTYPES, OPS, numbers, reduced, refuse_op, same

pytestmark = [pytest.mark.ranks(3, 2, 4), pytest.mark.transport]


@pytest.fixture
def comm(make_comm, world, monkeypatch):
    """One node, with parts so small that a tensor has many."""
    monkeypatch.setattr(staged, "_LEAST_BYTES", dict.fromkeys(staged._LEAST_BYTES, 0))
    monkeypatch.setattr(staged, "_PART_BYTES", 64)
    return make_comm(Topology.regular(1, world.size))


def scattered(comm, full, op):
    output = full.new_empty(full.numel() // comm.size)
    comm.reduce_scatter_tensor(output, full, op)
    return output


def gathered(comm, shard):
    output = shard.new_empty(shard.numel() * comm.size)
    comm.all_gather_into_tensor(output, shard)
    return output


@pytest.mark.parametrize("op", OPS)
def test_every_dtype_is_reduced(comm, op):
    for dtype in DTYPES:
        if refuse_op(op, dtype):
            continue
        for numel in (1, 7, 64, 100):
            given = [numbers(rank, numel * comm.size, dtype) for rank in range(comm.size)]
            mine, whole = given[comm.rank].clone(), reduced(op, given)
            assert same(scattered(comm, mine, op), whole.chunk(comm.size)[comm.rank]), (dtype, numel)
            comm.all_reduce(mine, op)
            assert same(mine, whole), (dtype, numel)
            mine = mine[:-1] if numel > 1 else mine  # not divisible
            mine.copy_(given[comm.rank][: mine.numel()])
            comm.all_reduce(mine, op)
            assert same(mine, whole[: mine.numel()]), (dtype, numel)
    assert comm._staging.memory is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_gathered(comm, dtype):
    for numel in (1, 7, 64):
        first, second = ([numbers(rank, numel, dtype, seed) for rank in range(comm.size)] for seed in range(2))
        whole = gathered(comm, first[comm.rank])
        assert same(whole, torch.cat(first))
        segment(whole, comm).copy_(second[comm.rank])
        comm.all_gather_into_tensor(whole, segment(whole, comm))  # in place
        assert same(whole, torch.cat(second))
        whole = second[comm.rank].repeat(comm.size)
        comm.reduce_scatter_tensor(segment(whole, comm), whole, "sum")
        assert same(segment(whole, comm), reduced("sum", second))


def test_values_are_bitwise_those_of_messages(comm, make_comm):
    messages = make_comm()
    for dtype in (torch.float32, torch.bfloat16):
        full = torch.randn(100 * comm.size, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
        for op in ("sum", "average", "product"):
            assert torch.equal(scattered(comm, full, op), scattered(messages, full, op)), (dtype, op)


def test_narrow_values_are_rounded_once_and_equal_on_all_ranks(comm):
    given = [torch.randn(300, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(comm.size)]
    mine = given[comm.rank].clone()
    comm.all_reduce(mine, "average")
    total = given[0].float()
    for other in given[1:]:
        total += other.float()
    assert torch.equal(mine, (total / comm.size).bfloat16())


def test_several_at_a_time_take_turns_and_do_not_hold_up_messages(comm):
    given = [torch.full((60 * comm.size,), float(comm.rank + turn)) for turn in range(4)]
    parts, wholes, received = torch.empty(4, 60), torch.empty(4, 60 * comm.size), torch.empty(comm.size, 1)
    works = [comm.all_gather_into_tensor(wholes[turn], given[turn][:60], async_op=True) for turn in range(4)]
    for turn in range(4):
        works.append(comm.reduce_scatter_tensor(parts[turn], given[turn], "sum", async_op=True))
        works.append(comm.all_reduce(given[turn], "sum", async_op=True))
    comm.all_to_all(list(received), [torch.tensor([float(comm.rank)])] * comm.size)
    for work in reversed(works):
        work.wait()
    for turn, tensor in enumerate(given):
        total = sum(rank + turn for rank in range(comm.size))
        assert (tensor == total).all() and (parts[turn] == total).all()
        assert torch.equal(wholes[turn].view(comm.size, -1)[:, 7], torch.arange(comm.size) + float(turn))
    assert torch.equal(received.view(-1), torch.arange(comm.size).float())


def test_results_are_right_under_delays(comm, world, monkeypatch):
    chance = random.Random(world.rank)
    for name in ("arrive", "done"):
        original = getattr(staged.NodeMemory, name)

        def late(self, *arguments, original=original):
            time.sleep(chance.choice((0, 0, 0.002)))
            original(self, *arguments)

        monkeypatch.setattr(staged.NodeMemory, name, late)
    for turn in range(6):
        given = [numbers(rank, 50 * comm.size, torch.float32, seed=turn) for rank in range(comm.size)]
        mine = given[comm.rank].clone()
        assert torch.equal(gathered(comm, mine), torch.cat(given)), turn
        part = scattered(comm, mine, "sum")
        comm.all_reduce(mine, "sum")
        assert torch.equal(mine, sum(given)), turn
        assert torch.equal(part, segment(mine, comm)), turn
        mine.fill_(-1.0)


@pytest.mark.parametrize("where", ["the first rank", "the last rank"])
def test_messages_are_used_where_a_rank_cannot_map_the_memory(comm, world, monkeypatch, where):
    def refuse(*_):
        raise OSError("no memory")

    if world.rank == (0 if where == "the first rank" else world.size - 1):
        monkeypatch.setattr(staged, "open_unnamed", refuse)
    for _ in range(2):
        mine = torch.full((25 * comm.size,), float(comm.rank + 1))
        assert torch.equal(gathered(comm, mine[:1]), torch.arange(1.0, comm.size + 1))
        part = scattered(comm, mine, "sum")
        comm.all_reduce(mine, "sum")
        assert (mine == sum(range(1, comm.size + 1))).all() and torch.equal(part, mine[:25])
        assert comm._staging.memory is None


def test_different_calls_are_named_and_the_memory_can_be_used_again(comm):
    for size in (100, 40):
        mine = torch.ones(size)
        comm.all_reduce(mine, "sum")
        with pytest.raises(DifferentCallsError, match=r"all_reduce\(sum\) of 5[01] x torch.float32"):
            comm.all_reduce(torch.ones(50 + (comm.rank == 0)), "sum")
        comm.all_reduce(mine, "sum")
        assert (mine == comm.size**2).all()
        with pytest.raises(DifferentCallsError, match="barrier"):
            comm.barrier() if comm.rank == 0 else gathered(comm, mine)


def test_a_call_that_fails_on_one_rank_fails_on_all(comm, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no arithmetic")

    mine = torch.ones(100)
    with monkeypatch.context() as patch:
        if comm.rank == 0:
            patch.setattr(staged, "reduce_into", refuse)
        comm.timeout_s = 0.5
        with pytest.raises(RuntimeError if comm.rank == 0 else CommunicationError, match=r"arithmetic|rank\(s\) 0"):
            comm.all_reduce(mine, "sum")
    comm.timeout_s = 60.0
    mine = torch.ones(100)
    comm.all_reduce(mine, "sum")
    assert (mine == comm.size).all()


def test_calls_that_are_compared_take_turns_in_one_order(make_comm, world, monkeypatch):
    monkeypatch.setattr(staged, "_PART_BYTES", 1 << 12)
    comm = make_comm(Topology.regular(1, world.size), compare_calls=True)
    chance = random.Random(world.rank)
    for _ in range(20):
        given = [torch.full((1 << 16,), float(comm.rank + turn)) for turn in range(4)]
        works = []
        for tensor in given:
            time.sleep(chance.choice((0, 0.001)))
            works.append(comm.all_reduce(tensor, "sum", async_op=True))
            works.append(
                comm.reduce_scatter_tensor(torch.empty(1 << 16), torch.ones(comm.size << 16), "sum", async_op=True)
            )
        for work in chance.sample(works, len(works)):
            work.wait()
        for turn, tensor in enumerate(given):
            assert (tensor == sum(rank + turn for rank in range(comm.size))).all()


def test_calls_that_differ_are_an_error_where_they_are_compared(make_comm, world, monkeypatch):
    comm = make_comm(Topology.regular(1, world.size), compare_calls=True)
    tensor = torch.ones(1 << 17)
    with pytest.raises(DifferentCallsError, match=r"all_reduce\(m.*but rank \d calls .*all_reduce\(m"):
        comm.all_reduce(tensor, "max" if comm.rank else "min")
