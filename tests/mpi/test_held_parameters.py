"""Every way in which a program can hold a parameter, at every moment: as in one process, or an error says why not."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpcfsdp
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.ranks(2)

MOMENTS = ["start", "forward", "evaluation", "before backward", "after backward", "step", "load"]
FRONTS = ["flat", "original", "rows"]


class Layer(nn.Linear):
    pass


class Net(nn.Module):
    """A unit inside, and parameters of the root: one is tied, one is kept in a list and in a closure."""

    def __init__(self):
        super().__init__()
        self.inner, self.first = Layer(5, 5), nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.kept = [self.scale]
        scale = self.scale
        self.scaled = lambda x: x * scale

    def forward(self, x):
        return self.scaled(self.second(torch.tanh(self.inner(self.first(x))))) + self.kept[0]


def shard(front, ranks=None, *, kind=Net, inner=Layer):
    torch.manual_seed(0)
    net = kind()
    net.inner.__class__ = inner
    net.double()
    if front == "plain":
        return net
    if front == "rows":
        hpcfsdp.fully_shard(net.inner, mesh=ranks)
        return hpcfsdp.fully_shard(net, mesh=ranks)
    policy = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(net, ranks, auto_wrap_policy=policy, use_orig_params=front == "original")


class Program:
    """Trains, and does `act` at a moment.

    Attributes:
        optimizer: `act` may replace it.
    """

    def __init__(self, model, act, moment):
        self.model, self.act, self.moment = model, act, moment
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def at(self, moment):
        if moment == self.moment:
            self.act(self)

    def run(self):
        model = self.model
        x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
        self.at("start")
        model(x)
        self.at("forward")
        with torch.no_grad():
            model(x)
        self.at("evaluation")
        loss = model(x).square().mean()
        self.at("before backward")
        loss.backward()
        self.at("after backward")
        self.optimizer.step()
        self.at("step")
        self.optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        self.at("load")
        for _ in range(2):
            model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        found = {name: whole(value) for name, value in model.state_dict().items()}
        return {**found, "output": model(x).detach()}


def whole(value):
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def build_optimizer(program):
    program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.05)


def build_groups(program):
    groups = hpcfsdp.param_groups(program.model, 0.1, lambda info: True)
    program.optimizer = torch.optim.SGD(groups, lr=0.05)


def add_group(program):
    """One more optimizer, for all parameters."""
    first, second = program.optimizer, torch.optim.SGD(program.model.parameters(), lr=0.05)
    step = first.step
    first.step = lambda: (step(), second.step())


def zero(program):
    program.model.zero_grad()


def clip(program):
    model = program.model
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.01)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def freeze(program):
    program.model.requires_grad_(False)
    program.model.requires_grad_(True)
    for param in program.model.inner.parameters():
        param.requires_grad_(False)


def thaw(program):
    """What was frozen at the start, see ``FROZEN``."""
    for param in program.model.inner.parameters():
        param.requires_grad_(True)


def hook(program):
    for param in program.model.parameters():
        param.register_hook(lambda grad: 0.5 * grad)


def halve_grad(param):
    param.grad.mul_(0.5)


def hook_after(program):
    for param in program.model.parameters():
        param.register_post_accumulate_grad_hook(halve_grad)


def write(program):
    with torch.no_grad():
        for param in program.model.parameters():
            param.mul_(0.5)


def write_each(program):
    with torch.no_grad():
        for param in program.model.parameters():
            param.copy_(0.5 * param)


def write_data(program):
    for param in program.model.parameters():
        param.data.mul_(0.5)


def assign_data(program):
    for param in program.model.parameters():
        param.data = 0.5 * param.data


def penalize(program):
    sum(param.square().sum() for param in program.model.parameters()).backward()


ACTS = [
    build_optimizer,
    build_groups,
    add_group,
    zero,
    clip,
    freeze,
    thaw,
    hook,
    hook_after,
    write,
    write_each,
    write_data,
    assign_data,
    penalize,
]
FROZEN = {thaw}
REFUSED = {
    ("flat", hook): ("register_hook was called on a flat parameter", MOMENTS),
    ("rows", assign_data): (r"the \.data of '.*' was assigned", MOMENTS),
    ("flat", assign_data): ("was changed between a forward and its backward", ["before backward"]),
    ("original", assign_data): ("was changed between a forward and its backward", ["before backward"]),
}
"""Errors that say why not."""
UNSEEN = {(write_data, "before backward")}
"""Autograd sees it neither: it computes gradients of a function that nobody has evaluated."""


def result(front, act, moment, ranks=None):
    """What a program finds, or the error that it ends with."""
    model = shard(front, ranks)
    if act in FROZEN:
        for param in model.inner.parameters():
            param.requires_grad_(False)
    try:
        return Program(model, act, moment).run()
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("act", ACTS)
def test_programs_that_hold_parameters(world, groups, row_meshes, act, front, shares_memory):
    ranks = row_meshes["shared memory" if shares_memory else "gloo"]
    if front != "rows":
        ranks = groups["shared memory" if shares_memory else "messages"]
    for moment in MOMENTS:
        if (act, moment) in UNSEEN:
            continue
        wanted, found = result("plain", act, moment), result(front, act, moment, ranks)
        text, moments = REFUSED.get((front, act), ("", []))
        if moment in moments:
            assert isinstance(found, EngineError), (moment, found)
            assert re.search(text, str(found)), (moment, found)
        elif not isinstance(wanted, RuntimeError):  # then what autograd refuses may be an error, or be computed
            assert not isinstance(found, RuntimeError), (moment, found)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, at=moment: f"{at}: {m}")


def test_optimizers_of_parameters_that_are_only_shown(world):
    """Within a forward, or after ``unshard``, modules hold whole parameters, which no optimizer may step."""

    class Greedy(Net):
        def forward(self, x):
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return super().forward(x)

    for front in ("flat", "rows"):
        model = shard(front, kind=Greedy)
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        with pytest.raises(EngineError, match=r"steps .* build the optimizer from model\.parameters"):
            model.optimizer.step()
    model = shard("rows")
    model.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(EngineError, match=r"steps .* build the optimizer from model\.parameters"):
        optimizer.step()


def test_hooks_of_before_are_those_of_the_rows(world):
    torch.manual_seed(0)
    plain = nn.Linear(5, 5)
    model, calls = copy.deepcopy(plain), []
    for module in (plain, model):
        module.weight.register_hook(lambda grad: 0.5 * grad)
        handle = module.bias.register_hook(lambda grad: 0.5 * grad)
        module.weight.register_post_accumulate_grad_hook(lambda param: calls.append(type(param)))
    hpcfsdp.fully_shard(model)
    handle.remove()
    x = torch.full((2, 5), 1.0 + world.rank)
    model(x).sum().backward()
    for rank in range(world.size):
        (plain(torch.full((2, 5), 1.0 + rank)).sum() / world.size).backward()
    torch.testing.assert_close(whole(model.weight.grad), plain.weight.grad)
    torch.testing.assert_close(whole(model.bias.grad), 2 * plain.bias.grad)
    assert calls.count(DTensor) == 1


def test_a_list_of_rows_from_before_is_used_after_loading(world):
    """The list holds what the module had before it was sharded, and so does a program that reads it in its forward."""
    model, plain = shard("rows"), shard("plain")
    state = {name: 2 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(state)
    rows = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.mul_(2) for name, value in rows.items()}, assign=True)
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("front", FRONTS)
def test_a_copy_that_is_kept_is_named(world, front):
    """A module that computes with detached values never trains."""

    class Detached(Layer):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.detach(), self.bias.detach())

    model = shard(front, inner=Detached)
    program = Program(model, None, None)
    with pytest.warns(UserWarning, match="no parameter of the unit 'inner' has got a gradient before this step"):
        program.run()


def test_other_tensors_in_place_of_parameters_of_a_unit_inside(world):
    """``torch.func.functional_call`` of a unit would compute with what the unit has gathered."""

    class Calling(Net):
        def forward(self, x):
            halved = {name: 0.5 * value for name, value in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, halved, (x,))

    for front in FRONTS:
        model = shard(front, kind=Calling)
        with pytest.raises(EngineError, match="another tensor has taken the place of"):
            model(torch.ones(2, 5, dtype=torch.float64))


@pytest.mark.parametrize("front", FRONTS)
def test_functional_calls_and_penalties_within_a_forward(world, front):
    class Calling(Net):
        def forward(self, x):
            halved = {name: 0.5 * value for name, value in self.first.named_parameters()}
            penalty = sum(param.square().sum() for param in self.first.parameters())
            return super().forward(torch.func.functional_call(self.first, halved, (x,))) + penalty

    wanted = Program(shard("plain", kind=Calling), None, None).run()
    torch.testing.assert_close(Program(shard(front, kind=Calling), None, None).run(), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("front", FRONTS)
def test_modules_under_replicate_are_left_alone(world, front):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed._composable import replicate
    plain, net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.load_state_dict(plain.state_dict())
    replicate(net[1])
    if front == "rows":
        model = hpcfsdp.fully_shard(net)
    else:
        model = FullyShardedDataParallel(net, use_orig_params=front == "original")
    for param in net[1].parameters():
        assert type(param) is nn.Parameter
        assert param.shape in {(4, 4), (4,)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 4), 1.0 + world.rank)).square().sum().backward()
    optimizer.step()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rank in range(world.size):
        (plain(torch.full((2, 4), 1.0 + rank)).square().sum() / world.size).backward()
    own.step()
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole(found[name]), value)
