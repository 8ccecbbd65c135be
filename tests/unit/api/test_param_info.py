"""What parameters are without sharding, and groups of an optimizer by that."""

import warnings

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)])
        self.norm = nn.LayerNorm(4)
        self.left = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(original, rank=0, size=1):
    torch.manual_seed(0)
    net = Net()
    return FullyShardedDataParallel(
        net,
        FakeCommunicator(rank, size),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        ignored_states=[net.left, net.head],
        use_orig_params=original,
    )


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 3)])
def test_names_and_shapes_are_those_of_the_plain_model(original, rank, size):
    plain, model = Net(), make(original, rank, size)
    expected = {name: (param.shape, param.dtype) for name, param in plain.named_parameters()}
    infos = hpcfsdp.param_info(model)
    assert {name: (info.shape, info.dtype) for name, info in infos.items()} == expected
    assert list(infos) == list(expected)
    assert {info.param for info in infos.values()} == set(model.parameters())
    assert [info.numel for info in infos.values()] == [param.numel() for param in plain.parameters()]
    assert [info.requires_grad for info in infos.values()] == [param.requires_grad for param in plain.parameters()]


def test_a_plain_module_has_its_own_parameters():
    plain = Net()
    infos = hpcfsdp.param_info(plain)
    assert {name: info.param for name, info in infos.items()} == dict(plain.named_parameters())
    assert infos["norm.weight"].name == "norm.weight"


def test_groups_by_whole_shapes():
    model = make(True)
    decayed, others = hpcfsdp.param_groups(model, weight_decay=0.1)
    infos = hpcfsdp.param_info(model)
    names = {info.param: name for name, info in infos.items()}
    assert [names[param] for param in decayed["params"]] == ["embed.weight", "blocks.0.weight", "left.weight"]
    assert [names[param] for param in others["params"]] == ["blocks.0.bias", "norm.weight", "norm.bias", "left.bias"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    own, rest = hpcfsdp.param_groups(model, 0.1, lambda info: info.name.startswith("norm"))
    assert (len(own["params"]), len(rest["params"])) == (2, 5)


def test_parts_of_one_flat_parameter_are_in_one_group():
    with pytest.raises(EngineError, match=r"'blocks.0.weight' and 'blocks.0.bias' belong to different groups but are"):
        hpcfsdp.param_groups(make(False), weight_decay=0.1)
    decayed, others = hpcfsdp.param_groups(make(False), 0.1, lambda info: True)
    assert (len(decayed["params"]), others["params"]) == (5, [])


def step(model, groups):
    model(torch.tensor([1, 2])).sum().backward()
    torch.optim.AdamW(groups, lr=0.1).step()


def test_groups_by_the_dimensions_of_shards_are_a_warning():
    model = make(True, 1, 3)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]
    with pytest.warns(UserWarning, match=r"applies no weight decay to any sharded matrix .1 of them .*param_info"):
        step(model, groups)


@pytest.mark.parametrize("original", [False, True])
def test_other_groups_are_no_warning(original):
    model = make(original)
    params = [param for param in model.parameters() if param.requires_grad]
    for groups in (
        params,
        [{"params": params, "weight_decay": 0.0}],
        [{"params": params[1:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}],
        [{"params": params[-1:], "weight_decay": 0.1}, {"params": params[:-1], "weight_decay": 0.0}],
    ):
        step(model, groups)
    if original:
        step(model, hpcfsdp.param_groups(model, weight_decay=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Net(), [{"params": [], "weight_decay": 0.1}, {"params": Net().parameters(), "weight_decay": 0.0}])
