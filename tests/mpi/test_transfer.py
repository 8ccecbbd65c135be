"""Values between flat shards and the tensors of state dicts; warnings of torch's classes would fail these tests."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hpcfsdp import _compat
from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.layout import Box, FlatLayout
from hpcfsdp.reshard import redistribute as moving
from hpcfsdp.reshard.boxes import chunk_box
from hpcfsdp.reshard.sharded_tensors import all_boxes, create_chunk_sharded_tensor, local_blocks, properties_of
from hpcfsdp.state import transfer as scattering
from hpcfsdp.state.settings import StateDictFormat
from hpcfsdp.state.tensors import LocalShards, Rank0Tensor
from hpcfsdp.state.transfer import gather, scatter
from hpcfsdp.units.groups import resolve_mesh

pytestmark = pytest.mark.ranks(2, 1, 3)

CPU = torch.device("cpu")
SHAPES = {"a": (5, 3), "scalar": (), "b": (7,), "no rows": (0, 2), "c": (2, 3, 4), "d": (1, 9), "empty": (0,)}
FORMS = [StateDictFormat(), StateDictFormat(rank0_only=True), StateDictFormat(sharded=True)]
FORMS += [dataclasses.replace(form, offload_to_cpu=True) for form in FORMS]
OWN_MEMORY = pytest.mark.parametrize("own", [False, True], ids=["one shard", "own memory"])
UNTOUCHED = 77.0


class Example:
    """Parameters with values, sharded over some groups: each rank knows all of them."""

    def __init__(self, groups, dtype=torch.float32, shapes=SHAPES):
        self.groups, self.dtype = groups, dtype
        self.layout = FlatLayout.plan([(name, shape, ()) for name, shape in shapes.items()], dtype, groups.shard.size)
        random = torch.Generator().manual_seed(5)
        self.values = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes.values()]

    def parts(self, own, values=None, left_out=()):
        """This rank's; what no slot owns is ``UNTOUCHED``, and so is all of it without values."""
        layout, rank = self.layout, self.groups.shard.rank
        full = torch.full((layout.padded_numel,), UNTOUCHED, dtype=self.dtype)
        for slot, value in zip(layout.slots, values or (), strict=False):
            full[slot.offset : slot.end] = value.reshape(-1)
        shard = full.view(layout.num_shards, -1)[rank].clone()
        tensors = []
        for index, slot in enumerate(layout.slots):
            extent = layout.param_run(slot.fqn, rank)
            # An empty run begins where others do, as it does for whoever makes views of one shard.
            begin, end = (extent.offset, extent.offset + extent.numel) if extent else (0, 0)
            tensors.append(None if index in left_out else shard[begin:end] if own else shard)
        return LocalShards(layout, tensors, whole_shard=not own), shard

    def check_filled(self, own, values, expected=None, *, left_alone=()):
        """That ``scatter`` brings `values` where they belong, and touches nothing else."""
        parts, shard = self.parts(own, left_out=left_alone if own else ())
        scatter(self.groups, parts, values)
        wanted = [value.to(self.dtype) for value in expected or self.values]
        for index in left_alone:
            wanted[index] = torch.full_like(wanted[index], UNTOUCHED)
        assert torch.equal(shard, self.parts(own, wanted)[1])


@pytest.fixture(params=["shared memory", "messages", "gloo"])
def over(groups, request):
    """To shard over all ranks, by each way that they can exchange values."""
    return resolve_mesh(groups[request.param], None, None)


@pytest.fixture
def plain(world):
    return resolve_mesh(None, None, None)


@pytest.fixture
def hybrid(world, comm):
    """Two replicas, on each half of the ranks: the shards of one replica are neighbours."""
    if world.size % 2:
        pytest.skip("two replicas need an even number of ranks")
    half = world.size // 2
    row, place = divmod(world.rank, half)
    pair = comm.subgroup(range(row * half, (row + 1) * half)), comm.subgroup([place, place + half])
    return resolve_mesh(pair, None, Strategy.HYBRID_SHARD)


def same(found, expected):
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


def check_chunks(groups, found, values, kind, rank):
    """That this rank holds its chunk of the rows of each value, and all ranks know who holds what."""
    for tensor, value in zip(found, values, strict=True):
        if not value.shape:
            assert type(tensor) is torch.Tensor
            assert same(tensor, value)
            continue
        assert type(tensor) is kind
        assert properties_of(tensor) == (tuple(value.shape), value.dtype)
        box = chunk_box(value.shape, groups.shard.size, groups.shard.rank)
        if kind is DTensor and not value.numel() and rank != 0:
            box = None  # of a mesh the very first rank has the block without elements
        if box is None:
            assert local_blocks(tensor) == []
            continue
        [(place, block)] = local_blocks(tensor)
        assert place == box
        assert all_boxes(tensor)[rank] == [box]
        assert same(block, value[box.offsets[0] : box.offsets[0] + box.sizes[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
@OWN_MEMORY
def test_what_each_form_shows(world, over, form, own, dtype):
    example = Example(over, dtype)
    parts, shard = example.parts(own, example.values)
    before = shard.clone()
    found = gather(over, parts, dtype, CPU, form)
    if form.sharded:
        check_chunks(over, found, example.values, ShardedTensor, world.rank)
        assert all(all_boxes(tensor) for tensor in found if isinstance(tensor, ShardedTensor))
    elif form.is_shown_by(over):
        assert all(map(same, found, example.values))
    else:
        assert found == [None] * len(example.values)
    for tensor in found:
        for block in [b for _, b in local_blocks(tensor)] if isinstance(tensor, ShardedTensor) else [tensor]:
            if block is not None:
                assert block.device == CPU
                block.fill_(3)  # new memory
    assert torch.equal(shard, before)


@pytest.mark.parametrize("left_out", [{1, 2, 4}, {0, 3, 5, 6}, set(range(len(SHAPES)))], ids=str)
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@OWN_MEMORY
def test_slots_that_are_left_out(world, over, form, own, left_out):
    example = Example(over)
    parts, _ = example.parts(own, example.values, left_out)
    found = gather(over, parts, torch.float32, CPU, form)
    for index in left_out:
        assert found[index] is None
    kept = [index for index in range(len(SHAPES)) if index not in left_out]
    if form.sharded:
        shown, values = [found[index] for index in kept], [example.values[index] for index in kept]
        check_chunks(over, shown, values, ShardedTensor, world.rank)
    elif form.is_shown_by(over):
        assert all(same(found[index], example.values[index]) for index in kept)


@OWN_MEMORY
@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_parameters_show_values_without_a_history(plain, form, own):
    example = Example(plain)
    parts, _ = example.parts(own, example.values)
    tensors = {id(tensor): torch.nn.Parameter(tensor) for tensor in parts.tensors}
    parts = dataclasses.replace(parts, tensors=[tensors[id(tensor)] for tensor in parts.tensors])
    for tensor in gather(plain, parts, torch.float32, CPU, form):
        for block in [b for _, b in local_blocks(tensor)] if isinstance(tensor, ShardedTensor) else [tensor]:
            assert block is None or not block.requires_grad
    scatter(plain, parts, example.values)
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in tensors.values())


@OWN_MEMORY
def test_chunks_are_dtensors_where_there_is_a_mesh(world, own):
    groups = resolve_mesh(None, world.mesh(), None)
    example = Example(groups)
    found = gather(groups, example.parts(own, example.values)[0], torch.float32, CPU, StateDictFormat(sharded=True))
    check_chunks(groups, found, example.values, DTensor, world.rank)
    assert all(tensor.placements == (Shard(0),) for tensor in found if isinstance(tensor, DTensor))
    assert all(same(t.full_tensor(), v) for t, v in zip(found, example.values, strict=True) if v.shape and v.numel())
    example.check_filled(own, found)


@OWN_MEMORY
def test_chunks_are_replicated_dtensors_on_a_mesh_of_two_dimensions(world, own):
    mesh = world.mesh(replicate=None, shard=2 if world.size % 2 == 0 else 1)
    groups = resolve_mesh(None, mesh, Strategy.HYBRID_SHARD)
    example = Example(groups)
    found = gather(groups, example.parts(own, example.values)[0], torch.float32, CPU, StateDictFormat(sharded=True))
    check_chunks(groups, found, example.values, DTensor, world.rank)
    assert all(t.placements == (Replicate(), Shard(0)) for t in found if isinstance(t, DTensor))
    assert all(same(t.full_tensor(), v) for t, v in zip(found, example.values, strict=True) if v.shape and v.numel())
    example.check_filled(own, found)


@pytest.mark.parametrize("with_mesh", [False, True])
def test_without_shards_a_sharded_form_is_whole(world, with_mesh):
    groups = resolve_mesh(None, world.mesh() if with_mesh else None, Strategy.NO_SHARD)
    example = Example(groups)
    found = gather(groups, example.parts(False, example.values)[0], torch.float32, CPU, StateDictFormat(sharded=True))
    assert all(map(same, found, example.values))


@OWN_MEMORY
def test_chunks_of_one_replica_name_its_ranks(world, hybrid, own):
    example = Example(hybrid)
    found = gather(hybrid, example.parts(own, example.values)[0], torch.float32, CPU, StateDictFormat(sharded=True))
    check_chunks(hybrid, found, example.values, ShardedTensor, world.rank)
    ranks = {rank for tensor in found if isinstance(tensor, ShardedTensor) for rank in all_boxes(tensor)}
    assert ranks <= {*hybrid.ranks(hybrid.dtensor_dim)}
    example.check_filled(own, found)


def test_the_first_rank_of_the_first_replica_alone_is_given_all(world, hybrid):
    example, form = Example(hybrid), StateDictFormat(rank0_only=True)
    parts, _ = example.parts(False, example.values)
    assert form.is_made_by(hybrid) == (world.rank < world.size // 2)
    assert form.is_shown_by(hybrid) == (world.rank == 0)
    if form.is_made_by(hybrid):  # the others need not call it
        assert (gather(hybrid, parts, torch.float32, CPU, form)[0] is None) == (world.rank != 0)
    found = gather(hybrid, parts, torch.float32, CPU, form)
    if world.rank == 0:
        assert all(map(same, found, example.values))
    else:
        assert found == [None] * len(SHAPES)


@OWN_MEMORY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_plain_tensors(over, own, dtype):
    example = Example(over)
    given = [value.to(dtype) for value in example.values]
    example.check_filled(own, given, given)
    columns = [value.mT.contiguous().mT if value.ndim > 1 else value.repeat_interleave(2)[::2] for value in given[4:]]
    example.check_filled(own, [*given[:4], *columns], given)
    example.check_filled(own, [None, *given[1:4], None, *given[5:]], given, left_alone={0, 4})


def blocks_of(shape, cuts):
    """A tensor's boxes where each dimension is cut into as many parts, the last ones first; none is empty."""
    ranges = []
    for size in shape:
        step = max(1, -(-size // cuts))
        ranges.append([(begin, min(step, size - begin)) for begin in range(0, max(size, 1), step)])
    boxes = [Box(*zip(*parts, strict=True)) for parts in itertools.product(*ranges)]
    return list(reversed(boxes))


def sharded_in_blocks(value, cuts, ranks):
    """A ``ShardedTensor`` of blocks that the ranks take in turn, its last blocks first."""
    metadata, mine = [], []
    for box, rank in zip(blocks_of(value.shape, cuts), itertools.cycle(ranks)):
        metadata.append(_compat.ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{rank}/cpu"))
        if rank == dist.get_rank():
            block = value[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].clone()
            mine.append(_compat.Shard(block, metadata[-1]))
    properties = _compat.TensorProperties(dtype=value.dtype)
    whole = _compat.ShardedTensorMetadata(metadata, value.shape, properties)
    return _compat.sharded_tensor(mine, whole, dist.group.WORLD)


@OWN_MEMORY
@pytest.mark.parametrize("cuts", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharded_tensors_of_any_blocks(world, over, own, cuts, dtype):
    example = Example(over)
    given = [value.to(dtype) for value in example.values]
    turned = [*range(1, world.size), 0]
    values = [sharded_in_blocks(value, cuts, turned) if value.ndim else value for value in given]
    if cuts > 2 and world.size < 8:
        assert len(all_boxes(values[4])[world.rank]) > 1
    example.check_filled(own, values, given)
    example.check_filled(own, [*values[:2], None, *values[3:]], given, left_alone={2})


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
@OWN_MEMORY
def test_the_way_back_of_each_form(over, form, own):
    example = Example(over)
    found = gather(over, example.parts(own, example.values)[0], torch.float32, CPU, form)
    if form.rank0_only:
        found = [Rank0Tensor(v.shape, v.dtype, t) for t, v in zip(found, example.values, strict=True)]
    example.check_filled(own, found)
    example.check_filled(not own, found)


def placements_for(value, mesh):
    """All that a tensor may have on a mesh."""
    kinds = [Replicate(), *(Shard(dim) for dim in range(value.ndim))]
    return itertools.product(kinds, repeat=mesh.ndim)


def meshes(world):
    return [world.mesh(), world.mesh(replicate=None, shard=2 if world.size % 2 == 0 else 1)]


@pytest.mark.parametrize("two", [False, True], ids=["1-D mesh", "2-D mesh"])
def test_blocks_of_dtensors_are_what_torch_distributes(world, two):
    mesh, nowhere = meshes(world)[two], 0
    for shape in SHAPES.values():
        value = torch.arange(float(math.prod(shape))).view(shape)
        for placements in placements_for(value, mesh):
            tensor = distribute_tensor(value, mesh, placements)
            local, blocks = tensor.to_local(), local_blocks(tensor)
            everyone = world.comm.allgather([box for box, _ in blocks])
            assert {rank: boxes for rank, boxes in enumerate(everyone) if boxes} == all_boxes(tensor)
            if blocks:
                [(box, block)] = blocks
                # Of nothing, all is a block of the first rank, whose local tensor may be a part of it.
                assert same(block, value[box.slices]) or (not value.numel() and same(block, local))
            else:
                nowhere += 1
                assert not local.numel()
    assert nowhere or world.rank == 0  # whoever is not first has nothing of some tensors


@OWN_MEMORY
@pytest.mark.parametrize("two", [False, True], ids=["1-D mesh", "2-D mesh"])
def test_dtensors_of_any_placement(world, over, own, two):
    mesh, example = meshes(world)[two], Example(over)
    kinds = [list(placements_for(value, mesh)) for value in example.values]
    for turn in range(max(map(len, kinds))):
        values = [
            distribute_tensor(value, mesh, placements[turn % len(placements)])
            for value, placements in zip(example.values, kinds, strict=True)
        ]
        example.check_filled(own, values)


def test_a_replicated_dtensor_is_taken_where_it_is(world, plain):
    """As a plain tensor is: no rank waits for another, whatever the others do."""
    example, mesh = Example(plain), world.mesh()
    values = [distribute_tensor(value, mesh, [Replicate()]) for value in example.values]
    plain.ranks(plain.dtensor_dim)
    if world.rank == world.size - 1:
        example.check_filled(False, values)


@OWN_MEMORY
def test_a_dtensor_that_some_ranks_have_whole_comes_from_them(world, plain, own):
    example, last = Example(plain), world.size - 1
    mesh = DeviceMesh("cpu", [last])
    values = [distribute_tensor(value, mesh, [Replicate()]) for value in example.values]
    assert [len(local_blocks(value)) for value in values] == [world.rank == last] * len(values)
    example.check_filled(own, values)
    if world.rank == last and world.size > 1:
        dist.destroy_process_group(mesh.get_group())


class HeldBack:
    """A communicator, and the sizes of what goes through it at a time."""

    def __init__(self, comm):
        self.comm, self.sent, self.received, self.called = comm, [], [], set()

    def __getattr__(self, name):
        self.called.add(name)
        return getattr(self.comm, name)

    def all_to_all(self, outputs, inputs, *, async_op=False):
        self.sent.append(sum(tensor.numel() for tensor in inputs))
        self.received.append(sum(tensor.numel() for tensor in outputs))
        return self.comm.all_to_all(outputs, inputs, async_op=async_op)


@pytest.mark.parametrize("batch", [1, 20, 40, 1 << 20])
def test_a_few_parameters_at_a_time_are_in_memory(world, plain, monkeypatch, batch):
    """Whatever is made, no rank sends or receives more at a time than one batch, or the largest parameter."""
    monkeypatch.setattr(moving, "BATCH_NUMEL", batch)
    shapes = {f"p{index}": (index % 5 + 1, 5) for index in range(12)}
    watch = HeldBack(plain.shard)
    groups = dataclasses.replace(plain, along={"shard": watch})
    example = Example(groups, shapes=shapes)
    form, bound = StateDictFormat(sharded=True), max(batch, 25)
    chunks = gather(groups, example.parts(True, example.values)[0], torch.float32, CPU, form)
    gather(groups, example.parts(False, example.values)[0], torch.float32, CPU, StateDictFormat(rank0_only=True))
    first = [Rank0Tensor(value.shape, value.dtype, value if world.rank == 0 else None) for value in example.values]
    blocks = [sharded_in_blocks(value, 3, range(world.size)) for value in example.values]
    columns = [distribute_tensor(value, world.mesh(), [Shard(1)]) for value in example.values]
    for values in (chunks, first, blocks, columns):
        example.check_filled(False, values)
    assert "all_gather_into_tensor" not in watch.called
    assert max(watch.sent + watch.received, default=0) <= bound
    total = sum(value.numel() for value in example.values)
    assert bool(watch.sent) == (world.size > 1)
    assert world.size == 1 or batch < total or len(watch.sent) == 6  # and no more often than it takes


def test_copies_of_blocks_are_made_when_their_turn_comes(world, plain, monkeypatch):
    """Blocks that are no single piece of memory are put together: not all of a state dict's at a time."""
    monkeypatch.setattr(moving, "BATCH_NUMEL", 1)
    made, alive, make = [], [], scattering._stored

    def watch(value):
        made.append(make(value))
        return made[-1]

    def watched(*arguments):
        alive.append(sum(tensor is not None for tensor in made))
        made.clear()
        actual(*arguments)

    actual = moving.redistribute
    monkeypatch.setattr(scattering, "_stored", watch)
    monkeypatch.setattr(moving, "redistribute", watched)
    example = Example(plain)
    example.check_filled(False, [sharded_in_blocks(v, 3, range(world.size)) if v.ndim else v for v in example.values])
    assert max(alive) == 1


@OWN_MEMORY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_the_first_rank_alone(world, over, own, dtype):
    example = Example(over)
    given = [value.to(dtype) for value in example.values]
    values = [Rank0Tensor(v.shape, v.dtype, v if world.rank == 0 else None) for v in given]
    example.check_filled(own, values, given)
    example.check_filled(own, [*values[:4], None, *values[5:]], given, left_alone={4})


@OWN_MEMORY
def test_tensors_of_the_first_rank_reach_all_replicas(world, hybrid, own):
    example = Example(hybrid)
    values = [Rank0Tensor(v.shape, v.dtype, v if world.rank == 0 else None) for v in example.values]
    example.check_filled(own, values)
    example.check_filled(own, [*values[:4], None, *values[5:]], left_alone={4})
    example.check_filled(own, [*values[:2], *example.values[2:]])


def test_other_replicas_keep_what_is_left_alone(world, hybrid):
    """Also where it lies in the same memory as what comes from the first replica."""
    example = Example(hybrid)
    parts, shard = example.parts(False)
    shard.fill_(float(world.rank))
    values: list = [None] * len(SHAPES)
    values[2] = Rank0Tensor(example.values[2].shape, torch.float32, example.values[2] if world.rank == 0 else None)
    scatter(hybrid, parts, values)
    expected = torch.full_like(shard, float(world.rank))
    extent = example.layout.param_run("b", hybrid.shard.rank)
    if extent is not None:
        mine = example.values[2][extent.start : extent.start + extent.numel]
        expected[extent.offset : extent.offset + extent.numel] = mine
    assert torch.equal(shard, expected)


@OWN_MEMORY
def test_kinds_and_dtypes_may_differ_from_slot_to_slot(world, over, own):
    example, mesh = Example(over), world.mesh()
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float32, torch.float16]
    given = [value.to(dtype) for value, dtype in zip(example.values, dtypes, strict=True)]

    def on_first(value):
        return Rank0Tensor(value.shape, value.dtype, value if world.rank == 0 else None)

    a, scalar, b, no_rows, c, d, empty = given
    backwards = [*reversed(range(world.size))]
    example.check_filled(
        own,
        [
            sharded_in_blocks(a, 2, backwards),
            on_first(scalar),
            distribute_tensor(b, mesh, [Shard(0)]),
            sharded_in_blocks(no_rows, 1, backwards),
            distribute_tensor(c, mesh, [Shard(2)]),
            on_first(d),
            empty,
        ],
        given,
    )
    example.check_filled(
        own,
        [on_first(a), scalar, sharded_in_blocks(b, 3, backwards), None, on_first(c), d, on_first(empty)],
        given,
        left_alone={3},
    )


@OWN_MEMORY
def test_memory_with_gaps_between_values(world, over, own):
    example = Example(over, shapes={"a": (6,), "b": (8,), "c": (4, 6)})
    a, b, c = example.values

    def spread(value):
        return value.repeat_interleave(2, dim=-1)[..., ::2]

    first = Rank0Tensor(a.shape, a.dtype, spread(a) if world.rank == 0 else None)
    distributed = [[], []]
    for values, value in zip(distributed, (b, c), strict=True):
        box = chunk_box(value.shape, world.size, world.rank)
        begin, rows = (0, 0) if box is None else (box.offsets[0], box.sizes[0])
        local = spread(value)[begin : begin + rows]
        assert local.numel() < 2 or not local.is_contiguous()
        shape, stride = value.shape, value.stride()
        for placement, mine in ((Shard(0), local), (Replicate(), spread(value))):
            values.append(
                DTensor.from_local(mine, world.mesh(), [placement], run_check=False, shape=shape, stride=stride)
            )
    for one, other in itertools.product(*distributed):
        example.check_filled(own, [first, one, other])


def test_a_sharded_tensor_of_other_ranks_is_refused_by_all(world, comm):
    """Before anything is filled: the model is sharded over the ranks of a half, the tensor over all."""
    if world.size < 2:
        pytest.skip("one rank has no others")
    half = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    groups = resolve_mesh(comm.subgroup(half), None, None)
    example = Example(groups)
    a = create_chunk_sharded_tensor(
        torch.zeros(chunk_box((world.size, 3), world.size, world.rank).sizes),
        (world.size, 3),
        torch.float32,
        CPU,
        dist.group.WORLD,
        range(world.size),
    )
    example = Example(groups, shapes={"first": (2,), "a": (world.size, 3)})
    parts, shard = example.parts(False)
    there, here = re.escape(str(list(range(world.size)))), re.escape(str(half))
    with pytest.raises(
        StateDictError, match=f"'a': its ShardedTensor is on the ranks {there}.*of the model \\({here}\\) .*: load"
    ):
        scatter(groups, parts, [example.values[0], a])
    assert torch.equal(shard, torch.full_like(shard, UNTOUCHED))


def test_a_dtensor_that_is_pending_is_refused(world, plain):
    example = Example(plain)
    parts, shard = example.parts(False)
    values: list = list(example.values)
    values[4] = DTensor.from_local(values[4], world.mesh(), [Partial()], run_check=False)
    with pytest.raises(
        StateDictError, match=r"'c': a DTensor with placements \(Partial\(sum\),\) has no values of its"
    ):
        scatter(plain, parts, values)
    assert torch.equal(shard, torch.full_like(shard, UNTOUCHED))
