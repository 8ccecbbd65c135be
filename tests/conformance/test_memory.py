"""What stays in memory."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.conformance.models import MLP, data_of


def tensors():
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_steps_leave_no_tensors_in_cycles(fsdp, mesh, world):
    """Memory does not wait for Python's collector."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), MLP(4)) for _ in range(2)))
    for block in model:
        for unit in (*block, block):
            fsdp.fully_shard(unit, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    counts = []
    gc.disable()
    try:
        for step in range(4):
            if step == 2:  # what is made once is there
                gc.collect()
            loss = model(data_of(world.rank, 2, 4, dtype=torch.float32)).sum()
            loss.backward()
            optim.step()
            optim.zero_grad()
            del loss
            counts.append(tensors())
    finally:
        gc.enable()
    assert counts[2] == counts[3]


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
