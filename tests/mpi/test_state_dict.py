"""State dicts of sharded models: what torch's FSDP1 gives, in every kind, and back into any model that it fits."""

import copy
import functools
import logging
import re
import warnings
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hpcfsdp import _compat
from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import communicator_for
from hpcfsdp.errors import EngineError, HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state import save, settings
from hpcfsdp.state.load import load_model
from hpcfsdp.tensor.runs import Box
from hpcfsdp.tensor.sharded import all_boxes, create_sharded_tensor, local_blocks, properties_of
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import parity
from tests.mpi.models import ORIGINAL, Block, adamw, make_net, train_plain, train_sharded
from tests.mpi.parity import WIDTH, Recipe, build
from tests.mpi.test_unshard import private_bytes

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
KINDS = pytest.mark.parametrize("kind", [FULL, SHARDED, LOCAL], ids=["full", "sharded", "local"])
CARRIERS = pytest.mark.parametrize("carrier", ["hpcfsdp", "messages", "gloo"])
STRATEGIES = pytest.mark.parametrize("strategy", parity.STRATEGIES)


@functools.cache
def line_mesh():
    """Collective over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def saved(engine, model, kind=FULL, config=None, **arguments):
    """Collective over all ranks."""
    with engine.quiet(), engine.cls.state_dict_type(model, kind, config):
        return model.state_dict(**arguments)


def loaded(engine, model, state, kind=FULL, **arguments):
    """Collective over all ranks."""
    with engine.quiet(), engine.cls.state_dict_type(model, kind):
        return model.load_state_dict(state, **arguments)


def parts(value):
    """What can be compared of a value: blocks of this rank, all of them, shape, dtype."""
    shape, dtype = properties_of(value)
    if isinstance(value, (ShardedTensor, DTensor)):
        return type(value).__name__, shape, dtype, all_boxes(value), local_blocks(value)
    return "tensor", shape, dtype, None, [(None, value)]


def same(found, expected, *, order=True):
    """Bit by bit."""
    assert (list if order else set)(found) == (list if order else set)(expected)
    for key, value in expected.items():
        *facts, blocks = parts(found[key])
        *theirs, their_blocks = parts(value)
        assert facts == theirs, key
        assert [box for box, _ in blocks] == [box for box, _ in their_blocks], key
        for (_, block), (_, other) in zip(blocks, their_blocks, strict=True):
            assert torch.equal(block, other), key


def memory(model):
    """Every bit of a model that this rank holds."""
    flats = [flat for unit in FullyShardedDataParallel.fsdp_modules(model) for flat in unit._unit.flats]
    return [flat.parameter.detach().clone() for flat in flats] + [buffer.clone() for buffer in model.buffers()]


def unchanged(model, before):
    after = memory(model)
    assert len(after) == len(before)
    assert all(torch.equal(tensor, other) for tensor, other in zip(after, before, strict=True))


def train_a_little(engine, model):
    """Collective over all ranks. One step, after which buffers and parameters are not those of a new model."""
    engine.train(model, Recipe("sgd", steps=1, dtype=next(model.parameters()).dtype))


# As torch has them

MODELS = [
    parity.Nested,
    parity.TiedInUnit,
    parity.Uneven,
    parity.Normed,
    parity.UnusedParameter,
    parity.RecomputedInside,
    parity.Frozen,  # which torch takes with use_orig_params alone
]


@ORIGINAL
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@pytest.mark.parametrize("model_type", MODELS)
def test_values_keys_shapes_and_dtypes_are_torchs(engines, world, model_type, kind, original):
    if model_type is parity.Frozen and not original:
        pytest.skip("torch does not wrap frozen and trained parameters together without use_orig_params")
    if kind is SHARDED and world.size == 1:
        pytest.skip("torch makes NO_SHARD of FULL_SHARD on one rank, and gives whole tensors")
    theirs, ours = (engines[name].shard(build(model_type), use_orig_params=original) for name in ("torch", "hpcfsdp"))
    found = saved(engines["hpcfsdp"], ours, kind)
    same(found, saved(engines["torch"], theirs, kind), order=False)
    # In the order of the plain model: torch puts tied parameters last.
    assert list(found) == list(build(model_type).state_dict())
    assert found._metadata == build(model_type).state_dict()._metadata


@ORIGINAL
@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
@pytest.mark.parametrize("mesh", ["line", "square"])
def test_a_mesh_gives_dtensors_as_torchs_do(engines, world, mesh, kind, original):
    if world.size == 1:
        pytest.skip("torch makes NO_SHARD of FULL_SHARD on one rank, and gives whole tensors")
    strategy, mesh = ("FULL_SHARD", line_mesh()) if mesh == "line" else ("HYBRID_SHARD", parity.square_mesh())
    options = {"strategy": strategy, "device_mesh": mesh, "use_orig_params": original}
    theirs, ours = (engines[name].shard(build(parity.Nested), **options) for name in ("torch", "hpcfsdp"))
    found, expected = saved(engines["hpcfsdp"], ours, kind), saved(engines["torch"], theirs, kind)
    same(found, expected, order=False)
    if kind is SHARDED:
        assert isinstance(found["norm.weight"], DTensor)
        assert all(found[key].placements == value.placements for key, value in expected.items() if "shift" not in key)
        other = engines["hpcfsdp"].shard(build(parity.Nested, seed=1), **options)
        loaded(engines["hpcfsdp"], other, found, kind)
        same(saved(engines["hpcfsdp"], other), saved(engines["hpcfsdp"], ours))


@pytest.mark.parametrize("model_type", [parity.Nested, parity.Uneven, parity.Normed])
def test_local_state_dicts_have_torchs_names(engines, world, model_type):
    if world.size == 1:
        pytest.skip("torch makes NO_SHARD of FULL_SHARD on one rank, and gives whole tensors")
    theirs, ours = (engines[name].shard(build(model_type)) for name in ("torch", "hpcfsdp"))
    found, expected = (saved(engines[name], model, LOCAL) for name, model in (("hpcfsdp", ours), ("torch", theirs)))
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert parts(found[key])[0] == parts(value)[0], key
        if isinstance(value, ShardedTensor):  # torch leaves no gaps between parameters
            assert found[key].metadata().size[0] >= value.metadata().size[0]


def test_local_state_dicts_of_original_parameters_hold_them_once(engines, several):
    """Torch's hold each run of a parameter beside the flat one, and its load_state_dict does not take them."""
    theirs, ours = (engines[name].shard(build(parity.Nested), use_orig_params=True) for name in ("torch", "hpcfsdp"))
    doubled = saved(engines["torch"], theirs, LOCAL)
    assert {"_flat_param", "first.weight"} <= set(doubled)
    with pytest.raises(RuntimeError, match=r"Unexpected key|size mismatch"):
        loaded(engines["torch"], theirs, doubled, LOCAL)
    found = saved(engines["hpcfsdp"], ours, LOCAL)
    assert {key.rpartition(".")[2] for key in found} == {"_flat_param", "shift"}
    loaded(engines["hpcfsdp"], ours, found, LOCAL)


@ORIGINAL
def test_buffers_that_were_cast_have_their_own_dtype(engines, original):
    """With the values of a step in low precision, as torch's."""
    precision = MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16)
    states = []
    for name in ("hpcfsdp", "torch"):
        model = engines[name].shard(
            build(parity.Nested, torch.float32), use_orig_params=original, mixed_precision=precision
        )
        train_a_little(engines[name], model)
        states.append(saved(engines[name], model))
        assert model.module.blocks[0].module.shift.dtype == torch.bfloat16
    assert {value.dtype for value in states[0].values()} == {torch.float32}
    assert torch.equal(states[0]["blocks.0.shift"], states[1]["blocks.0.shift"])
    plain = build(parity.Nested, torch.float32).state_dict()
    assert torch.equal(states[0]["blocks.0.shift"], plain["blocks.0.shift"].bfloat16().float())
    engines["hpcfsdp"].cls.set_state_dict_type(
        model := engines["hpcfsdp"].shard(build(parity.Nested, torch.float32), mixed_precision=precision), FULL
    )
    same(model.state_dict(), plain)  # never called: nothing has been rounded


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_whole_tensors_are_those_of_the_plain_model(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Normed), strategy=strategy, use_orig_params=original)
    plain = build(parity.Normed)
    same(saved(engine, model), plain.state_dict())
    train_a_little(engine, model)
    whole = saved(engine, model)
    expected = {**plain.state_dict(), **engine.whole(model)}
    for key, value in expected.items():
        if "running" not in key and "batches" not in key:
            assert torch.equal(whole[key], value), key
    assert whole["norm.num_batches_tracked"] == 1
    model.eval()
    same(saved(engine, model), whole)


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_what_is_saved_stays_as_it_was(engines, carrier, strategy, original):
    """Ranks that share memory read each other's shards: neither may write before all have read, nor after."""
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Normed), strategy=strategy, use_orig_params=original)
    states = {kind: saved(engine, model, kind) for kind in (FULL, SHARDED)}
    before = copy.deepcopy(states[FULL])
    train_a_little(engine, model)
    same(states[FULL], before)
    other = engine.shard(build(parity.Normed, seed=1), strategy=strategy, use_orig_params=original)
    loaded(engine, other, states[SHARDED])
    same(saved(engine, other), before)


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_rank_0_alone_has_it_if_asked(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Nested), strategy=strategy, use_orig_params=original)
    state = saved(engine, model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    same(state, build(parity.Nested).state_dict() if engine.comm.rank == 0 else {})
    same(saved(engine, model), build(parity.Nested).state_dict())


@CARRIERS
def test_under_rank0_only_hooks_find_tensors_on_all_ranks(engines, carrier):
    """Of which those of rank 0 count; as in torch's, which has whole parameters on all of them meanwhile."""
    engine, seen = parity.under_test(engines, carrier), []
    plain = build(parity.Nested)

    def touch(_module, state, prefix, _metadata):
        state.update({key: value.cpu() + 1 for key, value in state.items() if key.startswith(prefix)})
        seen.append(max(float(value.max()) for value in state.values()))

    plain.blocks[0].register_state_dict_post_hook(touch)
    model = engine.shard(plain)
    state = saved(engine, model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    assert len(seen) == 1
    expected = build(parity.Nested).state_dict()
    expected.update({key: value + 1 for key, value in expected.items() if key.startswith("blocks.0.")})
    same(state, expected if engine.comm.rank == 0 else {})


@CARRIERS
@KINDS
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_hook_that_fails_on_one_rank_is_told_to_all(engines, several, carrier, kind, where):
    engine = parity.under_test(engines, carrier)
    plain = build(parity.Nested)

    def fail(*_):
        if several.rank == 1:
            raise ZeroDivisionError("no luck")

    inner = plain.blocks[0]
    handle = inner.register_state_dict_pre_hook(fail) if where == "before" else None
    handle = handle or inner.register_state_dict_post_hook(fail)
    model = engine.shard(plain)
    with pytest.raises(ZeroDivisionError if several.rank == 1 else HpcfsdpError, match="no luck") as caught:
        saved(engine, model, kind)
    assert several.rank == 1 or str(caught.value).startswith("rank 1: ZeroDivisionError")
    handle.remove()
    same(saved(engine, model), build(parity.Nested).state_dict())


def test_hooks_of_wrappers_return_values_as_torchs_rules_are(engine):
    model = engine.shard(build(parity.Around))
    handle = model._register_state_dict_hook(lambda _, state, *rest: {"only": len(state)})
    assert model.state_dict() == {"only": len(build(parity.Around).state_dict())}
    handle.remove()
    model.register_state_dict_post_hook(lambda _, state, *rest: state)
    with pytest.raises(StateDictError, match="returned a value"):
        model.state_dict()


class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))


@ORIGINAL
@KINDS
def test_a_unit_without_elements(engine, kind, original):
    model = engine.cls(Nothing(), engine.group(), use_orig_params=original)
    state = saved(engine, model, kind)
    assert len(state) == 1
    assert loaded(engine, model, state, kind) == ([], [])


@ORIGINAL
@KINDS
def test_offloaded_shards_are_saved_and_loaded(engine, kind, original):
    options = {"cpu_offload": CPUOffload(offload_params=True), "use_orig_params": original}
    model, other = (engine.shard(build(parity.Nested, seed=seed), **options) for seed in (0, 1))
    loaded(engine, other, saved(engine, model, kind), kind)
    same(saved(engine, other), build(parity.Nested).state_dict())


# Kinds


def test_the_kind_is_chosen_for_a_while(engine):
    model, api = engine.shard(build(parity.Nested)), engine.cls
    outer = nn.Sequential(model)
    assert api.get_state_dict_type(outer) == api.get_state_dict_type(model)
    before = api.get_state_dict_type(model)
    assert (before.state_dict_type, before.state_dict_config) == (FULL, FullStateDictConfig())
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with api.state_dict_type(outer, SHARDED, config):
        assert api.get_state_dict_type(model).state_dict_type is SHARDED
        assert api.get_state_dict_type(model.module.blocks[0]).state_dict_config == config
        with pytest.raises(ZeroDivisionError), api.state_dict_type(model, LOCAL):
            raise ZeroDivisionError
        assert api.get_state_dict_type(model).state_dict_type is SHARDED
    assert api.get_state_dict_type(model) == before
    assert api.set_state_dict_type(model, LOCAL) == before
    assert api.set_state_dict_type(model, FULL).state_dict_config == LocalStateDictConfig()


def test_units_that_are_set_differently_are_refused_on_every_rank(engine):
    model, api = engine.shard(build(parity.Nested)), engine.cls
    api.set_state_dict_type(model.module.blocks[0], SHARDED)
    with pytest.raises(StateDictError, match=r"'the root'.*FULL.*blocks\.0.*SHARDED.*on the whole model"):
        model.state_dict()
    with api.state_dict_type(model, FULL):
        same(model.state_dict(), build(parity.Nested).state_dict())
    with pytest.raises(StateDictError, match="different state dicts"):
        api.get_state_dict_type(model)  # as before the context
    api.set_state_dict_type(model, FULL)
    same(model.state_dict(), build(parity.Nested).state_dict())


@CARRIERS
@pytest.mark.parametrize("difference", ["kind", "rank0_only", "offload_to_cpu"])
def test_ranks_that_are_set_differently_are_told(engines, several, carrier, difference):
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Nested))
    if difference == "kind":
        kind, config = (FULL if several.rank == 0 else SHARDED), None
    else:
        kind, config = FULL, FullStateDictConfig(**{difference: several.rank == 0})
    with pytest.raises(StateDictError, match=r"ranks are set to different state dicts: Nested gives .*FULL.*on rank 0"):
        saved(engine, model, kind, config)
    same(saved(engine, model), build(parity.Nested).state_dict())


def test_a_mesh_refuses_local_state_dicts_as_torch_does(engines):
    messages = []
    for name in ("torch", "hpcfsdp"):
        model = engines[name].shard(build(parity.Around), device_mesh=line_mesh())
        if name == "torch" and dist.get_world_size() == 1:
            continue  # which is NO_SHARD there
        with engines[name].quiet(), engines[name].cls.state_dict_type(model, LOCAL):
            with pytest.raises(RuntimeError) as caught:
                model.state_dict()
            if name == "hpcfsdp":
                with pytest.raises(StateDictError, match="device_mesh"):
                    model.load_state_dict({})
        messages.append(str(caught.value))
    assert all("SHARDED_STATE_DICT" in message for message in messages)


@KINDS
def test_units_that_are_not_sharded_give_whole_tensors(engine, caplog, kind):
    settings._tell_of_whole.cache_clear()
    model = engine.shard(build(parity.Nested), strategy="NO_SHARD")
    with caplog.at_level(logging.INFO, "hpcfsdp.state"):
        for _ in range(2):
            state = saved(engine, model, kind)
            same(state, build(parity.Nested).state_dict())
            loaded(engine, model, state, kind)
    assert len(caplog.records) == (kind is not FULL)


def test_one_rank_saves_what_is_not_sharded_by_itself(engine):
    """As scripts do that were written for replicas."""
    model = engine.shard(build(parity.Normed), strategy="NO_SHARD", process_group=None)
    if engine.comm.rank == 0:
        same(model.state_dict(), build(parity.Normed).state_dict())
    engine.comm.Barrier()


@ORIGINAL
def test_a_local_state_dict_is_the_memory_of_the_ranks(engine, original):
    model = engine.shard(build(parity.Nested), use_orig_params=original)
    state = saved(engine, model, LOCAL)
    for _, block in local_blocks(state["_flat_param"]):
        assert block.data_ptr() == model._unit.flats[0].parameter.data_ptr()


# Loading


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_what_was_saved_is_loaded_in_place_of_other_values(engines, carrier, strategy, original):
    engine = parity.under_test(engines, carrier)

    def trained(seed):
        model = engine.shard(build(parity.Normed, seed=seed), strategy=strategy, use_orig_params=original)
        train_a_little(engine, model)
        return model

    model = trained(seed=0)
    expected, states = saved(engine, model), {kind: saved(engine, model, kind) for kind in (FULL, SHARDED)}
    others = [trained(seed=1) for _ in range(3)]
    reports = [loaded(engine, other, state, kind) for other, (kind, state) in zip(others, states.items(), strict=False)]
    reports.append(loaded(engine, others[2], saved(engine, model, LOCAL), LOCAL))
    assert reports == [([], [])] * 3
    assert str(reports[0]) == "<All keys matched successfully>"
    for other in others:
        same(saved(engine, other), expected)
        torch.testing.assert_close(engine.whole(other), engine.whole(model), rtol=0, atol=0)
    losses = [engine.train(each, Recipe("sgd", steps=2)).losses for each in (model, *others)]
    assert losses[1:] == [losses[0]] * 3


@ORIGINAL
@CARRIERS
def test_any_number_of_ranks_loads_what_any_number_saved(engines, world, shared_path, carrier, original):
    """Through a file and a plain module, and training goes on as if nothing had happened."""
    if engines[carrier] is None:
        pytest.skip("no such carrier for one rank")
    plain = make_net()
    train_plain(plain, adamw(plain), range(2))
    expected = train_plain(plain, adamw(plain), range(2, 4))
    everyone = engines[carrier].group()
    over = dict.fromkeys(range(1, world.size + 1))
    if carrier != "gloo":
        everyone = communicator_for(everyone, required=True)
        for size in over:
            over[size] = everyone.subgroup(range(size)) if world.rank < size else None
    else:
        over = {world.size: communicator_for(everyone, required=True)}
    policy = ModuleWrapPolicy({Block})
    for size, comm in over.items():
        if comm is not None:
            model = FullyShardedDataParallel(make_net(), comm, auto_wrap_policy=policy, use_orig_params=original)
            train_sharded(model, adamw(model), range(2), comm)
            with FullyShardedDataParallel.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
                state = model.state_dict()
            if world.rank == 0:
                torch.save(state, shared_path / f"{size}.pt")
    world.comm.Barrier()
    for saved_by in over:
        state = torch.load(shared_path / f"{saved_by}.pt", weights_only=True)
        restored = make_net(seed=7)
        restored.load_state_dict(state)
        torch.testing.assert_close(train_plain(restored, adamw(restored), range(2, 4)), expected, rtol=1e-5, atol=0)
        for comm in over.values():
            if comm is not None:
                model = FullyShardedDataParallel(
                    make_net(seed=8), comm, auto_wrap_policy=policy, use_orig_params=original
                )
                model.load_state_dict(state)
                got = train_sharded(model, adamw(model), range(2, 4), comm)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@ORIGINAL
def test_a_local_state_dict_is_loaded_by_another_number_of_ranks(engine, world, original):
    """If it has been put on these: parameters lie at the same places of a flat one, however many ranks cut it."""
    model = engine.shard(build(parity.Nested), use_orig_params=original)
    state = saved(engine, model, LOCAL)
    sizes = {key: value.metadata().size[0] for key, value in state.items() if isinstance(value, ShardedTensor)}
    pieces = {key: [block for _, block in local_blocks(state[key])] for key in sizes}
    for key in sizes:
        pieces[key] = torch.cat([block for rank in world.comm.allgather(pieces[key]) for block in rank])
    fewer = range(max(1, world.size - 1))
    if world.rank not in fewer:
        return
    comm = communicator_for(None, required=True).subgroup(fewer)
    other = FullyShardedDataParallel(
        build(parity.Nested, seed=1),
        comm,
        auto_wrap_policy=ModuleWrapPolicy(parity.Nested.units),
        use_orig_params=original,
    )
    for key, size in sizes.items():  # cut at other places than this model is
        middle = size // 3
        boxes = {0: Box((0,), (middle,)), comm.size - 1: Box((middle,), (size - middle,))}
        if comm.size == 1:
            boxes = {0: Box((0,), (size,))}
        box = boxes.get(comm.rank)
        mine = None if box is None else pieces[key][box.offsets[0] : box.offsets[0] + box.sizes[0]].clone()
        group = other._groups.process_group()
        state[key] = create_sharded_tensor(mine, (size,), torch.float64, torch.device("cpu"), group, boxes)
    with FullyShardedDataParallel.state_dict_type(other, LOCAL):
        other.load_state_dict(state)
    same(other.state_dict(), build(parity.Nested).state_dict())


@ORIGINAL
@pytest.mark.parametrize("model_type", [parity.Nested, parity.Frozen, parity.WithScalars, parity.MixedDtypes])
def test_unusual_parameters_come_back(engine, model_type, original):
    """Tied ones, frozen ones, without dimensions, of two dtypes: the last three are beyond torch."""
    model = engine.shard(build(model_type), use_orig_params=original)
    for kind in (FULL, SHARDED, LOCAL):
        other = engine.shard(build(model_type, seed=1), use_orig_params=original)
        loaded(engine, other, saved(engine, model, kind), kind)
        same(saved(engine, other), build(model_type).state_dict())
        flags = [parameter.requires_grad for parameter in other.parameters()]
        assert flags == [parameter.requires_grad for parameter in model.parameters()]


class TiedLate(parity.Around):
    """A module whose second parameter is the first of the model."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.again = self.first.weight


@ORIGINAL
def test_names_are_in_the_order_of_the_plain_model(engine, original):
    model = engine.shard(build(TiedLate), use_orig_params=original)
    same(saved(engine, model), build(TiedLate).state_dict())


def test_tied_names_have_one_tensor_and_the_last_one_counts(engine):
    model = engine.shard(build(parity.Nested))
    whole = saved(engine, model)
    assert whole["first.weight"].data_ptr() == whole["last.weight"].data_ptr()
    sharded = saved(engine, model, SHARDED)
    assert sharded["first.weight"] is sharded["last.weight"]
    state = dict(whole)
    state["last.weight"] = torch.full_like(state["last.weight"], 3.0)
    model.load_state_dict(state)
    plain = build(parity.Nested)
    plain.load_state_dict(state)
    same(saved(engine, model), plain.state_dict())


def test_values_of_other_dtypes_are_converted_and_left_alone(engine):
    model = engine.shard(build(parity.Normed))
    plain = build(parity.Normed, seed=1).float()
    state = plain.state_dict(keep_vars=True)  # parameters, which want gradients
    state["last.bias"] = torch.tensor([1, 2, 3])
    frozen = state["first.weight"].requires_grad_(False)
    model.load_state_dict(state)
    assert not frozen.requires_grad
    assert state["first.bias"].requires_grad
    found = saved(engine, model)
    assert found["last.bias"].tolist() == [1, 2, 3]
    assert torch.equal(found["first.weight"], plain.first.weight.double())
    assert {value.dtype for value in found.values()} == {torch.float64, torch.int64}


@pytest.mark.parametrize("kind", [FULL, SHARDED], ids=["full", "sharded"])
def test_a_few_names_are_loaded_if_that_is_allowed(engine, kind):
    model = engine.shard(build(parity.Around))
    other = engine.shard(build(parity.Around, seed=1))
    state = {key: value for key, value in saved(engine, other, kind).items() if key.startswith("unit.a")}
    state["surplus"] = torch.ones(2)
    report = model.load_state_dict(state, strict=False)
    plain = build(parity.Around)
    expected = plain.load_state_dict({**build(parity.Around, seed=1).state_dict(), "surplus": 1}, strict=False)
    assert report.unexpected_keys == expected.unexpected_keys == ["surplus"]
    assert report.missing_keys == [key for key in plain.state_dict() if not key.startswith("unit.a")]
    found, before, after = saved(engine, model), *(build(parity.Around, seed=seed).state_dict() for seed in (0, 1))
    for key, value in found.items():
        assert torch.equal(value, (after if key.startswith("unit.a") else before)[key]), key
    with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "first\.weight"') as caught:
        model.load_state_dict(state)
    assert 'Unexpected key(s) in state_dict: "surplus"' in str(caught.value)


def test_names_may_carry_what_wrappers_add(engine):
    model = engine.shard(build(parity.Nested))
    names = build(parity.Nested, seed=1).state_dict()
    state = {
        f"_fsdp_wrapped_module.{key.replace('blocks.0.', 'blocks.0._fsdp_wrapped_module.')}": names[key]
        for key in names
    }
    assert model.load_state_dict(state) == ([], [])
    same(saved(engine, model), names)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_loading_does_not_depend_on_how_torch_exchanges_tensors(engine, around, swap):
    model = engine.shard(build(parity.Normed), use_orig_params=True)
    root = nn.Sequential(model) if around else model
    held = list(model.parameters())
    state = {("0." if around else "") + key: value for key, value in build(parity.Normed, seed=1).state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        root.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    same(saved(engine, model), build(parity.Normed, seed=1).state_dict())


@pytest.mark.parametrize("strategy", parity.STRATEGIES)
def test_one_rank_gives_all_of_it_to_the_others(engines, strategy):
    engine = engines["hpcfsdp"]
    model = engine.shard(build(parity.Normed), strategy=strategy)
    state = build(parity.Normed, seed=1).state_dict()
    state["norm.running_mean"] += 3
    given = state if engine.comm.rank == 0 else None
    assert load_model(model, given, from_first=True) == ([], [])
    same(saved(engine, model), state)
    before = memory(model)
    unreadable = {**state, "last.bias": state["last.bias"].to("meta")}
    for wrong, message in (
        ({**state, "surplus": 1}, "surplus"),
        ([], "mapping"),
        ({}, "Missing"),
        (unreadable, r"'last\.bias' is on the meta device"),
    ):
        with pytest.raises((StateDictError, TypeError), match=message):
            load_model(model, wrong if engine.comm.rank == 0 else None, from_first=True)
        unchanged(model, before)


# Models of other modules than plain ones


class Remembering(nn.Module):
    """With an extra state, hooks of its own, and a name that has changed."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory, self.seen = nn.Linear(WIDTH, WIDTH), "new", []

        def look(_module, state_dict, prefix, _metadata):
            self.seen.append((prefix, [tuple(value.shape) for key, value in state_dict.items() if "linear" in key]))

        self.register_state_dict_post_hook(look)
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(self._forgive)

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        return {"memory": self.memory}

    def set_extra_state(self, state):
        self.memory = state["memory"]

    def _rename(self, _module, state_dict, prefix, *_):
        if f"{prefix}old" in state_dict:
            state_dict[f"{prefix}linear.weight"] = state_dict.pop(f"{prefix}old").t()

    def _forgive(self, _module, keys):
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("linear.bias")]


class WithMemory(parity.Around):
    units: ClassVar = {Remembering}

    def make_unit(self):
        return Remembering()


class Converting(nn.Linear):
    """Keeps its weight the other way round since version 2."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class WithVersions(parity.Around):
    units: ClassVar = {parity.Linears}

    def make_unit(self):
        unit = parity.Linears()
        unit.b = Converting(WIDTH, WIDTH)
        return unit


@ORIGINAL
@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
@pytest.mark.parametrize("names", ["clean", "of wrappers", "of some wrappers", "none"])
def test_modules_learn_the_version_of_what_they_load(engine, around, names, original):
    """Also where a module around the unit loads, which hands each module its own."""
    plain, state = build(WithVersions), build(WithVersions, seed=1).state_dict()
    if names == "of some wrappers":
        apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, Converting))
    model = engine.shard(plain, use_orig_params=original)
    metadata = state._metadata
    if names.startswith("of"):
        changes = {"unit": "_fsdp_wrapped_module.unit._fsdp_wrapped_module"} if names == "of wrappers" else {}
        changes["b"] = "b" if names == "of wrappers" else "b._checkpoint_wrapped_module"
        metadata = {".".join(changes.get(part, part) for part in key.split(".")): metadata[key] for key in metadata}
    root = nn.Sequential(model) if around else model
    given = OrderedDict((("0." if around else "") + key, value) for key, value in state.items())
    if names != "none":
        given._metadata = {("0." if around else "") + key: value for key, value in metadata.items()}
    assert root.load_state_dict(given) == ([], [])
    if names == "none":
        state["unit.b.weight"] = state["unit.b.weight"].t()
    same(saved(engine, model), state)


class Clamping(parity.Linears):
    """Goes on to change what it has loaded, in place."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 3.0))
        self.offset = nn.Parameter(torch.full((5,), 3.0))

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        with torch.no_grad():
            self.scale.clamp_(max=1)
        self.offset.data.clamp_(max=1)


class WithClamping(parity.Around):
    units: ClassVar = {Clamping}

    def make_unit(self):
        return Clamping()


@ORIGINAL
def test_what_modules_do_to_what_they_have_loaded_is_not_done_to_the_callers_tensors(engine, original):
    model = engine.shard(build(WithClamping), use_orig_params=original)
    state = build(WithClamping, seed=1).state_dict()
    given = copy.deepcopy(state)
    model.load_state_dict(given)
    same(given, state)
    clamped = {name: torch.ones(5, dtype=torch.float64) for name in ("unit.scale", "unit.offset")}
    same(saved(engine, model), {**state, **clamped})


class Scaled(parity.Linears):
    """Computes something from its parameters when they are loaded, and changes one of them."""

    def __init__(self):
        super().__init__()
        self.scale, self.keys = None, None
        self.register_load_state_dict_post_hook(Scaled.look)

    def look(self, keys):
        self.scale, self.keys = self.a.weight.detach().abs().max(), [*keys.missing_keys]
        with torch.no_grad():
            self.a.bias.fill_(self.b.weight[-1, -1])
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("a.bias")]


class WithScaled(parity.Around):
    units: ClassVar = {Scaled}

    def make_unit(self):
        return Scaled()


@ORIGINAL
@KINDS
@CARRIERS
@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
def test_hooks_after_loading_find_whole_values_and_may_write(engines, carrier, kind, around, original):
    engine = parity.under_test(engines, carrier)
    models = [engine.shard(build(WithScaled, seed=seed), use_orig_params=original) for seed in (0, 1)]
    roots = [nn.Sequential(model) if around else model for model in models]
    state, expected = saved(engine, roots[1], kind), build(WithScaled, seed=1).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it has deprecated
        before = copy.deepcopy(state)
    assert loaded(engine, roots[0], state, kind) == ([], [])
    same(state, before)
    unit = models[0].module.unit.module
    assert torch.equal(unit.scale, expected["unit.a.weight"].abs().max())
    expected["unit.a.bias"] = expected["unit.b.weight"][-1, -1].expand(WIDTH)
    same(saved(engine, models[0]), expected)


@CARRIERS
@pytest.mark.parametrize("forgiven", [False, True])
def test_names_that_hooks_do_not_forgive_leave_the_model_as_it_was(engines, carrier, forgiven):
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(WithScaled))
    before, state = memory(model), build(WithScaled, seed=1).state_dict()
    del state["unit.a.bias"]
    if not forgiven:
        del state["last.bias"]
        with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "last\.bias"\. $'):
            model.load_state_dict(state)
        unchanged(model, before)
        return
    assert model.load_state_dict(state) == ([], [])
    assert model.module.unit.module.keys == ["unit.a.bias"]
    assert torch.equal(saved(engine, model)["last.bias"], state["last.bias"])


@CARRIERS
@pytest.mark.parametrize("around", [False, True], ids=["unit", "plain module"])
@pytest.mark.parametrize("where", ["before", "after", "extra state"])
def test_a_module_that_fails_to_load_on_one_rank_is_told_to_all(engines, several, carrier, around, where):
    """Where several units are to be loaded one after the other."""
    engine = parity.under_test(engines, carrier)
    models = [engine.shard(build(WithMemory)) for _ in range(2)]
    root = nn.Sequential(*models) if around else models[0]
    inner = models[0].module.unit.module

    def fail(*_):
        raise ZeroDivisionError("no luck")

    if several.rank == 1:  # which alone has a hook
        if where == "before":
            inner.register_load_state_dict_pre_hook(fail)
        elif where == "after":
            inner.register_load_state_dict_post_hook(fail)
        else:
            inner.set_extra_state = fail
    state = saved(engine, root)
    before = memory(models[0])
    state = {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    with pytest.raises(ZeroDivisionError if several.rank == 1 else HpcfsdpError, match="no luck") as caught:
        root.load_state_dict(state)
    assert several.rank == 1 or str(caught.value).startswith("rank 1: ")
    if where == "before":
        unchanged(models[0], before)
    if around:
        same_tensors(saved(engine, models[1]), build(WithMemory).state_dict())


@ORIGINAL
@KINDS
def test_extra_states_and_hooks_work(engine, kind, original):
    models = [engine.shard(build(WithMemory, seed=seed), use_orig_params=original) for seed in (0, 1)]
    models[0].module.unit.module.memory = "old"
    state = saved(engine, models[0], kind)
    assert state["unit._extra_state"] == {"memory": "old"}
    assert models[0].module.unit.module.seen == [("unit.", [] if kind is LOCAL else [(WIDTH, WIDTH), (WIDTH,)])]
    loaded(engine, models[1], state, kind)
    assert models[1].module.unit.module.memory == "old"
    same_tensors(saved(engine, models[1]), build(WithMemory).state_dict())


def same_tensors(found, expected):
    for states in (found, expected):
        states.pop("unit._extra_state")
    same(found, expected)


@pytest.mark.parametrize("wrong", [False, True])
def test_hooks_change_names_and_values_before_anything_is_loaded(engine, wrong):
    model = engine.shard(build(WithMemory))
    plain = build(WithMemory, seed=1)
    state = plain.state_dict()
    state["unit.old"] = state.pop("unit.linear.weight").t().contiguous()
    state["unit._extra_state"] = {"memory": "other"}
    del state["unit.linear.bias"]
    if wrong:
        state["last.bias"] = torch.ones(4)
        with pytest.raises(StateDictError, match=r"size mismatch for last\.bias"):
            model.load_state_dict(state)
        assert model.module.unit.module.memory == "new"
        same_tensors(saved(engine, model), build(WithMemory).state_dict())
        return
    assert model.load_state_dict(state) == ([], [])
    assert model.module.unit.module.memory == "other"
    expected = {**plain.state_dict(), "unit.linear.bias": build(WithMemory).unit.linear.bias.detach()}
    same_tensors(saved(engine, model), expected)


def test_hooks_of_wrappers_run(engine):
    model, seen = engine.shard(build(parity.Around)), []
    unit = model.module.unit
    unit.register_state_dict_pre_hook(lambda _, prefix, keep_vars: seen.append((prefix, keep_vars)))
    unit.register_state_dict_post_hook(lambda _, state, prefix, facts: seen.append(sorted(state)[:1]))
    unit.register_load_state_dict_pre_hook(lambda _, state, prefix, *rest: seen.append(prefix))
    unit.register_load_state_dict_post_hook(lambda _, keys: seen.append(keys.missing_keys))
    model.load_state_dict(saved(engine, model))
    assert seen == [("unit.", False), ["first.bias"], "unit.", []]


class Writing(parity.Linears):
    """Loads by writing to its parameters."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        with torch.no_grad():
            self.spare.copy_(state_dict[f"{prefix}spare"])
            self.level.copy_(state_dict[f"{prefix}level"])

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(5))
        self.register_buffer("level", torch.zeros(2))


class Holding(parity.Around):
    units: ClassVar = {Writing}

    def make_unit(self):
        return Writing()


def test_a_module_that_writes_to_its_parameters_is_refused_and_may_write_to_its_buffers(engine):
    model, state = engine.shard(build(Holding)), build(Holding, seed=1).state_dict()
    state["unit.level"] = torch.tensor([1.0, 2.0], dtype=torch.float64)
    before = memory(model)
    with pytest.raises(StateDictError, match=r"unit\.spare: Writing has a _load_from_state_dict"):
        model.load_state_dict(state)
    unchanged(model, before)
    ignoring = build(Holding)
    model = engine.shard(ignoring, ignored_states=[ignoring.unit.spare])
    state["unit.spare"] += 2
    spare = model.module.unit.module.spare
    with pytest.raises(StateDictError, match=r"size mismatch for last\.bias"):
        model.load_state_dict({**state, "last.bias": torch.ones(9)})
    assert (spare.tolist(), model.unit.level.tolist()) == ([0.0] * 5, [0.0, 0.0])
    model.load_state_dict(state)
    assert model.module.unit.module.spare is spare
    assert (spare.tolist(), model.unit.level.tolist()) == ([2.0] * 5, [1.0, 2.0])


class Growing(parity.Linears):
    """Takes a parameter and a buffer, which another module has too, of any shape."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(5))
        self.register_buffer("level", torch.zeros(2))
        self.a.register_buffer("level", None)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.spare = nn.Parameter(state_dict[f"{prefix}spare"])
        self.level = self.a.level = state_dict[f"{prefix}level"]


class WithGrowing(parity.Around):
    units: ClassVar = {Growing}

    def make_unit(self):
        return Growing()


@pytest.mark.parametrize("ignored", [False, True])
def test_buffers_may_grow_and_parameters_may_not(engine, ignored):
    plain = build(WithGrowing)
    plain.unit.a.level = plain.unit.level
    model = engine.shard(plain, ignored_states=[plain.unit.spare] if ignored else None)
    state = build(WithGrowing, seed=1).state_dict()
    state["unit.level"] = state["unit.a.level"] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    before = memory(model)
    with pytest.raises(StateDictError, match=r"'unit\.spare'.* shape \[6\] in place of one of \[5\]"):
        model.load_state_dict({**state, "unit.spare": torch.ones(6)})
    unchanged(model, before)
    assert model.load_state_dict(state) == ([], [])
    assert model.unit.level.tolist() == [1.0, 2.0, 3.0]
    assert model.unit.level is model.unit.a.level
    assert model.unit.level is not state["unit.level"]


class Recurrent(nn.Module):
    units: ClassVar = {nn.LSTM}
    idle = ()

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(WIDTH, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.lstm(x.unsqueeze(1))[0][:, 0])


@ORIGINAL
def test_a_module_with_a_list_of_its_parameters_goes_on_working(engine, original):
    """An LSTM keeps one, which has to hold the same tensors as the module."""
    models = [engine.shard(build(Recurrent, seed=seed), use_orig_params=original) for seed in (0, 1)]
    models[1].load_state_dict(saved(engine, models[0]))
    lstm = models[1].lstm.module
    assert all(
        weight is getattr(lstm, name) for weight, name in zip(lstm._flat_weights, lstm._flat_weights_names, strict=True)
    )
    assert engine.train(models[0]).losses == engine.train(models[1]).losses


@ORIGINAL
@pytest.mark.parametrize("inside", [False, True], ids=["around units", "inside of units"])
def test_names_are_free_of_activation_checkpointing(engine, inside, original):
    plain = build(parity.Nested)
    if inside:
        apply_activation_checkpointing(plain, check_fn=lambda m: isinstance(m, parity.Block))
    model = engine.shard(plain, use_orig_params=original)
    if not inside:
        apply_activation_checkpointing(
            model, check_fn=lambda m: isinstance(m, FullyShardedDataParallel) and m is not model
        )
    expected = build(parity.Nested, seed=1).state_dict()
    assert model.load_state_dict(expected) == ([], [])
    for kind in (FULL, SHARDED, LOCAL):
        state = saved(engine, model, kind)
        assert not [key for key in state if "wrapped" in key]
        loaded(engine, model, state, kind)
    same(saved(engine, model), expected)


@ORIGINAL
def test_names_are_free_of_compilation(engine, original):
    """Torch keeps ``_orig_mod`` in them, and a plain model does not load what a compiled one has saved."""
    plain = build(parity.Around)
    plain.unit = torch.compile(plain.unit, backend="eager")
    model = engine.shard(plain, use_orig_params=original, wrapping="root")
    expected = build(parity.Around, seed=1).state_dict()
    assert model.load_state_dict(expected) == ([], [])
    same(saved(engine, model), expected)
    same(saved(engine, model, SHARDED), saved(engine, engine.shard(_loaded(expected), wrapping="root"), SHARDED))


def _loaded(state):
    plain = build(parity.Around)
    plain.load_state_dict(state)
    return plain


@ORIGINAL
@KINDS
def test_what_is_ignored_is_saved_and_loaded_whole(engine, kind, original):
    def ignoring(seed):
        plain = build(parity.Normed, seed=seed)
        ignored = [plain.first.weight, *plain.unit.norm.parameters()]
        return engine.shard(plain, use_orig_params=original, ignored_states=ignored)

    models = [ignoring(0), ignoring(1)]
    state = saved(engine, models[0], kind)
    assert isinstance(state["first.weight"], torch.Tensor)
    held = models[1].first.weight
    loaded(engine, models[1], state, kind)
    assert models[1].first.weight is held
    same(saved(engine, models[1]), build(parity.Normed).state_dict())


@ORIGINAL
@KINDS
def test_units_within_a_plain_module(engine, kind, original):
    """Whose own methods are at work: the names begin with the units' places in it."""

    def outer(seed):
        first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        return nn.Sequential(
            first if seed == 0 else nn.Linear(WIDTH, WIDTH, dtype=torch.float64),
            engine.shard(build(parity.Normed, seed=seed), use_orig_params=original),
            engine.shard(build(parity.Nested, seed=seed), use_orig_params=original),
        )

    models = [outer(0), outer(1)]
    state, whole = (saved(engine, models[0], each) for each in (kind, FULL))
    plain = nn.Sequential(models[0][0], build(parity.Normed), build(parity.Nested))
    same(whole, plain.state_dict())
    assert loaded(engine, models[1], state, kind) == ([], [])
    same(saved(engine, models[1]), whole)
    assert list(models[1][1].children()), "the wrapper holds its module again"
    if kind is FULL:
        state["1.last.bias"] = torch.ones(9)
        before = memory(models[1][1])
        with pytest.raises(RuntimeError, match=r"size mismatch for 1\.last\.bias"):
            models[1].load_state_dict(state)
        unchanged(models[1][1], before)
        del state["1.last.bias"]
        report = models[1].load_state_dict({**state, "1.more": torch.ones(1)}, strict=False)
        assert report == (["1.last.bias"], ["1.more"])
        with pytest.raises(StateDictError, match="assign"):
            models[1].load_state_dict(whole, assign=True)


@ORIGINAL
@pytest.mark.parametrize("mesh", [False, True])
def test_torchs_functions_for_checkpoints_work(engine, original, mesh):
    """As far as they can be used on what is not torch's own class: kinds are chosen by the class's methods."""
    options = {"use_orig_params": original, **({"device_mesh": line_mesh()} if mesh else {})}
    model, other = (engine.shard(build(parity.Normed, seed=seed), **options) for seed in (0, 1))
    expected = build(parity.Normed).state_dict()
    same(get_model_state_dict(model), expected)
    for root in (model, nn.Sequential(model)):
        whole = get_model_state_dict(root, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert len(whole) == (len(expected) if engine.comm.rank == 0 else 0)
    for kind in (FULL, SHARDED):
        with engine.cls.state_dict_type(model, kind), engine.cls.state_dict_type(other, kind):
            state = get_model_state_dict(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch gathers with what it has deprecated
                gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            set_model_state_dict(other, state)
        same(gathered, expected)
        same(saved(engine, other), expected)
        other.load_state_dict(build(parity.Normed, seed=1).state_dict())


@ORIGINAL
@pytest.mark.parametrize("mesh", [False, True], ids=["sharded tensors", "dtensors"])
def test_what_is_sharded_goes_through_files(engine, shared_path, original, mesh):
    """By torch's distributed checkpoints, and by one pickle of each rank."""
    options = {"use_orig_params": original, **({"device_mesh": line_mesh()} if mesh else {})}
    model, other, third = (engine.shard(build(parity.Nested, seed=seed), **options) for seed in range(3))
    state = saved(engine, model, SHARDED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it has deprecated
        dcp.save(state, checkpoint_id=shared_path / "checkpoint")
        target = saved(engine, other, SHARDED)
        dcp.load(target, checkpoint_id=shared_path / "checkpoint")
        path = shared_path / f"{engine.comm.rank}.pt"
        torch.save(state, path)
        pickled = torch.load(path, weights_only=False)
    loaded(engine, other, target, SHARDED)
    loaded(engine, third, pickled, SHARDED)
    for each in (other, third):
        same(saved(engine, each), build(parity.Nested).state_dict())


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
        with pytest.raises(
            StateDictError, match=r"'first\.weight'.*ShardedTensor lies on the ranks.*load it for these"
        ):
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


def test_another_kind_than_is_set_is_told(engine):
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
    with pytest.raises(StateDictError, match="two tensors of the model are called 'weight'"):
        model.state_dict()


# Memory


def test_under_rank0_only_other_ranks_hold_one_unit_at_most(engines, world, monkeypatch):
    engine = parity.under_test(engines, "messages")
    width = 3600  # 49 MiB a layer
    layer = 4 * width * width
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    sharded = engine.cls(model, engine.group(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    held = []
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    saved(engine, sharded, FULL, config)  # what earlier tests have left behind goes now

    def probe(inner, call):
        values = make(inner, call)
        held.append(private_bytes() - at_rest)
        return values

    make = save._values
    monkeypatch.setattr(save, "_values", probe)
    at_rest = private_bytes()
    state = saved(engine, sharded, FULL, config)
    everything = private_bytes() - at_rest
    assert len(held) == 4
    if world.rank == 0:
        assert everything > 2.8 * layer, "the probe does not see whole parameters"
        # The root comes first, which has none of the layers to itself.
        assert all(nbytes < (turn + 1.2) * layer for turn, nbytes in enumerate(held)), held
    else:
        assert max(held) < 1.2 * layer, held
        assert everything < 0.2 * layer
    del state
    assert private_bytes() - at_rest < 0.2 * layer
