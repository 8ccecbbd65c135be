import pytest
import torch
from torch import nn

from hpcfsdp.units.arguments import resolve_ignored
from hpcfsdp.units.options import Ignored
from tests.unit.units.units import mark_as_unit


class Unit(nn.Module):
    """Stands for the wrapper."""

    def __init__(self, inner, ignored=None):
        super().__init__()
        self.inner = inner
        mark_as_unit(self, ignored)


class Gate(nn.Module):
    """Two layers, a parameter and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))


class Model(nn.Module):
    """A gate among others."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 2)
        self.gate = Gate()
        self.down = nn.Linear(2, 2)


def resolve(root, modules=None, states=None):
    return resolve_ignored(root, modules, states)


def test_nothing_is_ignored_by_default():
    for nothing in (None, [], iter(())):
        assert resolve(Model(), modules=nothing) == resolve(Model(), states=nothing) == Ignored()


@pytest.mark.parametrize("argument", ["modules", "states"])
@pytest.mark.parametrize("kind", [list, tuple, set, iter, nn.ModuleList])
def test_a_module_is_ignored_with_all_inside_of_it(argument, kind):
    model = Model()
    ignored = resolve(model, **{argument: kind([model.gate])})
    assert ignored
    assert ignored.modules == set(model.gate.modules())
    assert ignored.params == set(model.gate.parameters())
    assert ignored.buffers == set(model.gate.buffers())
    assert len(ignored.buffers) == 4


def test_a_parameter_is_ignored_alone():
    model = Model()
    model.tied = model.up.weight
    ignored = resolve(model, states=(param for param in [model.up.weight]))
    assert (ignored.modules, ignored.params, ignored.buffers) == (set(), {model.up.weight}, set())


def test_modules_and_parameters_from_elsewhere_are_welcome():
    elsewhere = Model()
    assert resolve(Model(), modules=[elsewhere.gate]).params == set(elsewhere.gate.parameters())
    assert resolve(Model(), states=[elsewhere.up.bias]).params == {elsewhere.up.bias}


def test_a_unit_inside_of_an_ignored_module_remains_a_unit():
    model = Model()
    inner = model.gate.layers
    model.gate.layers = Unit(inner)
    ignored = resolve(model, modules=[model.gate])
    assert (ignored.modules, ignored.params, ignored.buffers) == ({model.gate}, {model.gate.scale}, {model.gate.count})


def test_what_units_inside_ignore_is_ignored_by_the_outer_one():
    model = Model()
    own = resolve(model.gate, modules=[model.gate.layers])
    model.gate = Unit(model.gate, own)
    assert resolve(model) == own
    both = resolve(model, states=[model.up.weight])
    assert both == Ignored(own.modules, own.params | {model.up.weight}, own.buffers)
    again = resolve(model, modules=[model.gate.inner.layers, model.up])
    assert again.modules == own.modules | {model.up}
    assert resolve(model, states=[*own.params]).params == own.params


def test_what_the_outer_one_ignores_is_ignored_inside():
    model = Model()
    outer = resolve(model, modules=[model.gate.layers])
    assert resolve(model.gate, states=outer) == outer


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"modules": [], "states": []},
            ValueError,
            "ignored_modules and ignored_states were both given: pass ignored_states alone",
        ),
        ({"modules": 3}, TypeError, "ignored_modules must be a list of torch.nn.Module, not int"),
        (
            {"states": nn.Linear(1, 1)},
            TypeError,
            "ignored_states must be a list of torch.nn.Parameter or torch.nn.Module, not Linear",
        ),
        (
            {"modules": [nn.ReLU(), "gate"]},
            TypeError,
            "ignored_modules[1] must be a torch.nn.Module, not 'gate' of type str",
        ),
        (
            {"modules": [nn.Parameter(torch.ones(1))]},
            TypeError,
            "ignored_modules[0] must be a torch.nn.Module, not one of type Parameter",
        ),
        (
            {"states": torch.ones(2)},
            TypeError,
            "ignored_states[0] must be a torch.nn.Parameter or torch.nn.Module, not one of type Tensor",
        ),
        (
            {"modules": [nn.Linear]},
            TypeError,
            "ignored_modules[0] must be a torch.nn.Module, not <class 'torch.nn.modules.linear.Linear'> of type type",
        ),
        (
            {"states": [nn.Parameter(torch.ones(1)), nn.ReLU()]},
            ValueError,
            "ignored_states holds 1 module(s) and 1 parameter(s): give either modules or parameters",
        ),
    ],
)
def test_wrong_entries_are_named(arguments, error, message):
    with pytest.raises(error) as caught:
        resolve(Model(), **arguments)
    assert str(caught.value) == message


def test_the_module_itself_is_ignored_with_a_warning():
    model = Model()
    with pytest.warns(UserWarning, match="the Model to be wrapped is among the ignored modules itself"):
        ignored = resolve(model, modules=[model])
    assert ignored.params == set(model.parameters())


def test_units_cannot_be_ignored():
    model = Model()
    model.gate = Unit(model.gate)
    with pytest.raises(ValueError, match="an ignored Unit is already sharded"):
        resolve(model, modules=[model.gate])


def test_what_is_sharded_already_stays_so_with_a_warning():
    model = Model()
    model.gate = Unit(model.gate)
    with pytest.warns(UserWarning, match="parameters .the first: a Sequential. are already sharded by a unit inside"):
        assert resolve(model, modules=[model.gate.inner.layers, model.up]).modules == {model.up}
    with pytest.warns(UserWarning, match=r"the first: a parameter of shape \(2,\)\) are already sharded"):
        assert resolve(model, states=[model.gate.inner.scale, model.up.bias]).params == {model.up.bias}
