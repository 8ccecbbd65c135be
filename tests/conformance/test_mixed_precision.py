"""Dtypes that modules compute in, that gradients are reduced in, and of inputs and outputs."""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Noting(nn.Linear):
    """Notes the dtypes of its arguments."""

    def __init__(self, *args):
        super().__init__(*args)
        self.inputs = []

    def forward(self, x, *others):
        self.inputs.append(tuple(each.dtype for each in (x, *others)))
        return super().forward(x)


def largest_dim(param):
    return Shard(max(range(param.dim()), key=param.shape.__getitem__))


def whole_numbers(rank, step, *shape):
    """Small ones: products and sums of a few are exact in 16 bits."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(rank + 10 * step)).float()


def exact_model():
    """Two layers of whole numbers, whose gradients are such, too."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-1, 2, param.shape))
    return model


@pytest.mark.parametrize("placement", [None, largest_dim])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    ("compute", "sums"), [(BF16, None), (FP16, None), (BF16, FP32), (FP32, BF16)], ids=lambda dtype: str(dtype)[6:]
)
def test_dtypes_of_computation_and_sums(fsdp, mesh, world, compute, sums, reshard, placement):
    model = exact_model()
    plain = copy.deepcopy(model)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=sums)
    for unit in (model[0], model):
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
        fsdp.fully_shard(unit, shard_placement_fn=placement, **options)
    optim, plain_optim = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    for step in range(2):
        out = model(whole_numbers(world.rank, step, 3, 4))
        assert out.dtype == compute
        out.float().sum().backward()
        outputs = [plain(whole_numbers(rank, step, 3, 4)) for rank in range(world.size)]
        assert torch.equal(out.float(), outputs[world.rank])
        (sum(outputs).sum() / world.size).backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert param.dtype == param.grad.dtype == FP32
            assert torch.equal(param.grad.full_tensor(), expected.grad)
            with torch.no_grad():  # so that the next step is exact, too
                param.grad.sign_()
                expected.grad.sign_()
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad(set_to_none=False)


def test_sums_in_more_bits_than_the_computation(fsdp, mesh, world):
    model = nn.Linear(2, 4, bias=False)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))
    model(torch.full((1, 2), 256.0 if world.rank else 1.0)).sum().backward()
    total = 1 + 256 * (world.size - 1)  # which bfloat16 rounds
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 2), total / world.size))


@pytest.mark.parametrize("reshard", [True, False])
def test_accumulated_gradients_have_the_dtype_of_sums(fsdp, mesh, world, reshard):
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    values = [256.0 + world.rank * 2, 1.0, 1.0, 1.0]  # bfloat16 would stay at the first one
    for step, value in enumerate(values):
        is_last = step == len(values) - 1
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last or reshard)
        loss = model(torch.full((1, 2), value))
        assert loss.dtype == BF16
        loss.sum().backward()
    grad = 259 + (world.size - 1)
    assert model[0].weight.grad.dtype == FP32
    assert torch.equal(model[0].weight.grad.full_tensor(), torch.full((4, 2), float(grad)))
    assert torch.equal(model[1].weight.grad.full_tensor(), torch.full((1, 4), float(2 * grad)))


def test_a_model_that_is_converted_afterwards(fsdp, mesh):
    model = nn.Sequential(nn.Linear(8, 8, dtype=BF16), nn.Linear(8, 8, dtype=BF16))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    assert policy.reduce_dtype == BF16
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy)
    model.to(FP32)
    out = model(torch.ones(2, 8))
    assert out.dtype == BF16
    out.sum().backward()
    for param in model.parameters():
        assert param.dtype == param.grad.dtype == FP32


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Nested:
    pair: Pair
    third: torch.Tensor


class Tuple(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


CONTAINERS = {
    "dataclass": (lambda x, y, z: Pair(x, y + z), lambda held: (held.first, held.second)),
    "nested": (lambda x, y, z: Nested(Pair(x, y), z), lambda held: (held.pair.first, held.pair.second, held.third)),
    "namedtuple": (lambda x, y, z: Tuple(x, y + z), lambda held: (held.first, held.second)),
}


@pytest.mark.parametrize("policy", [(None, None), (BF16, BF16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_between_units(fsdp, mesh, world, container, policy):
    pack, unpack = CONTAINERS[container]

    class Pack(nn.Module):
        def forward(self, x):
            return pack(x, x.clone(), x.clone())

    class Each(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = Noting(4, 4)

        def forward(self, held):
            parts = [self.linear(part) for part in unpack(held)]
            return pack(*parts, *[torch.zeros_like(parts[0])] * (3 - len(parts)))

    class Unpack(nn.Module):
        def forward(self, held):
            return sum(unpack(held))

    model = nn.Sequential(Pack(), Each(), Each(), Unpack())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-1, 2, param.shape))
    plain = copy.deepcopy(model)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(*policy))
    out = model(whole_numbers(world.rank, 0, 2, 4))
    assert {dtypes for each in model[1:3] for dtypes in each.linear.inputs} == {(policy[0] or FP32,)}
    out.float().sum().backward()
    outputs = [plain(whole_numbers(rank, 0, 2, 4)) for rank in range(world.size)]
    assert torch.equal(out.float(), outputs[world.rank])
    (sum(outputs).sum() / world.size).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # which torch.func imports
def test_jvp_without_a_backward_before(fsdp, mesh):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, cast_forward_inputs=True)
    with torch.device("meta"):
        first, second = nn.Linear(8, 16, bias=False), nn.Linear(16, 12, bias=False)
    for module in (first, second):
        fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        module.to_empty(device="cpu")
        with torch.no_grad():
            module.weight.fill_(0.5)
    hidden = first(torch.ones(8, dtype=BF16))
    primal, tangent = torch.ones(12, dtype=BF16, requires_grad=True), torch.ones(12, dtype=BF16)
    out, out_tangent = torch.func.jvp(lambda _: second(hidden), (primal,), (tangent,))
    assert torch.equal(out, torch.full((12,), 32.0, dtype=BF16))
    assert torch.equal(out_tangent, torch.zeros(12, dtype=BF16))


def test_16_bits_in_one_module(fsdp, mesh):
    def train(unit, **policy):
        model = nn.Sequential(Noting(4, 4), Noting(4, 4))
        fsdp.fully_shard(model[unit], mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(FP16, **policy))
        fsdp.fully_shard(model, mesh=mesh)
        model(torch.zeros(2, 4)).sum().backward()
        return [layer.inputs[0][0] for layer in model]

    assert train(1) == [FP32, FP16]
    assert train(0, output_dtype=FP32) == [FP16, FP32]


@pytest.mark.parametrize("casts", [False, True])
def test_arguments_that_another_module_makes(fsdp, mesh, casts):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), Noting(4, 4)

        def forward(self, x):
            self.seen = x.dtype
            return self.second(self.first(x), torch.ones(2, 4))

    model = Outer()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=FP16, cast_forward_inputs=casts)
    fsdp.fully_shard(model.second, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=FP16))
    model(torch.zeros(2, 4)).sum().backward()
    assert model.seen == FP16
    assert model.second.inputs == [(FP16, FP16 if casts else FP32)]


def test_a_module_that_casts_its_argument_itself(fsdp, mesh):
    class Casting(Noting):
        def forward(self, x):
            self.given = x.dtype
            return super().forward(x.to(self.weight.dtype))

    model = nn.Sequential(nn.Linear(4, 4), Casting(4, 4))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=FP16, cast_forward_inputs=False)
    fsdp.fully_shard(model[1], mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh)
    model(torch.zeros(2, 4)).sum().backward()
    assert (model[1].given, model[1].inputs) == (FP32, [(FP16,)])


@pytest.mark.parametrize("casts", ["inputs", "outputs"])
def test_casts_in_a_recomputation(fsdp, mesh, casts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.results = Noting(1, 1), []

        def call(self, x):
            x = self.linear(x)
            self.results.append(x.dtype)
            return x

        def forward(self, x):
            x = x.to(FP32 if casts == "inputs" else BF16)
            return checkpoint(self.call, x, use_reentrant=False, early_stop=False).float().sum()

    options = {"output_dtype": FP32, "cast_forward_inputs": False} if casts == "outputs" else {}
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, **options)
    model = Model()
    fsdp.fully_shard(model.linear, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    model(torch.randn(8, 1)).backward()
    assert model.linear.inputs == [(BF16,)] * 2
    assert model.results == [FP32 if casts == "outputs" else BF16] * 2


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_norms_in_16_bits(fsdp, mesh, dtype):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype)

    def train(model, x, *, norm=policy):
        for unit in (*model, model):
            fsdp.fully_shard(unit, mesh=mesh, mp_policy=norm if unit is model[1] else policy)
        out = model(x)
        assert out.dtype == dtype
        out.sum().backward()
        assert all(param.grad.dtype == FP32 for param in model.parameters())

    linears = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.randn(4, 8)
    images = nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)), torch.randn(3, 1, 9, 9)
    train(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8))
    for model, x in (linears, images):
        with pytest.raises(RuntimeError):  # buffers keep their dtype, and the module wants that of its parameters
            train(copy.deepcopy(model), x)
        halves = copy.deepcopy(model)
        for name in ("running_mean", "running_var"):
            setattr(halves[1], name, getattr(halves[1], name).to(dtype))
        train(halves, x)
        train(model, x, norm=fsdp.MixedPrecisionPolicy(output_dtype=dtype))
