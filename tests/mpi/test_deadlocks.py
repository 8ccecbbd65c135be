"""No rank waits for another in a circle, and all call collectives in one order: random models, as on an accelerator.

Each rank uses other parameters. What it would put on its device is recorded, and joined into one graph (``deadlock``).
"""

import random

import pytest
import torch

from hpcfsdp.api.fully_shard import shard_modules
from hpcfsdp.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.wrap import CustomPolicy
from tests.deadlock import problem
from tests.mpi import random_models, traced

pytestmark = [
    pytest.mark.ranks(2, more=(1, 3, 4)),
    pytest.mark.filterwarnings("ignore:no parameter of the unit"),  # no rank may use one
]

COUNT, MANY = 70, 500


def options_of(draw, front):
    """Options of all units, alike on all ranks."""
    forward, backward = draw.choice([False, True]), draw.choice([None, *BackwardPrefetch])
    kept = draw.choice([False, False, True])
    if front == "rows":
        return {"reshard_after_forward": not kept}
    strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
    return {"forward_prefetch": forward, "backward_prefetch": backward, "sharding_strategy": strategy}


def train(world, streams, front, seed):
    """Train a random model, sharded in a random way."""
    draw = random.Random(seed)
    model, units = random_models.make(seed, world.size)
    replicas = 2 if world.size == 4 and draw.random() < 0.4 else 1
    options, is_apart = options_of(draw, front), draw.random() < 0.3
    shards, lines = traced.communicators(world, streams, replicas)
    if front == "rows":
        mesh = traced.mesh_over(world, shards, lines)
        for unit in [*units, model]:
            shard_modules([unit], mesh, **options)
        apart = None
    else:
        if replicas > 1:
            names = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}
            options["sharding_strategy"] = ShardingStrategy[names[options["sharding_strategy"].name]]
        policy, original = CustomPolicy(lambda module: module in units), front == "original"
        group = (shards, lines) if replicas > 1 else shards
        model = FullyShardedDataParallel(model, group, auto_wrap_policy=policy, use_orig_params=original, **options)
        if draw.random() < 0.3:
            pretend_offload(model)
        apart = model.no_sync if is_apart else None
    del streams.trace[:]  # from here on as on an idle device
    random_models.train(model, world.rank, steps=2, apart=apart)  # in the second the order of units is known


def pretend_offload(model):
    """Have flat parameters compute elsewhere than where they are."""
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        for flat in wrapper._unit.sharded_params:
            flat.device = torch.device("cpu", 0)  # not equal to "cpu"


@pytest.mark.parametrize("front", ["flat", "original", "rows"])
def test_random_models_come_to_their_end(world, thorough, front):
    for seed in range(MANY if thorough else COUNT):
        with traced.tracing(world) as streams:
            train(world, streams, front, seed)
        traces = world.comm.allgather(streams.trace)
        if world.rank == 0:
            assert len(traces[0]) > (20 if world.size > 1 else 8)  # something was recorded
        found = problem(traces)
        assert found is None, f"model {seed}: {found}"
