"""Mistakes of users: an error with what to do, on every rank, and a model that goes on working."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp.errors import DisagreementError, EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import WIDTH, Linears, Recipe, build, reference

BY_LINEARS = ModuleWrapPolicy({Linears})


@pytest.fixture
def engine(engines):
    return engines["hpcfsdp"]


def wrap(model=None, **options):
    model = build(parity.Around) if model is None else model
    return FullyShardedDataParallel(model, auto_wrap_policy=BY_LINEARS, **options)


def x(step=0, rank=0):
    return parity.inputs(step, rank, torch.float64)


def still_works(engine, sharded):
    expected = reference(parity.Around, engine.comm.size, Recipe("sgd"))
    parity.close(engine.train(sharded, Recipe("sgd")), expected, rtol=1e-9, atol=1e-11)


# Whole parameters at the wrong time


@ORIGINAL
@pytest.mark.parametrize("where", ["forward of a unit", "forward of the root", "backward"])
def test_whole_parameters_are_not_to_be_had_within_a_step(engine, where, original):
    sharded = wrap(use_orig_params=original)
    summon = FullyShardedDataParallel.summon_full_params

    def look(*_):
        with summon(sharded):
            pass

    if where == "backward":
        handle = sharded.module.unit.register_full_backward_hook(look)
    else:
        module = sharded.module.unit if where == "forward of a unit" else sharded.module.last
        handle = module.register_forward_hook(look)
    with pytest.raises(EngineError, match=r"summon_full_params.*(forward|backward)"):
        sharded(x()).sum().backward()
    handle.remove()
    sharded.zero_grad()
    still_works(engine, sharded)


@ORIGINAL
def test_whole_parameters_are_not_summoned_twice(engine, original):
    sharded = wrap(use_orig_params=original)
    summon = FullyShardedDataParallel.summon_full_params
    for inner in (sharded, sharded.module.unit):
        with summon(sharded), pytest.raises(EngineError, match="nest"), summon(inner):
            pass
    with summon(sharded.module.unit), pytest.raises(EngineError, match="nest"), summon(sharded):
        pass
    still_works(engine, sharded)


@ORIGINAL
def test_a_forward_within_summoned_parameters_is_refused(engine, original):
    sharded = wrap(use_orig_params=original)
    with FullyShardedDataParallel.summon_full_params(sharded), pytest.raises(EngineError, match="summon_full_params"):
        sharded(x())
    still_works(engine, sharded)


@ORIGINAL
def test_an_exception_within_summoned_parameters_leaves_shards(engine, original):
    sharded = wrap(use_orig_params=original)
    with pytest.raises(ZeroDivisionError), FullyShardedDataParallel.summon_full_params(sharded):
        raise ZeroDivisionError
    still_works(engine, sharded)


# Optimizers


def test_an_optimizer_that_was_built_before_wrapping_is_refused(comm):
    """It would step parameters that the model no longer has, and change nothing: no error, no training."""
    model = build(parity.Around)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = wrap(model)
    with pytest.raises(EngineError, match=r"optimizer.*after wrapping"):  # wherever it is noticed first
        sharded(x()).sum().backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()


def test_an_optimizer_of_original_parameters_may_be_built_before_wrapping(engine):
    plain, model = build(parity.Around), build(parity.Around)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    sharded = wrap(model, use_orig_params=True)
    for step in range(3):
        for each, optimizer in zip((plain, sharded), optimizers, strict=True):
            parity.loss_of(each, x(step)).backward()  # the same on all ranks
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(engine.whole(sharded), parity.named(plain), rtol=1e-9, atol=1e-11)


@ORIGINAL
def test_clipping_where_there_is_no_gradient(comm, original):
    sharded = wrap(use_orig_params=original)
    assert sharded.clip_grad_norm_(1.0).item() == 0.0


# Who is the root


@ORIGINAL
def test_what_belongs_to_the_root_is_refused_elsewhere(comm, original):
    sharded = wrap(use_orig_params=original)
    sharded(x())
    inner = sharded.module.unit
    with pytest.raises(EngineError, match="no_sync was called on the inner unit"), inner.no_sync():
        pass
    with pytest.raises(EngineError, match=r"register_comm_hook was called on the inner unit .*: call it on the root"):
        inner.register_comm_hook(None, print)


@ORIGINAL
def test_no_sync_within_a_forward_is_refused(engine, original):
    sharded = wrap(use_orig_params=original)

    def enter(*_):
        with sharded.no_sync():
            pass

    handle = sharded.module.unit.register_forward_hook(enter)
    with pytest.raises(EngineError, match=r"no_sync was called while .* is in forward"):
        sharded(x())
    handle.remove()
    still_works(engine, sharded)


@ORIGINAL
def test_a_model_that_has_run_becomes_part_of_a_larger_one(engine, original):
    plain = nn.Sequential(build(parity.Around), nn.Linear(3, 2).double())
    sharded = nn.Sequential(wrap(use_orig_params=original), nn.Linear(3, 2).double())
    sharded[1].load_state_dict(plain[1].state_dict())
    sharded[0](x()).sum().backward()
    sharded[0].zero_grad()
    outer = FullyShardedDataParallel(sharded, use_orig_params=original)
    torch.testing.assert_close(outer(x()), plain(x()), rtol=1e-9, atol=0)


def test_a_hook_for_communication_is_registered_once_and_can_be_called(comm):
    sharded = wrap()
    with pytest.raises(TypeError, match="must be a function, not int"):
        sharded.register_comm_hook(None, 3)
    sharded.register_comm_hook(None, lambda *_: None)
    with pytest.raises(EngineError, match="already registered"):
        sharded.register_comm_hook(None, lambda *_: None)


def test_hybrid_strategies_take_no_hook(world):
    groups = parity.square_mesh().get_group("shard"), parity.square_mesh().get_group("replicate")
    sharded = wrap(process_group=groups, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    with pytest.raises(EngineError, match="not supported under hybrid"):
        sharded.register_comm_hook(None, lambda *_: None)


# Ranks that differ


def last(comm):
    return comm.rank == comm.size - 1


class More(parity.Around):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(2, 2)


def differing_models(kind, is_other):
    model = build(More if kind == "a parameter more" and is_other else parity.Around)
    if is_other and kind == "dtype":
        model.float()
    if is_other and kind == "frozen":
        model.unit.a.weight.requires_grad_(False)
    if is_other and kind == "shape":
        model.last = nn.Linear(WIDTH, 4).double()
    if is_other and kind == "order":
        model.unit._modules = dict(reversed(model.unit._modules.items()))
    if is_other and kind == "tie":
        model.unit.b.weight = model.unit.a.weight
    return model


@ORIGINAL
@pytest.mark.parametrize("kind", ["a parameter more", "dtype", "frozen", "shape", "order", "tie"])
def test_ranks_that_wrap_different_models_all_raise(several, kind, original):
    with pytest.raises(DisagreementError, match=rf"rank 0 .*rank {several.size - 1}|rank 0 and rank"):
        wrap(differing_models(kind, last(several)), use_orig_params=original)


@ORIGINAL
def test_ranks_that_wrap_different_modules_all_raise(several, original):
    policy = None if last(several) else BY_LINEARS
    with pytest.raises(DisagreementError, match="rank 0"):
        FullyShardedDataParallel(build(parity.Around), auto_wrap_policy=policy, use_orig_params=original)


class Chooses(parity.Around):
    def __init__(self):
        super().__init__()
        self.other, self.choice = Linears(), 0

    def forward(self, x):
        x = self.first(x)
        return self.last((self.unit, self.other)[self.choice](x))


@ORIGINAL
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no grad"])
def test_ranks_that_call_different_units_all_raise(several, grad, original):
    sharded = wrap(build(Chooses), use_orig_params=original)
    sharded.module.choice = int(last(several))
    with torch.set_grad_enabled(grad), pytest.raises(DisagreementError, match=r"rank 0 .*(unit|other).*rank"):
        out = sharded(x())
        if grad:
            out.sum().backward()


# Modules and values


@ORIGINAL
def test_a_unit_within_its_own_forward(comm, original):
    class Again(Linears):
        def forward(self, x):
            return self.outside[0](x) if x.sum() > 0 else super().forward(x)

    torch.manual_seed(0)
    module = Again().double()
    sharded = FullyShardedDataParallel(module, use_orig_params=original)
    module.outside = [sharded]
    with pytest.raises(EngineError, match="from inside of its own forward"):
        sharded(x().abs())
    assert sharded(-x().abs()).isfinite().all()


@ORIGINAL
def test_a_parameter_on_the_meta_device_that_nothing_initialises(comm, original):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2)
            self.table = nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises((TypeError, ValueError), match="table"):
        FullyShardedDataParallel(Bare(), use_orig_params=original)


@ORIGINAL
def test_a_policy_that_tears_tied_weights_apart(comm, original):
    policy = ModuleWrapPolicy({nn.Linear})
    with pytest.raises(ValueError, match=r"'first\.weight' and 'last\.weight' are tied"):
        FullyShardedDataParallel(build(parity.Nested), auto_wrap_policy=policy, use_orig_params=original)


def test_tied_weights_torn_apart_by_hand(comm):
    model = build(parity.Nested)
    model.first = FullyShardedDataParallel(model.first)
    with pytest.raises(ValueError, match="tied"):
        FullyShardedDataParallel(model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@ORIGINAL
def test_gradients_of_gradients(comm, original):
    """Which have no graph: they have been cast, reduced and cut."""
    sharded = wrap(use_orig_params=original)
    loss = sharded(x()).square().sum()
    with pytest.raises((EngineError, RuntimeError), match=r"(?i)gradients of gradients|create_graph|second"):
        loss.backward(create_graph=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, (TypeError, ValueError), "(?s)sharding_strategy|ShardingStrategy"),
        ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision must be a MixedPrecision"),
        ({"mixed_precision": MixedPrecision(param_dtype=torch.int64)}, (TypeError, ValueError), "int64"),
        ({"mixed_precision": MixedPrecision(reduce_dtype=torch.int8)}, (TypeError, ValueError), "int8"),
        ({"mixed_precision": MixedPrecision(buffer_dtype="bf16")}, (TypeError, ValueError), "buffer_dtype|bf16"),
        ({"cpu_offload": True}, TypeError, "cpu_offload must be a CPUOffload"),
        ({"backward_prefetch": "BACKWARD_PRE"}, TypeError, "backward_prefetch must be a BackwardPrefetch"),
        ({"ignored_modules": [3]}, TypeError, "ignored_modules"),
        ({"ignored_states": ["name"]}, TypeError, "ignored_states"),
        ({"auto_wrap_policy": {Linears}}, TypeError, "auto_wrap_policy must be a function"),
        ({"param_init_fn": "normal"}, ValueError, "param_init_fn must be a function"),
        ({"process_group": 5}, TypeError, "process_group"),
        ({"device_mesh": (2, 2)}, TypeError, "device_mesh"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_of_the_wrong_type_are_named(comm, options, error, message):
    with pytest.raises(error, match=message):
        FullyShardedDataParallel(build(parity.Around), **options)


@pytest.mark.parametrize("offload", [CPUOffload(offload_params=False), None])
def test_values_that_ask_for_nothing_are_fine(engine, offload):
    still_works(engine, wrap(cpu_offload=offload, mixed_precision=MixedPrecision(), ignored_modules=[]))


@ORIGINAL
def test_what_is_refused_leaves_the_module_as_it_was(comm, original):
    model = build(parity.Nested)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="tied"):
        FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=original)
    assert [name for name, _ in model.named_parameters()] == names
    assert model(x()).isfinite().all()
