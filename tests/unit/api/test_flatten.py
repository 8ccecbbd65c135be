import pytest
import torch
from torch import nn

from hpcfsdp.api.flatten import check_same_model, own_params
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DisagreementError
from hpcfsdp.flat.layout import FlatLayout


class Stop(nn.Module):
    """Stands for a unit that is wrapped already."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("inner", torch.zeros(1))


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
    found = own_params(Model(), stop_at=Stop)
    assert [[entry.fqn for entry in group] for group in found.groups] == [
        ["own", "first.weight", "first.bias", "second.bias"],
        ["frozen.weight", "frozen.bias"],
        ["short.weight", "short.bias"],
    ]


def test_a_tied_parameter_is_found_once_with_all_of_its_names_and_places():
    model = Model()
    entry = own_params(model, stop_at=Stop).groups[0][1]
    assert (entry.fqn, entry.aliases) == ("first.weight", ("second.weight",))
    assert {(id(module), name) for module, name in entry.places} == {
        (id(model.first), "weight"),
        (id(model.second), "weight"),
    }


def test_a_module_registered_twice_has_its_parameters_under_both_names():
    shared = nn.Linear(2, 2)
    group = own_params(nn.ModuleDict({"a": shared, "b": shared}), stop_at=Stop).groups[0]
    assert [(entry.fqn, entry.aliases) for entry in group] == [("a.weight", ("b.weight",)), ("a.bias", ("b.bias",))]
    for entry in group:
        entry.deregister()
    assert list(shared.parameters()) == []


def test_all_buffers_but_those_of_wrapped_units_are_found():
    model = Model()
    found = own_params(model, stop_at=Stop).buffers
    assert [id(buffer) for buffer in found] == [id(model.kept), id(model.scratch)]


def test_a_deregistered_parameter_stays_an_attribute_at_every_place():
    model = Model()
    weight = model.first.weight
    for group in own_params(model, stop_at=Stop).groups:
        for entry in group:
            entry.deregister()
    assert model.first.weight is weight
    assert model.second.weight is weight
    assert [name for name, _ in model.named_parameters()] == ["stop.layer.weight", "stop.layer.bias"]


def test_a_parameter_that_another_unit_has_taken_is_named():
    model = Model()
    for entry in own_params(model.first, stop_at=Stop).groups[0]:
        entry.take()
    with pytest.raises(ValueError) as caught:
        own_params(nn.Sequential(model.second), stop_at=Stop)
    assert str(caught.value) == (
        "parameter '0.weight' is tied to 'weight', which belongs to a unit that is wrapped already: wrap the smallest "
        "module that holds both instead"
    )


def test_parameters_of_modules_that_stay_in_full_precision_are_grouped_apart():
    model = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 1))
    groups = own_params(model, stop_at=Stop, apart=(nn.LayerNorm,)).groups
    assert [[entry.fqn for entry in group] for group in groups] == [
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["1.weight", "1.bias"],
    ]


def test_a_parameter_is_hidden_and_shown_wherever_it_is_registered():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].weight = model[0].weight
    weight = model[0].weight
    found = own_params(model, stop_at=Stop)
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
        own_params(model, stop_at=Stop)
    assert str(caught.value) == (
        "the parameters of one unit lie on several devices ('a.bias' on cpu, 'b.bias' on meta): move them to one, or "
        "pass device_id"
    )


def layouts(*params, dtype=torch.float32):
    return [FlatLayout.plan([(name, shape, ()) for name, shape in params], dtype, 2)]


def results_of(run_ranks, size, usual, other):
    """What comparing models (layouts, and whether they are trained) gives on each rank; the last has `other`."""

    def check(comm):
        check_same_model(comm, *(other if comm.rank == size - 1 else usual), range(size))

    return run_ranks(size, check)


def test_equal_models_agree(run_ranks):
    usual = layouts(("w", (2, 3))), [True]
    check_same_model(FakeCommunicator(), *usual, [0])
    assert results_of(run_ranks, 3, usual, usual) == [None] * 3


@pytest.mark.parametrize(
    ("other", "trained", "text"),
    [
        (layouts(("w", (2, 3)), ("b", (4,))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has b (4,) "),
        (layouts(("w", (2, 3)), ("c", (3,))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has c (3,) "),
        (layouts(("w", (2, 3))), True, "1 rank 0 has b (3,) torch.float32 trained, rank 2 has nothing"),
        (
            layouts(("w", (2, 3)), ("b", (3,)), dtype=torch.float64),
            True,
            "0 rank 0 has w (2, 3) torch.float32 trained, rank 2 has w (2, 3) torch.float64 trained",
        ),
        (
            layouts(("w", (2, 3)), ("b", (3,))),
            False,
            "0 rank 0 has w (2, 3) torch.float32 trained, rank 2 has w (2, 3) torch.float32 with requires_grad=False",
        ),
    ],
    ids=["shape", "name", "missing", "dtype", "requires_grad"],
)
def test_the_first_difference_between_models_is_named_on_every_rank(run_ranks, other, trained, text):
    usual = layouts(("w", (2, 3)), ("b", (3,))), [True]
    for error in results_of(run_ranks, 3, usual, (other, [trained])):
        assert type(error) is DisagreementError
        assert str(error).startswith(f"ranks wrap different models: as parameter {text}")


def test_models_that_tie_other_names_are_told_apart(run_ranks):
    tied = [FlatLayout.plan([("w", (2,), ("v",))], torch.float32, 2)]
    for error in results_of(run_ranks, 2, (layouts(("w", (2,))), [True]), (tied, [True])):
        assert type(error) is DisagreementError
        assert str(error) == "ranks wrap different models: rank 0 and rank 1 differ in tied names"
