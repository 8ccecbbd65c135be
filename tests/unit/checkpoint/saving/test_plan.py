import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving import plan as planning
from hpcfsdp.checkpoint.saving.plan import SavePlan, check_tiling, plan_alone, plan_save
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.tensors import NO_RUNS, LocalShards, Runs, StateTensor, replicated

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])
meshes = st.tuples(st.integers(1, 9), st.integers(1, 4))
"""Ranks that shard, and replicas."""


def imagined(shapes, dtype, shards, replicas=1, aliases=False, rank=None):
    """The tensors of a model on replicas x shards ranks; without memory, or with that of one rank."""
    names = [(f"p{i}", shape, (f"t{i}",) if aliases else ()) for i, shape in enumerate(shapes)]
    layout = FlatLayout.plan(names, dtype, shards)
    copies = np.arange(shards * replicas).reshape(replicas, shards).T
    pieces = {}
    if rank is not None:
        pieces = LocalShards.of_shard(layout, torch.zeros(layout.shard_numel, dtype=dtype)).pieces(rank % shards)
    found = []
    for place, slot in enumerate(layout.slots):
        first, edges = layout.param_edges(slot.fqn)
        runs = Runs(edges, copies[first : first + len(edges) - 1])
        own = (pieces[place],) if place in pieces else ()
        found.append(("model", StateTensor(slot.fqn, slot.shape, dtype, runs, own, slot.aliases)))
    return found


def one(name="w", dtype=torch.float32, numel=4, aliases=()):
    return StateTensor(name, (numel,), dtype, Runs.of((0, numel), ((0,),)), (), aliases)


def held_by(holders, numel, dtype=torch.uint8, name="w"):
    """A tensor of one run that several ranks have."""
    return "model", StateTensor(name, (numel,), dtype, Runs.of((0, numel), (holders,)), ())


@contextlib.contextmanager
def split_from(nbytes):
    """Have runs be split from twice so many bytes on, instead of megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "SPLIT_BYTES", nbytes)
        yield


def bytes_of_ranks(plan):
    """The number of bytes that each rank writes."""
    nbytes = plan.blocks["numel"].astype(np.int64) * plan.blocks["count"] * plan.itemsizes[plan.blocks["tensor"]]
    return np.bincount(plan.blocks["rank"], nbytes, plan.num_ranks).astype(np.int64)


def rows(plan, *names):
    return plan.blocks[list(names)].tolist()


def assert_tiled_by_holders(plan, tensors):
    """Every element is written once, in order, by a rank that has it."""
    assert rows(plan, "tensor", "start") == sorted(rows(plan, "tensor", "start"))
    assert [row[0] for row in rows(plan, "count")] == [1] * len(plan.blocks)
    for index, (spec, (_, tensor)) in enumerate(zip(plan.specs, tensors, strict=True)):
        end = 0
        for block in plan.blocks[plan.blocks["tensor"] == index]:
            assert block["start"] == end
            assert block["numel"] > 0
            end += int(block["numel"])
            run = np.searchsorted(tensor.runs.edges, block["start"], "right") - 1
            assert block["rank"] in tensor.runs.ranks[run]
            assert end <= tensor.runs.edges[run + 1]
        assert end == spec.numel


@given(shapes, dtypes, meshes, st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_blocks_tile_every_tensor_once_in_order_on_ranks_that_have_it(shapes, dtype, mesh, block_bytes):
    tensors = imagined(shapes, dtype, *mesh)
    plan = plan_save(tensors, mesh[0] * mesh[1], block_bytes)
    assert [(spec.path, spec.shape) for spec in plan.specs] == [(f"model/p{i}", s) for i, s in enumerate(shapes)]
    assert_tiled_by_holders(plan, tensors)
    assert plan.blocks["numel"].max(initial=0) * dtype.itemsize <= max(block_bytes, dtype.itemsize)


@st.composite
def held_anyhow(draw):
    """(number of ranks, tensors whose runs several ranks have, in no order)."""
    num_ranks = draw(st.integers(1, 6))
    tensors = []
    for index in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.integers(1, 300), max_size=4))
        copies = draw(st.integers(1, num_ranks))
        holders = [draw(st.permutations(range(num_ranks)))[:copies] for _ in sizes]
        runs = Runs.of(np.cumsum([0, *sizes]), holders) if sizes else NO_RUNS
        tensors.append(("model", StateTensor(f"p{index}", (sum(sizes),), torch.uint8, runs, ())))
    return num_ranks, tensors


@given(held_anyhow(), st.integers(1, 40), st.integers(1, 100))
@settings(max_examples=150, deadline=None)
def test_runs_that_are_split_over_their_holders_tile_every_tensor(held, split_bytes, block_bytes):
    num_ranks, tensors = held
    with split_from(split_bytes):
        plan = plan_save(tensors, num_ranks, block_bytes)
    assert_tiled_by_holders(plan, tensors)
    assert bytes_of_ranks(plan).sum() == plan.nbytes


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_what_all_ranks_have_is_shared_out_evenly(sizes, num_ranks, split_bytes):
    everyone = list(range(num_ranks))
    with split_from(split_bytes):
        plan = plan_save([held_by(everyone, n, name=f"p{i}") for i, n in enumerate(sizes)], num_ranks)
    loads = bytes_of_ranks(plan)
    # Parts of what is split differ by less than one for each rank; what is not is no larger than two parts.
    assert loads.max() - loads.min() <= num_ranks * len(sizes) + 2 * split_bytes


@given(shapes, st.integers(1, 5), st.integers(2, 4), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_replicas_of_a_shard_share_its_bytes(shapes, shards, replicas, split_bytes):
    tensors = imagined(shapes, torch.float32, shards, replicas)
    with split_from(split_bytes):
        loads = bytes_of_ranks(plan_save(tensors, shards * replicas)).reshape(replicas, shards)
    for shard in range(shards):
        assert loads[:, shard].max() - loads[:, shard].min() <= 2 * split_bytes + 4 * (1 + replicas * len(shapes))


def test_a_long_run_is_split_over_all_that_have_it():
    plan = plan_save([held_by([3, 1], 3 * planning.SPLIT_BYTES)], 4)
    half = 3 * planning.SPLIT_BYTES // 2
    assert rows(plan, "rank", "start", "numel") == [(3, 0, half), (1, half, half)]


def test_short_runs_go_to_whom_has_least_to_write():
    sizes = [10, 4, 4, 4, 1]
    plan = plan_save([held_by([0, 1], size, name=f"p{i}") for i, size in enumerate(sizes)], 2)
    assert [row[0] for row in rows(plan, "rank")] == [0, 1, 1, 1, 0]
    assert bytes_of_ranks(plan).tolist() == [11, 12]


def test_short_runs_are_given_out_last():
    long = planning.SPLIT_BYTES
    plan = plan_save([held_by([0, 1], 10, name="short"), held_by([0], long, name="long")], 2)
    assert rows(plan, "tensor", "rank") == [(0, 1), (1, 0)]


def test_a_run_that_is_too_short_for_all_is_split_over_those_who_have_least_to_write():
    sizes = [2 * planning.SPLIT_BYTES] * 4
    plan = plan_save([held_by(range(8), size, name=f"p{i}") for i, size in enumerate(sizes)], 8)
    assert rows(plan, "tensor", "rank") == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6), (3, 7)]
    assert bytes_of_ranks(plan).tolist() == [planning.SPLIT_BYTES] * 8


@given(shapes, meshes)
@settings(max_examples=40, deadline=None)
def test_plans_of_all_ranks_are_equal_whatever_they_keep_in_memory(shapes, mesh):
    size = mesh[0] * mesh[1]
    plans = [plan_save(imagined(shapes, torch.float32, *mesh, aliases=True, rank=r), size, 32) for r in range(size)]
    for plan in plans:
        assert (plan.specs, plan.links, plan.num_ranks) == (plans[0].specs, plans[0].links, size)
        np.testing.assert_array_equal(plan.blocks, plans[0].blocks)
    assert len({plan.fingerprint() for plan in plans}) == 1


@given(shapes, dtypes, meshes, st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_each_rank_finds_its_own_blocks(shapes, dtype, mesh, block_bytes):
    plan = plan_save(imagined(shapes, dtype, *mesh), mesh[0] * mesh[1], block_bytes)
    own = [plan.blocks_of(rank) for rank in range(plan.num_ranks)]
    assert sorted(np.concatenate(own).tolist()) == list(range(len(plan.blocks)))
    for rank, places in enumerate(own):
        assert set(plan.blocks["rank"][places].tolist()) <= {rank}
        assert (plan.blocks["numel"][places].sum() * dtype.itemsize) == bytes_of_ranks(plan)[rank]


def test_thousands_of_ranks_write_every_element_once():
    shards, shapes = 4096, [(1000, 1009), (3,), (0, 5), (4096,), (128, 1024)]
    plan = plan_save(imagined(shapes, torch.bfloat16, shards, 2), 2 * shards)
    for index, spec in enumerate(plan.specs):
        blocks = plan.blocks[plan.blocks["tensor"] == index]
        ends = np.append(0, (blocks["start"] + blocks["numel"]).astype(np.int64))
        np.testing.assert_array_equal(blocks["start"], ends[:-1])
        assert ends[-1] == spec.numel
    assert bytes_of_ranks(plan).sum() == plan.nbytes


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_tensors_are_cut_alike_however_many_at_a_time(monkeypatch, parts):
    tensors = imagined([(7, 3), (0,), (), (40,), (0, 2), (5,)], torch.float32, 4, 2)
    plan = plan_save(tensors, 8, 12)
    assert_tiled_by_holders(plan, tensors)
    monkeypatch.setattr(planning, "_PARTS_AT_ONCE", parts)
    assert plan_save(tensors, 8, 12).fingerprint() == plan.fingerprint()


def test_a_run_is_cut_at_the_limit_and_the_rest_is_shorter():
    plan = plan_save([("model", one(numel=10))], 1, block_bytes=16)
    assert rows(plan, "start", "numel") == [(0, 4), (4, 4), (8, 2)]


def test_blocks_are_4_mib_at_most_by_default():
    plan = plan_save([("model", one(numel=(1 << 20) + 5))], 1)
    assert rows(plan, "numel") == [(1 << 20,), (5,)]


def test_bytes_are_those_of_all_tensors():
    plan = plan_save([("model", one("a", torch.bfloat16, 3)), ("optim/state", one("a/step", torch.float64, 2))], 1)
    assert plan.nbytes == 3 * 2 + 2 * 8
    assert bytes_of_ranks(plan).tolist() == [plan.nbytes]
    assert [spec.path for spec in plan.specs] == ["model/a", "optim/state/a/step"]


def test_what_training_may_let_differ_is_written_by_rank_0_alone():
    tensors = [("model", replicated("w", torch.zeros(3, 2))), ("model", replicated("e", torch.zeros(0, 2)))]
    plan = plan_save(tensors, 3)
    assert rows(plan, "rank", "start", "numel") == [(0, 0, 6)]
    assert [spec.shape for spec in plan.specs] == [(3, 2), (0, 2)]


def test_aliases_become_links():
    plan = plan_save([("model", one("a", aliases=("b", "c.d")))], 1)
    assert plan.links == (("model/b", "model/a"), ("model/c.d", "model/a"))
    assert len(plan.specs) == 1


def test_nothing_to_write_is_a_plan_too():
    plan = plan_save([], 2)
    assert (len(plan.blocks), plan.specs, plan.nbytes) == (0, (), 0)
    assert bytes_of_ranks(plan).tolist() == [0, 0]


def test_the_fingerprint_shows_every_difference():
    plans = [
        plan_save([("model", one())], 2),
        plan_save([("model", one("v"))], 2),
        plan_save([("optim/state", one())], 2),
        plan_save([("model", one(dtype=torch.int32))], 2),
        plan_save([("model", one(numel=5))], 2),
        plan_save([("model", one(aliases=("v",)))], 2),
        plan_save([held_by([1], 4, torch.float32)], 2),
        plan_save([("model", one())], 2, block_bytes=8),
        plan_save([("model", one())], 3),
    ]
    assert plans[0].fingerprint() == plan_save([("model", one())], 2).fingerprint()
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


@given(shapes, st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_one_process_writes_all_that_one_rank_would(shapes, block_bytes):
    many = plan_save(imagined(shapes, torch.int16, 1, aliases=True), 1, block_bytes)
    alone = plan_alone(many.specs, many.links, block_bytes)
    assert alone.fingerprint() == many.fingerprint()


BAD_NAMES = ["", ".", "..", "a/../b", "a//b", "/a", "a/", "./a", "a\nb", "a\0b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_cannot_stand_in_a_file_is_refused_by_name(name):
    message = f"{f'model/{name}'!r} cannot be the name of a dataset: rename the module or parameter"
    for tensor in (one(name), one(aliases=(name,))):
        with pytest.raises(CheckpointError) as caught:
            plan_save([("model", tensor)], 1)
        assert str(caught.value) == message
    with pytest.raises(CheckpointError) as caught:
        plan_alone([TensorSpec(f"model/{name}", (1,), "float32")])
    assert str(caught.value) == message


@pytest.mark.parametrize("tensors", [(one("a"), one("a/b")), (one("a/b"), one("c", aliases=("a",)))])
def test_a_name_below_another_one_is_refused_by_both(tensors):
    with pytest.raises(CheckpointError) as caught:
        plan_save([("model", tensor) for tensor in tensors], 1)
    assert str(caught.value) == "'model/a' and 'model/a/b' cannot both be in a file: rename one of them"


@pytest.mark.parametrize("dtype", [torch.complex32, torch.quint8, torch.bits8])
def test_an_unsupported_dtype_is_refused_with_the_tensors_name(dtype):
    with pytest.raises(CheckpointError) as caught:
        plan_save([("model", one("layer.w", dtype))], 1)
    name = str(dtype).removeprefix("torch.")
    assert str(caught.value) == f"'model/layer.w' has dtype {name}, which checkpoints do not support: convert it"


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ((0, 4, 10), r"do not cover each element of model/w, \[3, 4\], .* \(no rank has element \[2, 2\]\)"),
        ((2, 6, 12), r"\(no rank has element \[0, 0\]\)"),
        ((0, 4, 13), "do not cover each element"),
    ],
)
def test_runs_that_do_not_make_up_a_tensor_are_found_before_a_file_is(edges, message):
    good = StateTensor("v", (8,), torch.float32, Runs.of((0, 5, 8), ((1,), (0,))), ())
    bad = StateTensor("w", (3, 4), torch.float32, Runs.of(edges, ((0,), (1,))), ())
    with pytest.raises(CheckpointError, match=message):
        plan_save([("model", good), ("model", bad)], 2)


def test_blocks_that_two_ranks_write_are_named():
    plan = plan_save([("model", held_by((0,), 12)[1])], 1)
    twice = np.append(plan.blocks, plan.blocks)
    twice["rank"], twice["start"], twice["numel"] = (0, 3), (0, 4), (6, 8)
    with pytest.raises(CheckpointError, match=r"element \[4\] is written by the ranks 0 and 3"):
        check_tiling(SavePlan(plan.specs, twice, (), 4))
