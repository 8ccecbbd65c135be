"""State dicts of sharded models: what they show, and what they load."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.conformance.models import MLP, close, data_of, mesh_of, tensor_parallel

LAYOUTS = {
    "rows": {"shard": 2},
    "columns": {"shard": 2},
    "replicas": {"replicate": 2, "shard": 2},
    "tensor": {"shard": 2, "tensor": 2},
    "replicas and tensor": {"replicate": 2, "shard": 2, "tensor": 1},
}
"""Of 2 ranks, and of 4."""


def longest(param):
    return Shard(max(range(param.dim()), key=param.size))


def sharded(fsdp, layout, dim, **options):
    """A stack of which each MLP is a unit, and a copy of it before."""
    mesh = mesh_of(**LAYOUTS[layout])
    model = nn.Sequential(MLP(dim), MLP(dim, hidden=3), MLP(dim)).double()
    plain = copy.deepcopy(model)
    if "tensor" in LAYOUTS[layout]:
        tensor_parallel(model, mesh["tensor"])
    dims = tuple(name for name in LAYOUTS[layout] if name != "tensor")
    place = longest if layout == "columns" else None
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh[dims], shard_placement_fn=place, **options)
    return model, plain


def locations(tensors):
    """Where the parts of this rank are, of those that have any."""
    return {name: value.to_local().data_ptr() for name, value in tensors if value.to_local().numel()}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dim", [3, 4])
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.ranks(4 if len(dims) > 1 else 2)) for name, dims in LAYOUTS.items()]
)
def test_saving_and_loading(fsdp, world, layout, dim, reshard):
    model, plain = sharded(fsdp, layout, 8 * dim if layout == "columns" else dim, reshard_after_forward=reshard)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert isinstance(state[name], DTensor)
        close(state[name], value)
    assert locations(state.items()) == locations(model.named_parameters())
    assert all(isinstance(param, nn.Parameter) and isinstance(param, DTensor) for param in model.parameters())

    model(data_of(world.rank, 2, plain[0].in_proj.in_features))
    again = model.state_dict()
    for name, value in state.items():
        assert isinstance(again[name], DTensor)
        close(again[name].to_local(), value.to_local())

    model.load_state_dict({name: torch.full_like(value, 42.0 + world.rank) for name, value in state.items()})
    for param in model.parameters():
        assert param.to_local().eq(42 + world.rank).all()
    even = {name for name, param in model.named_parameters() if param.shape[0] % world.size == 0}
    stayed = locations((name, value) for name, value in state.items() if name in even)
    assert stayed == locations((name, param) for name, param in model.named_parameters() if name in even)


@pytest.mark.parametrize("dim", [3, 4])
@pytest.mark.parametrize("moved", [False, True])
def test_a_state_dict_that_was_taken_once(fsdp, mesh, world, dim, moved):
    model = fsdp.fully_shard(nn.Linear(dim, dim, bias=False).double(), mesh=mesh, reshard_after_forward=True)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = model.state_dict()
    if moved:
        model = model.float().double()
    for _ in range(3):
        shared = locations(state.items()) == locations(model.named_parameters())
        assert shared != moved
        optim.zero_grad()
        model(data_of(world.rank, 2, dim)).sum().backward()
        optim.step()
    if not moved:
        close(state["weight"], model.weight)


def test_loading_one_parameter_after_the_other_into_a_model_on_meta(fsdp, mesh, world):
    policy = fsdp.CPUOffloadPolicy(pin_memory=False)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh, offload_policy=policy)
    values = {name: torch.randn(param.shape, dtype=param.dtype) for name, param in model.named_parameters()}
    for name, param in list(model.named_parameters()):
        part = distribute_tensor(values[name], param.device_mesh, param.placements)
        model.load_state_dict({name: part}, assign=True, strict=False)
    x = data_of(world.rank, 2, 4)
    close(model(x), x @ values["0.weight"].T @ values["1.weight"].T)
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu"
        close(value, values[name])


@pytest.mark.ranks(4)
def test_whole_state_dicts_of_a_tensor_parallel_model(fsdp, world):
    model, plain = sharded(fsdp, "tensor", 6)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(data_of(0, 2, 6)).sum().backward()
    optim.step()
    parts = copy.deepcopy((get_model_state_dict(model), get_optimizer_state_dict(model, optim)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    values, state = (
        get_model_state_dict(model, options=options),
        get_optimizer_state_dict(model, optim, options=options),
    )
    assert (list(values) == list(plain.state_dict())) if world.rank == 0 else not values
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optim.state[param]["exp_avg"].zero_()
    set_model_state_dict(model, values, options=options)
    set_optimizer_state_dict(model, optim, state, options=options)
    for name, value in get_model_state_dict(model).items():
        close(value, parts[0][name])
    for name, found in get_optimizer_state_dict(model, optim)["state"].items():
        for key, value in found.items():
            close(value, parts[1]["state"][name][key])
