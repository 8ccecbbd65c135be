import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from hpcfsdp import wrap
from hpcfsdp.units.arguments import check_ties, choose_units, resolve_ignored
from hpcfsdp.units.own import Ignored
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


class Block(nn.Module):
    """Two layers."""

    def __init__(self, width=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Tree(nn.Module):
    """Blocks of two sizes, attention, containers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Block(), Block(), Block(8)])
        self.attention = nn.MultiheadAttention(4, 2)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})


def names(root, chosen):
    found = {module: name for name, module in root.named_modules()}
    return [found[module] for module in chosen]


def choose(policy, root=None):
    root = root or Tree()
    return names(root, choose_units(root, policy))


class Wrapped(nn.Module):
    """Stands for torch's FSDP."""

    def __init__(self, module, **_):
        super().__init__()
        self.inner = module


def choose_as_torch(policy):
    """What the wrapping of torch's FSDP makes of a function policy."""
    root = Tree()
    torch_wrap._recursive_wrap(root, policy, Wrapped, set(), set(), only_wrap_children=True)
    return {name.replace(".inner", "") for name, module in root.named_modules() if isinstance(module, Wrapped)}


def test_module_wrap_policy_chooses_the_classes():
    assert choose(wrap.ModuleWrapPolicy({Block})) == ["blocks.0", "blocks.1", "blocks.2"]


def test_inner_modules_come_before_outer_ones():
    found = choose(wrap.ModuleWrapPolicy({Block, nn.Linear, nn.ModuleList}))
    assert found[:4] == ["blocks.0.up", "blocks.0.down", "blocks.0", "blocks.1.up"]
    assert found.index("blocks") > found.index("blocks.2")


def test_the_root_is_never_chosen():
    block = Block()
    assert choose(wrap.ModuleWrapPolicy({Block}), block) == []
    assert choose(wrap.always_wrap_policy, block) == ["up", "down"]


def test_lambda_policy_chooses_by_its_function():
    policy = functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding))
    assert choose(policy) == ["embed"]


def test_a_plain_function_is_asked_whether_to_look_inside_and_whether_to_wrap():
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.Linear)

    assert choose(policy, Block(1)) == ["up", "down"]
    assert asked == [
        ("Block", True, 7),
        ("Linear", True, 4),
        ("Linear", False, 4),
        ("Linear", True, 3),
        ("Linear", False, 3),
    ]


def test_a_function_gets_the_number_of_elements_outside_of_units():
    counted = {}

    def policy(module, recurse, nonwrapped_numel):
        if not recurse:
            counted[type(module).__name__] = nonwrapped_numel
        return recurse or isinstance(module, nn.Linear)

    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.PReLU(5)))
    choose_units(root, policy)
    assert counted == {"Linear": 6, "PReLU": 5, "Sequential": 5}


def test_a_module_registered_twice_is_chosen_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, nn.Sequential(shared))
    assert list(choose_units(root, wrap.always_wrap_policy)).count(shared) == 1
    assert list(choose_units(root, wrap.ModuleWrapPolicy({nn.Linear}))) == [shared]


@pytest.mark.parametrize("minimum", [1, 40, 76, 150, 10_000])
def test_size_based_policy_chooses_what_torch_chooses(minimum):
    policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=minimum)
    found = choose(policy)
    assert set(found) == choose_as_torch(policy)
    assert len(found) == len(set(found))


def test_size_based_policy_gives_units_of_the_wanted_size():
    policy = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=76)
    assert choose(policy) == ["blocks.0", "blocks.1", "blocks.2.up", "blocks.2.down"]


def only_in_blocks(module, recurse, nonwrapped_numel):
    return isinstance(module, (Tree, nn.ModuleList)) if recurse else True


FUNCTIONS = {
    "always": wrap.always_wrap_policy,
    "lambda": functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (Block, nn.Linear))),
    "transformer": functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "odd": lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel % 2 == 1,
    "only_in_blocks": only_in_blocks,
    "never_look_inside": lambda module, recurse, nonwrapped_numel: not recurse,
}


@pytest.mark.parametrize("policy", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_function_policies_choose_what_torch_chooses(policy):
    assert set(choose(policy)) == choose_as_torch(policy) - {"heads.b.1"}  # which has no parameters


def test_custom_policy_gives_arguments_to_single_modules():
    policy = wrap.CustomPolicy(lambda m: {"sync_module_states": True} if isinstance(m, Block) else m is root.embed)
    root = Tree()
    chosen = choose_units(root, policy)
    assert names(root, chosen) == ["embed", "blocks.0", "blocks.1", "blocks.2"]
    assert list(chosen.values()) == [{}] + [{"sync_module_states": True}] * 3


@pytest.mark.parametrize("policy", [3, {Block}, "Block"])
def test_what_is_no_policy_is_named(policy):
    with pytest.raises(TypeError) as caught:
        choose_units(Tree(), policy)
    assert str(caught.value) == (f"auto_wrap_policy must be a function or one of torch's wrap policies, not {policy!r}")


def tied(first, second):
    """A model in which the weights at two places are one parameter."""
    root = nn.ModuleDict({"a": Block(), "b": Block()})
    places = dict(root.named_modules())
    places[second].weight = places[first].weight
    return root


def test_units_that_would_own_one_parameter_are_refused_by_both_names():
    root = tied("a.up", "b.up")
    with pytest.raises(ValueError) as caught:
        check_ties(root, {root["a"]: {}, root["b"]: {}})
    assert str(caught.value) == (
        "parameters 'a.up.weight' and 'b.up.weight' are tied but the policy puts them in different units: wrap the "
        "smallest module that holds both instead, or neither"
    )


def test_a_unit_tied_to_the_root_is_refused():
    root = tied("a.up", "b.up")
    with pytest.raises(ValueError, match=r"'a\.up\.weight' and 'b\.up\.weight' are tied"):
        check_ties(root, {root["b"]: {}})


def test_ties_within_one_unit_are_fine():
    root = tied("a.up", "b.up")
    check_ties(root, {})
    inside = nn.ModuleDict({"c": root})
    check_ties(inside, {root: {}})


def test_a_module_registered_in_two_units_is_refused():
    shared = nn.Linear(2, 2)
    root = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    with pytest.raises(ValueError, match=r"'a\.0\.weight' and 'b\.0\.weight' are tied"):
        check_ties(root, {root["a"]: {}, root["b"]: {}})


def test_a_shared_module_that_is_a_unit_itself_is_fine():
    shared = nn.Linear(2, 2)
    root = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    check_ties(root, {shared: {}})


def test_choosing_changes_nothing():
    root = Tree()
    before = copy.deepcopy(root.state_dict())
    choose_units(root, wrap.always_wrap_policy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in root.state_dict().items())


def test_the_policies_are_torchs_own():
    assert all(getattr(wrap, name) is getattr(torch_wrap, name) for name in wrap.__all__)
