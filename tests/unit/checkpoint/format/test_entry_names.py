import pytest

from hpcfsdp.checkpoint.format import entry_names as names
from hpcfsdp.checkpoint.format.entry_names import EntryRequest, StateEntry, place_entries
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError


def paths_of(state, path=()):
    return {names.dotted(p): p for p, _ in names.leaves(state, path)}


def places(tensors, values=()):
    found = place_entries({names.dotted(p): p for p in tensors}, {names.dotted(p): p for p in values})
    return {name: (entry.kind, "/".join(map(str, entry.place))) for name, entry in found.items()}


@pytest.mark.parametrize("optim", ["optim", "optimizer"])
@pytest.mark.parametrize("outer", [(), ("app",)])
def test_model_and_optimizer_stand_where_the_engines_do(outer, optim):
    found = places(
        [
            (*outer, "model", "layer.weight"),
            (*outer, optim, "state", "layer.weight", "exp_avg"),
            (*outer, optim, "param_groups", 0, "lr"),
        ],
        [
            (*outer, optim, "param_groups", 0, "betas"),
            (*outer, optim, "state", "layer.weight", "step"),
            (*outer, "epoch"),
            (*outer, "extra", "word"),
        ],
    )
    assert list(found.values()) == [
        ("tensor", "model/layer.weight"),
        ("tensor", "optim/state/layer.weight/exp_avg"),
        ("tensor", "optim/group_tensors/0/lr"),
        ("group", "0/betas"),
        ("scalar", "layer.weight/step"),
        ("extra", "epoch"),
        ("extra", "word"),
    ]


def test_a_models_own_state_dict_stands_in_model():
    assert places([("a.weight",), ("b",)], [("a._extra_state",)]) == {
        "a.weight": ("tensor", "model/a.weight"),
        "b": ("tensor", "model/b"),
        "a._extra_state": ("extra", "a._extra_state"),
    }


def test_other_tensors_stand_where_they_are_in_the_state_dict():
    assert [place for _, place in places([("model", "w"), ("ema", "w"), ("scale",), ("list", 1, "x")]).values()] == [
        "model/w",
        "ema/w",
        "scale",
        "list/1/x",
    ]


def test_optimizer_beside_optim_keeps_its_name():
    found = places([("optim", "state", "w", "m"), ("optimizer", "state", "w", "m")])
    assert [place for _, place in found.values()] == ["optim/state/w/m", "optimizer/state/w/m"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([("model", "a/b")], r"'model.a/b' has a key with / in it"),
        ([("model", "a"), ("meta", "tensors")], r"'meta.tensors' would be stored at 'meta/tensors'"),
        ([("model", "a"), ("extra", "x")], r"'extra.x' would be stored at 'extra/x'"),
        ([("model", "a"), ("optim", "param_groups")], r"'optim.param_groups' would be stored"),
        ([("model", "a"), ("optim",)], r"'optim' would be stored at 'optim'"),
        (
            [("optim", "param_groups", 0, "lr"), ("optim", "group_tensors", 0, "lr")],
            r"'optim.param_groups.0.lr' and 'optim.group_tensors.0.lr' would both",
        ),
    ],
)
def test_names_that_cannot_stand_in_a_file(paths, message):
    with pytest.raises(CheckpointError, match=message):
        places(paths)


def test_entries_survive_json():
    entry = StateEntry(
        ("optim", "param_groups", 0, "betas"), names.GROUP, (0, "betas"), (((), "tuple"), ((1, 2), "bytes"))
    )
    assert StateEntry.from_json(entry.to_json()) == entry


def found(known, *asked):
    """The names that entries were saved under, by the names that are asked for together; None: it is not there."""
    request = EntryRequest(known, lambda one, other: one.kind == other.kind)
    told = [request.find(name) for name in asked]
    entries = request.settled([name for name, entry in zip(asked, told, strict=True) if entry])
    return [names.dotted(entries[name].path) if name in entries else None for name in asked]


NATIVE = names.native_entries(["model/w", "model/v", "optim/state/w/m"], [{"lr": 1.0}], {"w/step": 1}, {"words": [1]})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["model.w"], ["model.w"]),
        (["w", "v"], ["model.w", "model.v"]),
        (["model.w", "optimizer.state.w.m"], ["model.w", "optim.state.w.m"]),
        (["optimizer.param_groups.0.lr", "extra.words"], ["optim.param_groups.0.lr", "extra.words"]),
        (["optimizer.state.w.step"], ["optim.state.w.step"]),
        (["x"], [None]),
        (["app.model.w"], [None]),
        (["app.model.w", "app.optim.state.w.m"], [None, None]),
        (["model.w", "app.model.v", "v"], ["model.w", None, None]),
        (["optim"], [None]),
        ([""], [None]),
    ],
)
def test_entries_are_found_under_other_outer_keys_if_all_of_them_are(asked, expected):
    assert found(NATIVE, *asked) == expected


@pytest.mark.parametrize("asked", [("w", "x"), ("x", "w"), ("app.model.w", "w"), ("model.model.w", "w")])
def test_names_that_fit_no_outer_keys_together_are_refused(asked):
    with pytest.raises(CheckpointMismatchError, match="holds 'w' only under other outer keys"):
        found(NATIVE, *asked)


@pytest.mark.parametrize("order", [list, reversed], ids=["as they are", "reversed"])
@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        (["model/w", "model/model.w"], ["w", "model.w"], ["model.w", "model.model.w"]),
        (["model/w", "model/model.w"], ["model.w", "model.model.w"], ["model.w", "model.model.w"]),
        (["model/w", "model/model.w"], ["model.w"], ["model.w"]),
    ],
)
def test_all_names_together_decide_what_one_of_them_means(saved, asked, expected, order):
    known = names.native_entries(saved, None, None, {})
    pairs = list(order(list(zip(asked, expected, strict=True))))
    assert found(known, *(name for name, _ in pairs)) == [path for _, path in pairs]


def test_two_names_are_not_found_in_one_place():
    known = place_entries({"model.w": ("model", "w"), "optim.x": ("optim", "x")}, {}).values()
    assert found(known, "optimizer.x", "model.w") == ["optim.x", "model.w"]
    with pytest.raises(CheckpointMismatchError, match=r"holds 'optimizer\.x' only under other outer keys"):
        found(known, "optimizer.x", "optim.x")


def test_a_name_that_was_taken_for_something_of_another_shape_is_refused():
    known = names.native_entries(["model/w", "model/model.w"], None, None, {})
    request = EntryRequest(known, lambda one, other: False)
    assert request.find("model.w").place == ("model", "w")
    assert request.find("w").place == ("model", "w")
    with pytest.raises(CheckpointMismatchError, match=r"'model\.w' may be 'model\.w' or 'model\.model"):
        request.settled(["w", "model.w"])


def test_what_was_saved_with_fewer_or_more_outer_keys_is_found():
    bare = place_entries({"w": ("w",)}, {}).values()
    assert found(bare, "model.w") == found(bare, "w") == ["w"]
    app = {name: tuple(name.split(".")) for name in ("app.model.w", "app.optimizer.state.w.m")}
    known = place_entries(app, {"app.epoch": ("app", "epoch")}).values()
    everything = ["app.model.w", "app.optimizer.state.w.m", "app.epoch"]
    assert found(known, *everything) == everything
    assert found(known, "model.w", "optim.state.w.m", "epoch") == everything
    assert found(known, "w") == ["app.model.w"]


def test_put_and_get_go_through_lists():
    root = {}
    names.set_at(root, ("a", 1, "b"), 5)
    names.set_at(root, ("a", 0), 4)
    assert root == {"a": [4, {"b": 5}]}
    assert names.get_at(root, ("a", 1, "b")) == 5
    with pytest.raises(CheckpointError, match=r"'a\.0\.x' is inside of another"):
        names.set_at(root, ("a", 0, "x"), 1)
