"""Hybrid sharding where each process sees one device: nodes come from MPI, never from counting devices."""

import copy

import pytest
import torch

from hpcfsdp import accelerator
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.launch.topology import Topology
from tests.mpi.models import adamw, make_net, shard, train_plain, train_sharded

pytestmark = [pytest.mark.ranks(4), pytest.mark.transport]


@pytest.fixture
def two_nodes(world, monkeypatch):
    """The world as if its ranks were on two nodes; each process sees one device."""
    import dataclasses

    from hpcfsdp import world as module
    from hpcfsdp.units import unit_mesh

    if world.size != 4:
        pytest.skip("two nodes of two ranks need four ranks")
    imagined = dataclasses.replace(world, topology=Topology.from_labels([0, 0, 1, 1]))
    monkeypatch.setattr(module, "_world", imagined)
    monkeypatch.setattr(unit_mesh, "_current", None)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)  # as each rank sees it under CUDA_VISIBLE_DEVICES
    yield imagined
    unit_mesh._current = None


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_gradients_are_reduced_over_nodes_and_replicas_stay_equal(two_nodes, comm, strategy, original):
    plain = make_net()
    sharded = shard(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], use_orig_params=original)
    expected = train_plain(plain, adamw(plain), range(6))
    got = train_sharded(sharded, adamw(sharded), range(6), comm)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    shards = [
        flat.parameter.detach().clone()
        for wrapper in FullyShardedDataParallel.fsdp_modules(sharded)
        for flat in wrapper._unit.sharded_params
    ]
    everyone = comm.all_gather_object([value.numpy().tobytes() for value in shards])
    assert everyone[0] == everyone[2]
    assert everyone[1] == everyone[3]
    assert everyone[0] != everyone[1]  # each rank of a node holds its own part
