"""Parameters that say how they are gathered, and derivatives within a loss, on the simulated device: as on the CPU."""

import pytest
import torch
from torch import nn

import hpcfsdp.fsdp2 as ours
from tests.accelerator.programs import SIM, SOME_POLICIES, leave_for_later, mesh_of
from tests.mpi.gathered_tensors import InHalves
from tests.mpi.row_cases import batches, make, whole
from tests.mpi.test_second_derivatives import Energy, data, equation, force_matching

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.usefixtures("hardware")]


def with_hooks(device):
    def prepare(model):
        for block in model.blocks:
            block.up.weight = nn.Parameter(InHalves(block.up.weight.detach()))
        if device is not None:
            for module in model.modules():
                for name, param in list(module._parameters.items()):
                    if param is not None:
                        kind = InHalves if isinstance(param, InHalves) else lambda values: values
                        values = param.values if kind is InHalves else param.detach()
                        module._parameters[name] = nn.Parameter(kind(values.detach().to(device)))
                for name, buffer in list(module._buffers.items()):
                    module._buffers[name] = buffer.to(device)

    return prepare


def train(model, rank, steps=3):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for ids in batches(rank, steps):
        loss = model(ids).square().mean()
        loss.backward()
        found += [loss.detach(), *(whole(param.grad) for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in found]


@pytest.mark.parametrize("policy", SOME_POLICIES)
@pytest.mark.parametrize("reshard", [None, False, 1])
def test_gather_hooks(world, streams, reshard, policy):
    expected = train(make(ours, None, prepare=with_hooks(None)), world.rank)
    model = make(ours, mesh_of((world.size,), ("shard",)), prepare=with_hooks(SIM), reshard_after_forward=reshard)
    leave_for_later(streams, policy)
    torch.testing.assert_close(train(model, world.rank), expected, rtol=1e-9, atol=1e-11)


def energy(mesh=None):
    torch.manual_seed(0)
    model = Energy().double()
    model.to("cpu" if mesh is None else SIM)
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    return ours.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("policy", SOME_POLICIES)
@pytest.mark.parametrize("loss", [force_matching, equation])
def test_derivatives_within_a_loss(world, streams, loss, policy):
    found = []
    for mesh in (None, mesh_of((world.size,), ("shard",))):
        model = energy(mesh)
        if mesh is not None:
            leave_for_later(streams, policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            x, target = (each.detach().to("cpu" if mesh is None else SIM) for each in data(step, world.rank))
            loss(model, x.requires_grad_(), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([whole(param).cpu() for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
