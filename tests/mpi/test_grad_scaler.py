"""Ranks that hold different parts of the gradients agree on whether to step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.comm import communicator_for
from hpcfsdp.fsdp import ShardedGradScaler

OPTIMIZERS = {
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}
BAD = float("inf")


@pytest.fixture(params=["default", "gloo", "communicator"])
def group(request, world):
    """What the scaler is given as its process group: it may be made before there is any need for one."""
    if request.param == "gloo":
        return dist.new_group(backend="gloo")
    return world.communicator if request.param == "communicator" else None


def parts(world, numel=3):
    """Parameters with some elements on this rank, or none on the last of several ranks."""
    empty = world.size > 1 and world.rank == world.size - 1
    return [nn.Parameter(torch.ones(0 if empty else numel)), nn.Parameter(torch.ones(0))]


def set_grads(params, scale, bad):
    for param in params:
        param.grad = torch.full_like(param, scale)
        if bad and param.numel():
            param.grad[-1] = BAD


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_inf_on_one_rank_stops_the_step_on_all(world, group, optimizer):
    params = parts(world)
    stepper = OPTIMIZERS[optimizer](params)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, process_group=group)
    scaler.scale(torch.ones(()))
    holders = max(world.size - 1, 1)
    expected = 8.0
    for bad_rank in [None, *range(holders), None, None]:
        before = [param.detach().clone() for param in params]
        set_grads(params, scaler.get_scale(), world.rank == bad_rank)
        scaler.step(stepper)
        moved = [not torch.equal(param.detach(), old) for param, old in zip(params, before, strict=True)]
        assert moved == [bad_rank is None and bool(params[0].numel()), False]
        scaler.update()
        expected = expected / 2 if bad_rank is not None else expected
        assert world.comm.allgather(scaler.get_scale()) == [scaler.get_scale()] * world.size
    assert scaler.get_scale() == 2 * expected  # two steps without an inf at the end


def test_ranks_without_gradients_take_part(world, group):
    params = parts(world)
    stepper = OPTIMIZERS["foreach"](params)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=group)
    scaler.scale(torch.ones(()))
    for step in range(2):
        if world.rank == 0:
            set_grads(params, 4.0, step == 0)
        scaler.unscale_(stepper)
        scaler.step(stepper)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert bool(params[0].numel() and params[0][0] != 1) == (step == 1 and world.rank == 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.ranks(4)
def test_replicas_agree_with_the_ranks_they_do_not_shard_with(world, optimizer):
    if world.size % 2:
        pytest.skip("an even number of ranks")
    mesh = world.mesh(replicate=None, shard=2)
    params = [nn.Parameter(torch.ones(3))]
    stepper = OPTIMIZERS[optimizer](params)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    # After the replicas have been reduced, those of one shard hold the same: an inf among them.
    set_grads(params, 4.0, mesh.get_local_rank("shard") == 1)
    scaler.step(stepper)
    scaler.update()
    assert params[0].tolist() == [1, 1, 1]
    assert scaler.get_scale() == 2.0
    only_shards = ShardedGradScaler("cpu", init_scale=4.0, process_group=mesh.get_group("shard"))
    only_shards.scale(torch.ones(()))
    set_grads(params, 4.0, mesh.get_local_rank("shard") == 0)
    only_shards.step(stepper)
    only_shards.update()
    assert params[0].tolist() == [1, 1, 1]
    assert only_shards.get_scale() == 2.0


def test_a_group_of_some_ranks_agrees_alone(world):
    group = dist.new_group([world.rank], use_local_synchronization=True)
    assert communicator_for(group, required=True).size == 1
    params = parts(world)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=group)
    scaler.scale(torch.ones(()))
    set_grads(params, 4.0, world.rank == 0)
    scaler.step(OPTIMIZERS["foreach"](params))
    scaler.update()
    assert scaler.get_scale() == (2.0 if world.rank == 0 else 4.0)
