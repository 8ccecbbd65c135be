"""State dicts of models whose modules have hooks, extra state, or ways of their own to save and load."""

import contextlib
import copy
import warnings
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcfsdp.errors import HpcfsdpError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.load import load_model
from tests.mpi import parity
from tests.mpi.models import ORIGINAL
from tests.mpi.parity import WIDTH, build
from tests.mpi.state_dict_cases import (
    CARRIERS,
    FULL,
    KINDS,
    LOCAL,
    SHARDED,
    line_mesh,
    loaded,
    memory,
    same,
    saved,
    unchanged,
)

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
def test_a_module_that_fails_to_load_on_one_rank_is_an_error_on_all(engines, several, carrier, around, where):
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
    before, other = memory(models[0]), models[1].module.unit.module
    other.memory = "old"
    state = {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    with pytest.raises(ZeroDivisionError if several.rank == 1 else HpcfsdpError, match="no luck") as caught:
        root.load_state_dict(state)
    assert several.rank == 1 or str(caught.value).startswith("rank 1: ")
    if where == "before":
        unchanged(models[0], before)
    if around:  # all units are loaded, or none: what fails after loading leaves what is loaded, as in a unit alone
        plain = build(WithMemory).state_dict()
        assert other.memory == ("old" if where == "before" else "new")
        if where != "before":
            plain = {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
        same_tensors(saved(engine, models[1]), plain)


def test_a_unit_that_fails_after_loading_keeps_no_other_from_it_where_that_lies_on_more_ranks(several):
    some = list(range(several.size - 1))
    units = {"everywhere": FullyShardedDataParallel(build(WithMemory), several)}
    if several.rank in some:

        def fail(*_):
            raise ZeroDivisionError("no luck")

        units = {"somewhere": FullyShardedDataParallel(build(WithMemory), several.subgroup(some)), **units}
        units["somewhere"].module.unit.set_extra_state = fail
    plain = build(WithMemory, seed=1).state_dict()
    plain["unit._extra_state"] = {"memory": "other"}
    state = {f"{unit}.{name}": value for unit in units for name, value in plain.items()}
    with pytest.raises(ZeroDivisionError) if several.rank in some else contextlib.nullcontext():
        nn.ModuleDict(units).load_state_dict(state)
    assert units["everywhere"].module.unit.memory == "other"
    for unit in units.values():
        same_tensors(unit.state_dict(), dict(plain))


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
    with pytest.raises(StateDictError, match=r"'unit\.spare'.* shape \[5\] with one of \[6\]"):
        model.load_state_dict({**state, "unit.spare": torch.ones(6)})
    unchanged(model, before)
    assert model.load_state_dict(state) == ([], [])
    assert model.unit.level.tolist() == [1.0, 2.0, 3.0]
    assert model.unit.level is model.unit.a.level
    assert model.unit.level is not state["unit.level"]


class Resizing(nn.Module):
    """Gives its buffers the shapes of what is loaded, and loads as any module does: as torch's observers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("level", torch.zeros(0))
        self.register_buffer("twin", torch.zeros(0))

    def forward(self, x):
        return self.linear(x)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in ("level", "twin"):
            getattr(self, name).resize_(state_dict[f"{prefix}{name}"].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class WithResizing(parity.Around):
    units: ClassVar = {Resizing}

    def make_unit(self):
        return Resizing()


@CARRIERS
@pytest.mark.parametrize("given", ["all", "first", "dtensor"])
def test_buffers_grow_whoever_has_what_they_become(engines, carrier, given):
    engine = parity.under_test(engines, carrier)
    plain, state = build(WithResizing), build(WithResizing, seed=1).state_dict()
    state["unit.level"] = state["unit.twin"] = torch.tensor([1, 2, 3])  # buffers keep their dtype
    plain.load_state_dict(state)
    model = build(WithResizing)
    model.unit.twin = model.unit.level
    model = engine.shard(model)
    sent, level = dict(state), state["unit.level"]
    if given == "dtensor":
        spread = DTensor.from_local(level, line_mesh(), [Replicate()], run_check=False)
        sent["unit.level"] = sent["unit.twin"] = spread.redistribute(line_mesh(), [Shard(0)])
    before = memory(model)
    wrong = {**sent, "last.bias": torch.ones(9)}
    first = {"from_rank0": True} if given == "first" else {}
    with pytest.raises(StateDictError, match=r"size mismatch for last\.bias"):
        load_model(model, wrong if not first or engine.comm.rank == 0 else None, **first)
    unchanged(model, before)
    assert load_model(model, sent if not first or engine.comm.rank == 0 else None, **first) == ([], [])
    same(saved(engine, model), plain.state_dict())
    unit = model.module.unit.module
    assert unit.level is unit.twin
    unit.level.fill_(7)
    assert level.tolist() == [1, 2, 3]


def test_modules_that_read_what_a_rank_does_not_have_raise(engine, several):
    model, state = engine.shard(build(Holding)), build(Holding, seed=1).state_dict()
    before = memory(model)
    # Writing copies to a buffer by itself.
    with pytest.raises(StateDictError, match=r"Writing at 'unit' reads or writes values .*pass the whole state dict"):
        load_model(model, state if several.rank == 0 else None, from_rank0=True)
    unchanged(model, before)


class Calibrated(parity.Linears):
    """Has buffers when a state dict has them: made by a hook, put there by itself, or taken from another name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)
        self.register_buffer("offset", None)
        self.register_load_state_dict_pre_hook(Calibrated.prepare)

    def prepare(self, state_dict, prefix, *_):
        if f"{prefix}scale" in state_dict:
            self.scale = torch.zeros(state_dict[f"{prefix}scale"].shape, dtype=torch.float32)
        if f"{prefix}old" in state_dict:
            self.register_buffer("table", state_dict.pop(f"{prefix}old"), persistent=False)
            self.register_buffer("step", torch.tensor(5))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        offset = state_dict.pop(f"{prefix}offset", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.offset = offset


class WithCalibrated(parity.Around):
    units: ClassVar = {Calibrated}

    def make_unit(self):
        return Calibrated()


@ORIGINAL
@CARRIERS
@pytest.mark.parametrize("first", [False, True], ids=["all", "first"])
def test_buffers_that_modules_register_when_they_load_are_the_models_own(engines, carrier, first, original):
    engine = parity.under_test(engines, carrier)
    state = build(WithCalibrated, seed=1).state_dict()
    values = {name: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) for name in ("scale", "offset", "old")}
    state.update({f"unit.{name}": value for name, value in values.items()})
    state["unit.step"] = torch.tensor(8)
    plain = build(WithCalibrated)
    plain.load_state_dict(state)
    model = engine.shard(build(WithCalibrated), use_orig_params=original)
    unit = model.module.unit.module

    def load(values):
        return load_model(model, values if engine.comm.rank == 0 or not first else None, from_rank0=first)

    before = memory(model)
    with pytest.raises(StateDictError, match=r"size mismatch for last\.bias"):
        load({**state, "last.bias": torch.ones(9)})
    unchanged(model, before)
    assert (unit.scale, unit.offset, hasattr(unit, "table"), hasattr(unit, "step")) == (None, None, False, False)
    assert load(state) == ([], [])
    same(saved(engine, model), plain.state_dict())
    assert type(unit.table) is type(unit.scale) is torch.Tensor
    assert unit.table.tolist() == [1, 2, 3]
    assert unit.scale.dtype is torch.float32
    for buffer in unit.buffers():
        buffer.fill_(9)
    assert all(value.tolist() == [1, 2, 3] for value in values.values())


class Extending(parity.Linears):
    """Makes a parameter, or a buffer where its parameters lie, when it is loaded."""

    def __init__(self, name):
        super().__init__()
        self.name, self.level, self.more = name, None, None
        self.register_load_state_dict_pre_hook(Extending.extend)

    def extend(self, *_):
        if self.name == "more":
            self.more = nn.Parameter(torch.ones(2))
        elif self.name == "level":
            self.register_buffer("level", torch.ones(2, device=self.a.weight.device))


@pytest.mark.parametrize(("name", "message"), [("more", "more: .* a parameter while"), ("level", "'level': .*device")])
def test_what_modules_cannot_register_when_they_load_is_refused(engine, name, message):
    plain = build(lambda: Extending(None))
    del plain.level  # which is to be a buffer
    state, model = plain.state_dict(), engine.shard(plain, wrapping="root")
    model.module.name = name
    before = memory(model)
    with pytest.raises(StateDictError, match=message):
        model.load_state_dict(state)
    unchanged(model, before)
    assert getattr(model.module, name, None) is None
    model.module.name = None
    assert model.load_state_dict(state) == ([], [])


class Skipping(parity.Linears):
    """Leaves a parameter as it is if the state dict has one of another shape."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        if state_dict[f"{prefix}spare"].shape != self.spare.shape:
            if self.takes_out:
                del state_dict[f"{prefix}spare"]
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __init__(self):
        super().__init__()
        self.spare, self.takes_out = nn.Parameter(torch.zeros(5)), False


class WithSkipping(parity.Around):
    units: ClassVar = {Skipping}

    def make_unit(self):
        return Skipping()


def test_a_module_may_leave_a_parameter_as_it_is(engine):
    """If it says so: it might as well have written to it, where nothing is kept."""
    model, state = engine.shard(build(WithSkipping)), build(WithSkipping, seed=1).state_dict()
    state["unit.spare"] = torch.ones(6)
    with pytest.raises(StateDictError, match=r"unit\.spare: Skipping .* not assigned it.* take its name out"):
        model.load_state_dict(state)
    model.module.unit.module.takes_out = True
    assert model.load_state_dict(state) == ([], [])
    same(saved(engine, model), {**state, "unit.spare": torch.zeros(5, dtype=torch.float64)})


class Filling(parity.Linears):
    """Gives its buffer and its ignored parameter values, and makes another buffer, if the state dict has none."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(2))
        self.register_buffer("made", None)
        self.spare = nn.Parameter(torch.zeros(2))
        self.register_load_state_dict_post_hook(Filling.fill)

    def fill(self, keys):
        with torch.no_grad():
            self.level.fill_(9)
            self.spare.fill_(9)
        self.made = torch.ones(2)
        keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith("unit.")]


class WithFilling(parity.Around):
    units: ClassVar = {Filling}

    def make_unit(self):
        return Filling()


@pytest.mark.parametrize("forgiven", [False, True])
def test_what_hooks_fill_in_is_taken_back_if_names_are_missing_all_the_same(engine, forgiven):
    plain = build(WithFilling)
    model = engine.shard(plain, ignored_states=[plain.unit.spare])
    state = build(WithFilling, seed=1).state_dict()
    del state["unit.level"], state["unit.spare"]
    unit, before = model.module.unit.module, memory(model)
    held = unit.level, unit.spare
    if forgiven:
        assert model.load_state_dict(state) == ([], [])
        assert (unit.level.tolist(), unit.spare.tolist(), unit.made.tolist()) == ([9, 9], [9, 9], [1, 1])
        return
    del state["last.bias"]
    with pytest.raises(StateDictError, match=r'Missing key\(s\) in state_dict: "last\.bias"\. $'):
        model.load_state_dict(state)
    unchanged(model, before)
    assert (unit.level.tolist(), unit.spare.tolist(), unit.made) == ([0, 0], [0, 0], None)
    assert all(a is b for a, b in zip((unit.level, unit.spare), held, strict=True))


class Scaling(parity.Linears):
    """With an extra state that is a tensor."""

    def __init__(self):
        super().__init__()
        self.state = torch.tensor([7, 8, 9], dtype=torch.uint8)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class WithScaling(parity.Around):
    units: ClassVar = {Scaling}

    def make_unit(self):
        return Scaling()


@CARRIERS
@pytest.mark.parametrize("given", ["all", "first", "dtensor", "in a list"])
def test_extra_states_that_are_tensors_arrive_as_they_are(engines, carrier, given):
    engine = parity.under_test(engines, carrier)
    model, state = engine.shard(build(WithScaling)), build(WithScaling, seed=1).state_dict()
    extra = torch.arange(4, dtype=torch.uint8)
    if given == "dtensor":
        extra = DTensor.from_local(extra, line_mesh(), [Replicate()], run_check=False)
    state["unit._extra_state"] = [extra] if given == "in a list" else extra
    if given in ("all", "dtensor"):
        assert model.load_state_dict(state) == ([], [])
        assert model.module.unit.module.state is extra
        return
    assert load_model(model, state if engine.comm.rank == 0 else None, from_rank0=True) == ([], [])
    found = model.module.unit.module.state
    (found,) = found if given == "in a list" else (found,)
    assert type(found) is torch.Tensor
    assert found.tolist() == [0, 1, 2, 3]


def test_numbers_are_converted_where_a_parameter_is_ignored(engine):
    plain = build(parity.Normed)
    model = engine.shard(plain, ignored_states=[plain.first.weight])
    held = plain.first.weight
    state = build(parity.Normed, seed=1).state_dict()
    state["first.weight"] = torch.arange(held.numel()).view_as(held)
    assert model.load_state_dict(state) == ([], [])
    assert model.module.first.weight is held
    assert held.requires_grad
    assert torch.equal(held, state["first.weight"].double())


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
