import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.plan import plan_save
from hpcfsdp.errors import CheckpointError
from hpcfsdp.flat.layout import FlatLayout, ShardExtent
from hpcfsdp.state.model import shard_pieces
from hpcfsdp.state.tensors import StateTensor, replicated

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])


def imagined(shapes, dtype, num_ranks):
    """The tensors of a model that `num_ranks` ranks share, without memory."""
    layout = FlatLayout.plan([(f"p{i}", shape, ()) for i, shape in enumerate(shapes)], dtype, num_ranks)
    return [
        ("model", StateTensor(slot.fqn, slot.shape, dtype, layout.param_extents(slot.fqn), ())) for slot in layout.slots
    ]


def one(name="w", dtype=torch.float32, numel=4, aliases=()):
    return StateTensor(name, (numel,), dtype, (ShardExtent(name, 0, 0, numel, 0),), (), aliases)


@given(shapes, dtypes, st.integers(1, 9), st.integers(1, 200))
@settings(max_examples=150, deadline=None)
def test_blocks_tile_every_tensor_once_in_order(shapes, dtype, num_ranks, block_bytes):
    plan = plan_save(imagined(shapes, dtype, num_ranks), block_bytes)
    assert [(spec.path, spec.shape) for spec in plan.specs] == [(f"model/p{i}", s) for i, s in enumerate(shapes)]
    assert [(block.tensor, block.start) for block in plan.blocks] == sorted((b.tensor, b.start) for b in plan.blocks)
    for index, spec in enumerate(plan.specs):
        end = 0
        for block in (block for block in plan.blocks if block.tensor == index):
            assert block.start == end
            assert block.numel > 0
            end += block.numel
        assert end == spec.numel


@given(shapes, dtypes, st.integers(1, 9), st.integers(1, 200))
@settings(max_examples=80, deadline=None)
def test_each_block_lies_on_the_rank_that_writes_it_and_keeps_to_the_limit(shapes, dtype, num_ranks, block_bytes):
    tensors = imagined(shapes, dtype, num_ranks)
    for block in plan_save(tensors, block_bytes).blocks:
        assert block.numel * dtype.itemsize <= max(block_bytes, dtype.itemsize)
        runs = [e for e in tensors[block.tensor][1].extents if e.shard_rank == block.rank]
        assert any(e.start <= block.start and block.start + block.numel <= e.start + e.numel for e in runs)


@given(shapes, st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_plans_of_all_ranks_are_equal_whatever_they_keep_in_memory(shapes, num_ranks):
    layout = FlatLayout.plan([(f"p{i}", s, (f"t{i}",)) for i, s in enumerate(shapes)], torch.float32, num_ranks)
    plans = []
    for rank in range(num_ranks):
        pieces = {s.fqn: shard_pieces(layout, s.fqn, rank, torch.zeros(layout.shard_numel)) for s in layout.slots}
        tensors = [
            StateTensor(s.fqn, s.shape, torch.float32, layout.param_extents(s.fqn), pieces[s.fqn], s.aliases)
            for s in layout.slots
        ]
        plans.append(plan_save([("model", tensor) for tensor in tensors], 32))
    assert all(plan == plans[0] for plan in plans)
    assert len({plan.fingerprint() for plan in plans}) == 1


def test_a_run_is_cut_at_the_limit_and_the_rest_is_shorter():
    plan = plan_save([("model", one(numel=10))], block_bytes=16)
    assert [(block.start, block.numel) for block in plan.blocks] == [(0, 4), (4, 4), (8, 2)]


def test_blocks_are_16_mib_at_most_unless_told_otherwise():
    plan = plan_save([("model", one(numel=5 << 20))])
    assert [block.numel for block in plan.blocks] == [4 << 20, 1 << 20]


def test_bytes_are_those_of_all_tensors():
    plan = plan_save([("model", one("a", torch.bfloat16, 3)), ("optim/state", one("a/step", torch.float64, 2))])
    assert plan.nbytes == 3 * 2 + 2 * 8
    assert [spec.path for spec in plan.specs] == ["model/a", "optim/state/a/step"]


def test_a_replicated_tensor_is_written_by_rank_0_alone():
    plan = plan_save([("model", replicated("w", torch.zeros(3, 2))), ("model", replicated("e", torch.zeros(0, 2)))])
    assert [(block.rank, block.start, block.numel) for block in plan.blocks] == [(0, 0, 6)]
    assert [spec.shape for spec in plan.specs] == [(3, 2), (0, 2)]


def test_aliases_become_links():
    plan = plan_save([("model", one("a", aliases=("b", "c.d")))])
    assert plan.links == (("model/b", "model/a"), ("model/c.d", "model/a"))
    assert len(plan.specs) == 1


def test_fingerprint_tells_every_difference():
    plans = [
        plan_save([("model", one())]),
        plan_save([("model", one("v"))]),
        plan_save([("optim/state", one())]),
        plan_save([("model", one(dtype=torch.int32))]),
        plan_save([("model", one(numel=5))]),
        plan_save([("model", one(aliases=("v",)))]),
        plan_save([("model", one())], block_bytes=8),
    ]
    assert plans[0].fingerprint() == plan_save([("model", one())]).fingerprint()
    assert len({plan.fingerprint() for plan in plans}) == len(plans)


BAD_NAMES = ["", ".", "..", "a/../b", "a//b", "/a", "a/", "./a", "a\nb", "a\0b"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_cannot_stand_in_a_file_is_refused_by_name(name):
    message = f"{name!r} cannot be the name of a dataset: rename the module or parameter"
    for tensor in (one(name), one(aliases=(name,))):
        with pytest.raises(CheckpointError) as caught:
            plan_save([("model", tensor)])
        assert str(caught.value) == message


@pytest.mark.parametrize("tensors", [(one("a"), one("a/b")), (one("a/b"), one("c", aliases=("a",)))])
def test_a_name_below_another_one_is_refused_by_both(tensors):
    with pytest.raises(CheckpointError) as caught:
        plan_save([("model", tensor) for tensor in tensors])
    assert str(caught.value) == "'model/a' and 'model/a/b' cannot both stand in a file: rename one of them"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex32])
def test_an_unsupported_dtype_is_refused_with_the_tensors_name(dtype):
    with pytest.raises(CheckpointError) as caught:
        plan_save([("model", one("layer.w", dtype))])
    assert str(caught.value) == f"'layer.w' has dtype {dtype}, which checkpoints do not hold yet"
