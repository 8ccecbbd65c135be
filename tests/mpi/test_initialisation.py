"""Models that are initialised after they were sharded: as in one process, and what has no value is named."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import init

import hpcfsdp
from hpcfsdp.errors import EngineError, HpcfsdpError
from hpcfsdp.fsdp import FullyShardedDataParallel

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.filterwarnings("ignore:enable_nested_tensor")]

MODULES = {
    "linear": lambda: nn.Linear(7, 5),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=7),
    "bag": lambda: nn.EmbeddingBag(9, 4, padding_idx=0, mode="sum"),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True),
    "convolution": lambda: nn.ConvTranspose1d(3, 5, 3),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.LayerNorm(5), nn.RMSNorm(5), nn.GroupNorm(2, 4), nn.PReLU(3)),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
}
FUNCTIONS = {
    **{name: getattr(init, name) for name in dir(init) if name.endswith("_") and not name.startswith("_")},
    "constant_": lambda weight: init.constant_(weight, 2.0),
    "dirac_": lambda weight: init.dirac_(weight.unsqueeze(2)),
    "sparse_": lambda weight: init.sparse_(weight, 0.3),
    "data.normal_": lambda weight: weight.data.normal_(0, 0.02),
    "far trunc_normal_": lambda weight: init.trunc_normal_(weight, std=2.0, a=-0.5, b=0.5),
    "exponential_": lambda weight: weight.exponential_(),
    "random_": lambda weight: weight.random_(3, 9),
    "bernoulli_": lambda weight: weight.bernoulli_(0.3),
    "randn_like": lambda weight: weight.copy_(0.1 * torch.randn_like(weight)),
    "a row": lambda weight: init.ones_(weight)[2].zero_(),
    "the last row": lambda weight: init.ones_(weight).data[-1].fill_(3.0),
    "a row and a value": lambda weight: init.ones_(weight).__setitem__(4, 3.0),
    "an element": lambda weight: init.ones_(weight).__setitem__((4, 1), 3.0),
    "a column": lambda weight: init.ones_(weight)[:, 1].zero_(),
    "rows of one rank": lambda weight: init.ones_(weight)[:2].zero_(),
}
FUNCTIONS.pop("dirac_")  # needs three dimensions


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def reset(model):
    for module in model.modules():
        method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if method is not None:
            method()


def check(build, initialise, **options):
    """A model that is built, sharded and initialised has the values of one process, and so has what is drawn next."""
    plain = build()
    torch.manual_seed(5)
    with torch.no_grad():
        initialise(plain)
    follows = torch.rand(3)
    with torch.device("meta"):
        model = build()
    hpcfsdp.fully_shard(model, **options)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    with torch.no_grad():
        initialise(model)
    assert torch.equal(torch.rand(3), follows)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(
            whole(state[name]), value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", MODULES)
def test_modules_reset_their_parameters(world, name):
    check(MODULES[name], reset)


def test_functions_that_initialise(world):
    for name, function in FUNCTIONS.items():
        build = functools.partial(nn.Linear, 6, 7, bias=False)
        check(build, lambda model, function=function: function(model.weight))
        if name != "a column":
            check(
                build,
                lambda model, function=function: function(model.weight),
                shard_placement_fn=lambda _: Shard(1),
            )
    check(lambda: nn.Conv1d(6, 7, 3, bias=False), lambda model: init.dirac_(model.weight))


@pytest.mark.ranks(4)
def test_replicas_draw_alike(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("linear", "embedding"):
        check(MODULES[name], reset, mesh=mesh)


def test_units_inside_are_initialised_as_others(world):
    def build():
        model = nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.Linear(4, 4), nn.Linear(4, 9))
        return model if torch.empty(0).is_meta is False else shard_first(model)

    def shard_first(model):
        hpcfsdp.fully_shard(model[1])
        return model

    check(build, reset)


def test_rows_of_several_ranks_are_a_copy(world):
    model = hpcfsdp.fully_shard(nn.Linear(4, 5 * world.size))
    with torch.no_grad(), pytest.warns(UserWarning, match="takes rows of several ranks, along dimension 0"):
        model.weight[:-1].zero_()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert model.weight[1].shape == (4,)
        assert torch.equal(whole(model.weight[:, 1]), whole(model.weight)[:, 1])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("shift", torch.arange(6), persistent=False)

    def forward(self, x):
        return self.layer(x * self.scale + self.shift)


@pytest.mark.parametrize("left", ["scale", "shift", "layer.weight", None])
def test_what_has_no_value_is_named_before_the_first_forward(world, left):
    with torch.device("meta"):
        model = Scaled()
    hpcfsdp.fully_shard(model.layer)
    hpcfsdp.fully_shard(model)
    with pytest.raises(EngineError, match=r"'.*' .*is (still )?on the meta device"):
        model(torch.ones(1, 6))
    model.to_empty(device="cpu")
    values = {"scale": lambda: model.scale.fill_(2.0), "shift": lambda: model.shift.copy_(torch.arange(6))}
    values |= {
        "layer.weight": lambda: init.ones_(model.layer.weight),
        "layer.bias": lambda: init.ones_(model.layer.bias),
    }
    for name, give in values.items():
        if name != left:
            give()
    if left is not None:
        with pytest.raises(EngineError, match=f"'{left.removeprefix('layer.')}' has memory, but no value"):
            model(torch.ones(1, 6))
        values[left]()
    assert torch.equal(model(torch.ones(1, 6)), 1 + torch.arange(2.0, 8.0).sum().expand(1, 6))


def test_a_buffer_that_stays_on_the_meta_device_is_named(world):
    with torch.device("meta"):
        model = Scaled()
    hpcfsdp.fully_shard(model)
    model.layer.to_empty(device="cpu")
    init.ones_(model.layer.weight), init.ones_(model.layer.bias)
    with pytest.raises(EngineError, match=r"'scale' is still on the meta device"):
        model(torch.ones(1, 6))


@pytest.mark.parametrize("where", ["everywhere", "elsewhere"])
def test_rank_0_has_to_have_values_to_synchronise(world, where):
    """Rank 0's values are those of all; a rank that gets them needs none."""
    with torch.device("cpu" if where == "elsewhere" and world.rank == 0 else "meta"):
        net = Scaled()
    arguments = {
        "sync_module_states": True,
        "param_init_fn": lambda module: module.to_empty(device="cpu", recurse=False),
    }
    if where == "everywhere":
        with pytest.raises((ValueError, HpcfsdpError), match="did not initialise"):
            FullyShardedDataParallel(net, **arguments)
        return
    torch.manual_seed(0)
    model = FullyShardedDataParallel(net, **arguments)
    assert not model(torch.ones(1, 6)).isnan().any()
