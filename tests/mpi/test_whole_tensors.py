"""``WholeTensors``: what it comes to is what the optimizer does with the plain model in one process."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import hpcfsdp
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, ShardedGradScaler, ShardingStrategy
from hpcfsdp.optim import WholeTensors
from tests.mpi import mesh_cases, models, row_cases
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
                torch.testing.assert_close(other, one, msg=lambda text, at=(name, key): f"{at}: {text}", **TIGHT)


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
        mesh_cases.close(got, expected)


def rows_net(mesh=None, prepare=None, **options):
    return row_cases.make(hpcfsdp.fsdp2, mesh, prepare=prepare, **options)


def plain_rows(name, steps=3):
    """What a plain model of ``row_cases`` comes to with the data of all ranks."""
    torch.manual_seed(0)
    model = row_cases.Net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    data = [row_cases.batches(rank, steps) for rank in range(dist.get_world_size())]
    for ids in zip(*data, strict=True):
        model(torch.cat(ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_rows(model, optimizer, steps=3):
    for ids in row_cases.batches(dist.get_rank(), steps):
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dim", [0, 1])
def test_it_steps_models_of_fully_shard(world, dim):
    for name in OPTIMIZERS:
        expected = plain_rows(name)
        model = rows_net(shard_placement_fn=lambda param: Shard(dim) if param.dim() > 1 else None)
        train_rows(model, whole(model, name))
        for (key, one), other in zip(expected.named_parameters(), model.parameters(), strict=True):
            got = row_cases.whole(other)
            torch.testing.assert_close(got, one, msg=lambda text, at=(name, key): f"{at}: {text}", **TIGHT)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicas", ["divide", "repeat"])
def test_it_steps_hybrid_models_of_fully_shard(world, replicas):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("muon", "shampoo"):
        expected = plain_rows(name)
        model = rows_net(mesh)
        train_rows(model, whole(model, name, replicas=replicas))
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(row_cases.whole(other), one, **TIGHT)


@pytest.mark.ranks(2, 3)
def test_it_steps_what_no_unit_owns(world, comm):
    for name in ("muon", "adafactor"):
        plain = net()
        expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(2), clip=1e9)
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = whole(model, name)
        for step in range(2):
            ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(step))
            models.loss_of(model, ids, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(expected) == 2
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


@pytest.mark.ranks(2, 3)
def test_accumulation_scaling_and_offload_go_on_around_it(comm):
    plain, name = net(), "muon"
    expected = models.train_plain(plain, OPTIMIZERS[name](plain.parameters()), range(2), clip=1e9)
    model = models.shard(net(), use_orig_params=True, cpu_offload=CPUOffload(offload_params=True))
    optimizer, scaler = whole(model, name), ShardedGradScaler(device="cpu", init_scale=64.0)
    losses = []
    for step in range(2):
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in models.batch(step))
        half = len(ids) // 2
        parts = [(ids[:half], targets[:half]), (ids[half:], targets[half:])]
        total = 0.0
        for number, (some, wanted) in enumerate(parts):
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                loss = models.loss_of(model, some, wanted) * len(some) / len(ids)
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        comm.all_reduce(total, "average")
        losses.append(total.item())
    assert losses == pytest.approx(expected, rel=1e-9)
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", ["summoned", "in place", "data", "state dict"])
def test_it_notices_parameters_that_change_between_steps(comm, way):
    @torch.no_grad()
    def change(model):
        if way == "summoned":
            with FullyShardedDataParallel.summon_full_params(model):
                halve(model)
        elif way == "in place":
            halve(model)
        elif way == "data":
            for param in model.parameters():
                param.data.mul_(0.5)
        else:
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})

    def halve(model):
        for param in model.parameters():
            param.mul_(0.5)

    plain = net()
    optimizer = OPTIMIZERS["muon"](plain.parameters())
    models.train_plain(plain, optimizer, range(2))
    with torch.no_grad():
        halve(plain)
        if way == "state dict":
            plain.scale.mul_(0.5)
    models.train_plain(plain, optimizer, range(2, 4))
    model = models.shard(net(), use_orig_params=True)
    optimizer = whole(model, "muon")
    models.train_sharded(model, optimizer, range(2), comm)
    change(model)
    models.train_sharded(model, optimizer, range(2, 4), comm)
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other, one, **TIGHT)
