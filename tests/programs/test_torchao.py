"""torchao's float8 training and its NF4 weights with ``fully_shard``: torch's numbers, and files that go on."""

import dataclasses
import logging

import h5py
import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn

logging.getLogger("torchao").setLevel(logging.CRITICAL)  # it logs libraries of devices that are not here
from torchao.float8 import (  # noqa: E402
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4  # noqa: E402

import hpcfsdp.fsdp2 as ours  # noqa: E402
from hpcfsdp import checkpoint  # noqa: E402

NF4 = [".nf4", ".quantization_factor", ".quantized_data", ".quantized_scalers", ".scaler_mean"]
WIDTH = 512  # NF4 keeps one factor for 256 blocks of 64 elements
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


class Adapted(nn.Module):
    """A frozen matrix of 4 bits, and its low-rank adapter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH) / WIDTH**0.5), requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return linear_nf4(x, self.weight) + self.b(self.a(x))


def of_float8(recipe):
    blocks = [
        nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)) for _ in range(3)
    ]
    config = Float8LinearConfig.from_recipe_name(recipe)
    if recipe == "tensorwise":
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(nn.Sequential(*blocks), config=dataclasses.replace(config, emulate=True))


def of_nf4():
    return nn.Sequential(*[nn.Sequential(Adapted(), nn.GELU(), Adapted()) for _ in range(2)])


def sharded(fsdp, model, **options):
    for block in model:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


def steps(model, optimizer, rank, *, first=0, count=3, after=lambda model: None):
    found = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + rank)
        width = model[0][0].a.in_features if isinstance(model[0][0], Adapted) else 64
        loss = model(torch.randn(16, width, generator=generator)).float().square().mean()
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()]
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    return found


def adamw(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise, scales at once", "rowwise"])
def test_float8(world, recipe, dtype):
    name, _, at_once = recipe.partition(",")

    def run(fsdp):
        torch.manual_seed(0)
        policy = fsdp.MixedPrecisionPolicy(dtype, torch.float32 if dtype else None)
        model = sharded(fsdp, of_float8(name), mp_policy=policy)
        after = precompute_float8_dynamic_scale_for_fsdp if at_once else lambda model: None
        return steps(model, adamw(model), world.rank, after=after)

    torch.testing.assert_close(run(ours), run(stock), rtol=1e-9, atol=0)


@pytest.mark.parametrize("offload", [False, True])
def test_adapters_of_nf4(world, offload):
    def run(fsdp):
        torch.manual_seed(0)
        policy = fsdp.CPUOffloadPolicy(pin_memory=False) if offload else fsdp.OffloadPolicy()
        model = sharded(fsdp, of_nf4(), offload_policy=policy)
        return steps(model, adamw(model), world.rank)

    torch.testing.assert_close(run(ours), run(stock), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["float8", "nf4"])
def test_a_file_has_what_they_hold_and_training_goes_on(world, tmp_path_factory, kind):
    path = world.comm.bcast(tmp_path_factory.mktemp("torchao") / "step.h5")

    def make(seed):
        torch.manual_seed(seed)
        model = sharded(ours, of_float8("tensorwise") if kind == "float8" else of_nf4())
        return model, adamw(model)

    model, optimizer = make(0)
    steps(model, optimizer, world.rank)
    checkpoint.save(path, model=model, optimizer=optimizer, step=3)
    expected = steps(model, optimizer, world.rank, first=3)
    model, optimizer = make(1)
    checkpoint.load(path, model=model, optimizer=optimizer)
    torch.testing.assert_close(steps(model, optimizer, world.rank, first=3), expected, rtol=0, atol=0)
    with h5py.File(path, "r") as file:
        names = sorted(name for name in file["model"] if name.startswith("0.0.weight"))
        inner = {"float8": [""], "nf4": NF4}[kind]
        assert names == [f"0.0.weight{name}" for name in inner]
