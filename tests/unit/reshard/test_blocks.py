"""Parameters moved between shards of their blocks and boxes of other cuts, on ranks that are threads."""

import pytest
import torch

from hpcfsdp.reshard.blocks import ShardedBlocks
from hpcfsdp.reshard.boxes import chunk_box, run_boxes, whole_box
from tests.unit.reshard.layouts import VALUES, layout_of

SLOTS = range(len(VALUES))


def shards_of(layout, shard_rank, values, *, whole_shard):
    """By slot, the memory of a rank's runs."""
    shard = torch.full((layout.shard_numel,), -1.0)
    own = [torch.empty(0)] * len(layout.slots)
    for run in layout.runs(shard_rank):
        slot = layout.slots[run.index]
        block = values[run.index] if slot.block is None else values[run.index][slot.block.box.slices]
        own[run.index] = block.reshape(-1)[run.start : run.start + run.numel].clone()
        shard[run.offset : run.offset + run.numel] = own[run.index]
    return dict(enumerate([shard] * len(own) if whole_shard else own))


def whole_on_first(rank, index, size):
    return [whole_box(VALUES[index].shape)] if rank == 0 else []


def chunks(rank, index, size):
    if not VALUES[index].shape:
        return [whole_box(())] if rank == 0 else []
    box = chunk_box(VALUES[index].shape, size, rank)
    return [] if box is None else [box]


def ranges(rank, index, size):
    step = -(-VALUES[index].numel() // size)
    begin = min(rank * step, VALUES[index].numel())
    return run_boxes(VALUES[index].shape, begin, min(step, VALUES[index].numel() - begin))


@pytest.mark.parametrize("boxes", [whole_on_first, chunks, ranges])
@pytest.mark.parametrize("whole_shard", [False, True], ids=["own memory", "one shard"])
@pytest.mark.parametrize(("num_shards", "num_blocks"), [(1, 1), (3, 1), (1, 2), (2, 2), (2, 3)])
def test_boxes_are_gathered_from_shards_and_scattered_back(run_ranks, num_shards, num_blocks, whole_shard, boxes):
    def body(comm):
        shard_rank, block = divmod(comm.rank, num_blocks)
        layout = layout_of(num_shards, num_blocks, block)
        places = [divmod(rank, num_blocks) for rank in range(comm.size)]
        blocks = ShardedBlocks(comm, places, num_blocks, layout, whole_shard)
        shards = shards_of(layout, shard_rank, VALUES, whole_shard=whole_shard)
        own = {index: boxes(comm.rank, index, comm.size) for index in SLOTS}
        found = {index: torch.full((sum(box.numel for box in own[index]),), -2.0) for index in SLOTS}

        def of_rank(rank, index):
            return boxes(rank, index, comm.size)

        blocks.gather(shards, of_rank, found, torch.float32)
        for index in SLOTS:
            expected = [VALUES[index][box.slices].reshape(-1) for box in own[index]]
            assert torch.equal(found[index], torch.cat(expected) if expected else torch.empty(0))
        empty = shards_of(layout, shard_rank, [value * 0 for value in VALUES], whole_shard=whole_shard)
        blocks.scatter(found.get, of_rank, empty, torch.float32)
        assert all(torch.equal(empty[index], shards[index]) for index in SLOTS)

    assert run_ranks(num_shards * num_blocks, body) == [None] * (num_shards * num_blocks)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_unsharded_parameters_come_from_the_first_rank_and_go_to_all(run_ranks, num_ranks):
    def body(comm):
        layout = layout_of(1, 1, 0)
        blocks = ShardedBlocks(comm, [(rank, 0) for rank in range(comm.size)], 1, layout, True)
        shards = shards_of(layout, 0, [value + comm.rank for value in VALUES], whole_shard=True)
        found = {index: torch.empty(value.numel()) for index, value in enumerate(VALUES)}
        blocks.gather(shards, lambda rank, index: [whole_box(VALUES[index].shape)], found, torch.float32)
        assert all(torch.equal(found[index], VALUES[index].reshape(-1)) for index in SLOTS)
        blocks.scatter(found.get, lambda rank, index: whole_on_first(rank, index, comm.size), shards, torch.float32)
        assert torch.equal(shards[0], shards_of(layout, 0, VALUES, whole_shard=True)[0])

    assert run_ranks(num_ranks, body) == [None] * num_ranks
