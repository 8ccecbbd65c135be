"""What several files of tests share, as fixtures."""

import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import settings
from torch import nn

from hpcfsdp.comm.communicator import Communicator, check_list
from hpcfsdp.comm.progress import Finished
from hpcfsdp.comm.reduce import accumulate_dtype
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.job import load_mpi

load_mpi()  # a module that loads it otherwise leaves a segment of shared memory where no launcher removes it
settings.register_profile("hpcfsdp", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("hpcfsdp")

NUM_SHARDS, NUM_REPLICAS = 3, 2
"""Of ``run_grid``."""


def pytest_collection_modifyitems(items):
    """Threads draw from one generator, so what they build at once has different values."""
    for item in items:
        if "tests/unit/" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings("ignore::hpcfsdp.errors.DifferentValuesWarning"))


class ThreadComm(Communicator):
    """A ``Communicator`` of ranks that are threads of this process, and share no memory as far as it says."""

    def __init__(self, rank, size, barrier, board):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self._barrier, self._board, self._round = barrier, board, 0

    def _exchange(self, value):
        self._round += 1
        slots = self._board.setdefault(self._round, [None] * self.size)
        slots[self.rank] = value
        self._barrier.wait(timeout=60)
        return list(slots)

    def all_gather_into_tensor(self, output, shard, *, async_op=False):
        output.copy_(torch.cat(self._exchange(shard.detach().clone())))
        return Finished() if async_op else None

    def reduce_scatter_tensor(self, output, full, op, *, accumulate=None, label="", async_op=False):
        total = full.detach().to(accumulate or accumulate_dtype(full.dtype), copy=True)
        self.all_reduce(total, op, label=label)
        output.copy_(total.view(self.size, -1)[self.rank])
        return Finished() if async_op else None

    def all_reduce(self, tensor, op, *, accumulate=None, label="", async_op=False):
        mine = tensor.detach().to(accumulate or accumulate_dtype(tensor.dtype), copy=True)
        told = self._exchange((label, mine))
        labels = [label for label, _ in told]
        if len(set(labels)) > 1:
            raise CommunicationError(f"ranks reduce different things: {labels}")
        everyone = torch.stack([values for _, values in told])
        total = everyone.amax(0) if op == "max" else everyone.sum(0)
        tensor.detach().copy_(total / self.size if op == "average" else total)
        return Finished() if async_op else None

    def broadcast(self, tensor, src, *, async_op=False):
        tensor.copy_(self._exchange(tensor.detach().clone())[src])
        return Finished() if async_op else None

    def gather(self, outputs, tensor, dst, *, async_op=False):
        assert (outputs is None) == (self.rank != dst)
        for output, value in zip(outputs or [], self._exchange(tensor.detach().clone()), strict=False):
            output.copy_(value)
        return Finished() if async_op else None

    def scatter(self, output, inputs, src, *, async_op=False):
        assert (inputs is None) == (self.rank != src)
        given = None if inputs is None else [tensor.detach().clone() for tensor in inputs]
        output.copy_(self._exchange(given)[src][self.rank])
        return Finished() if async_op else None

    def all_gather(self, outputs, tensor, *, async_op=False):
        check_list("all_gather", self, "outputs", outputs)
        self._check("all_gather", tensor, written=outputs)
        return self._arrive(outputs, self._exchange(tensor.detach().clone()), async_op)

    def all_to_all(self, outputs, inputs, *, async_op=False):
        check_list("all_to_all", self, "outputs", outputs)
        check_list("all_to_all", self, "inputs", inputs)
        self._check("all_to_all", *inputs, written=outputs)
        sent = self._exchange([tensor.detach().clone() for tensor in inputs])
        return self._arrive(outputs, [of_rank[self.rank] for of_rank in sent], async_op)

    def _arrive(self, outputs, values, async_op):
        for output, value in zip(outputs, values, strict=True):
            assert output.numel() == value.numel()
            output.detach().view(-1).copy_(value.view(-1))
        return Finished() if async_op else None

    def barrier(self, *, async_op=False):
        self._exchange(None)
        return Finished() if async_op else None

    def labelled_barrier(self, note, flag=False):
        notes, flags = zip(*self._exchange((note, flag)), strict=True)
        for rank, other in enumerate(notes):
            if other != notes[0]:
                raise CommunicationError(f"rank 0 comes with {notes[0]}, rank {rank} with {other}")
        return any(flags)

    def all_gather_object(self, value):
        return [pickle.loads(text) for text in self._exchange(pickle.dumps(value))]

    def broadcast_object(self, value, src=0):
        return self.all_gather_object(value)[src]


class SharingThreadComm(ThreadComm):
    """The same, as if ranks shared the memory of a node, which threads do."""

    shares_gathered = True
    shares_memory = True

    def alloc(self, numel, dtype, *, gathered=False):
        mine = super().alloc(numel, dtype, gathered=gathered)
        return self._exchange(mine)[0].view(-1) if gathered else mine


@pytest.fixture(scope="session")
def run_ranks():
    """``run_ranks(size, body, shares_memory=False)``: what ``body(comm)`` returns on each rank, or what it raises."""

    def run(size, body, shares_memory=False):
        barrier, board, results = threading.Barrier(size), {}, [None] * size
        kind = SharingThreadComm if shares_memory else ThreadComm

        def work(rank):
            try:
                results[rank] = body(kind(rank, size, barrier, board))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


@pytest.fixture
def run_grid(run_ranks):
    """``run_grid(body)``: what ``body(shard, replicate)`` returns on each rank of two replicas of three shards."""

    def run(body):
        shared = {place: (threading.Barrier(size), {}) for size, place in (*_lines("shard"), *_lines("replicate"))}

        def work(comm):
            replica, part = divmod(comm.rank, NUM_SHARDS)
            shard = type(comm)(part, NUM_SHARDS, *shared["shard", replica])
            return body(shard, type(comm)(replica, NUM_REPLICAS, *shared["replicate", part]))

        return run_ranks(NUM_SHARDS * NUM_REPLICAS, work)

    return run


def _lines(name):
    size, count = (NUM_SHARDS, NUM_REPLICAS) if name == "shard" else (NUM_REPLICAS, NUM_SHARDS)
    return [(size, (name, place)) for place in range(count)]


@pytest.fixture(scope="session")
def run_python():
    """``run_python(code, *arguments)``: stdout of a Python process of its own, which must succeed."""

    def run(code, *arguments):
        command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def give_away(monkeypatch):
    """``give_away(path)``: give a file, folder or link to another user, or be another user from here on."""

    user = os.geteuid()

    def give(path):
        if user == 0:
            os.chown(path, 12345, 12345, follow_symlinks=False)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        return path

    return give


class Model(nn.Module):
    """Tied weights, a scalar parameter, buffers of many dtypes, and one that is not persistent."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("brief", torch.randn(3).bfloat16())
        self.register_buffer("wide", torch.randn(2, 2, dtype=torch.float64))
        self.register_buffer("mask", torch.rand(4) < 0.5)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(self.hidden(self.embed(ids)))) * self.scale


@pytest.fixture(scope="session")
def make_model():
    """``make_model(seed)``: a small model with one of everything that a checkpoint has to keep."""

    def make(seed):
        torch.manual_seed(seed)
        return Model()

    return make


@pytest.fixture(scope="session")
def train_steps():
    """``train_steps(model, optimizer, count)``: steps on data that is the same in each call; the last loss."""

    def train(model, optimizer, count):
        ids = torch.tensor([0, 1, 2, 3, 4, 0])
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), ids.flip(0))
            loss.backward()
            optimizer.step()
        return loss.item()

    return train


@pytest.fixture(scope="session")
def same():
    """``same(a, b)``: whether two nested values are equal in type, dtype and every bit."""

    def compare(a, b):
        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            kinds = [(tensor.dtype, tensor.shape, tensor.requires_grad) for tensor in (a, b)]
            return kinds[0] == kinds[1] and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(compare(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(compare(x, y) for x, y in zip(a, b, strict=True))
        return a == b

    return compare
