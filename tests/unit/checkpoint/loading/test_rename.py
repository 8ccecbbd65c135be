"""Files whose names, or dtypes, are not the model's."""

import re

import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.loading.match import renaming
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError


def trunk():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Named(nn.Module):
    def __init__(self, name, module):
        super().__init__()
        self.add_module(name, module)


class Stateful(nn.Linear):
    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    scale = 1.0


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a trained model under a name, with its optimizer."""
    torch.manual_seed(0)
    model = Named("backbone", trunk())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.backbone(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    return tmp_path / "a.h5", model, optimizer


def moments(optimizer):
    return [state[key] for state in optimizer.state.values() for key in sorted(state)]


@pytest.mark.parametrize(
    "rename",
    [
        {"backbone.*": "encoder.*"},
        {"x.*": "y.*", "backbone.*": "encoder.*"},
        lambda n: n.replace("backbone", "encoder"),
    ],
)
def test_a_model_and_its_optimizer_get_other_names(saved, rename):
    path, model, optimizer = saved
    other = Named("encoder", trunk())
    new = torch.optim.AdamW(other.parameters(), lr=0.5)
    checkpoint.load(path, model=other, optimizer=new, rename=rename)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)
    torch.testing.assert_close(list(other.buffers()), list(model.buffers()), rtol=0, atol=0)
    torch.testing.assert_close(moments(new), moments(optimizer), rtol=0, atol=0)
    assert new.param_groups[0]["lr"] == 0.1


def test_a_part_by_names_of_either_side(saved):
    path, model, _ = saved
    for names in (["encoder.0.*"], ["backbone.0.*"]):
        other = Named("encoder", trunk())
        before = other.encoder[2].weight.clone()
        checkpoint.load(path, model=other, rename={"backbone.*": "encoder.*"}, names=names)
        assert torch.equal(other.encoder[0].weight, model.backbone[0].weight)
        assert torch.equal(other.encoder[2].weight, before)


@pytest.mark.parametrize(
    ("before", "after", "question"),
    [
        ("backbone", "encoder", "rename={'backbone.*': 'encoder.*'}"),
        ("backbone", None, "rename={'backbone.*': '*'}"),
        (None, "encoder", "rename={'*': 'encoder.*'}"),
    ],
)
def test_the_error_proposes_a_renaming_that_works(tmp_path, before, after, question):
    def make(name):
        return trunk() if name is None else Named(name, trunk())

    model, other = make(before), make(after)
    checkpoint.save(tmp_path / "a.h5", model=model)
    with pytest.raises(CheckpointMismatchError, match=re.escape(f"did you mean {question}")) as error:
        checkpoint.load(tmp_path / "a.h5", model=other)
    rename = eval(re.search(r"rename=(\{.*?\})", str(error.value))[1])
    checkpoint.load(tmp_path / "a.h5", model=other, rename=rename)
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)


def test_models_that_differ_by_more_get_no_proposal(tmp_path):
    checkpoint.save(tmp_path / "a.h5", model=nn.Linear(3, 4))
    with pytest.raises(CheckpointMismatchError) as error:
        checkpoint.load(tmp_path / "a.h5", model=Named("x", nn.Linear(3, 5)))
    assert "did you mean" not in str(error.value)


def test_states_of_modules_are_renamed_too(tmp_path):
    model, other = Named("a", Stateful(2, 2)), Named("b", Stateful(2, 2))
    model.a.scale = 7.0
    checkpoint.save(tmp_path / "a.h5", model=model)
    checkpoint.load(tmp_path / "a.h5", model=other, rename={"a.*": "b.*"})
    assert other.b.scale == 7.0


def test_two_names_must_not_become_one(saved):
    path, _, _ = saved
    with pytest.raises(CheckpointError, match=r"rename= gives .* of the file one name, 'x'"):
        checkpoint.load(path, model=Named("encoder", trunk()), rename=lambda name: "x")


@pytest.mark.parametrize(
    ("rename", "error"),
    [("a", TypeError), ({"a": 1}, TypeError), ({"a.*": "b"}, ValueError), ({"*.*": "*"}, ValueError)],
)
def test_wrong_patterns(saved, rename, error):
    with pytest.raises(error, match="rename="):
        checkpoint.load(saved[0], model=Named("encoder", trunk()), rename=rename)


def test_patterns():
    rename = renaming({"a.*.weight": "b.*.w", "a.*": "c.*", "*.x.*": "*.y.*"})
    assert [rename(n) for n in ("a.1.weight", "a.1.bias", "q.x.2", "other")] == ["b.1.w", "c.1.bias", "q.y.2", "other"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_values_are_cast_when_the_program_asks(saved, dtype):
    path, model, _ = saved
    other = Named("backbone", trunk()).to(dtype)
    with pytest.raises(CheckpointMismatchError, match=r"differing: backbone\.0\.weight is"):
        checkpoint.load(path, model=other)
    checkpoint.load(path, model=other, cast=True)
    assert torch.equal(other.backbone[0].weight, model.backbone[0].weight.to(dtype))
    assert torch.equal(other.backbone[1].running_mean, model.backbone[1].running_mean.to(dtype))
    with pytest.raises(CheckpointMismatchError, match="differing"):
        checkpoint.load(path, model=Named("backbone", nn.Sequential(nn.Linear(4, 4))), cast=True)
