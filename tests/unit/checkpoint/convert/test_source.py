import pytest

from hpcfsdp.checkpoint.convert.source import Stored, sort_out
from hpcfsdp.errors import CheckpointError


def stored(value=0, identity=None):
    return Stored((2,), "float32", lambda: value, identity)


def optimizer(**more):
    return {
        "state": {"w": {"exp_avg": stored(), "step": 3, "none": None}},
        "param_groups": [{"params": ["w"], "lr": stored(0.5)}],
        **more,
    }


def test_a_state_dict_is_the_model():
    parts = sort_out({"w": stored(), "epoch": 3})
    assert list(parts.tensors) == ["model/w"]
    assert parts.extra == {"epoch": 3}
    assert (parts.groups, parts.scalars, parts.step) == (None, None, None)


@pytest.mark.parametrize("model", ["model", "state_dict", "model_state_dict", "module"])
@pytest.mark.parametrize("optim", ["optimizer", "optim", "optimizer_state_dict", "optim_state_dict"])
def test_model_optimizer_and_the_rest_are_distinguished(model, optim):
    parts = sort_out(
        {model: {"w": stored(), "n._extra_state": {"a": 1}}, optim: optimizer(more=1), "step": 9, "rng": [stored(7)]}
    )
    assert set(parts.tensors) == {"model/w", "optim/state/w/exp_avg"}
    assert parts.scalars == {"w/step": 3}
    assert parts.groups == [{"params": ["w"], "lr": 0.5}]
    assert parts.extra == {model: {"n._extra_state": {"a": 1}}, "more": 1, "rng": [7]}
    assert parts.step == 9


def test_an_optimizer_may_stand_alone():
    for tree in (optimizer(), {"optim": optimizer()}):
        parts = sort_out(tree)
        assert set(parts.tensors) == {"optim/state/w/exp_avg"}
        assert parts.extra == {}


def test_names_that_share_a_tensor_are_tied():
    tree = {"a": stored(identity=1), "b": stored(identity=2), "c": stored(identity=1), "d": stored(), "e": stored()}
    parts = sort_out(tree)
    assert set(parts.tensors) == {"model/a", "model/b", "model/d", "model/e"}
    assert parts.links == [("model/c", "model/a")]


@pytest.mark.parametrize("kind", [int, str], ids=["torch", "dcp"])
def test_parameters_by_number_get_their_names_where_the_optimizer_has_them(kind):
    state = {kind(0): {"m": stored()}, kind(1): {"m": stored()}}
    groups = [{"params": [0], "param_names": ["a"]}, {"params": [1], "param_names": ["b"], "lr": 1}]
    parts = sort_out({"state": state, "param_groups": groups})
    assert set(parts.tensors) == {"optim/state/a/m", "optim/state/b/m"}
    assert parts.groups == [{"params": ["a"]}, {"params": ["b"], "lr": 1}]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (stored(), "holds a Stored, not a dict: a model is looked for under model, state_dict"),
        ([], "holds a list, not a dict"),
        ({}, "holds no tensors"),
        ({"epoch": 1}, "holds no tensors"),
        ({"encoder": {"w": stored()}}, "'encoder' holds tensors of unknown kind"),
        ({"model": {"w": stored()}, "state_dict": {"w": stored()}}, "'model' and 'state_dict' could both be meant"),
        ({"optim": optimizer(), "optimizer": optimizer()}, "'optimizer' and 'optim' could both be meant"),
        ({"model": {"w": stored()}, "optim": {"state.w.m": stored()}}, "'optim' is a flattened optimizer state dict"),
        ({"state": {0: {}}, "param_groups": [{"params": [0]}]}, r"param_groups\[0\] .* parameter 0, which has no name"),
        ({"state": {7: {}}, "param_groups": []}, "has state of parameter 7, which has no name"),
        ({"state": {}, "param_groups": [{"lr": 1}]}, r"param_groups\[0\] of the optimizer does not list"),
        ({"state": {"w": 3}, "param_groups": []}, "state of 'w' is a int, not a dict"),
        ({"state": {"w": {"a/b": 3}}, "param_groups": []}, "has the key 'a/b'"),
        ({"state": {"w": {"m": "x"}}, "param_groups": []}, "state 'm' of 'w' is a str"),
    ],
)
def test_what_is_not_understood_is_named(tree, message):
    with pytest.raises(CheckpointError, match=message):
        sort_out(tree)
