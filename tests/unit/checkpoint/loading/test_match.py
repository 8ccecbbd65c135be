"""Files of other programs, whose names have those of a wrapper in front."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def train(model, optimizer):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Pair(nn.Module):
    """A model of which a part is called as wrappers call their child."""

    def __init__(self):
        super().__init__()
        self.module, self.other = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.fixture
def wrapped_file(tmp_path):
    """A model, its optimizer, and the file of both, as DistributedDataParallel names what is in it."""
    model = net()
    wrapped = nn.DataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.named_parameters())
    train(wrapped, optimizer)
    state = optimizer.state_dict()
    names = state["param_groups"][0]["param_names"]
    state["state"] = {names[key]: value for key, value in state["state"].items()}
    state["param_groups"][0]["params"] = names
    torch.save({"model": wrapped.state_dict(), "optimizer": state, "step": 3}, tmp_path / "wrapped.pt")
    return model, optimizer, import_checkpoint(tmp_path / "wrapped.pt", tmp_path / "wrapped.h5").path


@pytest.mark.parametrize("wrap", [lambda module: module, nn.DataParallel])
def test_model_and_optimizer_load_from_a_file_of_a_wrapped_model(wrapped_file, wrap, same):
    model, optimizer, path = wrapped_file
    other = wrap(net())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=5.0)
    checkpoint.load(path, model=other, optimizer=other_optimizer)
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, its_optimizer)
    assert same(list(other.parameters()), list(model.parameters()))


@pytest.mark.parametrize("pattern", ["0.*", "module.0.*", "model/module.0.*"])
def test_patterns_are_names_in_the_model_or_in_the_file(wrapped_file, pattern):
    model, _, path = wrapped_file
    other = net()
    before = other[1].weight.clone()
    checkpoint.load(path, model=other, names=[pattern])
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[1].weight, before)


def test_differences_are_reported_by_the_models_names(wrapped_file):
    _, _, path = wrapped_file
    with pytest.raises(CheckpointMismatchError, match=r"differing: 1.weight is \[1, 3\](.|\n)*file: 1.b"):
        checkpoint.load(path, model=nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 1, bias=False)))


def test_a_part_called_module_is_no_wrapper(tmp_path):
    model, other = Pair(), Pair()
    path = checkpoint.save(tmp_path / "whole.h5", model=model)
    checkpoint.load(path, model=other, names=["module.*"])
    assert torch.equal(other.module.weight, model.module.weight)
    assert not torch.equal(other.other.weight, model.other.weight)


def test_the_average_in_a_file_loads_where_there_is_no_average(tmp_path):
    path = checkpoint.save(tmp_path / "average.h5", model=AveragedModel(net()))
    assert checkpoint.load(path, model=net()).unexpected == ("n_averaged",)
    plain = checkpoint.save(tmp_path / "plain.h5", model=net())
    with pytest.raises(CheckpointMismatchError, match="missing in the file: n_averaged"):
        checkpoint.load(plain, model=AveragedModel(net()))


def adapted():
    """A model that is frozen but for adapters, and an optimizer of these."""
    model = nn.ModuleDict({"base": nn.Linear(2, 2), "lora_A": nn.Linear(2, 1), "lora_B": nn.Linear(1, 2)})
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    return model, optimizer


def train_adapters(model, optimizer):
    (model["base"](torch.ones(1, 2)) + model["lora_B"](model["lora_A"](torch.ones(1, 2)))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_adapters_alone_are_saved_and_loaded_with_their_optimizer(tmp_path, same):
    model, optimizer = adapted()
    train_adapters(model, optimizer)
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, names=["lora_*"], step=7)
    index = checkpoint.open_index(path)
    assert [name for name in index.tensors if name.startswith("model/")] == [
        f"model/lora_{part}.{kind}" for part in "AB" for kind in ("weight", "bias")
    ]
    other, other_optimizer = adapted()
    before = other["base"].weight.clone()
    torch.manual_seed(5)
    info = checkpoint.load(path, model=other, optimizer=other_optimizer, names=["lora_*"])
    assert (info.step, info.missing, info.unexpected) == (7, (), ())
    assert torch.equal(other["base"].weight, before)
    other["base"].load_state_dict(model["base"].state_dict())
    drawn = torch.rand(2)
    checkpoint.load(path, model=other, optimizer=other_optimizer, names=["lora_*"])
    assert torch.equal(drawn, torch.rand(2))  # a training goes on: also with its random numbers
    for each in ((model, optimizer), (other, other_optimizer)):
        train_adapters(*each)
    assert same(list(other.parameters()), list(model.parameters()))


def test_a_file_of_a_part_raises_where_all_is_wanted(tmp_path):
    model, optimizer = adapted()
    path = checkpoint.save(tmp_path / "a.h5", model=model, names=["lora_*"])
    with pytest.raises(CheckpointMismatchError, match=r"holds only a part of the model: load it with names= (.|\n)*b"):
        checkpoint.load(path, model=model)
    assert checkpoint.load(path, model=model, strict=False).missing == ("base.bias", "base.weight")
    with pytest.raises(CheckpointMismatchError, match="holds no optimizer"):
        checkpoint.load(path, model=model, optimizer=optimizer, names=["lora_*"])


def test_the_optimizers_state_of_a_part_goes_with_it(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(
        [{"params": model["b"].parameters()}, {"params": model["a"].parameters(), "lr": 0.5}], lr=0.1, momentum=0.9
    )
    model["a"](model["b"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    index = checkpoint.open_index(checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, names=["a.*"]))
    assert {name for name in index.tensors if name.startswith("optim/")} == {
        f"optim/state/a.{kind}/momentum_buffer" for kind in ("weight", "bias")
    }
    assert [(group["params"], group["lr"]) for group in index.param_groups] == [(["a.weight", "a.bias"], 0.5)]
    alone = torch.optim.SGD(model["b"].parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="steps no parameter that names= chooses"):
        checkpoint.save(tmp_path / "b.h5", model=model, optimizer=alone, names=["a.*"])


def test_a_pattern_that_matches_nothing_is_reported_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tensor of the model matches '0\.wieght'; did you mean '0\.weight'"):
        checkpoint.save(tmp_path / "a.h5", model=net(), names=["1.*", "0.wieght"])
    for names, error in (("0.*", TypeError), ([], ValueError), ([1], TypeError)):
        with pytest.raises(error, match="names= is"):
            checkpoint.save(tmp_path / "a.h5", model=net(), names=names)
    assert list(tmp_path.iterdir()) == []


def test_a_manager_of_a_part(tmp_path):
    model, optimizer = adapted()
    with checkpoint.CheckpointManager(tmp_path, names=["lora_*"]) as manager:
        manager.save(3, model=model, optimizer=optimizer)
        other, other_optimizer = adapted()
        assert manager.load_latest(model=other, optimizer=other_optimizer).step == 3
    assert torch.equal(other["lora_A"].weight, model["lora_A"].weight)
