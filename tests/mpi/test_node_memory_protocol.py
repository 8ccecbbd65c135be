"""The protocol by which ranks take turns on memory of a node: right under random delays, wrong without any one wait.

Nodes are imagined: the ranks of one machine have a topology of several.
"""

import ast
import inspect
import math
import random
import time

import pytest
import torch

from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.mpi import communicator as communicators, messages, node_memory, shared
from hpcfsdp.launch.topology import Topology
from tests.mpi.imagined_nodes import held, machines

pytestmark = [pytest.mark.ranks(3, 1, 2, more=(4,)), pytest.mark.transport]


class Dice:
    """Sleeps of random length at random moments; each rank has its own."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def sleep(self, chance=0.3):
        if self._random.random() < chance:
            time.sleep(self._random.random() ** 3 * 0.003)


@pytest.fixture
def delays(world, monkeypatch):
    """Delays before and after everything by which ranks synchronize."""
    dice = Dice(world.rank)

    def delay(holder, name, chance=0.3):
        original = getattr(holder, name)

        def delayed(*arguments, **options):
            dice.sleep(chance)
            result = original(*arguments, **options)
            dice.sleep(chance)
            return result

        monkeypatch.setattr(holder, name, delayed)

    delay(node_memory.NodeMemory, "_set")
    delay(node_memory.NodeMemory, "arrive")
    delay(node_memory.NodeMemory, "_reached", 0.01)
    delay(node_memory.NodeMemory, "label_of", 0.1)
    delay(shared, "_in_region")
    delay(shared, "reduce_into")
    delay(messages.Requests, "send")
    delay(messages.Requests, "recv")
    delay(messages.Requests, "holds", 0.01)
    return dice


ROUNDS = 20


def test_gathered_memory_is_right_under_delays(world, make, delays):
    for topology in machines(world.size):
        comm = make(topology)
        numel = 50
        full = comm.alloc(numel * comm.size, torch.float32, gathered=True)
        for turn in range(1, ROUNDS):
            expected = torch.cat([held(rank, numel, turn) for rank in range(comm.size)])
            delays.sleep()
            if turn % 3 == 0:
                comm.all_gather_into_tensor(full, held(comm.rank, numel, turn))
            else:
                comm.labelled_barrier("read")
                delays.sleep()
                segment(full, comm).copy_(held(comm.rank, numel, turn))
                delays.sleep()
                comm.all_gather_into_tensor(full, segment(full, comm))
                if turn % 3 == 1:  # as for the backward pass: again, with nothing written
                    comm.all_gather_into_tensor(full, segment(full, comm))
            for _ in range(2):
                assert torch.equal(full, expected), (topology, turn)
                delays.sleep(1.0)
            assert torch.equal(full, expected), (topology, turn)


def test_parts_are_right_under_delays_while_memory_is_freed(world, make, delays, monkeypatch):
    """Rows of matrices along each dimension, some too small to be sent alone, as the units of a model use them."""
    monkeypatch.setattr(communicators, "KEPT_PART", 0)
    size = world.size
    shapes = [((3 * size, 700), 0), ((5, 2 * size), 1), ((size,), 0), ((size, 4096), 0)]
    for topology in machines(size):
        comm = make(topology)
        memories = [
            comm.alloc(sum(math.prod(shape) for shape, _ in shapes), torch.float32, gathered=True) for _ in "ab"
        ]
        for turn in range(1, ROUNDS):
            full = memories[turn % 2]
            places = full.split([math.prod(shape) for shape, _ in shapes])
            wholes = [place.view(shape) for place, (shape, _) in zip(places, shapes, strict=True)]
            rows = list(
                zip(*(whole.chunk(size, dim) for whole, (_, dim) in zip(wholes, shapes, strict=True)), strict=True)
            )
            given = [held(0, whole.numel(), turn).view(whole.shape) for whole in wholes]
            mine = [each.chunk(size, dim)[comm.rank].clone() for each, (_, dim) in zip(given, shapes, strict=True)]
            delays.sleep()
            comm.all_gather_parts(full, rows, mine)
            for _ in range(2):
                assert all(map(torch.equal, wholes, given)), (topology, turn)
                delays.sleep(1.0)
            if turn % 3:
                comm.release(full)


@pytest.mark.ranks(4, more=(3,))
def test_ranks_of_whole_nodes_gather_again_what_they_have_kept(several, world, make, delays):
    topology = Topology.regular(world.size, 1) if world.size % 2 else Topology.uneven([1] * (world.size - 2) + [2])
    comm, numel = make(topology), 700
    ranks = range(2, world.size) if world.rank >= 2 else range(min(2, world.size))
    within = comm.subgroup(ranks)
    full = comm.alloc(numel * comm.size, torch.float32, gathered=True)
    parts = [[part] for part in full.view(comm.size, -1)]
    kept = [[part] for part in full[: numel * comm.size // within.size * within.size].view(within.size, -1)]
    for turn in range(ROUNDS):
        comm.all_gather_parts(full, parts, [held(comm.rank, numel, turn)])
        expected = full.clone()
        mine = [kept[within.rank][0].clone()]
        comm.release(full)
        delays.sleep()
        within.barrier()
        comm.all_gather_parts(full, kept, mine, within=within)
        assert torch.equal(full, expected), turn


def test_reductions_are_right_under_delays_and_leave_their_input_to_the_caller(world, make, delays):
    for topology in machines(world.size):
        comm = make(topology)
        numel = 30
        inputs = comm.alloc(numel * comm.size, torch.float32)
        output = torch.empty(numel)
        for turn in range(ROUNDS):
            given = [held(rank, inputs.numel(), turn) for rank in range(comm.size)]
            inputs.copy_(given[comm.rank])
            delays.sleep()
            if turn % 2:
                comm.reduce_scatter_tensor(output, inputs, "sum")
                inputs.fill_(-1.0)
                assert torch.equal(output, segment(sum(given), comm)), (topology, turn)
            else:
                comm.all_reduce(inputs, "sum")
                result = inputs.clone()
                inputs.fill_(-1.0)
                assert torch.equal(result, sum(given)), (topology, turn)


def test_ranks_with_a_barrier_around_each_use_may_write_in_place(world, make, delays):
    """What the engine does with parameters that stay: nothing is gathered, barriers separate reads from writes."""
    comm, numel = make(), 40
    full = comm.alloc(numel * comm.size, torch.float32, gathered=True)
    for turn in range(2 * ROUNDS):
        expected = torch.cat([held(rank, numel, turn) for rank in range(comm.size)])
        delays.sleep()
        segment(full, comm).copy_(held(comm.rank, numel, turn))
        comm.labelled_barrier(f"written {turn}")
        assert torch.equal(full, expected), turn
        delays.sleep(1.0)
        assert torch.equal(full, expected), turn
        comm.labelled_barrier(f"used {turn}")


def waits():
    """The waits in shared.py: (function, its which) by line."""
    found = {}
    for function in ast.parse(inspect.getsource(shared)).body:
        if isinstance(function, ast.FunctionDef) and not function.decorator_list:
            lines = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Yield)]
            found |= {line: (function.name, number) for number, line in enumerate(sorted(lines), 1)}
    return found


def leaving_out(site, original):
    """A collective that goes on at once where it should wait."""
    lines = waits()

    def collective(*arguments):
        steps = original(*arguments)
        for condition in steps:
            innermost = steps
            while inspect.isgenerator(innermost.gi_yieldfrom):
                innermost = innermost.gi_yieldfrom
            if lines[innermost.gi_frame.f_lineno] != site:
                yield condition

    return collective


class Stage:
    """Two ranks that race: the late one is held until the other has done what it should not do yet."""

    def __init__(self, world, make, monkeypatch, patience_s):
        self.world, self.make, self.monkeypatch = world, make, monkeypatch
        self.is_late, self.is_first = world.rank == world.size - 1, world.rank == 0
        self._patience_s = patience_s
        self._board = node_memory.share(world.comm, 4096).view(torch.int64)
        world.comm.Barrier()

    def signal(self):
        if self.is_first:
            self._board[0] = 1

    def hold(self):
        """On the late rank: wait for the signal, but not without end; in a right protocol it does not come."""
        until = time.monotonic() + self._patience_s
        while self.is_late and not self._board[0] and time.monotonic() < until:
            time.sleep(0.001)

    def around(self, holder, name, before=lambda: None, after=lambda: None, when=lambda *_: True):
        original = getattr(holder, name)

        def wrapped(*arguments, **options):
            wanted = when(*arguments)
            if wanted:
                before()
            result = original(*arguments, **options)
            if wanted:
                after()
            return result

        self.monkeypatch.setattr(holder, name, wrapped)

    def machine(self, kind):
        size = self.world.size
        return self.make(
            {
                "one node": Topology.regular(1, size),
                "single ranks": Topology.regular(size, 1),
                "late rank on the first node": Topology.from_labels(
                    [1 if 0 < rank < size - 1 else 0 for rank in range(size)]
                ),
            }[kind]
        )


NUMEL = 6


def gathered(stage, kind, turn=0):
    comm = stage.machine(kind)
    full = comm.alloc(NUMEL * comm.size, torch.float32, gathered=True)
    comm.all_gather_into_tensor(full, held(comm.rank, NUMEL, turn))
    stage.world.comm.Barrier()
    return comm, full


def all_of(comm, turn, numel=NUMEL):
    return torch.cat([held(rank, numel, turn) for rank in range(comm.size)])


def write_while_the_late_rank_reads(stage, turn):
    comm, full = gathered(stage, "one node", turn)
    comm.labelled_barrier("before")
    stage.world.comm.Barrier()
    stage.hold()
    right = torch.equal(full, all_of(comm, turn))
    comm.labelled_barrier("read")
    segment(full, comm).fill_(-1.0)
    stage.signal()
    return right


def gather_another_shard_while_the_late_rank_reads(stage, turn):
    comm, full = gathered(stage, "one node", turn)
    stage.around(node_memory.NodeMemory, "arrive", after=stage.signal)
    stage.hold()
    right = torch.equal(full, all_of(comm, turn))
    comm.all_gather_into_tensor(full, torch.full((NUMEL,), -1.0))
    return right


def receive_from_other_nodes_while_the_late_rank_reads(stage, turn):
    comm, full = gathered(stage, "late rank on the first node", turn)
    stage.around(node_memory.NodeMemory, "arrive", after=stage.signal)
    stage.hold()
    right = torch.equal(full, all_of(comm, turn))
    is_elsewhere = 0 < comm.rank < comm.size - 1
    comm.all_gather_into_tensor(full, torch.full((NUMEL,), -1.0) if is_elsewhere else segment(full, comm))
    return right


def gather(stage, turn, kind):
    comm, full = gathered(stage, kind, turn)
    comm.labelled_barrier("read")
    stage.hold()
    segment(full, comm).copy_(held(comm.rank, NUMEL, turn + 1))
    comm.all_gather_into_tensor(full, segment(full, comm))
    right = torch.equal(full, all_of(comm, turn + 1))
    stage.signal()
    return right


def read_before_other_nodes_have_sent(stage, turn):
    return gather(stage, turn, "single ranks")


def read_before_the_late_rank_has_written(stage, turn):
    return gather(stage, turn, "one node")


def write_where_the_late_rank_frees_memory(stage, turn):
    stage.monkeypatch.setattr(communicators, "KEPT_PART", 0)
    comm, numel = stage.machine("late rank on the first node"), 4096
    full = comm.alloc(numel * comm.size, torch.float32, gathered=True)
    parts = [[full[numel * place : numel * (place + 1)]] for place in reversed(range(comm.size))]
    comm.all_gather_parts(full, parts, [held(comm.rank, numel, turn)])
    stage.around(node_memory, "_free_pages", before=stage.hold)
    stage.around(node_memory.NodeMemory, "arrive", before=stage.signal)
    if not stage.is_late:
        comm.release(full)
    stage.world.comm.Barrier()
    if stage.is_late:  # the last one, so it frees its part of the pages at once: there the first rank writes
        comm.release(full)
    comm.all_gather_parts(full, parts, [held(comm.rank, numel, turn + 1)])
    stage.world.comm.Barrier()
    return all(torch.equal(part, held(rank, numel, turn + 1)) for rank, (part,) in enumerate(parts))


def reduction(stage, turn, kind, operation, before=lambda: None):
    """One reduction; whether its result is right, also after what another rank does with its own input."""
    comm = stage.machine(kind)
    inputs = comm.alloc(NUMEL * comm.size, torch.float32)
    stage.world.comm.Barrier()
    before()
    given = [held(rank, inputs.numel(), turn) for rank in range(comm.size)]
    inputs.copy_(given[comm.rank])
    if operation == "reduce_scatter":
        result, expected = torch.empty(NUMEL), segment(sum(given), comm)
        comm.reduce_scatter_tensor(result, inputs, "sum")
    else:
        comm.all_reduce(inputs, "sum")
        result, expected = inputs.clone(), sum(given)
    inputs.fill_(-1.0)
    stage.signal()
    return torch.equal(result, expected)


def reduce_before_the_late_rank_has_written(stage, turn):
    stage.around(shared, "reduce_into", after=stage.signal)
    return reduction(stage, turn, "one node", "reduce_scatter", before=stage.hold)


def reduce_before_other_nodes_have_sent(stage, turn):
    return reduction(stage, turn, "single ranks", "reduce_scatter", before=stage.hold)


def change_the_input_while_the_late_rank_reduces(stage, turn):
    stage.around(shared, "reduce_into", before=stage.hold)
    return reduction(stage, turn, "one node", "reduce_scatter")


def return_before_other_nodes_have_sent_their_result(stage, turn):
    # The last step of the first half: its messages have left, those of the second half have not.
    stage.around(shared, "reduce_into", before=stage.hold, when=lambda output, sources, *_: len(sources) > 1)
    return reduction(stage, turn, "single ranks", "all_reduce")


def copy_before_the_late_rank_has_reduced(stage, turn):
    stage.around(shared, "reduce_into", before=stage.hold)
    stage.around(node_memory.NodeMemory, "done", before=stage.signal)
    return reduction(stage, turn, "one node", "all_reduce")


def change_the_result_while_the_late_rank_copies(stage, turn):
    stage.around(shared, "_in_region", before=stage.hold, when=lambda memory, *_: memory.epoch == 2)
    return reduction(stage, turn, "one node", "all_reduce")


def use_what_the_late_rank_has_not_written(stage, turn):
    """As parameters that stay in memory that ranks share: written by everyone, then used by everyone."""
    comm = stage.machine("one node")
    full = comm.alloc(NUMEL * comm.size, torch.float32, gathered=True)
    comm.labelled_barrier("before")
    stage.world.comm.Barrier()
    stage.hold()
    segment(full, comm).copy_(held(comm.rank, NUMEL, turn))
    comm.labelled_barrier(f"turn {turn}")
    right = torch.equal(full, all_of(comm, turn))
    stage.signal()
    return right


RACES = [
    (("labelled_barrier", 1), write_while_the_late_rank_reads),
    (("labelled_barrier", 1), use_what_the_late_rank_has_not_written),
    (("all_gather", 1), receive_from_other_nodes_while_the_late_rank_reads),
    (("all_gather", 2), gather_another_shard_while_the_late_rank_reads),
    (("all_gather", 1), write_where_the_late_rank_frees_memory),
    (("_exchange_parts", 1), read_before_other_nodes_have_sent),
    (("all_gather", 3), read_before_the_late_rank_has_written),
    (("_reduce_mine", 1), reduce_before_the_late_rank_has_written),
    (("_reduce_mine", 2), reduce_before_other_nodes_have_sent),
    (("reduce_scatter", 1), change_the_input_while_the_late_rank_reduces),
    (("all_reduce", 1), return_before_other_nodes_have_sent_their_result),
    (("all_reduce", 2), copy_before_the_late_rank_has_reduced),
    (("all_reduce", 3), change_the_result_while_the_late_rank_copies),
]


def test_there_is_a_race_for_every_wait():
    assert sorted(set(waits().values())) == sorted({site for site, _ in RACES})


@pytest.mark.parametrize(("site", "race"), RACES, ids=[race.__name__ for _, race in RACES])
def test_without_any_one_wait_values_are_wrong(several, world, make, monkeypatch, site, race):
    if site == ("all_gather", 1) and world.size < 3:
        pytest.skip("two ranks of one node and one of another are three")
    with monkeypatch.context() as patch:
        right = race(Stage(world, make, patch, patience_s=0.05), turn=1)
    assert world.comm.allreduce(right) == world.size
    with monkeypatch.context() as patch:
        for name in ("labelled_barrier", "all_gather", "reduce_scatter", "all_reduce"):
            patch.setattr(shared, name, leaving_out(site, getattr(shared, name)))
        right = race(Stage(world, make, patch, patience_s=5.0), turn=3)
        assert world.comm.allreduce(right) < world.size
