"""Slots, partners, and which version counts. What ranks do together stands in tests/mpi/test_checkpoint_memory.py."""

import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint.memory.loading import Held, newest
from hpcfsdp.checkpoint.memory.saving import held_by
from hpcfsdp.checkpoint.memory.windows import LINE_BYTES, Slot, SlotSize, Values, pack, partners, unpack
from hpcfsdp.checkpoint.saving.plan import plan_save
from hpcfsdp.launch.topology import Topology
from tests.unit.checkpoint.saving.test_plan import imagined, one, split_from


@pytest.mark.parametrize("sizes", [[1], [4], [1, 1], [2, 2, 2], [1, 3], [5, 2, 4], [1, 2, 1, 7]])
def test_each_rank_has_one_partner_on_another_node_which_knows_of_it(sizes):
    topology = Topology.uneven(sizes)
    pairs = []
    for rank in range(topology.size):
        partner, _ = partners(topology, rank)
        assert (partner is None) == (len(sizes) == 1)
        if partner is not None:
            assert topology.node_rank(partner) != topology.node_rank(rank)
            pairs.append((rank, partner))
    known = [(other, rank) for rank in range(topology.size) for other in partners(topology, rank)[1]]
    assert sorted(known) == pairs


def test_values_come_back_or_are_damaged():
    values = Values(3, {"date": "now"}, {"a": np.arange(2), "b": b"text"}, {})
    packed = pack(values)
    found, left = unpack(packed + b"more")
    assert (found.step, found.attributes, found.small["b"], left) == (3, {"date": "now"}, b"text", b"more")
    for place in range(len(packed)):
        with pytest.raises(ValueError, match="do not have their checksum"):
            unpack(packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :])
    with pytest.raises(ValueError):
        unpack(bytes(64))


def test_a_slot_keeps_a_version_until_the_next_one_begins():
    size = SlotSize(rank=1, room=256, blocks=3, data=100)
    slot = Slot(torch.zeros(size.nbytes, dtype=torch.uint8), size)
    assert (slot.version, slot.packed_values(), len(slot.places), len(slot.data)) == (0, None, 3, 100 + LINE_BYTES)
    packed = pack(Values(7, {}, None, {}))
    assert slot.put_values(packed) and not slot.put_values(bytes(257))
    slot.places[:] = (5, 6, 7)
    slot.data[:4] = 9
    slot.end(2, 7)
    assert (slot.version, slot.step, slot.packed_values()) == (2, 7, packed)
    copy = Slot(torch.zeros(size.nbytes, dtype=torch.uint8), size)
    copy.message(3).copy_(slot.message(3))
    assert (copy.version, copy.packed_values(), copy.places.tolist()) == (0, packed, [5, 6, 7])
    assert copy.data[:5].tolist() == [9, 9, 9, 0, 0]
    slot.begin()
    assert slot.version == 0


def held(generation, number, ranks, token="a", step=None, of=4):
    return Held(generation, number, token, number if step is None else step, of, ranks)


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        ([], None),
        ([[], []], None),
        ([[held(1, 3, (0, 1))], [held(1, 3, (2,))]], None),
        ([[held(1, 3, (0, 1)), held(1, 2, (0, 1, 2))], [held(1, 3, (2,)), held(1, 2, (2, 3))]], (1, 2)),
        ([[held(1, 9, (0, 1, 2, 3))], [held(2, 1, (0, 1), "b", of=2)]], (2, 1)),
        ([[held(1, 9, (0, 1, 2, 3))], [held(2, 1, (0,), "b", of=2)]], (1, 9)),
        ([[held(1, 3, (0, 1), "a")], [held(1, 3, (2, 3), "b")]], None),  # of two trainings
        ([[held(1, 3, (0, 1), step=3)], [held(1, 3, (2, 3), step=4)]], None),
    ],
)
def test_the_last_version_that_ranks_have_together_counts(everyone, expected):
    found = newest(everyone)
    assert (found and found[:2]) == expected
    if found is not None:
        assert found.ranks == tuple(range(found.num_ranks))


def test_blocks_that_a_rank_has_as_well():
    with split_from(8):
        named = [*imagined([(5, 3), (4,)], torch.float32, 2, replicas=2), ("model", one("whole"))]
        plan = plan_save(named, 4)
    tensors = [tensor for _, tensor in named]
    for rank in range(4):
        blocks = plan.blocks_of(rank)
        replica = held_by(plan, tensors, blocks, (rank + 2) % 4)
        other = held_by(plan, tensors, blocks, (rank + 1) % 4)
        # A tensor that all ranks keep whole may differ: that of rank 0 counts.
        is_sharded = np.array([plan.specs[of].path != "model/whole" for of in plan.blocks["tensor"][blocks]], bool)
        assert len(blocks) and replica.tolist() == is_sharded.tolist()
        assert not other.any() and not held_by(plan, tensors, blocks, None).any()
