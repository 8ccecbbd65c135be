import inspect
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

from hpcfsdp.api.grad_scaler import ShardedGradScaler
from hpcfsdp.comm.fake import FakeCommunicator

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0),
    "fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
}


def backward(scaler, param, grad):
    """The gradient `grad` of the loss, scaled."""
    param.grad = None
    scaler.scale((param * torch.as_tensor(grad).to(param)).sum()).backward()


def test_the_signature_is_torchs():
    ours, theirs = (inspect.signature(kind).parameters.values() for kind in (ShardedGradScaler, TorchShardedGradScaler))
    assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]
    assert [p.default for p in ours][:-1] == [p.default for p in theirs][:-1]
    assert inspect.signature(ShardedGradScaler).parameters["process_group"].default is None
    assert issubclass(ShardedGradScaler, TorchShardedGradScaler)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("group", [None, FakeCommunicator(1, 4)], ids=["alone", "group"])
def test_gradients_are_unscaled_and_steps_with_an_inf_left_out(optimizer, group):
    param = nn.Parameter(torch.ones(3))
    stepper = OPTIMIZERS[optimizer]([param])
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2, process_group=group)
    for bad, scale in ((None, 8.0), (None, 16.0), (float("inf"), 8.0), (float("nan"), 4.0), (None, 4.0)):
        before = param.detach().clone()
        backward(scaler, param, [0.5, 0.25, 0.0 if bad is None else bad])
        scaler.step(stepper)
        scaler.update()
        step = torch.tensor([0.5, 0.25, 0.0]) if bad is None else torch.zeros(3)
        assert torch.equal(param.detach(), before - step)
        assert scaler.get_scale() == scale


def test_unscaled_gradients_may_be_clipped_before_the_step():
    param = nn.Parameter(torch.zeros(2))
    stepper = OPTIMIZERS["sgd"]([param])
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    backward(scaler, param, [3.0, 4.0])
    assert param.grad.tolist() == [12, 16]
    scaler.unscale_(stepper)
    assert param.grad.tolist() == [3, 4]
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(stepper)
    nn.utils.clip_grad_norm_([param], 1.0)
    scaler.step(stepper)
    scaler.update()
    torch.testing.assert_close(param.detach(), torch.tensor([-0.6, -0.8]))


def test_gradients_of_float16_are_unscaled():
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = ShardedGradScaler("cpu", init_scale=2.0)
    backward(scaler, param, [0.5, 1.0])
    scaler.unscale_(OPTIMIZERS["sgd"]([param]))
    assert param.grad.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("found", [2.0 - 4.0j, complex(1.0, math.inf)])
def test_complex_gradients_are_unscaled(found):
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.complex64, torch.float32)]
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=4.0), torch.optim.SGD(params, lr=1.0)
    scaler.scale(torch.zeros(()))
    for param, grad in zip(params, (found, 8.0), strict=True):
        param.grad = torch.full_like(param, grad)
    scaler.step(optimizer)
    scaler.update()
    steps = [-0.5 + 1.0j, -2.0] if math.isfinite(abs(found)) else [0, 0]
    assert [param[0].item() for param in params] == steps


def test_the_scale_stays_finite():
    param = nn.Parameter(torch.ones(1))
    scaler = ShardedGradScaler("cpu", init_scale=2.0**126, growth_interval=1)
    for _ in range(4):
        backward(scaler, param, [0.0])
        scaler.step(OPTIMIZERS["sgd"]([param]))
        scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_it_can_be_turned_off():
    param = nn.Parameter(torch.ones(1))
    stepper = OPTIMIZERS["sgd"]([param])
    scaler = ShardedGradScaler("cpu", enabled=False)
    backward(scaler, param, [float("inf")])
    scaler.unscale_(stepper)
    scaler.step(stepper)
    scaler.update()
    assert param.item() == -float("inf")


def test_its_state_is_kept():
    scaler = ShardedGradScaler("cpu", init_scale=32.0, growth_factor=4.0)
    scaler.scale(torch.ones(()))
    other = ShardedGradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
