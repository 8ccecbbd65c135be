"""Columns exchanged for rows: any parts become rows, and every rank agrees on what travels. Ranks are threads."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.dcp import columns
from hpcfsdp.checkpoint.dcp.columns import Part
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.save_plan import BLOCK_DTYPE, SavePlan, box_blocks, check_tiling
from hpcfsdp.flat.layout import Box
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
    grids_ = [(shape, boxes) for shape, boxes in found if len(shape) > 1]
    specs = [TensorSpec(f"model/{n}", shape, dtypes[n]) for n, (shape, _) in enumerate(grids_)]
    values = [np.arange(spec.numel).reshape(spec.shape).astype(spec.dtype) for spec in specs]
    counts, parts = [0] * size, []
    for tensor, (_, boxes) in enumerate(grids_):
        for box in boxes:
            rank = data.draw(st.integers(0, size - 1))
            parts.append(Part(tensor, rank, counts[rank], box))
            counts[rank] += 1
    parts = data.draw(st.permutations(parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_ROUND_BYTES", data.draw(st.sampled_from([1, 100, 1 << 20])))
        plan, rounds = columns.plan_rounds(plan_of(specs, parts, size), parts)
    check_tiling(plan)
    assert all(plan.blocks["count"] == 1)
    assert len({len(of_rank) for of_rank in rounds}) == 1
    items = {(each.rank, each.item): part(values[each.tensor], each.box) for each in parts}
    shared = Comm(size)

    def run(rank):
        for round_ in rounds[rank]:
            specs_here = [specs[rows.tensor] for rows in round_.rows]
            arrays = columns.exchange(
                shared.of(rank), round_, specs_here, lambda item: items[rank, item], contextlib.nullcontext
            )
            for rows, array in zip(round_.rows, arrays, strict=True):
                np.testing.assert_array_equal(array, part(values[rows.tensor], rows.box))

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(run, range(size)))


def test_only_tensors_in_short_runs_on_several_ranks_are_exchanged():
    specs = [TensorSpec(f"model/{n}", (4, 40_000), "float32") for n in range(4)]
    halves = [Box((0, 0), (4, 20_000)), Box((0, 20_000), (4, 20_000))]
    thirds = [Box((0, 0), (4, 39_000)), Box((0, 39_000), (4, 1000))]
    rows = [Box((0, 0), (2, 40_000)), Box((2, 0), (2, 40_000))]
    parts = [Part(0, rank, 0, box) for rank, box in enumerate(halves)]  # long runs
    parts += [Part(1, rank, 1, box) for rank, box in enumerate(thirds)]
    parts += [Part(2, rank, 2, box) for rank, box in enumerate(rows)]
    parts += [Part(3, 1, 3 + n, box) for n, box in enumerate(thirds)]  # on one rank
    assert columns.columns_of(plan_of(specs, parts, 2)) == {1}


def test_rows_are_divided_among_the_ranks_that_have_parts():
    """The plan of one rank of thousands lists its own pieces alone."""
    size, width = 4096, 8
    spec = TensorSpec("model/w", (1024, width * 16), "float32")
    parts = [Part(0, 8 * n + 3, 0, Box((0, n * 16), (1024, 16))) for n in range(width)]
    plan, rounds = columns.plan_rounds(plan_of([spec], parts, size), parts)
    assert sorted(set(plan.blocks["rank"].tolist())) == [8 * n + 3 for n in range(width)]
    [mine] = rounds[3]
    assert (
        [piece.peer for piece in mine.sent] == [piece.peer for piece in mine.received] == [8 * n + 3 for n in range(8)]
    )
    assert [rows.box for rows in mine.rows] == [Box((0, 0), (128, 128))]
    assert [round_ for of_rank in rounds for round_ in of_rank].count(columns.Round((), (), ())) == size - width
