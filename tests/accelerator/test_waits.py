"""Each wait between queues, left out: values are wrong that are right with it, see docs/developers/streams.md.

tests/unit/engine/test_streams.py has programs for every place in the source that waits.
"""

import pytest
import torch
from torch import nn

from hpcfsdp.engine.streams import Wait
from hpcfsdp.params.flat_param import FlatParam
from tests.accelerator.programs import SIM, leave_for_later, mesh_of, shard, train
from tests.mpi import parity
from tests.mpi.parity import Recipe, build

pytestmark = pytest.mark.ranks(2)

WIDTH = 7


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


class Chain(nn.Sequential):
    """Units within a root that has no parameters; the first `count` of them are called."""

    units = (Layer,)

    def __init__(self):
        super().__init__(*(Layer() for _ in range(4)))

    def forward(self, x, count=4):
        for layer in list(self)[:count]:
            x = layer(x)
        return x


def batch():
    return torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH).to(SIM)


@torch.no_grad()
def halve(model):
    for param in model.parameters():
        param.mul_(0.5)


# Programs: what they compute, in host memory


def training(group, begin, **options):
    model = shard(build(parity.Nested).to(SIM), group, **options)
    begin()
    found = train(model, Recipe("sgd"), SIM)
    return [torch.tensor(found.losses), *found.parameters.values()]


def training_in_host_memory(group, begin):
    return training(group, begin, offload=True)


def training_of_replicas(group, begin):
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    return training(None, begin, strategy="HYBRID_SHARD", device_mesh=mesh)


def changes_after_an_evaluation(group, begin):
    """The program writes shards in host memory that the last unit is gathered from."""
    model, x, outputs = shard(build(Chain).to(SIM), group, offload=True), batch(), []
    with torch.no_grad():
        model(x)  # the ranks agree on the order of units, and wait for that
        begin()
        for _ in range(2):
            outputs.append(model(x))
            halve(model)
    return [output.cpu() for output in outputs]


def changes_after_a_backward(group, begin):
    """The backward gathers parameters without gradients: nothing waits for a reduction."""
    x = batch().requires_grad_()
    model = shard(build(Chain).requires_grad_(False).to(SIM), group, offload=True)
    model(x).sum().backward()
    begin()
    for _ in range(2):
        model(x).sum().backward()
        halve(model)
    return [x.grad.cpu()]


def changes_after_a_unit_that_is_not_called(group, begin):
    """Nobody computes with what was gathered in vain: look at what the ranks have sent."""
    model, x, sent, gather = shard(build(Chain).to(SIM), group, forward_prefetch=True), batch(), [], FlatParam.gather

    def watched(flat, async_op):
        work = gather(flat, async_op)
        sent.append(flat._buffer.full.clone())
        return work

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            model(x)
        begin()
        patch.setattr(FlatParam, "gather", watched)
        model(x, 2)
        halve(model)
    assert len(sent) == 3
    return [values.cpu() for values in sent]


PROGRAMS = [
    (Wait.SHARDS_WRITTEN, "compute", training),
    (Wait.VALUES_USED, "compute", training),
    (Wait.VALUES_GATHERED, "gather", training),
    (Wait.GRADS_WRITTEN, "compute", training),
    (Wait.GRADS_TAKEN, "reduce", training),
    (Wait.GRADS_REDUCED, "reduce", training),
    (Wait.GRADS_LANDED, "reduce", training_in_host_memory),
    (Wait.SHARDS_READ, "gather", changes_after_an_evaluation),
    (Wait.SHARDS_READ, "gather", changes_after_a_backward),
    (Wait.GATHERED_IN_VAIN, "gather", changes_after_a_unit_that_is_not_called),
    (Wait.SHARD_REDUCED, "reduce", training_of_replicas),
]


def name_of(value):
    return getattr(value, "name", None) or getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("why", "policy", "program"),
    [pytest.param(*case, marks=pytest.mark.ranks(4 if case[2] is training_of_replicas else 2)) for case in PROGRAMS],
    ids=name_of,
)
def test_a_wait_left_out_shows(world, group, streams, monkeypatch, why, policy, program):
    def run(policy):
        return program(group, lambda: leave_for_later(streams, policy))

    def same(one, other):
        return all(world.comm.allgather(all(map(torch.equal, one, other))))

    expected = run("eager")
    assert same(run(policy), expected)
    wait = streams.wait
    monkeypatch.setattr(
        streams, "wait", lambda queue, event, reason: None if reason is why else wait(queue, event, reason)
    )
    assert not same(run(policy), expected)


def test_there_is_a_program_for_each_wait():
    assert {why for why, _, _ in PROGRAMS} == set(Wait)
