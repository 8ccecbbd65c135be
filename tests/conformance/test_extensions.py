"""Parameters that say themselves what ranks send of them, and what modules compute with."""

import copy
import types

import pytest
import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.conformance.models import MLP, close, data_of, mesh_of, reference
from tests.mpi.gathered_tensors import Noted


class Pair(TwoTensor):
    """Two tensors, which are sent both."""

    calls = 0

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.a, self.b), "pair"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        assert metadata == "pair"
        Pair.calls += 1
        a, b = outputs
        if out is None:
            return Pair(a, b).to(param_dtype), (a, b)
        assert isinstance(out, Pair)
        for found, kept in ((a, out.a), (b, out.b)):
            if found.dtype == param_dtype:
                assert found.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
            else:
                kept.copy_(found)
        return None


class PairOfMesh(Pair):
    """The same with the hook that takes the mesh alone."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b), "pair"


def pairs(kind, dim=8):
    model = nn.Sequential(MLP(dim, bias=False), MLP(dim, bias=False)).double()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach(), module.weight.detach().clone()))
    return model


def here(param):
    """The part of this rank: the object that the parameter holds, of which ``to_local`` makes a view."""
    return param._local_tensor


def give_hooks(param, before, after):
    """Give the hooks to the part of this rank, a plain tensor."""
    local = here(param)
    local.fsdp_pre_all_gather = types.MethodType(before, local)
    local.fsdp_post_all_gather = types.MethodType(after, local)


def put(weight, out):
    """What a hook after a gather returns."""
    if out is None:
        return weight, (weight,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(weight)
    return None


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Pair, PairOfMesh])
def test_training_a_subclass(fsdp, mesh, world, kind, reshard):
    model = pairs(kind)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach().a)

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 2, 8)).sum()

    losses, expected = reference(plain, world, loss_of)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    Pair.calls = 0
    for step, total in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        optim.step()
        optim.zero_grad(set_to_none=step % 2 == 0)
        close(world.comm.allreduce(loss.detach().a) / world.size, total)
    assert Pair.calls == len(losses) * 4 * (2 if reshard else 1)
    for name, param in model.named_parameters():
        assert type(here(param)) is kind
        part = distribute_tensor(expected[name].detach(), mesh, param.placements).to_local()
        close(here(param).a, part)
        close(here(param).b, part)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", [Pair, PairOfMesh])
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_a_subclass_that_is_made_on_meta(fsdp, mesh, world, kind, reshard):
    def made(model):
        for unit in (*model, model):
            policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        model.to_empty(device="cpu")
        for number, param in enumerate(model.parameters(), 1):
            nn.init.trunc_normal_(param)
            assert here(param).count_nonzero() == here(param).numel()
            nn.init.constant_(param, number / 10)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    with torch.device("meta"):
        model, plain = pairs(kind), nn.Sequential(MLP(8, bias=False), MLP(8, bias=False)).double()
    (model, optim), (plain, other) = made(model), made(plain)
    for step in range(3):
        x = data_of(world.rank + step, 2, 8)
        out, expected = model(x), plain(x)
        assert out.a.dtype == out.b.dtype == torch.bfloat16
        close(out.a, expected)
        out.sum().backward()
        expected.sum().backward()
        optim.step()
        other.step()
        optim.zero_grad()
        other.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(here(param).a, expected.to_local())


def test_hooks_of_plain_tensors(fsdp, mesh, world):
    """Weights are sent in 16 bits, and computed with in 64."""
    shapes = []

    def before(local, mesh, outer_size, outer_stride, module, mp_policy):
        shapes.append((tuple(outer_size), tuple(outer_stride), type(module).__name__))
        return (local.bfloat16(),), None

    def after(local, outputs, metadata, param_dtype, *, out=None):
        (sent,) = outputs
        assert metadata is None and sent.dtype == torch.bfloat16 and param_dtype == torch.float64
        return put(sent.to(param_dtype), out)

    with torch.device("meta"):
        model = nn.Sequential(MLP(8), MLP(8)).double()
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    plain = nn.Sequential(MLP(8), MLP(8)).double()
    for (name, param), value in zip(model.named_parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            param.copy_(distribute_tensor(value.detach(), mesh, param.placements))
            if "weight" in name:
                give_hooks(param, before, after)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        with torch.no_grad():
            for param, value in zip(model.parameters(), plain.parameters(), strict=True):
                value.copy_(param.full_tensor().bfloat16() if param.dim() == 2 else param.full_tensor())
        x = data_of(world.rank + step, 2, 8)
        out = model(x)
        close(out, plain(x))
        out.sum().backward()
        optim.step()
        optim.zero_grad()
    assert set(shapes) == {((32, 8), (8, 1), "Linear"), ((8, 32), (32, 1), "Linear")}


def test_hooks_that_fill_up_rows(fsdp, mesh, world):
    model = MLP(3, hidden=3).double()
    plain = copy.deepcopy(model)
    for module in (model.in_proj, model.out_proj):
        module.weight = nn.Parameter(Noted(module.weight.detach()))
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = data_of(world.rank, 2, 3)
    close(model(x), plain(x))
    Noted.calls.clear()
    model(x).sum().backward()
    optim.step()
    assert model(x).isfinite().all()
    assert any(call[0] == "before" for call in Noted.calls)
    Noted.calls.clear()


@pytest.mark.ranks(4)
def test_hooks_get_the_mesh_that_shards(fsdp, world):
    meshes = []

    def before(local, mesh, outer_size, outer_stride, module, mp_policy):
        meshes.append(mesh)
        return (local,), None

    def after(local, outputs, metadata, param_dtype, *, out=None):
        return put(outputs[0], out)

    mesh = mesh_of(replicate=2, shard=2)
    model = MLP(8).double()
    plain = copy.deepcopy(model)
    fsdp.fully_shard(model, mesh=mesh)
    give_hooks(model.in_proj.weight, before, after)
    x = data_of(0, 2, 8)
    close(model(x), plain(x))
    assert [(each.ndim, each.size()) for each in meshes] == [(1, 2)]
