"""State dicts that do not fit, and calls at the wrong time: an error on every rank, and nothing is changed."""

import re
import warnings
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpcfsdp import _compat
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.load import load_model
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import WIDTH, Recipe, build
from tests.mpi.state_dict_cases import (
    CARRIERS,
    LOCAL,
    SHARDED,
    STRATEGIES,
    line_mesh,
    loaded,
    memory,
    same,
    saved,
    unchanged,
)

pytestmark = pytest.mark.ranks(3)

# At the wrong time


@ORIGINAL
@pytest.mark.parametrize("use", [lambda m: m.state_dict(), lambda m: m.load_state_dict({})], ids=["save", "load"])
@pytest.mark.parametrize("where", ["forward", "backward", "summon_full_params"])
def test_a_step_is_no_time_for_state_dicts(engine, where, use, original):
    model = engine.shard(build(parity.Around), use_orig_params=original)

    def look(*_):
        use(model)

    with pytest.raises(EngineError, match=f"state_dict.*{where}"):
        if where == "summon_full_params":
            with engine.cls.summon_full_params(model):
                look()
        linear = model.module.last
        handle = linear.register_forward_hook(look) if where == "forward" else linear.register_full_backward_hook(look)
        parity.loss_of(model, parity.inputs(0, 0, torch.float64)).backward()
    if where != "summon_full_params":
        handle.remove()
    model.zero_grad()
    same(saved(engine, model), build(parity.Around).state_dict())
    expected = parity.reference(parity.Around, engine.comm.size, Recipe("sgd"))
    parity.close(engine.train(model, Recipe("sgd")), expected, rtol=1e-9, atol=1e-11)


@ORIGINAL
@STRATEGIES
def test_between_forward_and_backward_is_a_time(engine, strategy, original):
    model = engine.shard(build(parity.Around), strategy=strategy, use_orig_params=original)
    x = parity.inputs(0, engine.comm.rank, torch.float64)
    loss = parity.loss_of(model, x)
    same(saved(engine, model), build(parity.Around).state_dict())
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    other = engine.shard(build(parity.Around), strategy=strategy, use_orig_params=original)
    parity.loss_of(other, x).backward()
    for grad, p in zip(grads, other.parameters(), strict=True):
        assert (grad is None) == (p.grad is None)  # there is none for what this rank holds nothing of
        assert grad is None or torch.equal(grad, p.grad)


@CARRIERS
def test_a_rank_at_the_wrong_time_is_an_error_on_all(engines, several, carrier):
    """Also if it is the only one, and the others wait for what comes next."""
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Around))
    before, state = memory(model), build(parity.Around, seed=1).state_dict()
    if several.rank == 1:
        model._unit.enter_state(TrainingState.SUMMON)
    try:
        with pytest.raises(EngineError, match=r"already whole: call load_state_dict outside") as caught:
            model.load_state_dict(state)
    finally:
        if several.rank == 1:
            model._unit.enter_state(TrainingState.IDLE)
    assert str(caught.value).startswith("rank 1: ") == (several.rank != 1)
    unchanged(model, before)
    model.load_state_dict(state)
    same(saved(engine, model), state)


# What does not fit


def other_model(state, rank):
    return build(parity.Uneven).state_dict()


def wrong_shape(state, rank):
    return {**state, "unit.a.weight": torch.zeros(WIDTH, WIDTH + 1)}


def no_tensor(state, rank):
    return {**state, "unit.a.weight": "a word"}


def no_mapping(state, rank):
    return list(state.items())


def number_as_name(state, rank):
    return {**state, 3: torch.zeros(1)}


def name_twice(state, rank):
    return {**state, "_fsdp_wrapped_module.first.bias": state["first.bias"]}


def name_missing_on_a_rank(state, rank):
    return {key: value for key, value in state.items() if rank != 1 or key != "unit.a.weight"}


def shape_of_a_rank(state, rank):
    return wrong_shape(state, rank) if rank == 1 else state


def dtype_of_a_rank(state, rank):
    return {**state, "unit.a.weight": state["unit.a.weight"].float()} if rank == 1 else state


def nothing_on_a_rank(state, rank):
    return state if rank != 1 else None


def sparse(state, rank):
    return {**state, "last.bias": state["last.bias"].to_sparse()}


def quantized(state, rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop it
        value = torch.quantize_per_tensor(state["last.bias"].float(), 1.0, 0, torch.qint8)
    return {**state, "last.bias": value}


def meta_on_a_rank(state, rank):
    return {**state, "last.bias": state["last.bias"].to("meta" if rank == 1 else "cpu")}


def meta_block_on_a_rank(state, rank):
    local = state["last.bias"].to("meta" if rank == 1 else "cpu")
    return {**state, "last.bias": _compat.dtensor(local, line_mesh(), [Replicate()], local.shape, local.stride())}


def nothing_at_all_on_a_rank(state, rank):
    return {} if rank == 1 else state


def pending_sum(state, rank):
    value = DTensor.from_local(state["unit.a.weight"], line_mesh(), [Partial()], run_check=False)
    return {**state, "unit.a.weight": value}


def sharded_on_a_rank(state, rank):
    value = DTensor.from_local(state["unit.a.weight"], line_mesh(), [Replicate()], run_check=False)
    return {**state, "unit.a.weight": value} if rank == 1 else state


BAD = {
    other_model: r'Missing key\(s\) in state_dict: "first\.weight".*Unexpected key\(s\) in state_dict: "layers\.0',
    wrong_shape: r"size mismatch for unit\.a\.weight.*7, 8.*7, 7",
    no_tensor: r"unit\.a\.weight.*received <class 'str'>",
    no_mapping: "a mapping of names to tensors, not list",
    number_as_name: "must be str, not 3 of type int",
    name_twice: r"has 'first\.bias' twice",
    sparse: r"'last\.bias' is sparse_coo, and the model has dense tensors: convert it with to_dense",
    quantized: r"'last\.bias' is quantized \(torch\.qint8\): pass its values, which dequantize",
    pending_sum: r"'unit\.a\.weight': a DTensor with placements .*Partial",
}


BAD_ON_ONE = {
    name_missing_on_a_rank: r'Missing key\(s\) in state_dict: "unit\.a\.weight"',
    shape_of_a_rank: r"size mismatch for unit\.a\.weight.*7, 8.*7, 7",
    dtype_of_a_rank: r"for 'unit\.a\.weight' rank 0 has a tensor \[7, 7\] of float64, rank 1 has .* of float32",
    nothing_on_a_rank: "a mapping of names to tensors, not NoneType",
    meta_on_a_rank: r"'last\.bias' is on the meta device, and has no values: load the file onto a real one",
    meta_block_on_a_rank: r"'last\.bias' is on the meta device",
    nothing_at_all_on_a_rank: r"Missing key.*The state dict is empty: .*set_model_state_dict.*broadcast_from_rank0=",
    sharded_on_a_rank: r"for 'unit\.a\.weight' rank 0 has a tensor .*, rank 1 has a DTensor",
}


@ORIGINAL
@CARRIERS
@pytest.mark.parametrize("change", [*BAD, *BAD_ON_ONE])
def test_what_does_not_fit_is_an_error_on_every_rank_and_changes_nothing(engines, world, carrier, change, original):
    if change in BAD_ON_ONE and world.size == 1:
        pytest.skip("one rank cannot disagree")
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Around), use_orig_params=original)
    before = memory(model)
    held = list(model.named_parameters())
    state = change(build(parity.Around, seed=1).state_dict(), world.rank)
    with pytest.raises((StateDictError, TypeError)) as caught:
        model.load_state_dict(state)
    message = str(caught.value).replace("\n", " ")
    re.search({**BAD, **BAD_ON_ONE}[change], message) or pytest.fail(message)
    if change in BAD_ON_ONE and change not in (dtype_of_a_rank, sharded_on_a_rank) and world.rank != 1:
        assert message.startswith("rank 1: ")
    unchanged(model, before)
    assert all(a[0] == b[0] and a[1] is b[1] for a, b in zip(held, model.named_parameters(), strict=True))
    model.load_state_dict(build(parity.Around, seed=1).state_dict())
    same(saved(engine, model), build(parity.Around, seed=1).state_dict())


@ORIGINAL
def test_tensors_on_other_ranks_are_refused_before_anything_is_loaded(engine, several, original):
    state = saved(engine, engine.shard(build(parity.Around, seed=1)), SHARDED)
    fewer = several.subgroup(range(several.size - 1)) if several.rank < several.size - 1 else None
    if fewer is not None:
        model = FullyShardedDataParallel(build(parity.Around), fewer, use_orig_params=original)
        before = memory(model)
        with pytest.raises(StateDictError, match=r"'first\.weight'.*ShardedTensor is on the ranks.*load it for these"):
            model.load_state_dict(state)
        unchanged(model, before)


@CARRIERS
def test_dtensors_for_what_is_not_sharded_have_to_be_alike(engines, several, carrier):
    engine = parity.under_test(engines, carrier)
    model, expected = engine.shard(build(parity.Normed)), build(parity.Normed, seed=1).state_dict()
    mean = torch.arange(WIDTH, dtype=torch.float64)

    def with_placement(placement):
        made = DTensor.from_local(mean, line_mesh(), [Replicate()], run_check=False).redistribute(
            line_mesh(), [placement]
        )
        return {**expected, "norm.running_mean": made}

    states = [with_placement(placement) for placement in (Replicate(), Shard(0))]
    before = memory(model)
    with pytest.raises(StateDictError, match=r"'norm\.running_mean' rank 0 has a DTensor .*Replicate.*has .*Shard"):
        model.load_state_dict(states[min(several.rank, 1)])
    unchanged(model, before)
    model.load_state_dict(states[1])
    assert torch.equal(saved(engine, model)["norm.running_mean"], mean)


def test_another_kind_than_is_set_is_reported(engine):
    model = engine.shard(build(parity.Around))
    with pytest.raises(StateDictError, match="state_dict_type is LOCAL_STATE_DICT, and was not"):
        loaded(engine, model, saved(engine, model), LOCAL)
    with pytest.raises(StateDictError, match="state_dict_type is not LOCAL_STATE_DICT, and was"):
        loaded(engine, model, saved(engine, model, LOCAL))
    with pytest.raises(StateDictError, match="assign=False"):
        model.load_state_dict(saved(engine, model), assign=True)


def test_two_names_that_are_one_without_wrappers_are_refused(engine):
    plain = build(parity.Linears)
    plain._orig_mod = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    plain.register_buffer("weight", torch.zeros(2))
    model = engine.cls(plain, engine.group())
    with pytest.raises(StateDictError, match="has 'weight' twice"):
        model.state_dict()


# What the first rank cannot tell the others


def known_here_alone():
    """What a pickle of ``KnownHere`` calls."""
    if dist.get_rank() != 0:
        raise ModuleNotFoundError("No module named 'elsewhere'")
    return KnownHere()


class KnownHere:
    def __reduce__(self):
        return known_here_alone, ()


class Unreadable(dict):
    """A state dict over a file that has been closed."""

    def items(self):
        raise OSError("the file is closed")


def no_pickle(state):
    return {**state, "unit._extra_state": lambda: 3}


def no_pickle_of_versions(state):
    found = OrderedDict(state)
    found._metadata = {"": {"version": lambda: 3}}
    return found


def no_file(state):
    return Unreadable(state)


def unknown_elsewhere(state):
    return {**state, "unit._extra_state": KnownHere()}


UNSENT = {
    no_pickle: (StateDictError, r"'unit\._extra_state' of .* is a function that cannot be pickled"),
    no_pickle_of_versions: (StateDictError, "of '_metadata' is a function that cannot be pickled"),
    no_file: (OSError, "the file is closed"),
    unknown_elsewhere: (StateDictError, "of rank 0 cannot be unpickled here .ModuleNotFoundError: No module named"),
}


class WithState(parity.Linears):
    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass


class Stateful(parity.Around):
    units: ClassVar = {WithState}

    def make_unit(self):
        return WithState()


@CARRIERS
@pytest.mark.parametrize("change", UNSENT)
def test_what_the_first_rank_cannot_describe_is_an_error_on_every_rank(engines, several, carrier, change):
    engine = parity.under_test(engines, carrier)
    model, state = engine.shard(build(Stateful)), build(Stateful, seed=1).state_dict()
    kind, message = UNSENT[change]
    before = memory(model)
    with pytest.raises(kind if several.rank == 0 else StateDictError, match=message):
        load_model(model, change(state) if several.rank == 0 else None, from_rank0=True)
    unchanged(model, before)
    load_model(model, state if several.rank == 0 else None, from_rank0=True)
    same({**saved(engine, model), "unit._extra_state": torch.ones(1)}, {**state, "unit._extra_state": torch.ones(1)})
