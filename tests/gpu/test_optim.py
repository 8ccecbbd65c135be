"""Optimizers for whole matrices on a device."""

import pytest
import torch
from torch import nn

from hpcfsdp.optim import Muon


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
