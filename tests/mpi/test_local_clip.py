"""Gradients of shards that each rank has clipped by itself."""

import pytest
import torch

from hpcfsdp.fsdp import ShardingStrategy
from tests.mpi.models import ORIGINAL, adamw, batch, loss_of, make_net, shard


def train(model, comm, change, steps=6):
    optimizer = adamw(model)
    for step in range(steps):
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        loss_of(model, ids, targets).backward()
        change(model)
        optimizer.step()
        optimizer.zero_grad()


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unscale_and_clip(model):
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    clip(model)


@ORIGINAL
@pytest.mark.parametrize("change", [clip, unscale_and_clip])
def test_clipping_by_the_norm_of_the_shard_is_a_warning(several, change, original):
    model = shard(make_net(), use_orig_params=original)
    with pytest.warns(UserWarning, match=r"had the norm 0.1 .*clip_grad_norm_.*call model.clip_grad_norm_") as caught:
        train(model, several, change)
    assert len(caught) == 1


HARMLESS = {
    "nothing": lambda model: None,
    "own": lambda model: model.clip_grad_norm_(0.1),
    "scaled": lambda model: [param.grad.mul_(0.5) for param in model.parameters() if param.grad is not None],
    "by value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.001),
    "never as large": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6),
}


@ORIGINAL
@pytest.mark.parametrize("change", HARMLESS)
def test_other_changes_are_none(comm, change, original):
    train(shard(make_net(), use_orig_params=original), comm, HARMLESS[change])


def test_gradients_that_each_rank_has_whole_may_be_clipped(comm):
    train(shard(make_net(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True), comm, clip)
