"""What users hang on parameters to be called in a backward."""

import warnings

import pytest
import torch

from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import ShardingStrategy
from tests.mpi.models import ORIGINAL, batch, loss_of, make_net, shard

pytestmark = pytest.mark.ranks(2)

with warnings.catch_warnings():  # torch's own, of torch.jit.script
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import _apply_optimizer_in_backward

STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def in_backward(params):
    _apply_optimizer_in_backward(torch.optim.AdamW, params, {"lr": 0.01})


def by_hooks(params):
    optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in params}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)


def train(model, comm, steps=3):
    for step in range(steps):
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in batch(step)) if comm else batch(step)
        loss_of(model, ids, targets).backward()
    return model


def expected():
    net = make_net()
    in_backward(net.parameters())
    return train(net, None).state_dict()


@ORIGINAL
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", [in_backward, by_hooks])
def test_optimizers_step_in_the_backward(comm, how, strategy, original):
    model = shard(make_net(), use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    how(list(model.parameters()))
    states = train(model, comm).state_dict()
    for name, value in expected().items():
        torch.testing.assert_close(states[name], value, rtol=1e-4, atol=1e-5)
    assert all(param.grad is None for param in model.parameters())


def test_optimizers_given_before_wrapping_step_original_parameters(comm):
    net = make_net()
    in_backward(net.parameters())
    states = train(shard(net, use_orig_params=True), comm).state_dict()
    for name, value in expected().items():
        torch.testing.assert_close(states[name], value, rtol=1e-4, atol=1e-5)


@ORIGINAL
def test_hooks_are_called_once_gradients_are_reduced_and_can_be_removed(comm, original):
    model = shard(make_net(), use_orig_params=original)
    seen = []
    handles = [
        param.register_post_accumulate_grad_hook(lambda param: seen.append((param, param.grad.clone())))
        for param in model.parameters()
        if param.numel()
    ]
    ids, targets = batch(0)
    with model.no_sync():
        loss_of(model, ids, targets).backward()
    assert seen == []
    loss_of(model, ids, targets).backward()
    assert {param for param, _ in seen} == {param for param in model.parameters() if param.numel()}
    assert len(seen) == len(handles)
    assert all(torch.equal(param.grad, grad) for param, grad in seen)
    for handle in handles:
        handle.remove()
    loss_of(model, ids, targets).backward()
    assert len(seen) == len(handles)


def test_hooks_on_gradients_of_original_parameters_see_those_of_this_rank(comm):
    model = shard(make_net(), use_orig_params=True)
    shapes = []
    weight = model.module.blocks[0].module.up.weight
    weight.register_hook(lambda grad: shapes.append(grad.shape) or grad * 2)
    plain = make_net()
    for net in (plain, model):
        loss_of(net, *batch(0)).backward()
    with model.summon_full_params(model, with_grads=True):
        torch.testing.assert_close(weight.grad, 2 * plain.blocks[0].up.weight.grad)
    assert shapes == [(29, 13)]


def test_hooks_that_nothing_would_call_are_refused(comm):
    model = shard(make_net())
    next(model.parameters()).register_hook(lambda grad: grad)
    with pytest.raises(EngineError, match="register_hook was called on a flat parameter"):
        loss_of(model, *batch(0))


def test_a_node_taken_at_rest_is_refused(comm):
    model = shard(make_net(), use_orig_params=True)
    nodes = [param.view_as(param).grad_fn.next_functions[0][0] for param in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: None)
    with pytest.raises(EngineError, match=r"the AccumulateGrad node of '.*' was read while the parameter was sharded"):
        loss_of(model, *batch(0)).backward()
