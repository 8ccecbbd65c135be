import math

import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint import save
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.diff import (
    ABSENT,
    ChangedTensor,
    Difference,
    Tolerance,
    compare,
    compare_tensor,
    to_compare,
)
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

BASE = {"model/a": torch.arange(12.0).view(3, 4), "model/b": torch.zeros(2), "model/c": torch.zeros(())}


@pytest.fixture
def of(write):
    """The difference of two files, each given as tensors and further values."""

    def difference(one, other, *patterns, **options):
        tensors_a, more_a = one
        tensors_b, more_b = other
        a, b = write(tensors_a, "a.h5", **more_a), write(tensors_b, "b.h5", **{**more_b, **options})
        return compare(open_index(a), open_index(b), patterns)

    return difference


def changed(dtype, a, b, **more):
    kind = np.dtype(dtype) if isinstance(dtype, str) else dtype
    one, other = np.array(a, kind), np.array(b, kind)
    return compare_tensor("t", TensorSpec("t", one.shape, kind.name), [(one.ravel(), other.ravel())], **more)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8", "bool"])
def test_integers_are_equal_within_no_tolerance(dtype):
    found = changed(dtype, [1, 1, 1], [1, 0, 1], tolerance=Tolerance(relative=1.0, absolute=2.0))
    assert (found.different, found.where) == (1, (1,))


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "is_equal"),
    [
        (1.0, 65504.0, Tolerance(absolute=65503.0), True),
        (-65504.0, 65504.0, Tolerance(absolute=120_000.0), False),  # float16 would have infinity for it
        (1000.0, 1000.5, Tolerance(relative=5.0001e-4), True),
        (1000.0, 1000.5, Tolerance(relative=4.9999e-4), False),  # and one number for both of these
    ],
)
def test_tolerances_of_float16_are_exact(a, b, tolerance, is_equal):
    assert (changed("float16", [a], [b], tolerance=tolerance) is None) == is_equal


def test_files_of_the_same_content_differ_in_nothing(of):
    more = {"extra": {"x": np.arange(3), "y": math.nan}, "config": {"lr": 0.5}, "step": 3}
    found = of((BASE, more), (BASE, more), block_bytes=16)
    assert found == Difference()
    assert found.same


def test_planted_differences_are_all_found(of):
    other = {
        "model/a": BASE["model/a"].clone(),
        "model/b": torch.zeros(3),
        "model/d": torch.zeros(1),
    }
    other["model/a"][1, 2] += 0.5
    other["model/a"][2, 3] -= 2
    found = of((BASE, {"step": 1}), (other, {"step": 2}))
    assert found.added == ("model/d",)
    assert found.removed == ("model/c",)
    assert [(path, a.shape, b.shape) for path, a, b in found.reshaped] == [("model/b", (2,), (3,))]
    assert found.changed == (ChangedTensor("model/a", 12, 2, 2.0, (2, 3), 0),)
    assert found.values == (("step", 1, 2),)
    assert not found.same


def test_patterns_leave_the_rest_out_and_match_in_either_file(of):
    other = {"model/a": BASE["model/a"] + 1, "model/d": torch.zeros(1)}
    sides = (BASE, {"step": 1}), (other, {"step": 2})
    assert of(*sides, "d", "b") == Difference(added=("model/d",), removed=("model/b",))
    assert [tensor.path for tensor in of(*sides, "model/a").changed] == ["model/a"]
    with pytest.raises(CheckpointError, match="no tensor matches 'e'"):
        of(*sides, "a", "e")


def test_another_dtype_is_reported_and_nothing_compared(of):
    found = of((BASE, {}), ({**BASE, "model/b": torch.ones(2, dtype=torch.bfloat16)}, {}))
    ((path, a, b),) = found.reshaped
    assert (path, a.dtype, b.dtype, found.changed) == ("model/b", "float32", "bfloat16", ())


def test_tied_names(of):
    tied = (BASE, {"links": [("model/e", "model/a")]})
    loose = ({**BASE, "model/e": BASE["model/a"]}, {})
    assert of(tied, tied).same
    assert of(tied, loose) == Difference(retied=(("model/e", "model/a", "model/e"),))
    moved = ({**BASE, "model/a": BASE["model/a"] + 1}, tied[1])
    assert [tensor.path for tensor in of(tied, moved).changed] == ["model/a"]


def test_elements_are_found_across_blocks_of_both_files(write):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = values.clone()
    other[[3, 500, 999]] += torch.tensor([1.0, -7.0, 2.0], dtype=torch.float64)
    a = open_index(write({"model/a": values}, "a.h5", block_bytes=64))
    b = open_index(write({"model/a": other}, "b.h5", block_bytes=104))
    (tensor,) = compare(a, b).changed
    assert (tensor.different, tensor.where) == (3, (500,))
    assert tensor.largest == abs(values[500] - other[500]).item()
    steps = []
    compare(a, b, advance=steps.append)
    assert sum(steps) == to_compare(a, b) == 8000


@pytest.mark.parametrize(
    ("dtype", "a", "b", "different", "largest", "where", "nan"),
    [
        ("int64", [-(2**63), 0], [2**63 - 1, 1], 2, 2**64 - 1, (0,), 0),
        ("uint64", [2**64 - 1, 5], [0, 5], 1, 2**64 - 1, (0,), 0),
        ("int8", [[1, -128]], [[1, 127]], 1, 255, (0, 1), 0),
        ("uint8", [1, 0], [0, 1], 2, 1, (0,), 0),
        ("float32", [0.0, 1.0], [-0.0, 1.0], 1, 0.0, (0,), 0),
        ("float32", [math.inf, 1.0], [1.0, 3.0], 2, math.inf, (0,), 0),
        ("float32", [math.nan, 1.0, 1.0], [math.nan, 3.0, math.nan], 2, 2.0, (1,), 1),
        ("float64", [1.0, math.nan], [1.0, 0.0], 1, None, (1,), 1),
        ("float64", 1.5, 1.25, 1, 0.25, (), 0),
        ("complex64", [1 + 1j, 2], [4 + 5j, 2], 1, 5.0, (0,), 0),
        ("complex128", [1, 2, 3], [1, 2 + 1j, 3], 1, 1.0, (1,), 0),
    ],
)
def test_the_largest_difference_of_every_kind(dtype, a, b, different, largest, where, nan):
    assert changed(dtype, a, b) == ChangedTensor("t", np.size(a), different, largest, where, nan)


def test_bits_decide_what_is_the_same():
    assert changed("float32", [math.nan, math.inf], [math.nan, math.inf]) is None
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    found = changed("float32", [quiet], [other])
    assert (found.different, found.nan, found.largest) == (1, 1, None)
    spec = TensorSpec("t", (2,), "float8_e4m3fn")
    blocks = [(np.array([0x38, 0x7F], np.uint8), np.array([0x40, 0x7F], np.uint8))]
    assert compare_tensor("t", spec, blocks) == ChangedTensor("t", 2, 1, 1.0, (0,), 0)


def test_values_beside_tensors(of):
    one = {"config": {"lr": 0.5, "net": {"width": 3}}, "extra": {"x": np.arange(3), "l": [1, 2], "only": 1, "t": True}}
    other = {"config": {"lr": 0.5, "net": {"width": 4}}, "extra": {"x": np.arange(4), "l": [1, 3], "new": 2, "t": 1}}
    values = {name: (a, b) for name, a, b in of(({}, one), ({}, other)).values}
    arrays = values.pop("extra.x")
    assert [len(array) for array in arrays] == [3, 4]
    assert values == {
        "config.net.width": (3, 4),
        "extra.l[1]": (2, 3),
        "extra.only": (1, ABSENT),
        "extra.new": (ABSENT, 2),
        "extra.t": (True, 1),
    }


def test_groups_of_the_optimizer_and_metrics(tmp_path):
    model = torch.nn.Linear(2, 2)
    paths = []
    for lr, loss in ((0.5, 3.0), (0.25, 4.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        path = tmp_path / f"{lr}.h5"
        paths.append(save(path, model=model, optimizer=optimizer, metrics={"loss": ([1], [loss])}))
    found = compare(*map(open_index, paths))
    names = {name for name, _, _ in found.values}
    assert ("optimizer group[0].lr", 0.5, 0.25) in found.values
    assert "metrics.loss.values" in names
    assert "metrics.loss[0]" not in names
    assert found.changed == ()


def test_damage_is_an_error_not_a_difference(write, flip):
    a, b = open_index(write(BASE, "a.h5")), open_index(write(BASE, "b.h5"))
    flip(b.info.path, int(b.rows_of("model/a")["byte_offset"][0]))
    with pytest.raises(CheckpointCorruptError, match="model/a"):
        compare(a, b)


def test_the_place_of_a_difference_counts_the_parts_before_it():
    parts = [(np.zeros(4, "f4"), np.zeros(4, "f4")), (np.zeros(2, "f4"), np.array([0, 3], "f4"))]
    assert compare_tensor("t", TensorSpec("t", (2, 3), "float32"), parts) == ChangedTensor("t", 6, 1, 3.0, (1, 2), 0)
