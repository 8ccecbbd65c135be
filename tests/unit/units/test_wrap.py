"""torch's ways to wrap, with the wrapper of hpcfsdp."""

import functools

import pytest
import torch
from torch import nn

from hpcfsdp import wrap
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


class Block(nn.Module):
    """Two layers, wrapped as they are made."""

    def __init__(self):
        super().__init__()
        self.up = wrap.wrap(nn.Linear(4, 8))
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([wrap.wrap(Block()) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model()


def units(model):
    """Names of the units, as the unwrapped model has them."""
    found = {name for name, module in model.named_modules() if isinstance(module, FSDP)}
    return {name.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".") for name in found}


def trains(model):
    """Forward and backward give what the plain module gives."""
    plain, ids = build(), torch.arange(8)
    loss, expected = model(ids).square().mean(), plain(ids).square().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    grads = [torch.zeros(0) if param.grad is None else param.grad.flatten() for param in model.parameters()]
    total = sum(param.grad.square().sum() for param in plain.parameters())
    torch.testing.assert_close(torch.cat(grads).square().sum(), total)
    return True


def test_nothing_is_wrapped_outside_of_the_context():
    assert units(build()) == set()


def test_modules_wrap_themselves_as_they_are_made():
    with wrap.enable_wrap(wrapper_cls=FSDP, process_group=FakeCommunicator()):
        model = wrap.wrap(build())
    assert units(model) == {"", "blocks.0", "blocks.1", "blocks.0.up", "blocks.1.up"}
    assert trains(model)


def test_arguments_of_the_module_come_before_those_of_the_context():
    comm, other = FakeCommunicator(), FakeCommunicator()
    with wrap.enable_wrap(
        wrapper_cls=FSDP, process_group=comm, device_id="cpu", sharding_strategy=ShardingStrategy.FULL_SHARD
    ):
        assert wrap.wrap(nn.Linear(2, 2))._unit.comm is comm
        assert wrap.wrap(nn.Linear(2, 2), process_group=other)._unit.comm is other
    assert type(wrap.wrap(nn.Linear(2, 2))) is nn.Linear


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (wrap.ModuleWrapPolicy({Block}), {"", "blocks.0", "blocks.1"}),
        (
            wrap.CustomPolicy(lambda module: {"limit_all_gathers": False} if isinstance(module, Block) else False),
            {"", "blocks.0", "blocks.1"},
        ),
        (
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            {"", "blocks.0", "blocks.1"},
        ),
        (
            functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)),
            {"", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"},
        ),
        (
            functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=60),
            {"", "blocks.0", "blocks.1"},
        ),
        (
            lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
            {"", "blocks.0", "blocks.1"},
        ),
    ],
    ids=["ModuleWrapPolicy", "CustomPolicy", "transformer", "lambda", "size_based", "function"],
)
def test_policies_choose_the_units(policy, expected):
    model = FSDP(build(), FakeCommunicator(), auto_wrap_policy=policy)
    assert units(model) == expected
    assert trains(model)


def test_always_wraps_every_module_that_can_be_called():
    model = FSDP(build(), FakeCommunicator(), auto_wrap_policy=wrap.always_wrap_policy)
    linears = {f"blocks.{n}.{name}" for n in range(2) for name in ("up", "down")}
    assert {"", "embed", "head", "blocks.0", "blocks.1", *linears} <= units(model)
    assert trains(model)


def test_a_policy_within_the_context():
    with wrap.enable_wrap(
        wrapper_cls=FSDP, process_group=FakeCommunicator(), auto_wrap_policy=wrap.ModuleWrapPolicy({nn.Linear})
    ):
        model = wrap.wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert units(model) == {"", "0", "2"}
