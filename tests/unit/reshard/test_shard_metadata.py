"""Metadata of sharded tensors beside torch's own functions, where these are right, and by themselves where not."""

import copy
import inspect
import math
import random
import re
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings, strategies as st
from torch.distributed import rpc
from torch.distributed._shard.sharded_tensor import utils as stock
from torch.distributed.remote_device import _remote_device as Remote
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp._compat import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard import shard_metadata as ours
from tests.unit.reshard.test_tiling import tilings

SIZE = 4


@pytest.fixture(scope="module", autouse=True)
def rank():
    """Rank 1 of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=SIZE)
    yield 1
    dist.destroy_process_group()


def shard_at(offsets, sizes, rank=1, **facts):
    tensor = torch.zeros(sizes, **facts)
    return Shard(tensor, ShardMetadata(list(offsets), list(sizes), f"rank:{rank}/cpu"))


def pinned(shard):
    """A shard that says of itself what one in page-locked memory says, which takes a GPU to be made."""
    shard.tensor.is_pinned = lambda: True
    return shard


def of_rank(boxes, rank, size, **facts):
    """The metadata that a rank has built of its blocks; None for none."""
    properties = TensorProperties(**{"dtype": torch.float32, "layout": torch.strided, "requires_grad": False, **facts})
    shards = [ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{rank}/cpu") for box in boxes]
    return ShardedTensorMetadata(shards, torch.Size(size), properties) if shards else None


def dealt(boxes, size, ranks=SIZE, **facts):
    """Blocks dealt to ranks in turn."""
    return [of_rank(boxes[rank::ranks], rank, size, **facts) for rank in range(ranks)]


def test_placements_have_a_rank_and_a_device():
    for function in (ours.parse_and_validate_remote_device, stock._parse_and_validate_remote_device):
        assert function(dist.group.WORLD, Remote("rank:3/cuda:1")) == (3, torch.device("cuda", 1))
        assert function(dist.group.WORLD, Remote("cpu")) == (None, torch.device("cpu"))
    assert ours.parse_and_validate_remote_device(None, Remote("rank:3/cpu")) == (3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (None, "no placement"),
        (Remote("rank:4/cpu"), r"rank 4, which is not in the process group of the ranks \[0, 1, 2, 3\]"),
        (Remote("trainer/cpu"), "trainer"),
    ],
)
def test_placements_that_are_none(placement, message):
    with pytest.raises((ShardingError, RuntimeError), match=message):
        ours.parse_and_validate_remote_device(dist.group.WORLD, placement)


FUNCTIONS = """parse_and_validate_remote_device validate_output_tensor_for_gather raise_if_mismatch
build_metadata_from_local_shards build_global_metadata recalc_global_sharded_tensor_metadata""".split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_those_of_torch_take(name):
    theirs = inspect.signature(getattr(stock, name, None) or getattr(stock, f"_{name}")).parameters.values()
    own = inspect.signature(getattr(ours, name)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in theirs]


def test_placements_are_not_looked_for_in_groups_of_other_ranks(rank):
    others = dist.new_group([0, 2])
    for function in (ours.parse_and_validate_remote_device, stock._parse_and_validate_remote_device):
        assert function(others, Remote("rank:3/cpu")) == (3, torch.device("cpu"))
    mine = dist.new_group([1, 3])
    for function in (ours.parse_and_validate_remote_device, stock._parse_and_validate_remote_device):
        with pytest.raises(ValueError, match=r"ank 2.* process group.*\[1, 3\]"):
            function(mine, Remote("rank:2/cpu"))


class Agent:
    """Two workers of torch's RPC."""

    def get_worker_infos(self):
        return [rpc.WorkerInfo(name="trainer", id=0), rpc.WorkerInfo(name="server", id=7)]


def test_workers_count_by_their_number(monkeypatch):
    monkeypatch.setattr(rpc, "_is_current_rpc_agent_set", lambda: True)
    monkeypatch.setattr(rpc, "_get_current_rpc_agent", Agent)
    for function in (ours.parse_and_validate_remote_device, stock._parse_and_validate_remote_device):
        assert function(dist.group.WORLD, Remote("server/cuda:1")) == (7, torch.device("cuda", 1))
        with pytest.raises(ValueError, match="nobody"):
            function(dist.group.WORLD, Remote("nobody/cpu"))
    with pytest.raises(ValueError, match=r"'nobody', and there are only \['server', 'trainer'\]"):
        ours.parse_and_validate_remote_device(None, Remote("nobody/cpu"))


def test_a_tensor_to_gather_into_is_given_where_it_is_needed():
    size, place = torch.Size((2, 3)), torch.zeros(2, 3)
    for check in (ours.validate_output_tensor_for_gather, stock._validate_output_tensor_for_gather):
        check(0, 0, size, place)
        check(1, 0, size, None)
        with pytest.raises(ValueError, match="dst_tensor"):
            check(0, 0, size, None)
        with pytest.raises(ValueError, match=r"\[3, 2\]|\(3, 2\)"):
            check(0, 0, size, torch.zeros(3, 2))
    with pytest.raises(ShardingError, match=r"rank 1 was given a dst_tensor of size .2, 3., but rank 0 gathers"):
        ours.validate_output_tensor_for_gather(1, 0, size, place)
    with pytest.raises(RuntimeError, match="Boolean value"):  # torch asks for the truth of a tensor
        stock._validate_output_tensor_for_gather(1, 0, size, place)


def test_a_zero_is_a_tensor_to_gather_into():
    zero = torch.zeros(1)
    stock._validate_output_tensor_for_gather(1, 0, torch.Size((1,)), zero)  # which torch lets pass
    with pytest.raises(ShardingError, match="rank 0 gathers"):
        ours.validate_output_tensor_for_gather(1, 0, torch.Size((1,)), zero)


@pytest.mark.parametrize("size", [(2, 3), ((2, 3),), ([2, 3],), (torch.Size((2, 3)),), (), ((),), (4,)])
def test_sizes_as_arguments_or_in_one(size):
    assert ours.flatten_tensor_size(*size) == stock._flatten_tensor_size(size)


@pytest.mark.parametrize("size", [(2, 3.0), (("2", 3),), ("23",), (2, None), (True, 2), (b"23",), ((2, 3), 4)])
def test_sizes_are_ints(size):
    with pytest.raises(TypeError, match="a size is a sequence of ints"):
        ours.flatten_tensor_size(*size)


def test_sizes_are_not_negative():
    with pytest.raises(ShardingError, match="-1"):
        ours.flatten_tensor_size(2, -1)


def test_what_differs_is_named_with_both_values():
    ours.raise_if_mismatch(3, 3, "size", 0)
    with pytest.raises(ShardingError, match=r"rank 2 differ in dtype: one has torch.float32, one torch.int8"):
        ours.raise_if_mismatch(torch.float32, torch.int8, "dtype", 2)
    with pytest.raises(ShardingError, match=r"pin_memory: True on rank 0, False on rank 3"):
        ours.raise_if_mismatch(True, False, "pin_memory", [0, 3], is_local=False)


def test_local_shards_have_metadata():
    shards = [shard_at((0, 2), (4, 1)), shard_at((0, 3), (4, 2))]
    found = ours.build_metadata_from_local_shards(shards, (4, 5), 1, dist.group.WORLD)
    assert found == stock.build_metadata_from_local_shards(shards, torch.Size((4, 5)), 1, dist.group.WORLD)
    found.shards_metadata[0].shard_offsets[0] = 3
    assert shards[0].metadata.shard_offsets == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.clear(), "rank 1 has no local shards"),
        (
            lambda s: s.append(shard_at((2, 0), (1, 2), rank=0)),
            "shard 1 of rank 1, at .2, 0., is on this rank, but its metadata gives rank 0",
        ),
        (lambda s: s.append(shard_at((2, 0), (1, 2), rank=7)), "names rank 7, which is not in the process group"),
        (
            lambda s: s.append(shard_at((2, 0), (1, 2), dtype=torch.int8)),
            r"rank 1 differ in dtype \(shards 0 and 1\): one has torch.float32, one torch.int8",
        ),
        (
            lambda s: s.append(shard_at((2, 0), (1, 2), requires_grad=True)),
            r"requires_grad \(shards 0 and 1\): one has False, one True",
        ),
        (
            lambda s: s.append(pinned(shard_at((2, 0), (1, 2)))),
            r"pin_memory \(shards 0 and 1\): one has False, one True",
        ),
        (lambda s: s.append(shard_at((2, 1), (1, 2))), "at .2, 1. of size .1, 2. .* is not within .* .3, 2."),
        (lambda s: s.append(shard_at((2,), (1,))), "is not within"),
        (lambda s: setattr(s[0].metadata, "shard_sizes", [2, 1]), "has the size .2, 2., but its metadata gives .2, 1."),
        (
            lambda s: setattr(s[0].metadata, "placement", Remote("rank:1/cuda:0")),
            "is on cpu, but its metadata gives cuda:0",
        ),
        (lambda s: setattr(s[0].metadata, "placement", None), "no placement"),
        (lambda s: setattr(s[0], "tensor", torch.zeros(2, 2).to_sparse()), "torch.sparse_coo"),
        (lambda s: setattr(s[0], "tensor", torch.zeros(2, 3)[:, :2]), r"not contiguous \(strides \(3, 1\)\)"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)
def test_local_shards_that_do_not_fit(change, message):
    shards = [shard_at((0, 0), (2, 2))]
    change(shards)
    with pytest.raises(ShardingError, match=message):
        ours.build_metadata_from_local_shards(shards, (3, 2), 1, dist.group.WORLD)


@given(tilings(), st.integers(1, 5))
def test_ranks_make_up_a_tensor(tiling, ranks):
    size, boxes = tiling
    gathered = dealt(boxes, size, ranks)
    before = copy.deepcopy(gathered)
    found = ours.build_global_metadata(gathered)
    assert gathered == before
    assert all(m is None or m.tensor_properties is not found.tensor_properties for m in gathered)
    assert found.size == torch.Size(size)
    told = {(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in found.shards_metadata}
    assert told == {(*box, number % ranks) for number, box in enumerate(boxes)}
    if all(box.numel for box in boxes):  # torch takes an empty block for an overlap, or for one too many
        assert found == stock.build_global_metadata(gathered)


LOCAL_FAULTS = {
    "layout": (lambda shard: setattr(shard, "tensor", shard.tensor.to_sparse()), "{shard} is torch.sparse_coo"),
    "contiguity": (
        lambda shard: setattr(shard, "tensor", torch.zeros(*shard.tensor.shape, 2)[..., 0]),
        "{shard} is not contiguous",
    ),
    "rank": (
        lambda shard: setattr(shard.metadata, "placement", Remote("rank:2/cpu")),
        "{shard} is on this rank, but its metadata gives rank 2",
    ),
    "group": (lambda shard: setattr(shard.metadata, "placement", Remote("rank:4/cpu")), "{shard} .* names rank 4"),
    "nowhere": (lambda shard: setattr(shard.metadata, "placement", None), "{shard} a shard has no placement"),
    "device": (
        lambda shard: setattr(shard.metadata, "placement", Remote("rank:1/cuda:0")),
        "{shard} is on cpu, but its metadata gives cuda:0",
    ),
    "size": (
        lambda shard: setattr(shard, "tensor", torch.zeros(2, *shard.tensor.shape)),
        r"{shard} has the size \[2.*\], but its metadata gives \[",
    ),
    "pinning": (pinned, r"rank 1 differ in pin_memory \(shards {pair}\): one has (True, one False|False, one True)"),
    "dtype": (
        lambda shard: setattr(shard, "tensor", shard.tensor.bfloat16()),
        r"rank 1 differ in dtype \(shards {pair}\): one has torch.(bfloat16.*float32|float32.*bfloat16)",
    ),
    "requires_grad": (
        lambda shard: shard.tensor.requires_grad_(),
        r"rank 1 differ in requires_grad \(shards {pair}\): one has (True, one False|False, one True)",
    ),
    "beyond": (
        lambda shard: setattr(shard.metadata, "shard_offsets", [at + 9 for at in shard.metadata.shard_offsets]),
        "{moved} .* is not within a tensor of size",
    ),
}


@settings(deadline=None)
@given(tilings(), st.data(), st.sampled_from(["none", *LOCAL_FAULTS]))
def test_one_planted_fault_among_local_shards_is_refused_and_named(tiling, data, kind):
    size, boxes = tiling
    shards = [shard_at(*box) for box in boxes]
    if kind == "none":
        found = ours.build_metadata_from_local_shards(shards, size, 1, dist.group.WORLD)
        assert found == stock.build_metadata_from_local_shards(shards, torch.Size(size), 1, dist.group.WORLD)
        return
    number = data.draw(st.integers(0, len(shards) - 1))
    plant, message = LOCAL_FAULTS[kind]
    assume("pair" not in message or len(shards) > 1)
    assume(kind != "contiguity" or shards[number].tensor.numel() > 1)
    assume(kind != "beyond" or size)
    place = re.escape(str(shards[number].metadata.shard_offsets))
    plant(shards[number])
    message = message.replace("{shard}", f"local shard {number} of rank 1, at {place},")
    message = message.replace("{pair}", f"0 and {number or 1}")
    message = message.replace("{moved}", f"the shard at {re.escape(str(shards[number].metadata.shard_offsets))}")
    with pytest.raises(ShardingError, match=message):
        ours.build_metadata_from_local_shards(shards, size, 1, dist.group.WORLD)


def say(shard):
    return f"the shard at {shard.shard_offsets} of size {shard.shard_sizes} on {shard.placement}"


def gap_in(box):
    """Whether an error tells of an element of a block that no shard has."""
    return lambda text: (
        (found := re.match(r"no shard has element \[(.*)\] of a tensor", text))
        and all(o <= int(at) < o + s for at, o, s in zip(found[1].split(", ") if found[1] else [], *box, strict=True))
    )


def overlap_of(*shards):
    return lambda text: text.split(":")[-1].startswith(" both have element") and any(say(s) in text for s in shards)


def outside(shard):
    return lambda text: text.startswith(f"{say(shard)} is not within a tensor of size")


class Planted:
    """One fault in the metadata of ranks, and how an error tells of it."""

    def __init__(self, tiling, data):
        self.size, boxes = tiling
        self.data, self.gathered = data, dealt(boxes, self.size)
        self.present = [rank for rank, metadata in enumerate(self.gathered) if metadata is not None]
        self.rank = data.draw(st.sampled_from(self.present))
        self.metadata = self.gathered[self.rank]
        self.shard = data.draw(st.sampled_from(self.metadata.shards_metadata))
        self.box = Box(tuple(self.shard.shard_offsets), tuple(self.shard.shard_sizes))
        self.others = [rank for rank in self.present if rank != self.rank]

    def dim(self):
        assume(self.size)
        return self.data.draw(st.integers(0, len(self.size) - 1))

    def twice(self):
        assume(self.box.numel)
        self.metadata.shards_metadata.append(copy.deepcopy(self.shard))
        return overlap_of(self.shard)

    def gone(self):
        assume(self.box.numel)
        self.metadata.shards_metadata.remove(self.shard)
        return gap_in(self.box)

    def larger(self):
        dim = self.dim()
        assume(self.box.numel)
        self.shard.shard_sizes[dim] += 1
        beyond = self.shard.shard_offsets[dim] + self.shard.shard_sizes[dim] > self.size[dim]
        return outside(self.shard) if beyond else overlap_of(self.shard)

    def smaller(self):
        dim = self.dim()
        assume(self.box.numel)
        self.shard.shard_sizes[dim] -= 1
        return gap_in(self.box)

    def moved(self):
        dim = self.dim()
        assume(self.box.numel)
        self.shard.shard_offsets[dim] += self.data.draw(st.sampled_from([-1, 1]))
        begin, end = self.shard.shard_offsets[dim], self.shard.shard_offsets[dim] + self.shard.shard_sizes[dim]
        if not 0 <= begin <= end <= self.size[dim]:
            return outside(self.shard)
        return lambda text: gap_in(self.box)(text) or overlap_of(self.shard)(text)

    def negative(self):
        dim = self.dim()
        self.shard.shard_sizes[dim] = -1
        return outside(self.shard)

    def dimensions(self):
        self.shard.shard_offsets.append(0)
        self.shard.shard_sizes.append(1)
        return outside(self.shard)

    def wrong_rank(self):
        assume(self.others)
        self.shard.placement = Remote(f"rank:{self.data.draw(st.sampled_from(self.others))}/cpu")
        return lambda text: (
            say(self.shard) in text and ("wrong rank" in text or "a rank must list only its own" in text)
        )

    def no_rank(self):
        self.shard.placement = self.data.draw(st.sampled_from([None, Remote("cpu")]))
        return lambda text: (
            text == f"{say(self.shard)}, which rank {self.rank} of the group lists, has no rank in its metadata"
        )

    def _differs(self, name, before, after):
        assume(self.others)
        first, *rest = self.present
        ranks = (first, rest[0]) if self.rank == first else (first, self.rank)
        values = (after, before) if self.rank == first else (before, after)
        told = f"{name}: {values[0]} on rank {ranks[0]}, {values[1]} on rank {ranks[1]}"
        return lambda text: text.endswith(told)

    def wrong_size(self):
        before, self.metadata.size = self.metadata.size, torch.Size((*self.size, 2))
        return self._differs("global_size", before, self.metadata.size)

    def wrong_property(self):
        name, value = self.data.draw(
            st.sampled_from(
                [
                    ("dtype", torch.int8),
                    ("layout", torch.sparse_coo),
                    ("requires_grad", True),
                    ("memory_format", torch.channels_last),
                    ("pin_memory", True),
                ]
            )
        )
        before = getattr(self.metadata.tensor_properties, name)
        setattr(self.metadata.tensor_properties, name, value)
        return self._differs(name, before, value)


FAULTS = [name for name in vars(Planted) if not name.startswith("_") and name != "dim"]


@pytest.mark.parametrize("kind", FAULTS)
@settings(deadline=None)
@given(tilings(max_dims=3), st.data())
def test_one_planted_fault_is_refused_and_named(kind, tiling, data):
    planted = Planted(tiling, data)
    is_told = getattr(planted, kind)()
    with pytest.raises(ShardingError) as raised:
        ours.build_global_metadata(planted.gathered)
    assert is_told(str(raised.value)), str(raised.value)


def test_torch_lets_wrong_ranks_and_layouts_pass():
    boxes = [Box((0,), (2,)), Box((2,), (2,))]
    for plant in (
        lambda metadata: setattr(metadata.shards_metadata[0], "placement", Remote("rank:0/cpu")),
        lambda metadata: setattr(metadata.tensor_properties, "layout", torch.sparse_coo),
        lambda metadata: setattr(metadata.tensor_properties, "memory_format", torch.channels_last),
    ):
        gathered = dealt(boxes, (4,), ranks=2)
        plant(gathered[1])
        stock.build_global_metadata(gathered)
        with pytest.raises(ShardingError, match=r"wrong rank|layout|memory_format"):
            ours.build_global_metadata(gathered)


def test_torch_takes_shards_before_the_tensor_for_such_within():
    gathered = dealt([Box((0,), (2,)), Box((2,), (2,))], (4,), ranks=2)
    gathered[0].shards_metadata[0].shard_offsets = [-2]
    stock.build_global_metadata(gathered)
    with pytest.raises(ShardingError, match=r"at \[-2\] of size \[2\] .* is not within"):
        ours.build_global_metadata(gathered)


def test_a_shard_without_elements_overlaps_no_other():
    gathered = dealt([Box((0,), (4,)), Box((1,), (0,))], (4,), ranks=2)
    assert len(ours.build_global_metadata(gathered).shards_metadata) == 2
    with pytest.raises(ValueError, match="overlap"):
        stock.build_global_metadata(gathered)


def work_of(function, *arguments):
    """Lines of Python that a call runs, and how many rows numpy sorts for it."""
    lines, rows, sort, before = 0, [], np.lexsort, sys.gettrace()

    def trace(_frame, event, _value):
        nonlocal lines
        lines += event == "line"
        return trace

    def lexsort(keys):
        rows.append(len(keys[0]))
        return sort(keys)

    np.lexsort = lexsort
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
        np.lexsort = sort
    return lines, sum(rows)


@pytest.mark.parametrize("dims", [1, 2])
def test_the_work_grows_with_the_shards_not_with_their_pairs(dims):
    """Up to 16,384 of one tensor, in no order, on 64 ranks: all is done for each once, but for one sort."""
    found = {}
    for count in (4096, 16384):
        edge = count if dims == 1 else math.isqrt(count)
        places = [(at, 0) if dims == 1 else divmod(at, edge) for at in range(count)]
        random.Random(0).shuffle(places)
        boxes = [Box((2 * row, 3 * column), (2, 3)) for row, column in places]
        size = (2 * edge, 3 if dims == 1 else 3 * edge)
        found[count] = work_of(ours.build_global_metadata, dealt(boxes, size, ranks=64))
        assert found[count][1] == 2**dims * (count + 1)
    assert found[16384][0] < 4.01 * found[4096][0]
    assert found[16384][0] < 100 * 16384


def test_no_rank_has_anything():
    for build in (ours.build_global_metadata, stock.build_global_metadata):
        with pytest.raises(ValueError, match=r"no tensor|no local shards"):
            build([None, None])


def test_a_gap_is_named_by_its_first_element():
    boxes = [shard_at((0, 0), (2, 3)), shard_at((2, 1), (1, 2))]
    whole = ShardedTensorMetadata([b.metadata for b in boxes], torch.Size((3, 3)), TensorProperties())
    with pytest.raises(ShardingError, match=r"no shard has element \[2, 0\] of a tensor of size \[3, 3\]"):
        ours.validate_tiling(whole)


def rows(*sizes_and_ranks, width=2):
    shards = [ShardMetadata([0, 9], [size, width], f"rank:{rank}/cpu") for size, rank in sizes_and_ranks]
    return ShardedTensorMetadata(shards, torch.Size((0, 0)), TensorProperties())


def negative(metadata):
    """With a last shard of a size that torch would not let it be made with."""
    metadata.shards_metadata[-1].shard_sizes[0] = -1
    return metadata


def offsets_of(metadata):
    return [shard.shard_offsets for shard in metadata.shards_metadata]


def test_offsets_are_found_again():
    found, theirs = rows((3, 0), (2, 1), (4, 2)), rows((3, 0), (2, 1), (4, 2))
    ours.recalc_global_sharded_tensor_metadata(found, 0)
    stock.recalc_global_sharded_tensor_metadata(theirs, 0)
    assert found == theirs
    assert (offsets_of(found), found.size) == ([[0, 0], [3, 0], [5, 0]], torch.Size((9, 2)))


def test_offsets_go_by_rank_in_whatever_order_shards_are_listed():
    found, theirs = rows((4, 2), (3, 0), (2, 1)), rows((4, 2), (3, 0), (2, 1))
    ours.recalc_global_sharded_tensor_metadata(found, 0)
    assert offsets_of(found) == [[5, 0], [0, 0], [3, 0]]
    ours.validate_tiling(found)
    stock.recalc_global_sharded_tensor_metadata(theirs, 0)  # sorts the sizes, and gives them out by place in the list
    with pytest.raises(ValueError, match="overlap"):
        stock.build_global_metadata([theirs])


def test_dimensions_may_be_counted_from_the_last():
    found, theirs = rows((3, 0), (2, 1), width=4), rows((3, 0), (2, 1), width=4)
    for metadata in (found, theirs):
        for shard in metadata.shards_metadata:
            shard.shard_sizes.reverse()
    ours.recalc_global_sharded_tensor_metadata(found, -1)
    assert (offsets_of(found), found.size) == ([[0, 0], [0, 3]], torch.Size((4, 5)))
    stock.recalc_global_sharded_tensor_metadata(theirs, -1)  # sets all offsets back to 0
    assert (offsets_of(theirs), theirs.size) == ([[0, 0], [0, 0]], torch.Size((4, 3)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=8), st.integers(0, 2))
def test_recalculated_offsets_tile(sizes_and_ranks, dim):
    shards = []
    for size, rank in sizes_and_ranks:
        sizes = [2, 3, 1]
        sizes[dim] = size
        shards.append(ShardMetadata([7, 7, 7], sizes, f"rank:{rank}/cpu"))
    found = ShardedTensorMetadata(shards, torch.Size(()), TensorProperties())
    ours.recalc_global_sharded_tensor_metadata(found, dim - 3 if dim else dim)
    assert found.size[dim] == sum(size for size, _ in sizes_and_ranks)
    ours.validate_tiling(found)
    by_place = sorted(range(len(shards)), key=lambda number: (sizes_and_ranks[number][1], number))
    assert [shards[n].shard_offsets[dim] for n in by_place] == sorted(s.shard_offsets[dim] for s in shards)


def test_ranks_that_do_not_know_the_size_of_the_whole():
    boxes = [rows((3, 0)), rows((2, 1)), rows((4, 2))]
    found = ours.build_global_metadata(boxes, recalc_metadata=True)
    assert (offsets_of(found), found.size) == ([[0, 0], [3, 0], [5, 0]], torch.Size((9, 2)))
    assert offsets_of(boxes[1]) == [[0, 9]]


@pytest.mark.parametrize(
    ("metadata", "dim", "message"),
    [
        (rows(), 0, "no shards"),
        (rows((3, 0)), 2, "has 2 dimension.s., but no dimension 2"),
        (rows((3, 0)), -3, "no dimension -3"),
        (ShardedTensorMetadata([ShardMetadata([0], [1])], torch.Size((1,)), TensorProperties()), 0, "has no rank"),
        (negative(rows((3, 0), (3, 1), (3, 2))), 0, r"size \[-1, 2\] on rank:2/cpu has a negative size"),
        (
            ShardedTensorMetadata(
                [ShardMetadata([0, 0], [1, 2], "rank:0/cpu"), ShardMetadata([1, 0], [1, 3], "rank:1/cpu")],
                torch.Size((2, 2)),
                TensorProperties(),
            ),
            0,
            r"size \[1, 2\] on rank:0/cpu and .* size \[1, 3\] on rank:1/cpu differ in another dimension than 0",
        ),
    ],
)
def test_what_cannot_be_recalculated(metadata, dim, message):
    with pytest.raises(ShardingError, match=message):
        ours.recalc_global_sharded_tensor_metadata(metadata, dim)
