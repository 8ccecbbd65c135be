"""State dicts of sharded models: what torch's FSDP1 gives, in every kind, and back into any model that it fits."""

import copy
import io
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
)
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import (
    ChunkShardingSpec,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from hpcfsdp.errors import HpcfsdpError, StateDictError
from hpcfsdp.reshard.sharded_tensors import local_blocks
from hpcfsdp.state import save, settings
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import build
from tests.mpi.state_dict_cases import (
    CARRIERS,
    FULL,
    KINDS,
    LOCAL,
    SHARDED,
    STRATEGIES,
    line_mesh,
    loaded,
    parts,
    same,
    saved,
    train_a_little,
)
from tests.mpi.test_unshard import private_bytes

pytestmark = [pytest.mark.ranks(2, 1, 3), pytest.mark.pairs]

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
    model = engine.shard(build(parity.Nested), strategy=strategy, use_orig_params=original)
    states = {kind: saved(engine, model, kind) for kind in (FULL, SHARDED)}
    before = copy.deepcopy(states[FULL])
    train_a_little(engine, model)
    same(states[FULL], before)
    other = engine.shard(build(parity.Nested, seed=1), strategy=strategy, use_orig_params=original)
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
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(engines, several, carrier, kind, where):
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
    with pytest.raises(StateDictError, match="different state_dict_type settings"):
        api.get_state_dict_type(model)  # as before the context
    api.set_state_dict_type(model, FULL)
    same(model.state_dict(), build(parity.Nested).state_dict())


@CARRIERS
@pytest.mark.parametrize("difference", ["kind", "rank0_only", "offload_to_cpu"])
def test_ranks_with_different_settings_raise(engines, several, carrier, difference):
    engine = parity.under_test(engines, carrier)
    model = engine.shard(build(parity.Nested))
    if difference == "kind":
        kind, config = (FULL if several.rank == 0 else SHARDED), None
    else:
        kind, config = FULL, FullStateDictConfig(**{difference: several.rank == 0})
    with pytest.raises(
        StateDictError, match=r"ranks have different state_dict_type settings: Nested gives .*FULL.*on rank 0"
    ):
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
    settings._log_whole.cache_clear()
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
        assert block.data_ptr() == model._unit.sharded_params[0].parameter.data_ptr()


TORCHS_OWN = [
    *(Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties, ChunkShardingSpec),
    *(MEM_FORMAT_ENCODING, ShardedTensor.ProcessGroupState, _remote_device, getattr),
]
"""What the pickle of a LOCAL_STATE_DICT of torch's FSDP1 needs."""


@ORIGINAL
@pytest.mark.parametrize("kind", [LOCAL, SHARDED], ids=["local", "sharded"])
def test_pickles_of_shards_are_loaded_with_weights_only(engine, original, kind):
    model, other = (engine.shard(build(parity.Uneven, seed=seed), use_orig_params=original) for seed in (0, 1))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what it has deprecated
        torch.save(saved(engine, model, kind), file)
        file.seek(0)
        with torch.serialization.safe_globals(TORCHS_OWN):
            state = torch.load(file, weights_only=True)
    loaded(engine, other, state, kind)
    same(saved(engine, other), saved(engine, model))


@ORIGINAL
@KINDS
def test_what_is_not_sharded_is_shown_as_it_is(engines, world, kind, original):
    """As torch shows it: buffers, and parameters that are ignored, are the module's own memory in any kind."""
    if world.size == 1:
        pytest.skip("torch makes NO_SHARD of FULL_SHARD on one rank, and copies nothing")
    found = {}
    for name in ("torch", "hpcfsdp"):
        plain = build(parity.Normed)
        model = engines[name].shard(plain, use_orig_params=original, ignored_modules=[plain.last])
        own = {tensor.data_ptr() for tensor in (*model.buffers(), *plain.last.parameters())}
        state = saved(engines[name], model, kind)
        whole = {key: value for key, value in state.items() if not isinstance(value, ShardedTensor)}
        found[name] = {key for key, value in whole.items() if value.data_ptr() in own}
        assert not any(value.requires_grad for value in whole.values())
    assert found["hpcfsdp"] == found["torch"]
    assert {"last.weight", "last.bias"} < found["hpcfsdp"]


# Memory


@pytest.mark.ranks(2)
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
