"""``torch.nn.utils.clip_grad_norm_`` of sharded gradients."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.conformance.models import MLP, close, data_of, mesh_of, tensor_parallel

clip_grad_norm_ = nn.utils.clip_grad_norm_


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
@pytest.mark.parametrize("dims", ["one", pytest.param("two", marks=pytest.mark.ranks(4))])
def test_clipping_by_the_norm_over_all_ranks(fsdp, world, dims, norm_type):
    mesh = mesh_of(shard=2, tensor=world.size // 2)
    model = nn.Sequential(MLP(8, hidden=3), MLP(8), nn.LayerNorm(8, bias=False)).double()
    plain = copy.deepcopy(model)
    if dims == "two":
        tensor_parallel(model, mesh["tensor"])
    for unit in (*model[:2], model):
        fsdp.fully_shard(unit, mesh=mesh["shard"])
    for step in range(2):
        for rank in range(2):
            (plain(data_of(rank + 2 * step, 2, 8)).sin().sum() / 2).backward()
        model(data_of(mesh.get_local_rank("shard") + 2 * step, 2, 8)).sin().sum().backward()
        expected = clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        with CommDebugMode() as counted:
            norm = clip_grad_norm_(model.parameters(), 0.5, norm_type)
        assert expected > 0.6
        close(norm, expected)
        assert counted.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == norm.device_mesh.ndim
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            close(param.grad, other.grad)
            param.grad = other.grad = None
