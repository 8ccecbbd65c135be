"""Random models of which each rank uses other parameters, on the simulated device: values are right, no rank waits."""

import pytest

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import CustomPolicy
from tests.accelerator.programs import SIM, leave_for_later, mesh_of
from tests.mpi import random_models

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.usefixtures("hardware"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module", "ignore:no parameter of the unit"),
]

SEEDS = range(10)


@pytest.mark.parametrize("front", ["flat", "original", "rows"])
def test_random_models(world, group, streams, front):
    for seed in SEEDS:
        leave_for_later(streams, ["eager", "random", "all"][seed % 3])
        model, units = random_models.make(seed, world.size)
        expected = random_models.trained(model, world.size)
        if front == "rows":
            for unit in [*units, model.to(SIM)]:
                hpcfsdp.fully_shard(unit, mesh=mesh_of((world.size,), ("shard",)))
        else:
            policy, original = CustomPolicy(lambda module, units=units: module in units), front == "original"
            model = FullyShardedDataParallel(model.to(SIM), group, auto_wrap_policy=policy, use_orig_params=original)
        random_models.train(model, world.rank, SIM)
        random_models.check(model, expected)
