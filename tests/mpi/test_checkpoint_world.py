"""Any number of ranks, however they shard, goes on from a file that any other number has written, bit by bit."""

import h5py
import numpy as np
import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.fsdp import ShardingStrategy
from tests.mpi.models import adamw, batch, loss_of, make_net, shard

WRITERS = ["posix", "subfiles", *(["mpio"] if h5py.get_config().mpi else [])]


@pytest.fixture(autouse=True)
def _files_of_nodes_hold_small_tensors_too(monkeypatch):
    monkeypatch.setattr("hpcfsdp.checkpoint.saving.subfiles.LEAST_BYTES", 1)


class Layout:
    """The first ranks of the world, and how they shard. Collective over the world.

    Args:
        shards: how many ranks shard; None: all of them, else the other ranks replicate.
    """

    def __init__(self, world, size, shards=None):
        part = world.comm.Split(0 if world.rank < size else 1)
        self.name, self.size, self.group = f"{size}-{shards}", size, None
        if world.rank >= size:
            return
        self.group = MpiCommunicator(part)
        self.argument, self.strategy = self.group, ShardingStrategy.FULL_SHARD
        if shards is not None:
            first = self.group.rank // shards * shards
            sharding = self.group.subgroup(list(range(first, first + shards)))
            replicas = self.group.subgroup(list(range(self.group.rank % shards, size, shards)))
            self.argument, self.strategy = (sharding, replicas), ShardingStrategy.HYBRID_SHARD

    def model(self, seed):
        return shard(make_net(seed=seed), self.argument, sharding_strategy=self.strategy)


def train(model, optimizer, steps):
    """Train on the whole of each batch on every rank: any number of ranks does then, nearly, the same."""
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step))
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def content(path):
    """Everything in a file that another world is to have, too."""
    index = open_index(path)
    with BlockReader(index) as reader:
        tensors = {name: b"".join(block.tobytes() for block in reader.blocks(name)) for name in index.tensors}
    assert len(tensors) > 30
    specs = [(spec.path, spec.shape, spec.dtype) for spec in index.tensors.values()]
    return specs, tensors, index.links, index.param_groups, index.scalars


def check_all_pairs(world, folder, layouts, writer):
    expected = {}
    for layout in layouts:
        if layout.group is not None:
            model = layout.model(0)
            optimizer = adamw(model)
            train(model, optimizer, range(3))
            checkpoint.save(folder / f"{layout.name}.h5", model=model, optimizer=optimizer, step=3, writer=writer)
            expected[layout.name] = train(model, optimizer, range(3, 6))
    world.comm.Barrier()
    for written in layouts:
        path = folder / f"{written.name}.h5"
        before = content(path)
        for layout in layouts:
            if layout.group is None:
                continue
            model = layout.model(7)
            optimizer = adamw(model)
            train(model, optimizer, range(10, 11))  # everything that is there must be replaced
            info = checkpoint.load(path, model=model, optimizer=optimizer)
            assert (info.world_size, info.step) == (written.size, 3)
            again = folder / f"{written.name} to {layout.name}.h5"
            checkpoint.save(again, model=model, optimizer=optimizer, step=3, writer=writer)
            assert content(again) == before
            losses = train(model, optimizer, range(3, 6))
            if layout is written:
                assert losses == expected[layout.name]
            torch.testing.assert_close(losses, expected[layout.name], rtol=1e-5, atol=0)
    world.comm.Barrier()
    values = np.array([expected.get(layout.name, [0.0] * 3) for layout in layouts])
    everyone = np.stack(world.comm.allgather(values))
    for index, layout in enumerate(layouts):
        assert np.array_equal(everyone[: layout.size, index], everyone[:1, index].repeat(layout.size, 0))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.ranks(4)
def test_any_number_of_ranks_goes_on_from_the_file_of_any_other(world, shared_path, writer, thorough):
    layouts = [(1,), (3,), (4,), (4, 2), *([(2,), (4, 1)] if thorough else [])]
    layouts = [Layout(world, *layout) for layout in layouts]
    check_all_pairs(world, shared_path, layouts, writer)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.ranks(8)
def test_up_to_eight_ranks_too(world, shared_path, writer):
    if world.size < 8:
        pytest.skip("needs 8 ranks: make test-slow")
    layouts = [Layout(world, *layout) for layout in ((1,), (2,), (3,), (4,), (7,), (8,), (8, 4), (8, 2))]
    check_all_pairs(world, shared_path, layouts, writer)
