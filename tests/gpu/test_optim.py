"""Optimizers for whole matrices on a device."""

import copy

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.wrap import ModuleWrapPolicy


@pytest.mark.ranks(1)
def test_muon_computes_stacks_on_the_device_as_matrices_on_the_host(alone):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in [(32, 16)] * 3 + [(8, 24), (5,)]]
    params = {device: [nn.Parameter(value.to(device, copy=True)) for value in values] for device in ("cpu", alone)}
    for own in params.values():
        optimizer = Muon(own, lr=0.05, ns_dtype="float32")
        for _ in range(3):
            for param in own:
                param.grad = param.detach().cos()
            optimizer.step()
    expected, found = params.values()
    torch.testing.assert_close([param.detach().cpu() for param in found], [p.detach() for p in expected])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def made(device):
    torch.manual_seed(0)
    return Net().to(device)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_whole_tensors_are_those_of_the_plain_model(world, device, overlap, offload):
    options = {"lr": 0.02, "adamw_lr": 0.01, "ns_dtype": "float32"}
    plain = made("cpu")
    its = Muon(plain.parameters(), **options)
    model = FullyShardedDataParallel(
        made(device),
        use_orig_params=True,
        cpu_offload=CPUOffload(offload),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )
    optimizer = WholeTensors(model, model.parameters(), Muon, overlap=overlap, **options)
    data = torch.randn(3, world.size, 4, 12, generator=torch.Generator().manual_seed(1))
    for batch in data:
        plain(batch.flatten(0, 1)).square().mean().backward()
        model(batch[world.rank].to(device)).square().mean().backward()
        for each in (its, optimizer):
            each.step()
            each.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    batch = data[0]
    plain(batch.flatten(0, 1)).square().mean().backward()
    model(batch[world.rank].to(device)).square().mean().backward()
    its.step()
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_whole_tensors_go_through_a_file(world, device, shared_path):
    model = FullyShardedDataParallel(made(device), use_orig_params=True)
    optimizer = WholeTensors(model, model.parameters(), torch.optim.Adafactor, lr=0.01)
    data = torch.randn(4, 12, generator=torch.Generator().manual_seed(world.rank)).to(device)

    def step():
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    step()
    hpcfsdp.checkpoint.save(shared_path / "whole.h5", model=model, optimizer=optimizer, step=1)
    expected = step()
    step()
    hpcfsdp.checkpoint.load(shared_path / "whole.h5", model=model, optimizer=optimizer)
    torch.testing.assert_close(step(), expected)
