"""What stays in memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.conformance.models import MLP, data_of


@pytest.mark.parametrize("trained", [False, True])
def test_a_deleted_model_is_freed(fsdp, mesh, world, trained):
    model = nn.Sequential(MLP(4), MLP(4))
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    if trained:
        model(data_of(world.rank, 2, 4, dtype=torch.float32)).sum().backward()
    left = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model, unit
    gc.collect()
    assert not [each() for each in left if each() is not None]
