"""Columns exchanged for rows: any parts become rows, and every rank agrees on what travels. Ranks are threads."""

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.dcp import columns
from hpcfsdp.checkpoint.dcp.columns import ColumnExchange, ItemBox
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, SavePlan, box_blocks, check_tiling
from hpcfsdp.params.layout import Box
from tests.unit.checkpoint.examples import grids, part


class Comm:
    """Exchanges between threads."""

    def __init__(self, size):
        self.size, self._sent, self._barrier = size, [None] * size, threading.Barrier(size, timeout=60)

    def of(self, rank):
        mine = Comm.__new__(Comm)
        mine.__dict__.update(self.__dict__, rank=rank)
        return mine

    def all_to_all(self, outputs, inputs):
        self._sent[self.rank] = inputs
        self._barrier.wait()
        for output, sent in zip(outputs, self._sent, strict=True):
            assert output.shape == sent[self.rank].shape
            output.copy_(sent[self.rank])
        self._barrier.wait()


def plan_of(specs, parts, num_ranks):
    blocks = [np.empty(0, BLOCK_DTYPE)]
    for tensor, rank, _, box in parts:
        blocks.append(box_blocks(specs[tensor].shape, box, specs[tensor].itemsize))
        blocks[-1]["tensor"], blocks[-1]["rank"] = tensor, rank
    return SavePlan(tuple(specs), np.concatenate(blocks), (), num_ranks)


@given(st.lists(grids(), min_size=1, max_size=4), st.data())
def test_any_parts_become_rows(found, data):
    size = data.draw(st.integers(1, 4))
    dtypes = data.draw(st.lists(st.sampled_from(["float32", "uint8", "complex64"]), min_size=4, max_size=4))
    grids_ = [(shape, boxes) for shape, boxes in found if len(boxes) > 1]
    specs = [TensorSpec(f"model/{n}", shape, dtypes[n]) for n, (shape, _) in enumerate(grids_)]
    values = [np.arange(spec.numel).reshape(spec.shape).astype(spec.dtype) for spec in specs]
    counts, parts = [0] * size, []
    for tensor, (_, boxes) in enumerate(grids_):
        for box in boxes:
            rank = data.draw(st.integers(0, size - 1))
            parts.append(ItemBox(tensor, rank, counts[rank], box))
            counts[rank] += 1
    parts = data.draw(st.permutations(parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_ROUND_BYTES", data.draw(st.sampled_from([1, 100, 1 << 20])))
        patch.setattr(columns, "_LEAST_BYTES", data.draw(st.sampled_from([1, 20, 1 << 20])))
        plan, rounds = columns.plan_rounds(plan_of(specs, parts, size), parts)
    check_tiling(plan)
    assert len({len(of_rank) for of_rank in rounds}) == 1
    assert pickle.loads(pickle.dumps(rounds)) == rounds
    items = {(each.rank, each.item): part(values[each.tensor], each.box) for each in parts}
    shared = Comm(size)

    def run(rank):
        exchange = ColumnExchange(shared.of(rank))
        for round_ in rounds[rank]:
            specs_here = [specs[rows.tensor] for rows in round_.rows]
            arrays = exchange.rows_of(round_, specs_here, lambda item: items[rank, item], contextlib.nullcontext)
            for rows, array in zip(round_.rows, arrays, strict=True):
                end = rows.start + array.size
                np.testing.assert_array_equal(array.reshape(-1), values[rows.tensor].reshape(-1)[rows.start : end])

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(run, range(size)))


def parts_of(tensor, boxes, ranks=None):
    return [ItemBox(tensor, rank, tensor, box) for rank, box in zip(ranks or range(len(boxes)), boxes, strict=True)]


def in_columns(shape, num_ranks, dim=1):
    width = shape[dim] // num_ranks
    sizes = (*shape[:dim], width, *shape[dim + 1 :])
    return [Box(tuple(n * width if d == dim else 0 for d in range(len(shape))), sizes) for n in range(num_ranks)]


def test_only_tensors_in_short_runs_on_several_ranks_are_exchanged():
    specs = [TensorSpec(f"model/{n}", (4, 40_000), "float32") for n in range(4)]
    specs.append(TensorSpec("model/wide", (100, 640_000), "float32"))
    rows = [Box((0, 0), (2, 40_000)), Box((2, 0), (2, 40_000))]
    parts = parts_of(0, in_columns((4, 40_000), 2))  # long runs
    parts += parts_of(1, in_columns((4, 40_000), 8))
    parts += parts_of(2, rows)
    parts += parts_of(3, in_columns((4, 40_000), 8), [1] * 8)  # on one rank
    parts += parts_of(4, in_columns((100, 640_000), 64))  # a row is more than a block
    assert columns.columns_of(plan_of(specs, parts, 64)) == {1, 4}


def test_rows_are_divided_among_the_ranks_that_have_parts():
    """The plan of one rank of thousands lists its own pieces alone."""
    size, everyone = 4096, [8 * n + 3 for n in range(8)]
    spec = TensorSpec("model/w", (1024, 8192), "float32")
    parts = parts_of(0, in_columns(spec.shape, 8), everyone)
    plan, rounds = columns.plan_rounds(plan_of([spec], parts, size), parts)
    assert sorted(set(plan.blocks["rank"].tolist())) == everyone
    [mine] = rounds[3]
    assert [piece.peer for piece in mine.sent] == [piece.peer for piece in mine.received] == everyone
    assert mine.rows == (columns.RowRange(0, 0, (128, 8192)),)
    assert [round_ for of_rank in rounds for round_ in of_rank].count(columns.ExchangeRound()) == size - 8


def test_leading_dimensions_that_no_part_cuts_are_rows():
    spec = TensorSpec("model/w", (1, 4096, 1024), "float32")
    parts = parts_of(0, in_columns(spec.shape, 4, dim=2))
    _, rounds = columns.plan_rounds(plan_of([spec], parts, 4), parts)
    assert [of_rank[0].rows for of_rank in rounds] == [(columns.RowRange(0, n << 20, (1024, 1024)),) for n in range(4)]


def test_a_small_tensor_is_written_by_one_rank():
    spec = TensorSpec("model/w", (64, 64), "float32")
    parts = parts_of(0, in_columns(spec.shape, 4))
    _, rounds = columns.plan_rounds(plan_of([spec], parts, 4), parts)
    assert [len(of_rank[0].rows) for of_rank in rounds] == [1, 0, 0, 0]


def test_a_tensor_in_columns_of_very_many_ranks_stays():
    spec = TensorSpec("model/w", (8192, 8192), "bfloat16")
    parts = parts_of(0, in_columns(spec.shape, 512))
    before = plan_of([spec], parts, 512)
    plan, rounds = columns.plan_rounds(before, parts)
    assert not any(rounds)
    np.testing.assert_array_equal(plan.blocks, before.blocks)


def test_groups_of_ranks_do_not_wait_for_each_other():
    """Rounds are filled for each rank: stages of a pipeline exchange their own tensors at once."""
    specs = [TensorSpec(f"model/{n}", (4096, 8192), "float32") for n in range(16)]  # 64 MiB on each of two ranks
    parts = [part for n in range(16) for part in parts_of(n, in_columns((4096, 8192), 2), [n % 8 * 2, n % 8 * 2 + 1])]
    plan, rounds = columns.plan_rounds(plan_of(specs, parts, 16), parts)
    assert [len(of_rank) for of_rank in rounds] == [2] * 16
    assert all(len(round_.rows) == 1 for of_rank in rounds for round_ in of_rank)
    check_tiling(plan)
