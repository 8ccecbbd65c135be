from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed import utils as stock

from hpcfsdp.params.prefixes import get_root_modules, replace_by_prefix


@pytest.mark.parametrize(
    ("old", "new"), [("a.", "z."), ("a.", ""), ("", "module."), ("a.b", "q"), ("none.", "x."), ("a.", "a.deep.")]
)
def test_keys_are_renamed_as_torch_does(old, new):
    ours, theirs = ({"a.b": 1, "c": 2, "a.x": 3, "ba.": 4} for _ in range(2))
    replace_by_prefix(ours, old, new)
    stock._replace_by_prefix(theirs, old, new)
    assert ours == theirs


def test_the_order_of_keys_is_kept():
    """torch puts renamed keys at the end."""
    ours, theirs = ({"a.x": 1, "b": 2, "a.y": 3} for _ in range(2))
    replace_by_prefix(ours, "a.", "")
    stock._replace_by_prefix(theirs, "a.", "")
    assert list(ours) == ["x", "b", "y"]
    assert list(theirs) == ["b", "x", "y"]


def test_the_mapping_is_changed_in_place_and_keeps_values_and_metadata():
    value = torch.ones(2)
    state = OrderedDict({"m.a": value, "b": 1})
    state._metadata = {"": {"version": 1}}
    assert replace_by_prefix(state, "m.", "") is None
    assert list(state) == ["a", "b"]
    assert state["a"] is value
    assert state._metadata == {"": {"version": 1}}


def test_a_new_name_may_be_the_old_one_of_another_that_is_renamed_too():
    """torch writes over the second before it is renamed: one value is lost, the other gets its name."""
    ours, theirs = ({"a.x": 1, "a.a.x": 2} for _ in range(2))
    replace_by_prefix(ours, "a.", "a.a.")
    stock._replace_by_prefix(theirs, "a.", "a.a.")
    assert ours == {"a.a.x": 1, "a.a.a.x": 2}
    assert theirs == {"a.a.a.x": 1}


def test_two_entries_for_one_name_are_refused_before_anything_changes():
    """torch keeps one of them."""
    state = {"m.a": 1, "m.b": 2, "b": 3}
    with pytest.raises(ValueError, match=r"^'m\.b' and 'b' would both be 'b' with '' for 'm\.'$"):
        replace_by_prefix(state, "m.", "")
    assert state == {"m.a": 1, "m.b": 2, "b": 3}


def test_equal_prefixes_are_refused():
    with pytest.raises(ValueError, match=r"both 'a\.'"):
        replace_by_prefix({"a.b": 1}, "a.", "a.")


class Counting(nn.Module):
    """Counts how often its children are asked for."""

    asked = 0

    def children(self):
        Counting.asked += 1
        return super().children()

    def modules(self):
        # as torch walks, but through children(), to be counted too
        seen, pending = set(), [self]
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                pending += module.children()
                yield module


def chain(length):
    modules = [Counting() for _ in range(length)]
    for outer, inner in pairwise(modules):
        outer.inner = inner
    return modules


def tree():
    leaf, shared = nn.Linear(1, 1), nn.ReLU()
    left, right = nn.Sequential(leaf, shared), nn.Sequential(shared)
    root = nn.Sequential(left, right)
    return {"leaf": leaf, "shared": shared, "left": left, "right": right, "root": root, "other": nn.Linear(1, 1)}


@pytest.mark.parametrize(
    "names",
    [
        "root left right leaf shared other",
        "leaf shared left right root",
        "leaf root",
        "shared right left",
        "leaf other",
        "right leaf shared",
        "other",
        "",
        "left left leaf",
    ],
)
def test_root_modules_are_those_that_torch_finds(names):
    modules = tree()
    given = [modules[name] for name in names.split()]
    expected = stock._get_root_modules(given)
    got = get_root_modules(given)
    assert list(map(id, got)) == list(map(id, expected))
    assert bool(got) == bool(given)


def test_any_iterable_of_modules_will_do():
    root = tree()["root"]
    assert get_root_modules(root.modules()) == [root]


@pytest.mark.parametrize("order", ["outer first", "inner first"])
def test_each_module_is_looked_into_once(order):
    """torch walks below each of them: 20 100 times in a chain of 200."""
    modules = chain(200)
    given = modules if order == "outer first" else modules[::-1]
    Counting.asked = 0
    assert get_root_modules(given) == [modules[0]]
    assert Counting.asked == 200
    Counting.asked = 0
    stock._get_root_modules(given)
    assert Counting.asked == 20_100


def test_modules_that_contain_each_other_have_a_root():
    """torch finds none."""
    outer, inner = nn.Module(), nn.Module()
    outer.inner, inner.outer = inner, outer
    assert get_root_modules([outer, inner]) == [outer]
    assert stock._get_root_modules([outer, inner]) == []
