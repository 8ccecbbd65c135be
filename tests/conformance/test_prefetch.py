"""When units gather: in the order of the forward and the backward, ahead of the computation, and on demand."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.models import MLP, check_training, close, data_of, reference
from tests.conformance.recording import Layer, record, sharded_stack, since


def without(kind, events):
    """Events but those of one kind."""
    return " ".join(event for event in events.split() if event[0] != kind)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("reshard", [True, False, None, pytest.param(2, marks=pytest.mark.ranks(4))])
def test_a_backward_gathers_one_unit_ahead(fsdp, mesh, world, reshard, checkpoints):
    model, log = sharded_stack(fsdp, mesh, 3, reshard=reshard, checkpoints=checkpoints)
    for step in range(3):
        out = model(data_of(world.rank, 2, 4))
        assert since(log) == "groot g0 c0 g1 c1 g2 c2"
        out.sum().backward()
        expected = "groot g2 g1 c2 r2 g0 c1 r1 c0 r0 rroot"
        if reshard is False:
            expected = without("g", expected)
        elif reshard is None:
            expected = expected.removeprefix("groot ")
        found = since(log)
        if step:  # the first one may learn the order
            assert found == (expected if checkpoints else without("c", expected))


@pytest.mark.parametrize("reshard", [True, False])
def test_two_forwards_before_one_backward(fsdp, mesh, world, reshard):
    model, log = sharded_stack(fsdp, mesh, 3, reshard=reshard)
    outputs = []
    for again in range(2):
        outputs.append(model(data_of(world.rank + 10 * again, 2, 4)))
        gathers = reshard or not again
        assert since(log) == ("groot g0 c0 g1 c1 g2 c2" if gathers else "c0 c1 c2")
    sum(outputs).sum().backward()
    found = since(log).split()
    assert {event for event in found if event[0] == "r"} == {"r2", "r1", "r0", "rroot"}
    if reshard:
        assert found[:2] == ["groot", "g2"]
        assert {event for event in found if event[0] == "g"} == {"g2", "g1", "g0", "groot"}


def test_a_backward_through_one_of_two_branches(fsdp, mesh, world):
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.stem(x)
            return torch.relu(self.left(x)), torch.relu(self.right(x))

    model = Fork().double()
    plain, log = copy.deepcopy(model), []
    for unit in (model.stem, model.left, model.right, model):
        fsdp.fully_shard(unit, mesh=mesh)
    record(log, stem=model.stem, left=model.left, right=model.right)
    left, right = model(data_of(world.rank, 3, 4))
    assert since(log) == "gstem gleft gright"
    model.set_is_last_backward(False)
    right.sum().backward(retain_graph=True)
    assert {"gright", "gstem", "rright", "rstem"} <= set(since(log).split())
    model.set_is_last_backward(True)
    left.sum().backward()
    assert {"rleft", "rstem"} <= set(since(log).split())
    for rank in range(world.size):
        left, right = plain(data_of(rank, 3, 4))
        ((left.sum() + right.sum()) / world.size).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.grad, expected.grad)


@pytest.mark.parametrize("num", [1, 2])
def test_units_that_a_forward_prefetches(fsdp, mesh, world, num):
    model, log = sharded_stack(fsdp, mesh, 4)
    for index, layer in enumerate(model.layers[: 4 - num]):
        layer.set_modules_to_forward_prefetch(list(model.layers[index + 1 : index + 1 + num]))
    for step in range(2):
        out = model(data_of(world.rank, 2, 4))
        ahead = {1: "groot g0 g1 c0 g2 c1 g3 c2 c3", 2: "groot g0 g1 g2 c0 g3 c1 c2 c3"}
        assert since(log) == ahead[num]
        out.sum().backward()
        found = since(log)
        if step:  # the first one may learn the order
            assert found == "groot g3 g2 r3 g1 r2 g0 r1 r0 rroot"


@pytest.mark.parametrize("num", [1, 2])
def test_units_that_a_backward_prefetches(fsdp, mesh, world, num):
    model, log = sharded_stack(fsdp, mesh, 4)
    for index, layer in enumerate(model.layers):
        if index >= num:
            layer.set_modules_to_backward_prefetch([model.layers[index - ahead] for ahead in range(1, num + 1)])
    for _ in range(2):
        out = model(data_of(world.rank, 2, 4))
        assert since(log) == "groot g0 c0 g1 c1 g2 c2 g3 c3"
        out.sum().backward()
        ahead = {1: "groot g3 g2 r3 g1 r2 g0 r1 r0 rroot", 2: "groot g3 g2 g1 r3 g0 r2 r1 r0 rroot"}
        assert since(log) == ahead[num]


@pytest.mark.parametrize("chosen", [False, True])
def test_prefetching_with_a_unit_inside_of_a_checkpoint(fsdp, mesh, world, chosen):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x):
            return x + torch.relu(self.inner(self.norm(x)))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed().double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 3, 4)).square().sum()

    losses, params = reference(model, world, loss_of)
    log = []
    for index, block in enumerate(model.blocks):
        fsdp.fully_shard(block.inner, mesh=mesh)
        fsdp.fully_shard(block, mesh=mesh)
        record(log, **{f"{index}": block, f"{index}inner": block.inner})
    fsdp.fully_shard(model, mesh=mesh)
    if chosen:
        for before, block in zip(model.blocks, model.blocks[1:], strict=False):
            block.set_modules_to_backward_prefetch([before, before.inner])
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        assert since(log) == "g0 g0inner g1 g1inner g2 g2inner"
        loss.backward()
        found = since(log)
        if step or chosen:  # the first one may learn the order
            assert without("r", found) == (
                "g2 g1 g1inner g2inner g0 g0inner" if chosen else "g2 g2inner g1 g1inner g0 g0inner"
            )
        assert sorted(without("g", found).split()) == ["r0", "r0inner", "r1", "r1inner", "r2", "r2inner"]
        optim.step()
        optim.zero_grad()
        close(world.comm.allreduce(loss.detach()) / world.size, expected)
    for name, param in model.named_parameters():
        close(param, params[name])


def test_units_of_several_modules(fsdp, mesh, world):
    log = []
    model = nn.Sequential(*(Layer(log, index, 4) for index in range(5))).double()
    units = {"0": [model[0]], "12": [model[1], model[2]], "34": [model[3], model[4]]}
    for name, modules in units.items():
        fsdp.fully_shard(modules, mesh=mesh, reshard_after_forward=name != "34")
        record(log, **{name: modules[0]})
    fsdp.fully_shard(model, mesh=mesh)
    for step in range(3):
        out = model(data_of(world.rank, 2, 4))
        assert since(log) == "g0 c0 g12 c1 c2 g34 c3 c4"
        out.sum().backward()
        found = since(log)
        if step:  # the first one may learn the order
            assert found == "g12 r34 g0 r12 r0"


def test_a_unit_with_a_module_that_is_not_called(fsdp, mesh, world):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = nn.Linear(1, 1), nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.used(x))

    model = nn.Sequential(Partly(), Partly(), nn.Linear(4, 4)).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 3, 4)).square().sum()

    losses, params = reference(model, world, loss_of)
    log = []
    for index in range(2):
        fsdp.fully_shard([model[index].unused, model[index].used], mesh=mesh, reshard_after_forward=True)
        record(log, **{str(index): model[index].used})
    fsdp.fully_shard(model, mesh=mesh)
    record(log, root=model)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        assert since(log) == "groot g0 g1"
        loss.backward()
        assert sorted(since(log).split()) == ["g0", "g1", "r0", "r1", "rroot"]
        assert model[0].unused.weight.grad is None
        optim.step()
        optim.zero_grad()
        close(world.comm.allreduce(loss.detach()) / world.size, expected)
    for name, param in model.named_parameters():
        close(param, params[name])


def test_a_prefetch_of_what_is_not_needed_any_more(fsdp, mesh, world):
    model = MLP(4).double()

    def loss_of(model, rank, step):
        return model(data_of(rank, 2, 4)).sum()

    expected = reference(model, world, loss_of)
    for unit in (model.in_proj, model.out_proj, model):
        fsdp.fully_shard(unit, mesh=mesh)
    model.in_proj.set_modules_to_backward_prefetch([model.out_proj])
    check_training(model, world, loss_of, expected)


def test_a_forward_that_unshards_ahead(fsdp, mesh, world):
    log = []

    class Ahead(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Parameter(torch.randn(4, 4))
            self.parts = nn.ModuleList(Layer(log, index, 4) for index in range(3))

        def forward(self, x, total=None):
            y, works = x @ self.stem, []
            for part in self.parts:
                mine = x.sum()
                works.append((mine, dist.all_reduce(mine, async_op=True)) if total is None else (total, None))
                if isinstance(part, fsdp.FSDPModule):
                    part.unshard(async_op=True)
            for part, (number, work) in zip(self.parts, works, strict=True):
                if work is not None:
                    work.wait()
                y = part(y * number)
            return y

    model = Ahead().double()
    data = [data_of(rank, 2, 4) for rank in range(world.size)]

    def loss_of(model, rank, step):
        return model(data[rank], None if isinstance(model, fsdp.FSDPModule) else sum(data).sum()).sum()

    losses, params = reference(model, world, loss_of)
    for part in model.parts:
        fsdp.fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fsdp.fully_shard(model, mesh=mesh)
    log.clear()
    record(log, **{str(index): part for index, part in enumerate(model.parts)})
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        assert since(log) == "g0 g1 g2 c0 c1 c2"
        loss.backward()
        optim.step()
        optim.zero_grad()
        since(log)
        close(world.comm.allreduce(loss.detach()) / world.size, expected)
    for name, param in model.named_parameters():
        close(param, params[name])


def test_unshard_of_a_module_without_parameters_of_its_own(fsdp, mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    handle = model.unshard(async_op=True)
    handle.wait()
    assert model.unshard() is None


def test_unshard_before_the_first_forward(fsdp, mesh):
    model = MLP(4).double()
    plain = copy.deepcopy(model)
    fsdp.fully_shard(model, mesh=mesh)
    model.unshard()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(param) is nn.Parameter
        close(param, expected)
