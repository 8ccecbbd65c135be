import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.stats import (
    Statistics,
    decoded,
    file_statistics,
    iter_pieces,
    json_number,
    nbytes_of,
    statistics,
)
from hpcfsdp.errors import CheckpointCorruptError

KINDS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "int64": "<i8",
    "int8": "i1",
    "uint64": "<u8",
    "bool": "u1",
    "complex64": "<c8",
    "complex128": "<c16",
}


@given(
    dtype=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 1 << 30),
    numel=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_any_blocks_of_any_bits_give_what_numpy_gives_in_one_go(dtype, seed, numel, cuts):
    kind = np.dtype(KINDS[dtype])
    rng = np.random.default_rng(seed)
    elements = np.frombuffer(rng.bytes(numel * kind.itemsize), kind)
    if dtype == "bool":
        elements = elements & 1
    edges = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    found = statistics((elements[a:b] for a, b in itertools.pairwise(edges)), dtype)
    values = decoded(elements, dtype)
    finite = values[np.isfinite(values)]
    wide = finite.astype(np.clongdouble if np.iscomplexobj(values) else np.longdouble)
    assert found.numel == numel
    assert found.nan == np.isnan(values).sum()
    assert found.inf == numel - finite.size - found.nan
    if not finite.size:
        assert (found.min, found.max, found.mean, found.norm) == (None, None, None, 0.0)
        return
    sized = np.abs(finite.astype(np.complex128)) if np.iscomplexobj(values) else finite
    assert (found.min, found.max) == (sized.min().item(), sized.max().item())
    scale = float(np.abs(wide).max()) or 1.0
    assert abs(complex(wide.mean() / scale) - found.mean / scale) < 1e-12
    norm = np.sqrt((np.abs(wide) ** 2).sum())
    if norm > np.finfo(np.float64).max:
        assert found.norm == math.inf
        return
    assert abs(found.norm / scale - float(norm / scale)) < 1e-12 * math.sqrt(finite.size)


def test_integers_keep_all_digits():
    found = statistics([np.array([-(2**63), 2**63 - 1])], "int64")
    assert (found.min, found.max) == (-(2**63), 2**63 - 1)
    assert statistics([np.array([2**64 - 1], np.uint64)], "uint64").max == 2**64 - 1


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_a_norm_of_numbers_with_squares_out_of_range(size):
    found = statistics([np.array([3.0, 4.0]) * size, np.array([12.0]) * size], "float64")
    assert found.norm == pytest.approx(13 * size, rel=1e-14)
    assert found.mean == pytest.approx(19 / 3 * size, rel=1e-14)


def test_sizes_of_complex_numbers_near_the_largest_are_finite():
    values = np.array([3e38 + 3e38j, 1j], np.complex64)
    found = statistics([values], "complex64")
    assert (found.inf, found.min) == (0, 1.0)
    assert found.max == pytest.approx(math.hypot(3e38, 3e38), rel=1e-7)
    assert statistics([np.array([1.7e308 + 1.7e308j])], "complex128").max == math.inf  # and no warning


def test_nothing_and_nothing_finite():
    assert statistics([], "float32") == Statistics()
    blocks = [np.array([np.nan, np.inf]), np.array([-np.inf]), np.array([2.0])]
    assert statistics(blocks[:2], "float64") == Statistics(3, 1, 2)
    assert statistics(blocks, "float64") == Statistics(4, 1, 2, 2.0, 2.0, 2.0, 2.0)


def test_a_complex_number_with_any_nan_is_nan_and_else_infinite():
    values = np.array([complex(1, math.nan), complex(math.inf, math.nan), complex(math.inf, 0), 3 + 4j])
    assert statistics([values], "complex128") == Statistics(4, 2, 1, 5.0, 5.0, 3 + 4j, 5.0)


def test_of_a_file_tensor_by_tensor_with_what_has_been_gone_through(write):
    path = write(
        {"model/a": torch.arange(12.0).view(3, 4), "model/b": torch.tensor([1.5, -2], dtype=torch.bfloat16)},
        links=[("model/c", "model/a")],
    )
    index, steps = open_index(path), []
    with BlockReader(index) as reader:
        found = {spec.path: facts for spec, facts in file_statistics(index, reader, index.tensors, steps.append)}
    assert found == {
        "model/a": Statistics(12, 0, 0, 0.0, 11.0, 5.5, math.sqrt(506)),
        "model/b": Statistics(2, 0, 0, -2.0, 1.5, -0.25, 2.5),
    }
    assert sum(steps) == nbytes_of(index, index.tensors) == 52


def test_damage_is_an_error(write, flip):
    path = write({"model/a": torch.arange(12.0)})
    index = open_index(path)
    flip(path, int(index.extents["byte_offset"][0]) + 5)
    with BlockReader(index) as reader, pytest.raises(CheckpointCorruptError, match=r"of model/a .* checksum"):
        list(file_statistics(index, reader, ["model/a"]))


def test_pieces_make_up_a_tensor_and_end_where_checksums_do(write):
    index = open_index(write({"model/a": torch.arange(100.0), "model/b": torch.zeros(0)}, block_bytes=64))
    starts = set(index.rows_of("model/a")["start"].tolist())
    assert len(starts) > 4
    for at_least in (0, 64, 200, 1 << 20):
        found = list(iter_pieces(index, "model/a", at_least))
        assert [start for start, _ in found] == [0, *np.cumsum([numel for _, numel in found])[:-1]]
        assert sum(numel for _, numel in found) == 100
        assert {start for start, _ in found} <= starts
        assert all(numel * 4 >= at_least for _, numel in found[:-1])
    assert list(iter_pieces(index, "model/b")) == []


def test_runs_between_each_other_are_read_together_up_to_a_limit(monkeypatch):
    rows = np.zeros(3, schema.EXTENT_DTYPE)
    rows["start"], rows["numel"], rows["count"], rows["stride"] = [0, 3, 20], [3, 2, 10], [4, 4, 1], [5, 5, 10]
    spec = schema.TensorSpec("model/a", (30,), "float32")
    index = SimpleNamespace(resolve=lambda path: spec, rows_of=lambda path: rows)
    assert list(iter_pieces(index, "model/a", at_least=0)) == [(0, 20), (20, 10)]
    monkeypatch.setattr("hpcfsdp.checkpoint.inspect.stats.MOST_BYTES", 32)
    assert list(iter_pieces(index, "model/a", at_least=0)) == [(0, 8), (8, 8), (16, 4), (20, 8), (28, 2)]


FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_of_an_8_bit_float_is_what_torch_says(dtype):
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).float().numpy()
    found = decoded(codes, dtype)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[expected == 0]))


def test_every_code_of_bfloat16_is_what_torch_says():
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(decoded(codes, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (np.float32(0.5), 0.5),
        (math.nan, "nan"),
        (np.float64(-math.inf), "-inf"),
        (np.complex64(1 + 2j), "(1+2j)"),
        (None, None),
    ],
)
def test_numbers_for_json(value, expected):
    found = json_number(value)
    assert (found, type(found)) == (expected, type(expected))
