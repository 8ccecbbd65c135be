"""Default device, modes, transforms and inference mode of a program, around calls that make tensors of their own."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import hpcfsdp
from hpcfsdp.errors import CommunicationError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.fsdp2 import fully_shard
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.state_dict import get_state_dict, set_state_dict

pytestmark = pytest.mark.ranks(2)


class Forbidden(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called in a mode of the program")


class ForbiddenBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called in a mode of the program")


def transformed(transform, *given):
    def run(call):
        found = []
        transform(lambda x: (found.append(call()), x)[1])(*given)
        return found[0]

    return run


def in_context(context):
    def run(call):
        with context():
            return call()

    return run


MODES = {
    "meta": in_context(lambda: torch.device("meta")),
    "functions": in_context(Forbidden),
    "dispatch": in_context(ForbiddenBelow),
    "fake": in_context(FakeTensorMode),
    "inference": in_context(torch.inference_mode),
    "grad": transformed(torch.func.grad, torch.tensor(1.0)),
    "vmap": transformed(torch.func.vmap, torch.zeros(2)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("members", ["shared memory", "messages", "gloo"])
def test_collectives_make_their_own_tensors_outside_of_it(world, comm, groups, gloo, members, mode):
    """Each mode begins with a new communicator: what that keeps for later calls is usable outside, too."""
    comm = {"shared memory": comm, "messages": groups["messages"], "gloo": gloo}[members].subgroup(range(world.size))
    mode, large = MODES[mode], 1 << 17
    mine, total = torch.full((large,), float(world.rank)), torch.full((large,), 1.0)
    small, parts = torch.tensor([world.rank]), torch.empty(2, dtype=torch.int64)

    def calls():
        comm.barrier()
        comm.labelled_barrier("label")
        comm.all_reduce(mine, "sum")
        comm.all_gather_into_tensor(parts, small)
        comm.broadcast(small, 1)
        return comm.all_gather_object(world.rank), comm.broadcast_object("here" if world.rank else None, 1)

    assert mode(calls) == ([0, 1], "here")
    assert torch.equal(mine, total)
    assert (parts.tolist(), small.tolist()) == ([0, 1], [1])
    memory = mode(lambda: comm.alloc(large, torch.float32))
    for values in (memory, mine):  # afterwards, outside
        values.fill_(world.rank)
        comm.all_reduce(values, "sum")
        assert torch.equal(values, total)


def test_modes_are_in_effect_again_afterwards_also_after_an_error(comm):
    with FakeTensorMode() as outer, torch.device("meta"), FlopCounterMode(display=False) as inner:
        comm.barrier()
        with pytest.raises(CommunicationError, match="no rank 7"):
            comm.broadcast_object(None, 7)
        made = torch.ones(2, 2) @ torch.ones(2, 2)
    assert made.is_meta
    assert made.fake_mode is outer
    assert inner.get_total_flops() == 16


def test_objects_groups_and_meshes_of_torch_are_those_of_a_program_without_it(world):
    with torch.device("meta"):
        everyone = [None] * world.size
        dist.all_gather_object(everyone, world.rank)
        group = dist.new_group(range(world.size))
        dist.barrier(group)
        mesh = world.mesh(replicate=2, shard=1)
        received = [torch.empty(2, device="cpu") for _ in range(world.size)]
        dist.all_gather(received, torch.full((2,), float(world.rank), device="cpu"), group=group)
    assert everyone == [0, 1]
    assert mesh.mesh.tolist() == [[0], [1]]
    assert [each.tolist() for each in received] == [[0.0, 0.0], [1.0, 1.0]]


def train(front, path, context):
    """Parameters after steps, a checkpoint, a new start and another step, all within a context."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)

    def built():
        made = nn.Sequential(*(nn.Linear(8, 8, device="cpu") for _ in range(2)))
        made.load_state_dict(model.state_dict())
        if front == "fully_shard":
            fully_shard(made[0])
            fully_shard(made)
        else:
            made = FullyShardedDataParallel(made, use_orig_params=front == "original")
        if front == "flat":
            return made, torch.optim.AdamW(made.parameters(), lr=0.1)
        return made, WholeTensors(made, made.parameters(), Muon, lr=0.1)

    with context, hpcfsdp.preemption() as stop:
        for load in (False, True):
            sharded, optimizer = built()
            if load:
                hpcfsdp.checkpoint.load(path, model=sharded, optimizer=optimizer)
                values, state = get_state_dict(sharded, optimizer)
                set_state_dict(sharded, optimizer, model_state_dict=values, optim_state_dict=state)
            sharded(batch).square().mean().backward()
            optimizer.step()
            stop.requested(1 + load)
            hpcfsdp.checkpoint.save(path, model=sharded, optimizer=optimizer)
    with FullyShardedDataParallel.summon_full_params(sharded):
        return [getattr(p, "full_tensor", p.clone)() for p in sharded.parameters()]


@pytest.mark.parametrize("front", ["flat", "original", "fully_shard"])
def test_a_default_device_changes_nothing_about_training_on_another(world, shared_path, front):
    plain = train(front, shared_path / "run.h5", contextlib.nullcontext())
    torch.testing.assert_close(train(front, shared_path / "run.h5", torch.device("meta")), plain, rtol=0, atol=0)


def test_modules_are_sharded_under_meta_and_materialized(world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        for part in (*model, model):
            fully_shard(part)
        wrapped = FullyShardedDataParallel(nn.Sequential(nn.Linear(8, 8)), device_id=torch.device("cpu"))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    for each in (model, wrapped):
        each(torch.ones(2, 8)).sum().backward()
        assert all(param.grad is not None for param in each.parameters())
