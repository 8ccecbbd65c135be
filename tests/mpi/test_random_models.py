"""Random models of which each rank uses other parameters, next to one process."""

import pytest

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import CustomPolicy
from tests.mpi import random_models

pytestmark = [
    pytest.mark.ranks(2, 3),
    pytest.mark.transport,
    pytest.mark.filterwarnings("ignore:no parameter of the unit"),  # no rank may use one
]


@pytest.fixture
def seeds(world, thorough):
    """Other models under each number of ranks."""
    return range(6 * world.size, 6 * world.size + (12 if thorough else 6))


@pytest.mark.parametrize("transport", ["shared memory", "messages"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_wrapped(world, seeds, groups, transport, original):
    for seed in seeds:
        model, units = random_models.make(seed, world.size)
        expected = random_models.trained(model, world.size)
        policy = CustomPolicy(lambda module, units=units: module in units)
        model = FullyShardedDataParallel(model, groups[transport], auto_wrap_policy=policy, use_orig_params=original)
        random_models.train(model, world.rank)
        random_models.check(model, expected)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_fully_sharded(world, seeds, row_meshes, transport):
    for seed in seeds:
        model, units = random_models.make(seed, world.size)
        expected = random_models.trained(model, world.size)
        for unit in [*units, model]:
            hpcfsdp.fully_shard(unit, mesh=row_meshes[transport])
        random_models.train(model, world.rank)
        random_models.check(model, expected)
