"""Every strategy, precision and way of wrapping, on models with something unusual in them.

In float64 a sharded model has to compute what the plain one computes to the last digits. Where numbers are rounded to
fewer bits on the way, torch's FSDP1 over gloo is the reference, see ``tests/mpi/parity.py``.
"""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

import hpcfsdp.world
from hpcfsdp.fsdp import ShardedGradScaler
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import STRATEGIES, WIDTH, Recipe, build, close, reference

pytestmark = [pytest.mark.ranks(2, 1, 3), pytest.mark.pairs]

EXACT = {"rtol": 1e-9, "atol": 1e-11}
"""float64 has 16 digits; ranks add in another order, and optimizers divide by what may be small."""
SINGLE = {"rtol": 1e-5, "atol": 1e-6}

PLAIN_STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
SOME = [("FULL_SHARD", False), ("FULL_SHARD", True), ("NO_SHARD", True), ("HYBRID_SHARD", False)]


@pytest.fixture
def carried(engines, carrier):
    """Over memory that all ranks share, where nothing is gathered; over MPI with memory shared by none, or by some."""
    return parity.under_test(engines, carrier)


def over(*dtensor_ranks):
    return pytest.mark.parametrize("carrier", ["hpcfsdp", *dtensor_ranks])


def check_plain(engine, model_type, recipe, tolerance, **options):
    """Train sharded, and compare with the plain module on the data of all ranks."""
    if hasattr(model_type, "partly_used"):
        # Original parameters that no rank has used have no gradient, as in the plain module; torch's have zeros.
        recipe = dataclasses.replace(recipe, zero_unused=not options["use_orig_params"] or engine.is_torch)
    expected = reference(model_type, engine.comm.size, recipe)
    sharded = engine.shard(build(model_type, recipe.dtype), **options)
    close(engine.train(sharded, recipe), expected, **tolerance)


# Strategies and wrapping


@pytest.mark.parametrize(
    ("carrier", "strategy", "original"),
    [
        *(
            (carrier, each, flag)
            for carrier in ("hpcfsdp", "messages")
            for each in STRATEGIES
            for flag in (False, True)
        ),
        *((carrier, each, True) for carrier in ("two nodes", "gloo") for each in ("FULL_SHARD", "_HYBRID_SHARD_ZERO2")),
    ],
)
def test_strategies(carried, strategy, original):
    recipe = Recipe("sgd" if original else "adamw")
    check_plain(carried, parity.Nested, recipe, EXACT, strategy=strategy, use_orig_params=original)


@pytest.mark.parametrize("wrapping", ["whole", "by hand", "size"])
@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_wrapping(engine, strategy, original, wrapping):
    options = {"strategy": strategy, "use_orig_params": original, "wrapping": wrapping}
    check_plain(engine, parity.Nested, Recipe(), EXACT, **options)


@ORIGINAL
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_float32(engine, strategy, original):
    recipe = Recipe("adamw" if original else "sgd", steps=5, dtype=torch.float32)
    check_plain(engine, parity.Nested, recipe, SINGLE, strategy=strategy, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_the_same_as_torch(engine, engines, strategy, original):
    recipe = Recipe("sgd", follow=True)
    got, expected = (
        made.train(made.shard(build(parity.Nested), strategy=strategy, use_orig_params=original), recipe)
        for made in (engine, engines["torch"])
    )
    close(got, expected, **EXACT)
    torch.testing.assert_close(got.after_one, expected.after_one, **EXACT)


@ORIGINAL
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("way", ["mesh", "topology"])
def test_hybrid_by_mesh_and_by_topology(engine, world, monkeypatch, strategy, original, way):
    mesh = parity.square_mesh()
    if way == "mesh":
        options = {"device_mesh": mesh}
    else:
        engine.beyond_torch("nodes that are imagined")
        split = dataclasses.replace(world, topology=world.topology.split(2))
        monkeypatch.setattr(hpcfsdp.world, "_world", split)
        options = {"process_group": None}
    check_plain(engine, parity.Nested, Recipe(), EXACT, strategy=strategy, use_orig_params=original, **options)


# Models


@pytest.mark.parametrize(
    ("carrier", "strategy", "original"),
    [
        ("hpcfsdp", "FULL_SHARD", False),
        ("hpcfsdp", "FULL_SHARD", True),
        ("hpcfsdp", "NO_SHARD", True),
        ("messages", "FULL_SHARD", True),
        ("messages", "SHARD_GRAD_OP", False),
        ("messages", "HYBRID_SHARD", False),
    ],
)
@pytest.mark.parametrize(
    "model_type",
    [
        parity.TiedInUnit,
        parity.Frozen,
        parity.FrozenUnit,
        parity.UnusedParameter,
        parity.TwiceAndIdle,
        parity.Uneven,
        parity.MixedDtypes,
        parity.WithScalars,
        parity.Branches,
        parity.WithoutGraph,
    ],
)
def test_models(carried, model_type, strategy, original):
    if model_type in (parity.MixedDtypes, parity.WithScalars):
        carried.beyond_torch("several dtypes in a unit, parameters without dimensions")
    if model_type is parity.Frozen and not original:
        carried.beyond_torch("frozen parameters next to others in a flat parameter")
    tolerance = SINGLE if model_type is parity.MixedDtypes else EXACT
    recipe = Recipe("adamw" if original else "sgd")
    check_plain(carried, model_type, recipe, tolerance, strategy=strategy, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_sizes_that_shards_end_inside_of(engine, strategy, original):
    """All at once: units of one element and of primes, in one flat parameter and apart."""
    for wrapping in ("whole", "by hand"):
        options = {"strategy": strategy, "use_orig_params": original, "wrapping": wrapping}
        check_plain(engine, parity.Uneven, Recipe(), EXACT, **options)


# Steps


@ORIGINAL
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_gradients_accumulate(engine, strategy, no_sync, original):
    recipe = Recipe("sgd", parts=3, no_sync=no_sync)
    check_plain(engine, parity.Nested, recipe, EXACT, strategy=strategy, use_orig_params=original)


@over("messages")
@ORIGINAL
def test_a_unit_called_twice_accumulates_without_exchange(carried, original):
    recipe = Recipe(parts=2, no_sync=True, set_to_none=False)
    check_plain(carried, parity.TwiceAndIdle, recipe, EXACT, use_orig_params=original)


@pytest.mark.parametrize(
    ("norm_type", "dtype"),
    [
        (1.0, torch.float32),
        (2.0, torch.float32),
        (2.0, torch.float64),
        (3.5, torch.float64),
        (torch.inf, torch.float32),
    ],
)
@pytest.mark.parametrize(("strategy", "original"), SOME)
def test_clipping(engine, strategy, norm_type, dtype, original):
    if dtype == torch.float64:
        engine.beyond_torch("norms of gradients in float64")
    recipe = Recipe("sgd", parts=2, no_sync=True, clip=(0.2, norm_type), dtype=dtype)
    tolerance = SINGLE if dtype == torch.float32 else EXACT
    check_plain(engine, parity.Nested, recipe, tolerance, strategy=strategy, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize("model_type", [parity.TiedInUnit, parity.Uneven, parity.Frozen, parity.TwiceAndIdle])
def test_every_gradient_counts_once_in_the_norm(engine, model_type, original):
    if model_type is parity.Frozen and not original:
        engine.beyond_torch("frozen parameters next to others in a flat parameter")
    recipe = Recipe("sgd", clip=(0.1, 2.0), dtype=torch.float32)
    check_plain(engine, model_type, recipe, SINGLE, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zero", "none"])
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_evaluation_between_steps_and_both_ways_to_forget_gradients(engine, strategy, set_to_none, original):
    recipe = Recipe("sgd", set_to_none=set_to_none, evaluate=True)
    check_plain(engine, parity.Nested, recipe, EXACT, strategy=strategy, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize(
    ("carrier", "strategy"), [("hpcfsdp", "FULL_SHARD"), ("messages", "FULL_SHARD"), ("messages", "SHARD_GRAD_OP")]
)
@pytest.mark.parametrize(
    "model_type",
    [
        parity.RecomputedOutside,
        parity.RecomputedOutsideReentrant,
        parity.RecomputedInside,
        parity.RecomputedInsideReentrant,
    ],
)
def test_activation_checkpointing(carried, model_type, strategy, original):
    check_plain(carried, model_type, Recipe(steps=2), EXACT, strategy=strategy, use_orig_params=original)


@ORIGINAL
@pytest.mark.parametrize("kind", CheckpointImpl)
def test_checkpoint_wrapper_put_on_after_sharding(engine, kind, original):
    expected = reference(parity.Nested, engine.comm.size)
    sharded = engine.shard(build(parity.Nested), use_orig_params=original)
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=kind)
    with engine.quiet():
        apply_activation_checkpointing(
            sharded, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, parity.Block)
        )
    close(engine.train(sharded), expected, **EXACT)


@pytest.mark.parametrize("carrier", ["messages"])
@ORIGINAL
@pytest.mark.parametrize("forward", [False, True], ids=["", "forward"])
@pytest.mark.parametrize("backward", [None, *BackwardPrefetch])
def test_prefetching(carried, backward, forward, original):
    options = {"backward_prefetch": backward, "forward_prefetch": forward, "limit_all_gathers": not original}
    check_plain(carried, parity.Nested, Recipe(steps=2), EXACT, use_orig_params=original, **options)


@ORIGINAL
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_parameters_offloaded_to_host_memory(engine, strategy, original):
    engine.beyond_torch("offloading on a machine without an accelerator")
    options = {"strategy": strategy, "cpu_offload": CPUOffload(offload_params=True)}
    check_plain(engine, parity.Nested, Recipe(clip=(0.2, 2.0)), EXACT, use_orig_params=original, **options)


def plain_loss(model, step, rank):
    return parity.loss_of(model, parity.inputs(step, rank, torch.float64))


def step_both(engine, models, optimizers, step, loss_of=plain_loss):
    """One step of a plain and of a sharded model; `loss_of(model, step, rank)` is the loss on the data of one rank."""
    plain, sharded = models
    for rank in range(engine.comm.size):
        (loss_of(plain, step, rank) / engine.comm.size).backward()
    with engine.quiet():
        loss_of(sharded, step, engine.comm.rank).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same_parameters(engine, models):
    torch.testing.assert_close(engine.whole(models[1]), parity.named(models[0]), **EXACT)


def both(engine, model_type, **options):
    models = build(model_type), engine.shard(build(model_type), **options)
    return models, [Recipe("sgd").make_optimizer(model.parameters()) for model in models]


@over("messages")
@ORIGINAL
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_a_model_called_several_times_for_one_loss(carried, strategy, original):
    """Twice with gradients and once without, as models have it that compare their inputs."""
    models, optimizers = both(carried, parity.Nested, strategy=strategy, use_orig_params=original)

    def loss_of(model, step, rank):
        one, other = (model(parity.inputs(step, rank, torch.float64, part)) for part in range(2))
        with torch.no_grad():
            target = model(parity.inputs(step, rank, torch.float64, 2))
        return (one * other - target).square().mean()

    for step in range(3):
        step_both(carried, models, optimizers, step, loss_of)
    same_parameters(carried, models)


@over("messages")
@ORIGINAL
def test_forwards_that_no_backward_follows(carried, original):
    models, optimizers = both(carried, parity.Nested, use_orig_params=original)
    for step in range(3):
        with carried.quiet():
            models[1](parity.inputs(step, 0, torch.float64, part=1))  # with a graph that is thrown away
        step_both(carried, models, optimizers, step)
    same_parameters(carried, models)


@over("messages")
@ORIGINAL
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_two_models_in_turn(carried, strategy, original):
    """As a generator and its critic: one is run through the other, and each has its own step."""
    options = {"strategy": strategy, "use_orig_params": original}
    made = [both(carried, parity.Nested, **options) for _ in range(2)]
    for step in range(3):
        for turn in range(2):
            for which in range(2):  # plain, sharded
                first, second = (models[which] for models, _ in made)
                ranks = range(carried.comm.size) if which == 0 else [carried.comm.rank]
                with carried.quiet():
                    for rank in ranks:
                        x = parity.inputs(step, rank, torch.float64, turn)
                        middle = first(x) if turn == 0 else first(x).detach()
                        ((second(middle) - turn).square().mean() / len(ranks)).backward()
                made[turn][1][which].step()
                for _, optimizers in made:
                    optimizers[which].zero_grad()
    for models, _ in made:
        same_parameters(carried, models)


class Auxiliary(parity.Around):
    """A second head, a unit of its own, that always runs and to which gradients come on some ranks."""

    idle = ()

    def __init__(self):
        super().__init__()
        self.head = parity.Linears()

    def forward(self, x):
        x = self.unit(self.first(x))
        return self.last(x), self.head(x)


@over("messages")
@ORIGINAL
@pytest.mark.filterwarnings("ignore:no parameter of the unit 'head'")  # of one rank it is not used in every step
@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_gradients_that_come_to_a_unit_on_some_ranks_alone(carried, strategy, original):
    carried.beyond_torch("backward passes that differ between ranks")
    models, optimizers = both(carried, Auxiliary, strategy=strategy, use_orig_params=original)

    def loss_of(model, step, rank):
        out, extra = model(parity.inputs(step, rank, torch.float64))
        return out.square().mean() + (extra.square().mean() if (rank + step) % 2 == 0 else 0.0)

    for step in range(3):
        step_both(carried, models, optimizers, step, loss_of)
    same_parameters(carried, models)


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_groups_of_original_parameters_have_their_own_settings(engine, strategy):
    models = build(parity.Nested), engine.shard(build(parity.Nested), strategy=strategy, use_orig_params=True)
    optimizers = []
    for model in models:
        parameters = {parity.plain_name(name): parameter for name, parameter in model.named_parameters()}
        assert sorted(parameters) == sorted(name for name, _ in models[0].named_parameters())
        groups = [[p for name, p in parameters.items() if name.endswith(end)] for end in ("weight", "bias", "gain")]
        settings = {"weight_decay": 0.1}, {"weight_decay": 0.0, "lr": 0.03}, {"weight_decay": 0.0}
        grouped = [{"params": group, **each} for group, each in zip(groups, settings, strict=True)]
        optimizers.append(torch.optim.AdamW(grouped, lr=0.01, eps=1e-5))
    for step in range(3):
        step_both(engine, models, optimizers, step)
    same_parameters(engine, models)


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_all_ranks_together_hold_original_parameters_once(engine, strategy):
    plain, sharded = build(parity.Uneven), engine.shard(build(parity.Uneven), strategy=strategy, use_orig_params=True)
    here = {parity.plain_name(name): parameter.numel() for name, parameter in sharded.named_parameters()}
    copies = {"NO_SHARD": engine.comm.size, "HYBRID_SHARD": 2}.get(strategy, 1)
    total = {name: sum(rank[name] for rank in engine.comm.allgather(here)) for name in here}
    assert total == {name: copies * parameter.numel() for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_layers_are_thawed_as_training_goes_on(engine, strategy):
    """``requires_grad`` of original parameters is the user's, between steps too."""
    engine.beyond_torch("original parameters that are frozen and thawed after wrapping")
    models, optimizers = both(engine, parity.Nested, strategy=strategy, use_orig_params=True)
    for step in range(4):
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("blocks.0" not in name or step >= 2)
        step_both(engine, models, optimizers, step)
    same_parameters(engine, models)


# Starts


SYNC = "sync_module_states on a machine without an accelerator"


@ORIGINAL
@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_all_ranks_take_the_values_of_the_first(engine, strategy, original):
    engine.beyond_torch(SYNC)
    mine = build(parity.Nested, seed=engine.comm.rank)
    mine.blocks[0].shift.add_(engine.comm.rank)
    sharded = engine.shard(mine, strategy=strategy, use_orig_params=original, sync_module_states=True)
    close(engine.train(sharded), reference(parity.Nested, engine.comm.size), **EXACT)


def fill(module):
    """Values that depend on neither a seed nor the order in which modules are asked."""
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        with torch.no_grad():
            tensor.copy_(torch.linspace(-0.4, 0.6, tensor.numel(), dtype=tensor.dtype).view(tensor.shape))


class FilledLinear(nn.Linear):
    def reset_parameters(self):
        fill(self)


class Filled(parity.Around):
    """A model in which every module with parameters can initialise them."""

    units = {FilledLinear}  # noqa: RUF012
    idle = ()

    def __init__(self):
        nn.Module.__init__(self)
        self.first, self.unit, self.last = (FilledLinear(WIDTH, WIDTH) for _ in range(3))


def materialise(module):
    module.to_empty(device="cpu", recurse=False)
    fill(module)


@pytest.mark.parametrize("model_type", [parity.Untied, Filled, parity.TiedInUnit])
@pytest.mark.parametrize(("strategy", "original"), SOME)
def test_a_model_that_starts_on_the_meta_device(engine, strategy, model_type, original):
    if model_type is parity.TiedInUnit:
        engine.beyond_torch("weights that stay tied when they are materialised")
    plain = build(model_type)
    for module in plain.modules():
        fill(module)
    expected = parity.train_plain(plain, engine.comm.size, Recipe())
    options = {} if model_type is Filled else {"param_init_fn": materialise}
    with torch.device("meta"):
        empty = build(model_type)
    sharded = engine.shard(empty, strategy=strategy, use_orig_params=original, **options)
    close(engine.train(sharded), expected, **EXACT)


@ORIGINAL
def test_random_values_of_a_model_on_the_meta_device_are_those_of_the_first_rank(engine, original):
    engine.beyond_torch(SYNC)
    with torch.device("meta"):
        empty = build(parity.Around)
    torch.manual_seed(engine.comm.rank)
    sharded = engine.shard(empty, use_orig_params=original, sync_module_states=True)
    whole = engine.whole(sharded)
    assert all(tensor.isfinite().all() and tensor.std() > 0.01 for tensor in whole.values())
    first = engine.comm.bcast(whole)
    torch.testing.assert_close(whole, first, rtol=0, atol=0)


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
def test_values_that_the_first_rank_alone_has(engine, strategy, original):
    """The others start on the meta device and give memory alone."""
    engine.beyond_torch(SYNC)
    if engine.comm.rank == 0:
        model, options = build(parity.Nested), {}
    else:
        with torch.device("meta"):
            model = build(parity.Nested)
        options = {"param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False)}
    options |= {"strategy": strategy, "use_orig_params": original, "sync_module_states": True}
    close(engine.train(engine.shard(model, **options)), reference(parity.Nested, engine.comm.size), **EXACT)


@ORIGINAL
@pytest.mark.parametrize("how", ["ignored_modules", "ignored_states", "ignored parameters"])
def test_what_is_ignored_stays_whole_and_is_the_users_to_reduce(engine, how, original):
    plain = build(parity.Nested)
    mine = build(parity.Nested)
    ignored = mine.blocks[1].inner.linear
    chosen = {
        "ignored_modules": {"ignored_modules": [ignored]},
        "ignored_states": {"ignored_states": [ignored]},
        "ignored parameters": {"ignored_states": list(ignored.parameters())},
    }[how]
    sharded = engine.shard(mine, use_orig_params=original, **chosen)
    assert ignored.weight.shape == (5, WIDTH)
    assert any(parameter is ignored.weight for parameter in sharded.parameters())
    optimizers = [Recipe("sgd").make_optimizer(m.parameters()) for m in (plain, sharded)]
    for step in range(3):
        for rank in range(engine.comm.size):
            (parity.loss_of(plain, parity.inputs(step, rank, torch.float64)) / engine.comm.size).backward()
        with engine.quiet():
            parity.loss_of(sharded, parity.inputs(step, engine.comm.rank, torch.float64)).backward()
        for parameter in ignored.parameters():
            parameter.grad = engine.mean(parameter.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(engine.whole(sharded), parity.named(plain), **EXACT)


# Low precision

U = 2.0**-8
"""The largest relative error of rounding to bfloat16."""

MIXED = {
    "bf16": MixedPrecision(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduced in bf16": MixedPrecision(reduce_dtype=torch.bfloat16),
    "bf16, reduced in fp32, bf16 buffers": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    "kept low": MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True),
    "kept low, reduced in fp32": MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=True),
    "inputs of all units cast": MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True),
    "no inputs cast": MixedPrecision(reduce_dtype=torch.bfloat16, cast_root_forward_inputs=False),
    "fp16": MixedPrecision(param_dtype=torch.float16),
}


def largest(tensors):
    return max(tensor.abs().max().item() for tensor in tensors)


def close_in_bf16(got, expected, *, exact_sum):
    """Trainings that round to bfloat16 at the same places, but may add in another order and precision.

    The first gradients come from the same numbers through the same operations, so that they differ by how they were
    added up over ranks alone: by digits of float32, or by a rounding to bfloat16 of each of few sums. Each is measured
    against the largest of the parameter, for terms may cancel. The update of plain SGD is the gradient times the
    rate; it is found as a difference of parameters, which float32 rounds.
    """
    assert got.parameters.keys() == expected.parameters.keys() == expected.start.keys()
    for name, start in expected.start.items():
        assert torch.equal(got.start[name], start), name
        assert got.parameters[name].dtype == torch.float32
        first, reference_first = got.after_one[name] - start, expected.after_one[name] - start
        bound = 1e-5 if exact_sum else 4 * U
        atol = bound * largest([reference_first]) + 2e-7 * largest([start])
        torch.testing.assert_close(first, reference_first, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023
    # Later steps start from parameters that differ in their last digits, some of which round to neighbours in
    # bfloat16: outputs differ by a few U, and so do gradients against the largest one.
    torch.testing.assert_close(got.losses, expected.losses, rtol=4 * U, atol=0)
    updates, expected_updates = ({n: t.parameters[n] - t.start[n] for n in t.start} for t in (got, expected))
    torch.testing.assert_close(updates, expected_updates, rtol=0, atol=16 * U * largest(expected_updates.values()))


def train_mixed(engine, mixed, model_type, recipe, **options):
    model = build(model_type, torch.float32)
    return engine.train(engine.shard(model, mixed_precision=MIXED[mixed], **options), recipe)


def check_mixed(engine, torch_engine, mixed, original, model_type=parity.Nested, *, strategy="FULL_SHARD", **recipe):
    if MIXED[mixed].keep_low_precision_grads and original:
        engine.beyond_torch("gradients of another dtype than the original parameters")
    recipe = Recipe("sgd", dtype=torch.float32, follow=True, **recipe)
    case = (mixed, model_type, recipe)
    if case not in torch_engine.known:  # for all strategies: they round at the same places
        torch_engine.known[case] = train_mixed(torch_engine, *case, strategy="FULL_SHARD")
    got = train_mixed(engine, *case, strategy=strategy, use_orig_params=original)
    exact_sum = MIXED[mixed].reduce_dtype == torch.float32
    if recipe.parts > 1 or model_type is parity.TwiceAndIdle or MIXED[mixed].keep_low_precision_grads:
        # torch adds gradients of several calls in the dtype of the parameters, and keeps them in it after all.
        exact_sum = False
    close_in_bf16(got, torch_engine.known[case], exact_sum=exact_sum)


@pytest.mark.parametrize(("strategy", "original"), SOME)
@pytest.mark.parametrize("mixed", MIXED)
def test_mixed_precision(engine, engines, mixed, strategy, original):
    check_mixed(engine, engines["torch"], mixed, original, strategy=strategy)


@ORIGINAL
@pytest.mark.parametrize("no_sync", [False, True], ids=["sync", "no_sync"])
@pytest.mark.parametrize("mixed", ["bf16", "bf16, reduced in fp32"])
def test_gradients_accumulate_in_mixed_precision(engine, engines, mixed, no_sync, original):
    if original and no_sync and engine.comm.size == 1:
        engine.beyond_torch("gradients of another dtype than the original parameters, which it has on one rank")
    check_mixed(engine, engines["torch"], mixed, original, parts=2, no_sync=no_sync)


@ORIGINAL
@pytest.mark.parametrize(
    "model_type",
    [parity.TiedInUnit, parity.TwiceAndIdle, parity.Uneven, parity.Normed, parity.RecomputedInside],
)
def test_models_in_mixed_precision(engine, engines, model_type, original):
    check_mixed(engine, engines["torch"], "bf16, reduced in fp32", original, model_type)


@ORIGINAL
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_autocast(engine, strategy, original):
    recipe = Recipe("sgd", dtype=torch.float32, autocast=True, follow=True)
    expected = reference(parity.Untied, engine.comm.size, recipe)
    sharded = engine.shard(build(parity.Untied, torch.float32), strategy=strategy, use_orig_params=original)
    close_in_bf16(engine.train(sharded, recipe), expected, exact_sum=True)


class Taker(nn.Module):
    """Notes the dtypes that it computes with."""

    units = ()

    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.linear, self.seen = inner, nn.Linear(WIDTH, WIDTH), []
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))

    def forward(self, x, index, *, more=None):
        tensors = [x, index, more, self.linear.weight, self.scale, self.count]
        x = self.linear(x.to(self.linear.weight.dtype))
        tensors.append(x)
        if self.inner is not None:
            x = self.inner(x, index, more=x)
            tensors.append(x)
        self.seen.append([None if tensor is None else tensor.dtype for tensor in tensors])
        return x


NESTED_MIXED = {name: (mixed, mixed) for name, mixed in MIXED.items()} | {
    "inner alone": (None, MixedPrecision(torch.bfloat16, cast_forward_inputs=True)),
    "outer alone": (MixedPrecision(torch.bfloat16), None),
    "two": (
        MixedPrecision(torch.bfloat16, cast_forward_inputs=True),
        MixedPrecision(torch.float16, torch.float32, torch.float32, cast_forward_inputs=True),
    ),
    "inner casts nothing": (MixedPrecision(torch.bfloat16, cast_forward_inputs=True), MixedPrecision()),
    "buffers alone": (MixedPrecision(buffer_dtype=torch.float16), MixedPrecision(buffer_dtype=torch.bfloat16)),
}


def dtypes_seen(engine, mixed, original):
    """Of everything that a unit in a unit is given, computes with and returns, and of gradients and parameters."""
    torch.manual_seed(0)
    options = {"wrapping": "by hand", "use_orig_params": original}
    inner = Taker()
    outer = Taker(engine.shard(inner, mixed_precision=mixed[1], **options))
    sharded = engine.shard(outer, mixed_precision=mixed[0], **options)
    with engine.quiet():
        x = torch.ones(2, WIDTH)
        for _ in range(2):
            result = sharded(x, torch.ones(2, dtype=torch.int64), more=x.double())
            result.float().sum().backward()
        dtypes = [parameter.dtype for parameter in sharded.parameters()]
        grads = [parameter.grad.dtype for parameter in sharded.parameters() if parameter.grad is not None]
    whole = [tensor.dtype for tensor in engine.whole(sharded).values()]
    buffers = {parity.plain_name(name): buffer.dtype for name, buffer in sharded.named_buffers()}
    return {
        "outer": outer.seen,
        "inner": inner.seen,
        "result": result.dtype,
        "sharded": set(dtypes),
        "gradients": set(grads),
        "whole": set(whole),
        "buffers": buffers,
    }


@ORIGINAL
@pytest.mark.parametrize("mixed", NESTED_MIXED)
def test_what_is_cast_and_what_is_not(engine, engines, mixed, original):
    given = NESTED_MIXED[mixed]
    if any(one is not None and one.keep_low_precision_grads for one in given) and original:
        engine.beyond_torch("gradients of another dtype than the original parameters")
    known = engines["torch"].known
    if mixed not in known:
        known[mixed] = dtypes_seen(engines["torch"], given, original=False)
    expected = dict(known[mixed])
    if mixed == "kept low, reduced in fp32" and not engine.is_torch:
        expected["gradients"] = {torch.float32}  # that of the reduction, as torch's documentation has it
    assert dtypes_seen(engine, given, original) == expected


# What others put around and into units


@ORIGINAL
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_hooks_that_torch_brings_for_communication(engine, strategy, original):
    sharded = engine.shard(build(parity.Nested), strategy=strategy, use_orig_params=original)
    state = default_hooks.DefaultState(engine.group() or dist.group.WORLD)
    replicated = strategy == "NO_SHARD" or engine.comm.size == 1
    sharded.register_comm_hook(state, default_hooks.allreduce_hook if replicated else default_hooks.reduce_scatter_hook)
    close(engine.train(sharded, Recipe("sgd")), reference(parity.Nested, engine.comm.size, Recipe("sgd")), **EXACT)


@ORIGINAL
@pytest.mark.parametrize("strategy", PLAIN_STRATEGIES)
def test_a_hook_for_communication_is_given_every_gradient_once(engine, strategy, original):
    """The hook may do as it likes: here ranks keep a tenth of their own gradients."""
    calls = []

    def hook(state, grad, output=None):
        calls.append((state, grad.numel(), None if output is None else output.numel()))
        if output is None:
            grad.div_(10)
        else:
            size = output.numel()
            output.copy_(grad[engine.comm.rank * size : (engine.comm.rank + 1) * size] / 10)

    sharded = engine.shard(build(parity.Around), strategy=strategy, use_orig_params=original)
    sharded.register_comm_hook("state", hook)
    start = engine.whole(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
    with engine.quiet():
        parity.loss_of(sharded, parity.inputs(0, 0, torch.float64)).backward()  # the same on all ranks
    optimizer.step()
    got = {name: start[name] - tensor for name, tensor in engine.whole(sharded).items()}
    plain = build(parity.Around)
    parity.loss_of(plain, parity.inputs(0, 0, torch.float64)).backward()
    expected = {name: parameter.grad / 10 for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(got, expected, **EXACT)
    replicated = strategy == "NO_SHARD" or engine.comm.size == 1
    assert len(calls) == 2
    for state, numel, part in calls:
        assert state == "state"
        assert part == (None if replicated else numel // engine.comm.size)


@pytest.mark.parametrize(("strategy", "original"), SOME)
@pytest.mark.parametrize("scaler_type", ["torch", "own"])
def test_scaled_gradients_with_an_infinite_one(engine, strategy, scaler_type, original):
    recipe, poisoned = Recipe("sgd"), 1
    plain, mine = build(parity.Nested), build(parity.Nested)
    sharded = engine.shard(mine, strategy=strategy, use_orig_params=original)
    make_scaler = TorchShardedGradScaler if scaler_type == "torch" or engine.is_torch else ShardedGradScaler
    scaler = make_scaler(device="cpu", init_scale=1024.0, growth_interval=2, process_group=engine.group())
    optimizers = [recipe.make_optimizer(m.parameters()) for m in (plain, sharded)]
    scales = []
    for step in range(4):
        for rank in range(engine.comm.size):
            (parity.loss_of(plain, parity.inputs(step, rank, torch.float64)) / engine.comm.size).backward()
        with engine.quiet():
            scaler.scale(parity.loss_of(sharded, parity.inputs(step, engine.comm.rank, torch.float64))).backward()
        if step == poisoned:
            if engine.comm.rank == 0:  # others see no sign of it in their own shards
                gradient = next(p.grad for p in sharded.parameters() if p.grad is not None and p.numel())
                gradient.view(-1)[0] = float("inf")
        else:
            optimizers[0].step()
        scaler.unscale_(optimizers[1])
        scaler.step(optimizers[1])
        scaler.update()
        scales.append(scaler.get_scale())
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    torch.testing.assert_close(engine.whole(sharded), parity.named(plain), **EXACT)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked for by dynamo itself
@ORIGINAL
@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["units", "inside of units", "after wrapping"])
def test_compiled_modules(engine, where, original):
    if not original:
        engine.beyond_torch("compiling with use_orig_params=False")
    mine = build(parity.Nested)
    types = {"units": parity.Block, "inside of units": nn.Linear, "after wrapping": parity.Inner}
    chosen = [module for module in mine.modules() if isinstance(module, types[where])]
    if where != "after wrapping":
        for module in chosen:
            module.compile(backend="aot_eager")
    sharded = engine.shard(mine, use_orig_params=original)
    if where == "after wrapping":
        for module in chosen:
            module.compile(backend="aot_eager")
    close(engine.train(sharded), reference(parity.Nested, engine.comm.size), **EXACT)
