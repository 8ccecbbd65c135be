"""``WholeTensors``: what it comes to is what the optimizer does with the plain model in one process."""

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.optim import WholeTensors
from tests.mpi import mesh_cases, models
from tests.mpi.whole_cases import OPTIMIZERS, class_and_options

pytestmark = pytest.mark.ranks(2, 1, 3, 4)
TIGHT = {"rtol": 1e-9, "atol": 1e-11}
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.NO_SHARD,
]


def whole(model, name, **options):
    kind, kwargs = class_and_options(name)
    return WholeTensors(model, model.parameters(), kind, **kwargs, **options)


def net():
    return models.make_net().double()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name.lower())
def test_it_steps_as_the_optimizer_of_the_plain_model(comm, strategy):
    for name in OPTIMIZERS:
        plain = net()
        expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(4))
        model = models.shard(net(), use_orig_params=True, sharding_strategy=strategy)
        got = models.train_sharded(model, whole(model, name), range(4), comm)
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}", **TIGHT)
        with FullyShardedDataParallel.summon_full_params(model):
            for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(other, one, msg=lambda text, key=key: f"{name} {key}: {text}", **TIGHT)


@pytest.mark.ranks(4, 2, 3)
@pytest.mark.parametrize("replicas", ["divide", "repeat"])
@pytest.mark.parametrize("name", ["muon", "adafactor", "soap"])
@mesh_cases.each_mesh
def test_it_steps_tensor_parallel_models(shape, name, replicas):
    at = mesh_cases.place(shape)
    for kind in (mesh_cases.Gpt, mesh_cases.Primes, mesh_cases.Tied):
        plain = mesh_cases.build(kind)
        expected = mesh_cases.train_plain(plain, optimizer=OPTIMIZERS[name](plain.parameters()))
        model = mesh_cases.shard(mesh_cases.build(kind), at, use_orig_params=True)
        optimizer = whole(model, name, replicas=replicas)
        got = mesh_cases.train(model, at, optimizer=optimizer)
        mesh_cases.assert_same(got, expected)
