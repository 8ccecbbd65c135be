"""What goes wrong on the simulated device, and training after it; gradient scaling, and compilation."""

import pytest
import torch
from torch import nn

from hpcfsdp.fsdp import ShardedGradScaler
from tests.accelerator.programs import EXACT, POLICIES, SIM, SOME_POLICIES, leave_for_later, shard, train, whole
from tests.mpi import parity
from tests.mpi.parity import Recipe, build, close, inputs, loss_of, reference

pytestmark = pytest.mark.ranks(2, 1, 4)

ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


class Fault(Exception):
    pass


class Faulty(nn.Module):
    """Raises in the forward or in the backward, where it is told to."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.where = inner, None

    def forward(self, x):
        x = self.inner(x)
        if self.where == "forward":
            raise Fault
        if self.where == "backward" and x.requires_grad:
            x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        raise Fault


class Net(parity.Nested):
    def __init__(self):
        super().__init__()
        self.faulty = [Faulty(nn.Identity())]
        self.blocks.insert(1, self.faulty[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("original", "offload"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(world, group, streams, where, original, offload, policy):
    recipe, model = Recipe("sgd"), build(Net)
    faulty = model.faulty[0]
    sharded = shard(model.to(SIM), group, original=original, offload=offload)
    optimizer = recipe.make_optimizer(sharded.parameters())
    x = inputs(9, world.rank, recipe.dtype).to(SIM)
    leave_for_later(streams, policy)
    for _ in range(2):
        faulty.where = where
        with pytest.raises(Fault):
            loss_of(sharded, x).backward()
        faulty.where = None
        optimizer.zero_grad()
    close(train(sharded, recipe, SIM, optimizer), reference(Net, world.size, recipe), **EXACT)


# Gradient scaling


@ORIGINAL
@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_no_rank_steps_when_one_has_an_infinite_gradient(world, group, streams, original, policy):
    sharded = shard(build(parity.Nested, torch.float32).to(SIM), group, original=original, mixed="fp16")
    plain = shard(build(parity.Nested, torch.float32), original=original, mixed="fp16")
    scales = []
    leave_for_later(streams, policy)
    for model, device, ranks in ((sharded, "sim", group), (plain, "cpu", None)):
        scaler = ShardedGradScaler(device=device, init_scale=1024.0, growth_interval=2, process_group=ranks)
        optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.1), [*scales, []]
        for step in range(4):
            x = inputs(step, world.rank, torch.float32).to(device)
            if step == 1 and world.rank == 0:
                x[0, 0] = float("inf")
            scaler.scale(loss_of(model, x)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales[-1].append(scaler.get_scale())
            optimizer.zero_grad()
    assert scales == [[1024.0, 512.0, 512.0, 1024.0]] * 2

    for name, value in whole(sharded).items():
        assert value.isfinite().all()
        torch.testing.assert_close(value, whole(plain)[name], rtol=0, atol=0)


# torch.compile


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked for by dynamo itself
@ORIGINAL
def test_compiled_blocks(world, group, streams, original):
    model = build(parity.Nested)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    sharded = shard(model.to(SIM), group, original=original)
    leave_for_later(streams, "all")
    close(train(sharded, Recipe("sgd"), SIM), reference(parity.Nested, world.size, Recipe("sgd")), **EXACT)
