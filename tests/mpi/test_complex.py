"""Complex parameters, as of Fourier layers: next to real ones, in both fronts, they come to what one process does."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.func import functional_call

import hpcfsdp
from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer, load, save
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardedGradScaler
from hpcfsdp.fsdp2 import MixedPrecisionPolicy
from hpcfsdp.optim import WholeTensors
from hpcfsdp.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from hpcfsdp.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.ranks(2, 3)
FRONTS = ["flat", "original", "rows"]
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


class Spectral(nn.Module):
    """The three parameters of few elements are on some ranks alone."""

    def __init__(self, dtype):
        super().__init__()
        self.lift, self.out = nn.Linear(1, 4, dtype=dtype), nn.Linear(4, 1, dtype=dtype)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=dtype.to_complex()) * 0.3)
        self.bias = nn.Parameter(torch.randn(3, dtype=dtype.to_complex()) * 0.1)
        self.register_buffer("phase", torch.randn(3, dtype=dtype.to_complex()))

    def forward(self, x):
        x = self.lift(x)
        modes = torch.fft.rfft(x.to(self.weight.dtype.to_real()), dim=1)[:, :3]
        modes = torch.einsum("bmi,iom,m->bmo", modes, self.weight, self.phase) + self.bias[:, None]
        return self.out(x + torch.fft.irfft(modes, n=x.shape[1], dim=1).to(x.dtype))


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(Spectral(dtype), Spectral(dtype))


def shard(front, model, half=False):
    if front == "rows":
        policy = {"mp_policy": MixedPrecisionPolicy(**HALF)} if half else {}
        for module in (*model, model):
            hpcfsdp.fully_shard(module, **policy)
        return model
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Spectral}),
        use_orig_params=front == "original",
        mixed_precision=MixedPrecision(**HALF) if half else None,
    )


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model):
    return WholeTensors(model, model.parameters(), torch.optim.AdamW, lr=1e-2)


def clip(model, norm_type):
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(0.1, norm_type)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train(model, optimizer, world=None, *, first=0, norm_type=2.0, call=None, scaler=None, dtype=torch.float64):
    """The norms of a few steps, over the batch of all ranks, or this rank's part of it."""
    norms = []
    for step in range(first, first + 3):
        x = torch.randn(12, 8, 1, generator=torch.Generator().manual_seed(step), dtype=dtype)
        x = x if world is None else x.chunk(world.size)[world.rank]
        loss = ((call or model)(x).to(dtype) - x.cumsum(1)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        norms.append(clip(model, norm_type))
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return norms


def values(model):
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in found.items()}


def same(world, model, plain, **tolerance):
    found = values(model)
    if world.rank == 0:
        torch.testing.assert_close(found, dict(plain.state_dict()), **tolerance)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("front", FRONTS)
def test_clipping_and_steps(world, front, norm_type):
    plain, model = build(), shard(front, build())
    expected = train(plain, adam(plain), norm_type=norm_type)
    torch.testing.assert_close(train(model, adam(model), world, norm_type=norm_type), expected)
    same(world, model, plain)


@pytest.mark.parametrize("front", FRONTS)
def test_mixed_precision_leaves_them(world, front):
    def call(x):
        params = {name: p.bfloat16() if p.is_floating_point() else p for name, p in plain.named_parameters()}
        return functional_call(plain, params, (x.bfloat16(),))

    plain, model = build(torch.float32), shard(front, build(torch.float32), half=True)
    expected = train(plain, adam(plain), call=call, dtype=torch.float32)
    got = train(model, adam(model), world, dtype=torch.float32)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=0)
    same(world, model, plain, rtol=0, atol=1e-2)


@pytest.mark.parametrize("front", FRONTS)
def test_a_scaler(world, front):
    plain, model = build(), shard(front, build())
    expected = train(plain, adam(plain))
    torch.testing.assert_close(train(model, adam(model), world, scaler=ShardedGradScaler("cpu", 2.0**8)), expected)
    same(world, model, plain)


@pytest.mark.parametrize("front", FRONTS[1:])
def test_owners_step_whole_ones(world, front):
    plain, model = build(), shard(front, build())
    expected = train(plain, adam(plain))
    torch.testing.assert_close(train(model, whole(model), world), expected)
    same(world, model, plain)


@pytest.mark.parametrize(("way", "make"), [("file", adam), ("file", whole), ("folder", adam), ("writer", whole)])
@pytest.mark.parametrize("front", FRONTS)
def test_files(world, shared_path, front, way, make):
    if front == "flat" and make is whole:
        pytest.skip("a flat parameter stands for several tensors")
    path = shared_path / "it.h5"

    def keep(model, optimizer):
        if way == "file":
            save(path, model=model, optimizer=optimizer, step=1)
            return
        writer = HDF5Writer(path) if way == "writer" else dcp.FileSystemWriter(path)
        dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), storage_writer=writer)

    def restore(model, optimizer):
        if way == "file":
            load(path, model=model, optimizer=optimizer)
            return
        state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.load(state, storage_reader=HDF5Reader(path) if way == "writer" else dcp.FileSystemReader(path))
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])

    model = shard(front, build())
    optimizer = make(model)
    train(model, optimizer, world)
    keep(model, optimizer)
    expected = train(model, optimizer, world, first=3), values(model)
    again = shard(front, build())
    with torch.no_grad():
        for param in again.parameters():
            param.zero_()
    optimizer = make(again)
    restore(again, optimizer)
    assert (train(again, optimizer, world, first=3), values(again).keys()) == (expected[0], expected[1].keys())
    torch.testing.assert_close(values(again), expected[1], rtol=0, atol=0)
