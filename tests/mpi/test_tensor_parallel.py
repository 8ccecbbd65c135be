"""Models that are parallel over tensors are trained like the plain model in one process, at every mesh."""

import functools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import mesh_cases
from tests.mpi.mesh_cases import (
    CASES,
    MIXED_SHAPE,
    MODELS,
    SIZE,
    TIGHT,
    Block,
    Gpt,
    Mlp,
    Primes,
    Recipe,
    Sequence,
    build,
    close,
    each_mesh,
    each_mesh_in_each_mode,
    each_mesh_in_one_mode,
    expected,
    named,
    place,
    shard,
    train,
    whole,
    whole_gradients,
    wrap,
)
from tests.mpi.models import ORIGINAL

pytestmark = [pytest.mark.ranks(3, 1, 4), pytest.mark.meshes]

ONE_STEP = Recipe("sgd", steps=1)


def ids(value):
    if isinstance(value, str):
        return value
    return getattr(value, "__name__", None) or "x".join(map(str, value))


@pytest.mark.ranks(3, 1, 4, 8)
@each_mesh_in_each_mode
@pytest.mark.parametrize("model", MODELS, ids=ids)
def test_training_is_that_of_one_process(world, model, original, shape):
    at, recipe = place(shape), Recipe("momentum" if original else "adamw")
    sharded = shard(build(model), at, "by hand" if original else "policy", use_orig_params=original)
    close(train(sharded, at, recipe), expected(model, recipe))


STRATEGIES = [
    (name, shape)
    for shape in CASES
    for name in (
        ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") if shape[0] > 1 else ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    )
]
"""Each with the meshes that it takes."""


@ORIGINAL
@pytest.mark.parametrize(("strategy", "shape"), STRATEGIES, ids=ids)
def test_every_strategy(world, strategy, shape, original):
    at, recipe = place(shape), Recipe("momentum" if not original else "adamw")
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    close(train(shard(build(Gpt), at, **options), at, recipe), expected(Gpt, recipe))


@pytest.mark.parametrize("wrapping", ["policy", "by hand", "whole"])
def test_every_wrapping(world, wrapping):
    at = place(MIXED_SHAPE)
    close(train(shard(build(Gpt), at, wrapping), at), expected(Gpt))


@each_mesh
def test_groups_instead_of_a_mesh(world, shape):
    at = place(shape)
    close(train(shard(build(Mlp), at, **at.groups), at), expected(Mlp))


# Norms


@pytest.mark.ranks(3, 1, 4, 8)
@each_mesh
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(("model", "original"), [(Gpt, False), (Sequence, True)], ids=["Gpt-flat", "Sequence-original"])
def test_norms_and_clipped_gradients(world, model, norm_type, original, shape):
    at, recipe = place(shape), Recipe("sgd", steps=1, clip=0.05, norm_type=norm_type)
    wanted = expected(model, recipe)
    assert wanted.norms[0] > 0.05
    close(train(shard(build(model), at, use_orig_params=original), at, recipe), wanted)


@each_mesh_in_one_mode
def test_norm_0_counts_each_element_once(world, shape, original):
    at = place(shape)
    sharded = shard(build(Primes), at, use_orig_params=original)
    mesh_cases.model_loss(sharded, at, 0).backward()
    grads = expected(Primes, Recipe("sgd", steps=1, clip=None)).gradients.values()
    assert sharded.clip_grad_norm_(1e9, 0).item() == sum(int(grad.count_nonzero()) for grad in grads)


@each_mesh
def test_gradients_within_the_bound_stay_as_they_are(world, shape):
    at, recipe = place(shape), Recipe("sgd", steps=1, clip=1e9)
    sharded = shard(build(Mlp), at)
    mesh_cases.model_loss(sharded, at, 0).backward()
    before = [param.grad.clone() for param in sharded.parameters()]
    assert sharded.clip_grad_norm_(1e9).item() == pytest.approx(expected(Mlp, recipe).norms[0], rel=1e-9)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(sharded.parameters(), before, strict=True))


# Accumulation


@each_mesh
@ORIGINAL
@pytest.mark.parametrize("no_sync", [False, True], ids=["reduced", "kept"])
def test_gradients_of_several_backwards_add_up(world, no_sync, original, shape):
    at, recipe = place(shape), Recipe(parts=3, steps=2)
    sharded = shard(build(Sequence), at, use_orig_params=original)
    close(train(sharded, at, recipe, no_sync=no_sync), expected(Sequence, recipe))


# What modules see


@each_mesh
@ORIGINAL
def test_modules_compute_with_dtensors_and_parameters_are_this_ranks_blocks(world, shape, original):
    at, seen = place(shape), {}
    sharded = shard(build(Mlp), at, use_orig_params=original)

    def look(name, module, *_):
        for key in ("weight", "bias"):
            param = getattr(module, key)
            seen[f"{name}.{key}"] = tuple(param.shape), getattr(param, "placements", None)

    modules = {mesh_cases.plain_name(name): module for name, module in sharded.named_modules()}
    watched = {name: module for name, module in modules.items() if type(module) in (nn.Linear, nn.LayerNorm)}
    for name, module in watched.items():
        module.register_forward_pre_hook(functools.partial(look, name))
    mesh_cases.model_loss(sharded, at, 0).backward()
    plain = dict(build(Mlp).named_parameters())
    cut = {"up.weight": (Shard(0),), "up.bias": (Shard(0),), "down.weight": (Shard(1),), "down.bias": (Replicate(),)}
    assert seen == {name: (tuple(value.shape), cut.get(name.split(".", 2)[-1])) for name, value in plain.items()}
    for module in watched.values():
        for key in ("weight", "bias"):
            assert not isinstance(getattr(module, key), DTensor)
    assert not any(isinstance(param, DTensor) for param in sharded.parameters())
    if original:
        kept = sum(param.numel() for param in sharded.parameters())
        total = sum(world.comm.allgather(kept)) / shape[0]
        parallel = sum(plain[f"blocks.{i}.{key}"].numel() for i in range(2) for key in cut if key != "down.bias")
        assert total == parallel + shape[2] * (sum(param.numel() for param in plain.values()) - parallel)


@each_mesh_in_one_mode
def test_evaluation_between_steps_changes_nothing(world, shape, original):
    at, recipe = place(shape), Recipe(steps=1)
    sharded = shard(build(Sequence), at, use_orig_params=original)
    with torch.no_grad():
        before = mesh_cases.mean(mesh_cases.model_loss(sharded.eval(), at, 0).item())
    sharded.train()
    got = train(sharded, at, recipe)
    assert got.losses == [before]
    close(got, expected(Sequence, recipe))


@each_mesh_in_one_mode
def test_an_exception_in_forward_leaves_a_model_that_works(world, shape, original):
    at = place(shape)
    sharded = shard(build(Gpt), at, use_orig_params=original)
    inner = sharded.block.module
    handle = inner.down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mesh_cases.model_loss(sharded, at, 0)
    handle.remove()
    assert not isinstance(inner.up.weight, DTensor)
    close(train(sharded, at), expected(Gpt))


# Precision


class Integers(mesh_cases.Vectors):
    """Whole numbers below 256, which bfloat16 sums exactly in any order."""

    units = frozenset({nn.Sequential})

    def __init__(self):
        super().__init__()
        # No bias: each rank adds its part of one, a third is none of these numbers.
        self.inner = nn.Sequential(nn.Linear(self.width, 12), nn.ReLU(), nn.Linear(12, self.width, bias=False))
        self.last = nn.Linear(self.width, 2)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randint(-1, 2, param.shape, generator=generator).float()
        self.dtypes = set()

    @classmethod
    def plan(cls):
        return {"inner.0": ColwiseParallel(), "inner.2": RowwiseParallel()}

    @classmethod
    def batch(cls, step, part=0):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randint(-1, 2, (24, cls.width), generator=generator).float()
        return inputs, (torch.arange(24) % 3 == 0).float().unsqueeze(1)  # few, that gradients are small

    def forward(self, x):
        hidden = self.inner(x)
        self.dtypes |= {x.dtype, hidden.dtype, self.last.weight.dtype}
        return self.last(hidden)

    def loss(self, inputs, targets):
        return (self(inputs) * targets.to(inputs)).float().sum()


@each_mesh
@ORIGINAL
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["reduced-as-computed", "reduced-in-float32"])
def test_bfloat16_is_exact_for_whole_numbers(world, shape, original, reduce_dtype):
    at, plain = place(shape), Integers()
    wanted = plain.loss(*plain.batch(0))
    wanted.backward()
    assert max(param.grad.abs().max().item() for param in plain.parameters()) * 3 <= 256
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    sharded = shard(Integers(), at, mixed_precision=mixed, use_orig_params=original)
    loss = mesh_cases.model_loss(sharded, at, 0)
    (loss * at.data_size).backward()  # averaged over ranks it is the sum over parts
    assert sharded.module.dtypes == {torch.bfloat16}
    assert world.comm.allreduce(loss.item()) == wanted.item() * at.shape[2]
    for (name, param), grad in zip(named(plain), whole_gradients(sharded).values(), strict=True):
        assert grad.dtype == torch.float32
        assert torch.equal(grad, param.grad), name


@each_mesh_in_one_mode
def test_bfloat16_is_that_of_a_model_that_is_not_parallel(world, shape, original):
    """They differ by the order of sums alone: as little as the same model over another number of ranks."""
    at, recipe = place(shape), Recipe("sgd", steps=3, clip=None)
    options = {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
        "use_orig_params": original,
    }
    got = train(shard(build(Mlp).float(), at, **options), at, recipe)
    reference = wrap(build(Mlp).float(), at, **options)
    wanted = train(reference, at, recipe)
    assert wanted.losses != expected(Mlp, recipe).losses
    torch.testing.assert_close(got.losses, wanted.losses, rtol=2**-8, atol=0)
    torch.testing.assert_close(got.parameters, wanted.parameters, rtol=0, atol=2**-8 * 5e-2)
    assert {value.dtype for value in got.parameters.values()} == {torch.float32}


def test_a_scaler_skips_the_step_on_all_ranks_if_one_block_overflows(world):
    at = place(MIXED_SHAPE)
    sharded = shard(build(Mlp).float(), at, use_orig_params=True)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    before = whole(sharded)
    scaler.scale(mesh_cases.model_loss(sharded, at, 0)).backward()
    if world.rank == SIZE - 1:
        next(p for p in sharded.parameters() if p.grad is not None and p.grad.numel()).grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert world.comm.allgather(scaler.get_scale()) == [2.0] * SIZE
    torch.testing.assert_close(whole(sharded), before, rtol=0, atol=0)


# Recomputation


@each_mesh
@pytest.mark.parametrize(("around", "original"), [(False, False), (True, True)], ids=["inside-flat", "around-original"])
@pytest.mark.parametrize("kind", CheckpointImpl, ids=lambda kind: kind.name.lower())
def test_activations_that_are_computed_again(world, kind, around, original, shape):
    at = place(shape)
    sharded = shard(build(Sequence), at, use_orig_params=original)
    chosen = FullyShardedDataParallel if around else Block
    apply_activation_checkpointing(
        sharded.module,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=kind),
        check_fn=lambda module: isinstance(module, chosen),
    )
    assert sum(name.endswith("_checkpoint_wrapped_module") for name, _ in sharded.named_modules()) == 2
    close(train(sharded, at), expected(Sequence))


# Parameters that are not trained here


class WithAdapter(Mlp):
    """A parallel pair of layers that is ignored, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.adapter, self.frozen = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    @classmethod
    def plan(cls):
        pairs = {"adapter.0": ColwiseParallel(use_local_output=False), "adapter.1": RowwiseParallel()}
        return {**super().plan(), **pairs, "frozen": ColwiseParallel(output_layouts=Replicate())}

    def forward(self, x):
        return super().forward(x + self.adapter(x) + self.frozen(x))


@each_mesh_in_one_mode
def test_ignored_modules_keep_their_dtensors_and_count_in_the_norm(world, shape, original):
    at = place(shape)
    model = build(WithAdapter).parallelize(at.tensor)
    sharded = wrap(model, at, ignored_modules=[model.adapter, model.frozen], use_orig_params=original)
    mesh_cases.model_loss(sharded, at, 0).backward()
    assert all(isinstance(param, DTensor) for param in [*model.adapter.parameters(), *model.frozen.parameters()])
    groups = [at.mesh.get_group(name) for name in at.mesh.mesh_dim_names if name != "tensor"]
    for param in model.adapter.parameters():  # which is the user's to do
        for group in groups:
            dist.all_reduce(param.grad.to_local(), group=group)
        param.grad.to_local().div_(at.data_size)
    recipe = Recipe("sgd", steps=1, clip=0.05)
    assert sharded.clip_grad_norm_(0.05).item() == pytest.approx(expected(WithAdapter, recipe).norms[0], rel=1e-9)
    gradients = whole_gradients(sharded)
    for name, grad in expected(WithAdapter, recipe).gradients.items():
        assert (gradients[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(gradients[name], grad, **TIGHT)


# Where values come from


@each_mesh_in_one_mode
def test_every_rank_takes_the_values_of_the_first(world, shape, original):
    at = place(shape)
    model = build(Primes, seed=world.rank)
    model.blocks[0].shift.add_(world.rank)
    sharded = shard(model, at, sync_module_states=True, use_orig_params=original)
    torch.testing.assert_close(whole(sharded), dict(named(build(Primes))), rtol=0, atol=0)
    assert torch.equal(sharded.blocks[0].shift, build(Primes).blocks[0].shift)


@each_mesh_in_one_mode
def test_models_that_are_built_without_memory(world, shape, original):
    at = place(shape)
    values = dict(build(Mlp).named_parameters())
    with torch.device("meta"):
        model = Mlp().double()
    model.parallelize(at.tensor)
    names = {module: name for name, module in model.named_modules()}

    def fill(module):
        for key, param in list(module.named_parameters(recurse=False)):
            value = values[f"{names[module]}.{key}"]
            if isinstance(param, DTensor):
                value = distribute_tensor(value, param.device_mesh, param.placements)
            setattr(module, key, nn.Parameter(value.detach().clone()))
        for key, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, key, getattr(build(Mlp).blocks[0], key).to(buffer.dtype))

    sharded = wrap(model, at, param_init_fn=fill, use_orig_params=original)
    close(train(sharded, at), expected(Mlp))


# Torch's own engine


# It takes no mesh whose shard has one rank, nor two dimensions beside that of tensors; it trains what is tied as if it
# were not, and what is partly frozen otherwise than one process does.
TORCHS = [shape for shape in CASES if shape[0] == 1 < shape[1]] or CASES


@pytest.mark.parametrize("shape", TORCHS, ids=ids)
@pytest.mark.parametrize("model", [Mlp, Gpt], ids=ids)
def test_torchs_engine_comes_to_the_same(several, model, shape):
    at, recipe = place(shape), Recipe(clip=None)
    got = train(shard(build(model), at, use_orig_params=True), at, recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        theirs = torch_fsdp.FullyShardedDataParallel(
            build(model).parallelize(at.tensor),
            auto_wrap_policy=ModuleWrapPolicy(model.units),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            **at.sharding,
        )
        optimizer, losses = recipe.make_optimizer(theirs.parameters()), []
        for step in range(recipe.steps):
            optimizer.zero_grad()
            loss = mesh_cases.model_loss(theirs, at, step)
            loss.backward()
            losses.append(mesh_cases.mean(loss.item()))
            optimizer.step()
    torch.testing.assert_close(got.losses, losses, rtol=1e-9, atol=0)
