"""Parts of files, models on the meta device, replaced files, and what modules and optimizers keep beside tensors."""

import copy
import dataclasses
import errno
import json
import os
import shutil
import warnings
from collections import Counter, OrderedDict, defaultdict

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.optim import lr_scheduler

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.loading import loader
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReplacedError,
)
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from tests.disks import Failing, Watched, using
from tests.unit.checkpoint.examples import equal
from tests.unit.checkpoint.loading.test_loader import snapshot, two_layers


def test_not_strict_loads_what_there_is_and_reports_the_rest(tmp_path):
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "old": nn.Linear(1, 1)})
    path = checkpoint.save(tmp_path / "a.h5", model=saved, step=3)
    model = two_layers(7.0)
    info = checkpoint.load(path, model=model, strict=False)
    assert torch.equal(model["a"].weight, saved["a"].weight)
    assert model["b"].weight.unique().tolist() == [7]
    assert (info.missing, info.unexpected) == (("b.bias", "b.weight"), ("old.bias", "old.weight"))
    assert info.step == 3


def test_not_strict_does_not_take_other_shapes(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.Linear(2, 3))
    model = nn.Linear(3, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(CheckpointMismatchError, match=r"differing: weight is \[3, 2\] float32 in the file"):
        checkpoint.load(path, model=model, strict=False)
    assert torch.equal(model.weight, before)


def test_names_load_a_part_and_leave_the_rest_and_the_random_numbers(tmp_path):
    saved, model = two_layers(1.0), two_layers(0.0)
    path = checkpoint.save(tmp_path / "a.h5", model=saved)
    torch.manual_seed(5)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    info = checkpoint.load(path, model=model, names=["a.*", "model/b.bias"])
    assert torch.equal(torch.rand(1), expected)
    assert {name: tensor.unique().item() for name, tensor in model.state_dict().items()} == {
        "a.weight": 1, "a.bias": 1, "b.weight": 0, "b.bias": 1,
    }  # fmt: skip
    assert (info.missing, info.unexpected) == ((), ())


def test_names_that_match_nothing_are_reported(tmp_path):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["b"](model["a"](torch.ones(2))).sum().backward()
    optimizer.step()
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"no tensor matches 'a\.wieght'.*a\.weight"):
        checkpoint.load(path, model=model, names=["a.*", "a.wieght"])
    with pytest.raises(CheckpointError, match="match no tensor of the model, only the optimizer's"):
        checkpoint.load(path, model=model, names=["optim/*"])
    with pytest.raises(CheckpointError, match=r"the optimizer steps 'b\.weight', which names= leaves out"):
        checkpoint.load(path, model=model, optimizer=optimizer, names=["a.*"])


def test_a_part_that_the_model_has_and_the_file_lacks_is_missing(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.ModuleDict({"a": nn.Linear(2, 3)}))
    model = two_layers(2.0)
    assert checkpoint.load(path, model=model, names=["a.*"]).missing == ()
    model["a"].register_buffer("more", torch.zeros(1))
    with pytest.raises(CheckpointMismatchError, match=r"missing in the file: a\.more \[1\]"):
        checkpoint.load(path, model=model, names=["a.*"])
    assert checkpoint.load(path, model=model, names=["a.*"], strict=False).missing == ("a.more",)


def test_without_verifying_a_damaged_block_is_taken(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=two_layers(1.0))
    row = checkpoint.open_index(path).rows_of("model/a.weight")[0]
    with open(path, "r+b") as file:
        file.seek(int(row["byte_offset"]))
        file.write(np.float32(9).tobytes())
    model = two_layers()
    with pytest.raises(CheckpointCorruptError):
        checkpoint.load(path, model=model)
    checkpoint.load(path, model=model, verify=False)
    assert model["a"].weight.flatten().tolist() == [9, 1, 1, 1, 1, 1]


def meta_model():
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
        model["b"].weight = model["a"].weight
        model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return model


def filled_like_meta():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3)})
    model["b"].weight = model["a"].weight
    model.register_buffer("count", torch.tensor([4, 5]))
    return model


def test_a_model_on_the_meta_device_gets_memory_and_keeps_its_tensors_and_ties(tmp_path, train_steps, same):
    saved = filled_like_meta()
    optimizer = torch.optim.AdamW(saved.parameters())
    for param in saved.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = checkpoint.save(tmp_path / "a.h5", model=saved, optimizer=optimizer)
    model = meta_model()
    model["b"].bias.requires_grad_(False)
    params = list(model.parameters())
    other = torch.optim.AdamW(params)
    checkpoint.load(path, model=model, optimizer=other)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert model["a"].weight is model["b"].weight
    assert [param.requires_grad for param in params] == [True, True, False]
    assert same(model.state_dict(), saved.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())


def test_a_model_on_the_meta_device_stays_there_when_loading_fails(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=filled_like_meta())
    row = checkpoint.open_index(path).rows_of("model/b.bias")[0]
    with open(path, "r+b") as file:
        file.seek(int(row["byte_offset"]))
        file.write(b"\xff\xff")
    model = meta_model()
    with pytest.raises(CheckpointCorruptError):
        checkpoint.load(path, model=model)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_a_part_of_a_meta_model_is_loaded_and_the_rest_stays(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=filled_like_meta())
    model = meta_model()
    checkpoint.load(path, model=model, names=["b.*"])
    assert {name for name, tensor in model.state_dict().items() if tensor.is_meta} == {"a.bias", "count"}


def test_a_file_that_has_another_name_of_a_tied_tensor_fits(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.ModuleDict({"b": nn.Linear(2, 2, bias=False)}))
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    checkpoint.load(path, model=model)
    with checkpoint.open(path) as file:
        assert torch.equal(model["a"].weight, file["model/b.weight"][:])


class Replaced(System):
    """Puts another file in place of the one that is read, the first few times that it is opened."""

    def __init__(self, path, others, times):
        self.path, self.others, self.times = path, others, times

    def open(self, path, *arguments):
        fd = os.open(path, *arguments)
        if os.fspath(path) == os.fspath(self.path) and self.times:
            self.times -= 1
            shutil.copy(self.others[self.times % 2], self.path.with_suffix(".new"))
            os.replace(self.path.with_suffix(".new"), self.path)
        return fd


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(tmp_path):
    others = [checkpoint.save(tmp_path / f"{fill}.h5", model=two_layers(fill), step=fill) for fill in (1, 2)]
    path = tmp_path / "a.h5"
    shutil.copy(others[1], path)
    model = two_layers()
    with using(Replaced(path, others, 3)):
        info = checkpoint.load(path, model=model)
    assert {tensor.unique().item() for tensor in model.parameters()} == {info.step}


def test_a_file_that_is_replaced_again_and_again_is_given_up(tmp_path):
    others = [checkpoint.save(tmp_path / f"{fill}.h5", model=two_layers(fill), step=fill) for fill in (1, 2)]
    path = tmp_path / "a.h5"
    shutil.copy(others[0], path)
    model = two_layers(5)
    message = "was replaced 5 times while it was opened"
    with pytest.raises(CheckpointReplacedError, match=message), using(Replaced(path, others, 1000)):
        checkpoint.load(path, model=model)
    assert {tensor.unique().item() for tensor in model.parameters()} == {5}


class Scaled(nn.Linear):
    """Keeps something beside its tensors, as layers of 8-bit training do."""

    def __init__(self, scale):
        super().__init__(2, 2)
        self.scale = scale

    def get_extra_state(self):
        return {"scale": self.scale, "history": torch.tensor([self.scale, 1.5]), "key": (b"ab", 3)}

    def set_extra_state(self, state):
        assert torch.equal(state["history"], torch.tensor([state["scale"], 1.5]))
        assert state["key"] == (b"ab", 3)
        self.scale = state["scale"]


def test_what_modules_keep_beside_tensors_comes_back(tmp_path):
    saved, model = nn.Sequential(Scaled(2.0), Scaled(3.0)), nn.Sequential(Scaled(0.0), Scaled(0.0))
    path = checkpoint.save(tmp_path / "a.h5", model=saved, extra={"mine": np.arange(2)})
    info = checkpoint.load(path, model=model)
    assert [module.scale for module in model] == [2, 3]
    assert list(info.extra) == ["mine"]
    assert info.extra["mine"].tolist() == [0, 1]


def test_what_modules_keep_beside_tensors_is_missing_or_unexpected_like_a_tensor(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.Sequential(nn.Linear(2, 2), Scaled(3.0)))
    model = nn.Sequential(Scaled(1.0), nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(path, model=model)
    assert "missing in the file: 0._extra_state, the state of a module" in str(caught.value)
    assert "unexpected in the file: 1._extra_state, the state of a module" in str(caught.value)
    info = checkpoint.load(path, model=model, strict=False)
    assert (info.missing, info.unexpected) == (("0._extra_state",), ("1._extra_state",))
    assert model[0].scale == 1


def test_types_that_json_lacks_come_back_in_extra_and_in_what_modules_keep(tmp_path):
    value = {
        "milestones": Counter({3: 1, 1: 2}),
        "ordered": OrderedDict(b=(1, 2), a=np.float32(0.5)),
        "by default": defaultdict(list, a=[b"x"]),
        "short": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "shorter": torch.tensor([1.5], dtype=torch.float8_e5m2),
    }

    class Keeps(nn.Linear):
        state = value

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    path = checkpoint.save(tmp_path / "a.h5", model=Keeps(2, 2), extra=value)
    model = Keeps(2, 2)
    model.state = None
    assert equal(checkpoint.load(path, model=model).extra, value)
    assert equal(model.state, value)
    assert equal(open_index(path).info.extra, value)
    with h5py.File(path) as file:  # as readers see it that know of no types
        plain = json.loads(file["extra/values"][()])
        assert plain["milestones"] == {"__items__": [[3, 1], [1, 2]]}
        assert plain["ordered"] == {"b": [1, 2], "a": 0.5}
        assert file["extra/arrays/" + plain["short"]["__array__"]][...].tolist() == [1.5, 0]


def test_the_scheduler_of_a_checkpoint_goes_on(tmp_path):
    def make():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        warm, drops = lr_scheduler.LinearLR(optimizer, total_iters=4), lr_scheduler.MultiStepLR(optimizer, [1, 3])
        return model, optimizer, lr_scheduler.SequentialLR(optimizer, [warm, drops], [5])

    def rates(optimizer, schedule, steps):
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    _, optimizer, schedule = make()
    expected = rates(optimizer, schedule, 9)
    model, optimizer, schedule = make()
    rates(optimizer, schedule, 3)
    extra = {"schedule": schedule.state_dict()}
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, extra=extra)
    model, optimizer, schedule = make()
    schedule.load_state_dict(checkpoint.load(path, model=model, optimizer=optimizer).extra["schedule"])
    assert rates(optimizer, schedule, 6) == expected[3:]


FLAGS = {"foreach": True, "capturable": True, "differentiable": True, "fused": True}


def test_flags_of_how_an_optimizer_computes_are_its_own(tmp_path):
    def make(**flags):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(nn.Linear(2, 2), FakeCommunicator())
        return model, torch.optim.AdamW(model.parameters(), **flags)

    model, optimizer = make()
    step(model, optimizer)
    optimizer.param_groups[0].update(FLAGS, maximize=True)  # as of a run on a device
    whole = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=whole)
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    loads = {
        "file": lambda m, o: checkpoint.load(path, model=m, optimizer=o),
        "state dict": lambda m, o: set_optimizer_state_dict(m, o, states, options=whole),
        "to load": lambda m, o: o.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(m, o, states)),
    }
    for name, load in loads.items():
        for flags in ({}, {"fused": True}, {"foreach": False}):
            model, optimizer = make(**flags)
            before = {key: optimizer.param_groups[0][key] for key in FLAGS}
            load(model, optimizer)
            assert {key: optimizer.param_groups[0][key] for key in FLAGS} == before, name
            assert optimizer.param_groups[0]["maximize"]  # what it computes is of the file
            step(model, optimizer)
            (state,) = optimizer.state.values()
            assert state["step"].item() == 2


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_keys_of_a_user_in_groups_come_back_with_their_types(tmp_path):
    keys = {"tags": ("a", "b"), "none": None, "empty": (), "nested": {"x": [1, (2, 3)], 3: 4}, "initial_lr": 0.1}

    def make(**held):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.param_groups[0].update(held)
        return model, optimizer

    model, optimizer = make(**keys)
    step(model, optimizer)
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    for held in ({}, keys, {"tags": ("z",), "none": 3, "nested": 1}):
        model, optimizer = make(**held)
        checkpoint.load(path, model=model, optimizer=optimizer)
        group = optimizer.param_groups[0]
        assert equal({key: group[key] for key in keys}, keys)
        assert group["betas"] == (0.9, 0.999)
        step(model, optimizer)
    optimizer.param_groups[0]["bytes"] = b"x"
    with pytest.raises(CheckpointError, match="param_groups of the optimizer hold arrays, or bytes"):
        checkpoint.save(tmp_path / "b.h5", model=model, optimizer=optimizer)


class Growing(nn.Linear):
    """Finds the size of a buffer later, as observers of quantisation do."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("count", torch.zeros(()))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.seen.resize_(state_dict[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_buffers_that_grow_are_saved_and_loaded_and_can_go_on_growing(tmp_path):
    for wrap in (lambda m: m, lambda m: FullyShardedDataParallel(m, FakeCommunicator())):
        saved, model = wrap(nn.Sequential(Growing())), wrap(nn.Sequential(Growing()))
        (seen, _), (other, count) = list(saved.buffers()), list(model.buffers())
        seen.resize_(3).copy_(torch.arange(3))
        path = checkpoint.save(tmp_path / "a.h5", model=saved, extra={"seen": seen})
        seen.resize_(5)
        count.fill_(7)
        checkpoint.load(path, model=model)
        assert next(model.buffers()) is other
        assert (other.tolist(), count.item()) == ([0, 1, 2], 0)
        other.resize_(5)


def test_a_module_that_refuses_another_shape_leaves_everything_as_it_was(tmp_path, same):
    path = checkpoint.save(tmp_path / "a.h5", model=nn.BatchNorm1d(3))  # it has a method of its own, too
    model = nn.BatchNorm1d(4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointMismatchError, match=r"running_mean is \[3\] float32 in the file, \[4\] float32"):
        checkpoint.load(path, model=model)
    assert same(model.state_dict(), before)


def test_a_model_of_observers_goes_on(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        model = quantization.prepare_qat(model.train())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, seeds):
        losses = []
        for seed in seeds:
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with warnings.catch_warnings(action="ignore"):  # torch's plans for it
        model, optimizer = make()
        train(model, optimizer, (1, 2))
        path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
        expected = train(model, optimizer, (3, 4))
        model, optimizer = make()
        checkpoint.load(path, model=model, optimizer=optimizer)
        assert train(model, optimizer, (3, 4)) == expected


class Odd(nn.Linear):
    def get_extra_state(self):
        return [object()]


def test_what_modules_keep_and_no_file_can_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"'0\._extra_state'\[0\] is a object, and nothing is pickled"):
        checkpoint.save(tmp_path / "a.h5", model=nn.Sequential(Odd(2, 2)))


@pytest.mark.parametrize(("names", "error"), [("a.*", TypeError), ([], ValueError)])
def test_names_that_are_no_list_of_names_are_refused(tmp_path, names, error):
    path = checkpoint.save(tmp_path / "a.h5", model=two_layers())
    with pytest.raises(error, match="names= is"):
        checkpoint.load(path, model=two_layers(), names=names)


def test_random_numbers_that_do_not_fit_change_nothing(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path / "a.h5", model=two_layers(1.0))
    model = two_layers(0.0)
    torch.manual_seed(3)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(3))

    def wrong(path):
        index = open_index(path)
        index.rng["numpy"] = index.rng["numpy"][:, :5]
        return index

    monkeypatch.setattr("hpcfsdp.checkpoint.loading.loader.open_index", wrong)
    with pytest.raises(CheckpointCorruptError, match="random number states do not fit"):
        checkpoint.load(path, model=model)
    assert model["a"].weight.unique().tolist() == [0]
    assert torch.equal(torch.rand(1), expected)


def test_what_an_optimizer_remembers_of_no_parameter_is_refused_and_left_alone(tmp_path):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters())
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    optimizer.state["global"] = {"k": 1}
    with pytest.raises(CheckpointError, match=r"state holds 'global', which belongs to no parameter"):
        checkpoint.save(tmp_path / "b.h5", model=model, optimizer=optimizer)
    checkpoint.load(path, model=model, optimizer=optimizer)
    assert optimizer.state["global"] == {"k": 1}


def test_within_summon_full_params_nothing_is_saved_or_loaded(tmp_path):
    model = FullyShardedDataParallel(nn.Linear(2, 3), process_group=FakeCommunicator())
    path = checkpoint.save(tmp_path / "a.h5", model=model)
    with FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(CheckpointError, match="whole within summon_full_params"):
            checkpoint.save(tmp_path / "b.h5", model=model)
        with pytest.raises(CheckpointError, match="whole within summon_full_params"):
            checkpoint.load(path, model=model)


class Remembering(nn.Linear):
    """A module with a state beside tensors."""

    def get_extra_state(self):
        return {"seen": (1, 2)}

    def set_extra_state(self, state):
        raise AssertionError("a state that nobody has saved")


WRONG = {
    "betas: null": ({"group": {"betas": None}}, r"group 0 has betas=None, the optimizer here \(0.9, 0.999\)"),
    "three betas": ({"group": {"betas": [0.9, 0.9, 0.9]}}, "group 0 has betas="),
    "betas of text": ({"group": {"betas": ["a", "b"]}}, "group 0 has betas="),
    "lr: text": ({"group": {"lr": "fast"}}, "group 0 has lr='fast', the optimizer here tensor"),
    "lr: a list": ({"group": {"lr": [1.0, 2.0]}}, "group 0 has lr="),
    "weight_decay: null": ({"group": {"weight_decay": None}}, "group 0 has weight_decay=None"),
    "weight_decay: {}": ({"group": {"weight_decay": {}}}, "group 0 has weight_decay={}"),
    "params: 7": ({"group": {"params": 7}}, "parameters are listed as 7"),
    "a state: 7": ({"module_states": {"_extra_state": 7}}, "state of the module '_extra_state'"),
    "types: text": ({"module_states": {"_extra_state": [{"seen": 1}, [[[9], "tuple"]]]}}, "state of the module"),
}


@pytest.mark.parametrize("what", WRONG)
def test_values_of_wrong_kinds_change_nothing(tmp_path, monkeypatch, same, what):
    def make():
        model = Remembering(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=True)
        model(torch.ones(1, 2)).sum().backward()
        return model, optimizer

    path = checkpoint.save(tmp_path / "a.h5", **dict(zip(("model", "optimizer"), make(), strict=True)))
    changes, message = WRONG[what]
    changes = dict(changes)

    def open_changed(*arguments):
        index = open_index(*arguments)
        if group := changes.get("group"):
            return dataclasses.replace(index, param_groups=[{**index.param_groups[0], **group}], group_types=())
        return dataclasses.replace(index, **changes)

    monkeypatch.setattr(loader, "open_index", open_changed)
    model, optimizer = make()
    before, numbers = snapshot(model, optimizer), torch.get_rng_state()
    with pytest.raises((CheckpointMismatchError, CheckpointCorruptError), match=message):
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert same(snapshot(model, optimizer), before) and torch.equal(torch.get_rng_state(), numbers)


def test_a_descriptor_that_fails_to_close_is_no_reason_not_to_load(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=two_layers(2.0))
    watched = Watched()
    with using(watched):
        checkpoint.load(path, model=two_layers())
    closes = [number for number, kind in enumerate(watched.calls) if kind == "close"]
    assert len(closes) > 1
    for number in closes:
        model = two_layers()
        with using(Failing(number, errno.EIO)):
            checkpoint.load(path, model=model)
        assert model["a"].weight[0, 0] == 2


class Halved(torch.Tensor):
    """Has its values in another tensor, as a quantized weight."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*(2 * arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_tensor_with_values_of_its_own_kind_is_refused_by_name(tmp_path, kind):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = None
    weight = Halved(torch.ones(2, 2))
    if kind == "buffer":
        del module[1].weight
        module[1].register_buffer("weight", weight)
    else:
        module[1].weight = nn.Parameter(weight, requires_grad=False)
    model = FullyShardedDataParallel(module, process_group=FakeCommunicator(), ignored_modules=[module[1]])
    model(torch.ones(2, 2)).sum().backward()
    assert type(model.state_dict()["1.weight"]) is Halved
    path, refusal = tmp_path / "file.h5", r"'1\.weight' is a .*Halved, a subclass of torch\.Tensor .* names="
    with pytest.raises(CheckpointError, match=refusal):
        checkpoint.save(path, model=model)
    checkpoint.save(path, model=model, names=["0.*"])
    checkpoint.load(path, model=model, names=["0.*"])
    checkpoint.save(path, model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=refusal):
        checkpoint.load(path, model=model)
