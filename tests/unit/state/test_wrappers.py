import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.model import model_tensors, stateful_modules
from hpcfsdp.state.wrappers import CleanNames


class Around(nn.Module):
    """A wrapper of a kind that nobody has heard of."""

    def __init__(self, module, **others):
        super().__init__()
        self.module = module
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.module(x)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"seen": 1}


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def names(model):
    return [tensor.name for tensor in model_tensors(model)]


def sharded(module, **options):
    return FullyShardedDataParallel(module, FakeCommunicator(), **options)


PLAIN = names(net())


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        Around,
        lambda module: Around(Around(module)),
        lambda module: torch.compile(Around(module), backend="eager"),
        lambda module: nn.DataParallel(torch.compile(module, backend="eager")),
        lambda module: Around(sharded(module)),
        lambda module: sharded(Around(module)),
        lambda module: sharded(Around(module), use_orig_params=True),
        lambda module: torch.compile(sharded(nn.DataParallel(module)), backend="eager"),
    ],
)
def test_names_are_those_of_the_model_whatever_stands_around_it(wrap):
    assert sorted(names(wrap(net()))) == sorted(PLAIN)


def test_an_average_has_its_models_names_and_a_count():
    assert names(AveragedModel(net())) == ["n_averaged", *PLAIN]


def test_wrappers_that_are_known_are_none_inside_of_a_model_either():
    model = nn.ModuleDict({"model": nn.DataParallel(net()), "average": AveragedModel(net())})
    expected = [f"model.{name}" for name in PLAIN] + ["average.n_averaged"] + [f"average.{name}" for name in PLAIN]
    assert names(model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(Around(nn.Linear(1, 1))), ["0.module.weight", "0.module.bias"]),
        (Around(nn.Linear(1, 1), head=nn.Linear(1, 1, bias=False)), ["module.weight", "module.bias", "head.weight"]),
        (Around(nn.Linear(1, 1), gain=nn.Parameter(torch.ones(1))), ["gain", "module.weight", "module.bias"]),
        (nn.ModuleDict({"inner": nn.Linear(1, 1)}), ["inner.weight", "inner.bias"]),
        (nn.DataParallel(nn.Sequential(Around(nn.Linear(1, 1)))), ["0.module.weight", "0.module.bias"]),
    ],
    ids=["inside", "with another child", "with a parameter", "under another name", "inside of a wrapped one"],
)
def test_a_models_own_child_called_module_stays_in_its_names(model, expected):
    assert names(model) == expected


def test_states_of_modules_have_the_models_names_too():
    assert list(stateful_modules(Around(nn.Sequential(Stateful(1, 1))))) == ["0._extra_state"]


def test_a_name_has_the_models_parts_that_look_like_a_wrappers():
    name_of = CleanNames.of(nn.DataParallel(nn.Sequential(Around(nn.Linear(1, 1)))))
    assert name_of("module.0", "module.weight") == "0.module.weight"
    assert name_of("", "module.0.module.weight") == "0.module.weight"
    assert name_of("", "other.module.weight") == "other.module.weight"
