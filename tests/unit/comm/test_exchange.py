"""The algorithms of messages, for any number of ranks in one process.

Results, and the messages that docs/explanation/scaling.md counts. (pytest-mpi skips what is in a folder named mpi.)
"""

from collections import defaultdict, deque
from math import ceil, log2

import pytest
import torch

from hpcfsdp.comm.mpi import exchange
from hpcfsdp.comm.progress import Sent
from hpcfsdp.comm.reduce import Reduction
from hpcfsdp.launch.topology import Topology


class Network:
    """Messages between imagined ranks. Counts for each rank the messages and bytes that it sends, and its waits."""

    def __init__(self):
        self.mail = defaultdict(deque)
        self.sent, self.nbytes, self.waits = defaultdict(int), defaultdict(int), defaultdict(int)
        self.pairs = set()

    def run(self, size, collective):
        """Advance the steps that ``collective(call)`` returns on all ranks, until all are done."""
        calls = [Call(self, rank, range(size)) for rank in range(size)]
        running = {rank: [collective(call), None] for rank, call in enumerate(calls)}
        while running:
            before = len(running), sum(self.waits.values())
            for rank, state in list(running.items()):
                if state[1] is None or state[1].holds():
                    try:
                        state[1] = next(state[0])
                        self.waits[rank] += 1
                    except StopIteration:
                        del running[rank]
            assert before != (len(running), sum(self.waits.values())), "ranks wait for each other"
        assert not any(self.mail.values()), "messages that no rank received"


class Call:
    def __init__(self, network, place, ranks):
        self.network, self.rank, self.ranks, self.size = network, place, ranks, len(ranks)

    def among(self, ranks):
        return Call(self.network, ranks.index(self.rank), [self.ranks[rank] for rank in ranks])


class Requests:
    def __init__(self, call):
        self._call, self._receives = call, []

    def send(self, tensor, to):
        network, rank, to = self._call.network, self._call.ranks[self._call.rank], self._call.ranks[to]
        network.mail[rank, to].append(tensor.clone())
        network.sent[rank] += 1
        network.nbytes[rank] += tensor.numel() * tensor.element_size()
        network.pairs.add((rank, to))

    def recv(self, tensor, source):
        self._receives.append((tensor, self._call.ranks[source]))

    def holds(self):
        mail, rank = self._call.network.mail, self._call.ranks[self._call.rank]
        while self._receives:
            tensor, source = self._receives[0]
            if not mail[source, rank]:
                return False
            sent = mail[source, rank].popleft()
            assert sent.numel() == tensor.numel()
            tensor.copy_(sent.view_as(tensor))
            self._receives.pop(0)
        return True

    def missing(self):
        return []


@pytest.fixture(autouse=True)
def network(monkeypatch):
    monkeypatch.setattr(exchange, "Requests", Requests)
    return Network()


SIZES = [*range(1, 20), 31, 32, 33, 64, 100]


def given(size, numel, dtype=torch.float32):
    return [torch.arange(numel).to(dtype) + 3 * rank for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_small_tensors_are_gathered_in_rounds_among_many_ranks(network, size):
    wholes = [torch.empty(size, 5) for _ in range(size)]
    mine, topology = given(size, 5), Topology.regular(size, 1)
    network.run(size, lambda call: exchange.all_gather_into(call, wholes[call.rank], mine[call.rank], topology))
    assert all(torch.equal(whole, torch.stack(mine)) for whole in wholes)
    rounds = ceil(log2(size))
    for rank in range(size):
        assert network.nbytes[rank] == (size - 1) * 20
        if size > exchange._MOST_PAIRS:  # a run of rows that goes on at the first row is two messages
            assert rounds <= network.sent[rank] <= 2 * rounds
            assert network.waits[rank] == rounds
        else:
            assert network.sent[rank] == size - 1


@pytest.mark.parametrize("numel", [1, 60, 40_000])
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_and_gives_all_ranks_the_same_bits(network, size, numel):
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected = torch.stack(tensors).double().sum(0)
    network.run(size, lambda call: exchange.all_reduce(call, tensors[call.rank], Reduction("sum", torch.float32, size)))
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert torch.allclose(tensors[0].double(), expected, atol=1e-4)
    if size > exchange._MOST_PAIRS:
        assert max(network.sent.values()) <= 4 * ceil(log2(size))
        assert max(network.waits.values()) <= 2 * ceil(log2(size))


@pytest.mark.parametrize("size", [3, 9, 12, 17])
@pytest.mark.parametrize("op", ["average", "max"])
def test_narrow_values_travel_and_are_added_in_the_accumulation_dtype_in_rounds(network, size, op):
    tensors = given(size * 4, 4 * size, torch.bfloat16)[:size]
    outputs = [torch.empty(4, dtype=torch.bfloat16) for _ in range(size)]
    expected = torch.stack(tensors).float()
    expected = (expected.mean(0) if op == "average" else expected.amax(0)).bfloat16()
    reduction = Reduction(op, torch.float32, size)
    network.run(
        size,
        lambda call: exchange.reduce_scatter(call, tensors[call.rank].split(4), outputs[call.rank], reduction),
    )
    assert torch.equal(torch.cat(outputs), expected)


@pytest.mark.parametrize("size", [9, 13])
def test_pieces_of_a_reduction_may_be_unequal_in_rounds(network, size):
    counts = [rank % 3 for rank in range(size)]
    tensors, outputs = given(size, sum(counts)), [torch.empty(count) for count in counts]
    reduction = Reduction("sum", torch.float32, size)
    network.run(
        size,
        lambda call: exchange.reduce_scatter(call, tensors[call.rank].split(counts), outputs[call.rank], reduction),
    )
    assert torch.equal(torch.cat(outputs), sum(tensors))


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_takes_rounds_among_many_ranks(network, size):
    left = []

    def collective(call):
        yield from exchange.barrier(call)
        assert network.waits.keys() == set(range(size))  # all have entered
        left.append(call.rank)

    network.run(size, collective)
    assert sorted(left) == list(range(size))
    if size > exchange._MOST_PAIRS:
        assert max(network.waits.values()) == ceil(log2(size))


@pytest.mark.parametrize("nodes", [(1,), (4,), (2, 2), (3, 3, 3, 3), (1, 3), (3, 1, 2), (8, 8, 8), (1,) * 20], ids=str)
def test_large_tensors_go_to_each_other_node_once(network, monkeypatch, nodes):
    monkeypatch.setattr(exchange, "_ROUND_BYTES", 0)
    topology = Topology.uneven(nodes)
    size = topology.size
    wholes, mine = [torch.empty(size, 6) for _ in range(size)], given(size, 6)
    ends = []

    def collective(call):
        for condition in exchange.all_gather_into(call, wholes[call.rank], mine[call.rank], topology):
            if isinstance(condition, Sent):
                assert torch.equal(wholes[call.rank], torch.stack(mine))
                ends.append(call.rank)
            yield condition

    network.run(size, collective)
    assert sorted(ends) == list(range(size))
    between = [(a, b) for a, b in network.pairs if topology.node_rank(a) != topology.node_rank(b)]
    assert len(between) == size * (len(nodes) - 1)


@pytest.mark.parametrize("nodes", [(2, 2), (3, 3), (4,) * 4, (2, 3)], ids=str)
def test_sums_of_nodes_travel_between_nodes(network, nodes):
    topology = Topology.uneven(nodes)
    size, numel = topology.size, 30_000
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(size)]
    expected = torch.stack(tensors).double().mean(0)
    reduction = Reduction("average", torch.float32, size)
    network.run(size, lambda call: exchange.all_reduce(call, tensors[call.rank], reduction, topology))
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert (tensors[0].double() - expected).abs().max() < 0.01
    if len(set(nodes)) == 1:
        between = [pair for pair in network.pairs if len(set(map(topology.node_rank, pair))) > 1]
        assert all(topology.local_rank(a) == topology.local_rank(b) for a, b in between)
