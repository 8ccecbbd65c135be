"""Sharded models that ``torch.compile`` has compiled."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.conformance.models import MLP, check_training, close, data_of, reference

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler reads it


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def ops(counter):
    """The functions that all graphs call, of those that have been compiled."""
    return [node.target for graph in counter.graphs for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_graphs_have_the_computation_alone(fsdp, mesh, world, when):
    """Not the hooks around it, which gather and reduce: each layer has one graph."""
    model = nn.Sequential(MLP(4), MLP(4)).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 2, 4)).sum()

    expected = reference(model, world, loss_of)
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model:
        if when == "before":
            layer.compile(backend=counter)
        fsdp.fully_shard(layer, mesh=mesh)
        if when == "after":
            layer.compile(backend=counter)
    fsdp.fully_shard(model, mesh=mesh)
    check_training(model, world, loss_of, expected)
    assert ops(counter) == [nn.functional.linear, torch.relu] * 4


def test_compiled_layers_of_a_model(fsdp, mesh, world):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)).double()
    plain, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    for number, layer in enumerate(model):
        model[number] = torch.compile(layer, backend=counter)
    fsdp.fully_shard(model, mesh=mesh)
    x = data_of(world.rank, 2, 4)
    for _ in range(2):
        close(model(x), plain(x))
    assert counter.frame_count == 3
