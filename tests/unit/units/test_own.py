from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from hpcfsdp.fsdp import MixedPrecision
from hpcfsdp.units.own import UNIT, Ignored, UnitOptions, check_device, label, move_buffers, own_params
from tests.unit.units.units import mark_as_unit


class Stop(nn.Module):
    """Stands for a unit that is wrapped already."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("inner", torch.zeros(1))
        mark_as_unit(self)


class Model(nn.Module):
    """One of everything."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.register_parameter("missing", None)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(2, 1).requires_grad_(False)
        self.short = nn.Linear(2, 1, dtype=torch.float16)
        self.stop = Stop()
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_parameters_are_grouped_by_dtype_and_requires_grad_in_order_of_the_model():
    found = own_params([Model()])
    assert [[entry.fqn for entry in group] for group in found.groups] == [
        ["own", "first.weight", "first.bias", "second.bias"],
        ["frozen.weight", "frozen.bias"],
        ["short.weight", "short.bias"],
    ]


def test_a_tied_parameter_is_found_once_with_all_of_its_names_and_places():
    model = Model()
    entry = own_params([model]).groups[0][1]
    assert (entry.fqn, entry.aliases) == ("first.weight", ("second.weight",))
    assert {(id(module), name) for module, name in entry.places} == {
        (id(model.first), "weight"),
        (id(model.second), "weight"),
    }


def test_a_module_registered_twice_has_its_parameters_under_both_names():
    shared = nn.Linear(2, 2)
    group = own_params([nn.ModuleDict({"a": shared, "b": shared})]).groups[0]
    assert [(entry.fqn, entry.aliases) for entry in group] == [("a.weight", ("b.weight",)), ("a.bias", ("b.bias",))]
    for entry in group:
        entry.deregister()
    assert list(shared.parameters()) == []


def test_all_buffers_but_those_of_wrapped_units_are_found():
    model = Model()
    found = own_params([model]).buffers
    assert [id(buffer) for buffer in found.values()] == [id(model.kept), id(model.scratch)]


def test_a_deregistered_parameter_stays_an_attribute_at_every_place():
    model = Model()
    weight = model.first.weight
    for group in own_params([model]).groups:
        for entry in group:
            entry.deregister()
    assert model.first.weight is weight
    assert model.second.weight is weight
    assert [name for name, _ in model.named_parameters()] == ["stop.layer.weight", "stop.layer.bias"]


def test_a_parameter_that_another_unit_has_taken_is_named():
    model = Model()
    for entry in own_params([model.first]).groups[0]:
        label(entry.param, entry.fqn, entry.shape)
    with pytest.raises(ValueError) as caught:
        own_params([nn.Sequential(model.second)])
    assert str(caught.value) == (
        "parameter '0.weight' is tied to 'weight', which belongs to a unit that is already wrapped: wrap the smallest "
        "module that holds both instead"
    )


def test_parameters_of_modules_that_stay_in_full_precision_are_grouped_apart():
    model = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 1))
    lowered = MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])
    groups = own_params([model], UnitOptions(mixed_precision=lowered)).groups
    assert [[entry.fqn for entry in group] for group in groups] == [
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["1.weight", "1.bias"],
    ]


def test_a_parameter_is_hidden_and_shown_wherever_it_is_registered():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].weight = model[0].weight
    weight = model[0].weight
    found = own_params([model])
    for _ in range(2):
        for entry in found.entries:
            entry.deregister()
        assert list(model.parameters()) == []
        assert model[0].weight is model[1].weight is weight
        for entry in found.entries:
            entry.register()
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
        assert model[1]._parameters["weight"] is weight


def test_parameters_on_several_devices_are_named_with_theirs():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, device="meta")})
    with pytest.raises(ValueError) as caught:
        own_params([model])
    assert str(caught.value) == (
        "the parameters of one unit are on several devices ('a.bias' on cpu, 'b.bias' on meta): move them to one, or "
        "pass device_id"
    )


MINE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "wanted", "what"),
    [
        ({OTHER: "0.weight"}, None, "parameter '0.weight' of GPT is on"),
        ({OTHER: "0.weight"}, MINE, "parameter '0.weight' of GPT is on"),
        ({}, OTHER, "device_id of GPT is"),
    ],
)
def test_parameters_on_the_device_of_another_rank_are_refused(devices, wanted, what):
    ranks = SimpleNamespace(device=MINE, rank=1, size=2, world_ranks=(4, 6))
    with pytest.raises(ValueError, match=rf"^rank 6: {what} cuda:1, but .* on cuda:0: build .*world\.device"):
        check_device("GPT", devices, wanted, ranks)
    check_device("GPT", {MINE: "0.weight", torch.device("cpu"): "1.weight"}, torch.device("cuda"), ranks)


class Codes(torch.Tensor):
    """As quantized weights: the values are not those in memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """A parameter with a class of its own, and the values of a plain one."""


@pytest.mark.parametrize("what", ["parameter", "frozen parameter", "buffer", "fake parameter"])
def test_tensors_of_other_classes_are_refused_by_name_unless_they_are_ignored(what):
    model = nn.Sequential(nn.Linear(2, 2))
    if what == "buffer":
        model[0].register_buffer("codes", torch.ones(2).as_subclass(Codes))
    elif what == "fake parameter":
        with FakeTensorMode():
            model[0].codes = nn.Parameter(torch.ones(2))
    else:
        model[0].codes = nn.Parameter(torch.ones(2).as_subclass(Codes), requires_grad=what == "parameter")
    found = type(model[0].codes)
    with pytest.raises(NotImplementedError, match=rf"'0\.codes' is a {found.__module__}\.{found.__name__}, a subclass"):
        own_params([model])
    kept = frozenset([model[0].codes])
    own_params([model], UnitOptions(ignored=Ignored(buffers=kept) if what == "buffer" else Ignored(params=kept)))


def test_parameters_that_only_have_a_name_of_their_own_are_sharded():
    model = nn.Linear(2, 2)
    model.weight = Named(torch.ones(2, 2))
    assert [entry.fqn for entry in own_params([model]).entries] == ["weight", "bias"]


class Wrapped(nn.Module):
    """Stands for a unit that is wrapped already."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("inner", torch.zeros(1))
        mark_as_unit(self)


class Metric(nn.Module):
    """Has an `_apply` of its own without `recurse`, as torchmetrics has it, and a tensor unknown to torch."""

    def __init__(self):
        super().__init__()
        self.state = torch.zeros(2)

    def _apply(self, fn):
        self.state = fn(self.state)
        return super()._apply(fn)


def test_modules_that_move_in_a_way_of_their_own():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Metric(), nn.LSTM(2, 2)), nn.Sequential(Wrapped(), Metric()))
    move_buffers(model, torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*model[0].buffers(), model[1][0].state, model[2][1].state))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model[2][0].buffers()))


class MetricAround(Metric):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layer.__dict__[UNIT] = object()


def test_modules_that_move_in_a_way_of_their_own_around_modules_of_fully_shard():
    model = MetricAround()
    move_buffers(model, torch.device("meta"))
    assert model.state.is_meta
    assert not model.layer.weight.is_meta


def test_gradients_stay_with_their_parameters():
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    move_buffers(layer, torch.device("meta"))
    assert not layer.weight.grad.is_meta
