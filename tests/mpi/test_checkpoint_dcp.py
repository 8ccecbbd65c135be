"""Storage for ``torch.distributed.checkpoint``: saved by some ranks, loaded by others, by the engine and back."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hpcfsdp.state_dict as ours
from hpcfsdp import checkpoint
from hpcfsdp._compat import ShardedTensor
from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer, open_index
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from tests.disks import using
from tests.mpi.models import adamw, make_net, shard

pytestmark = pytest.mark.ranks(2, 1, 3)


class Layers(nn.Module):
    """Sizes that no number of ranks divides, a layer with fewer rows than ranks, a buffer, a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 13), nn.LayerNorm(13), nn.Linear(13, 1)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.gain


def build(mesh, seed=0):
    """An FSDP2 model over a mesh, or a plain one (None), and its optimizer."""
    torch.manual_seed(seed)
    model = Layers()
    if mesh is not None:
        for module in (model.first, model.last, model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5 ** (seed + 3), betas=(0.5, 0.75))


def train(model, optimizer, steps=2):
    for step in range(steps):
        model(torch.full((4, 5), step / 4) + torch.eye(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": state}


def whole(value):
    """Collective over the ranks of a DTensor."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same(one, other, path=""):
    if isinstance(one, dict):
        assert isinstance(other, dict), path
        assert set(one) == set(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}/{place}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    else:
        assert type(one) is type(other) and one == other, path


@pytest.fixture(scope="module")
def some(world):
    """``some(n)``: the first n ranks, as a process group and as a mesh; collective over all ranks."""
    made = {}

    def first(n):
        if n not in made:
            ranks = list(range(n))
            made[n] = dist.new_group(ranks), DeviceMesh("cpu", ranks)
        return made[n]

    return first


def sizes(world):
    return range(1, world.size + 1)


@pytest.mark.ranks(4)
def test_fsdp2_saved_by_n_ranks_loads_on_m(world, some, shared_path):
    for n in sizes(world):
        group, mesh = some(n)
        path, expected = shared_path / f"{n}.h5", None
        if world.rank < n:
            model, optimizer = build(mesh)
            train(model, optimizer)
            state = state_of(model, optimizer)
            dcp.save({**state, "epoch": n}, storage_writer=HDF5Writer(path, step=n), process_group=group)
            expected = whole(state)
        expected = world.comm.bcast(expected)
        for m in sizes(world):
            group, mesh = some(m)
            if world.rank < m:
                model, optimizer = build(mesh, seed=1)
                state = {**state_of(model, optimizer), "epoch": 0}
                dcp.load(state, storage_reader=HDF5Reader(path), process_group=group)
                assert state.pop("epoch") == n
                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
                assert_same(whole(state_of(model, optimizer)), expected)
            world.comm.Barrier()
        if world.rank == 0:
            assert open_index(path).info.world_size == n
    assert sorted(os.listdir(shared_path)) == [f"{n}.h5" for n in sizes(world)]


def test_training_goes_on_bit_by_bit_in_a_plain_model_and_in_the_engine(world, some, shared_path):
    _, mesh = some(world.size)
    model, optimizer = build(mesh)
    train(model, optimizer)
    dcp.save(state_of(model, optimizer), storage_writer=HDF5Writer(shared_path / "a.h5"))
    plain, plain_optimizer = build(None, seed=1)
    checkpoint.load(shared_path / "a.h5", model=plain, optimizer=plain_optimizer)
    assert_same(state_of(plain, plain_optimizer), whole(state_of(model, optimizer)))
    sharded = shard(build(None, seed=1)[0])
    engine_optimizer = torch.optim.AdamW(sharded.parameters(), lr=1.0)
    checkpoint.load(shared_path / "a.h5", model=sharded, optimizer=engine_optimizer)
    assert engine_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    found = ours.get_model_state_dict(sharded, options=ours.StateDictOptions(full_state_dict=True))
    assert_same(dict(found), whole(dict(state_of(model, optimizer)["model"])))


def test_the_engines_file_loads_into_fsdp2(world, some, comm, shared_path):
    sharded = shard(build(None)[0])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.25)
    train(sharded, optimizer)
    checkpoint.save(shared_path / "a.h5", model=sharded, optimizer=optimizer)
    _, mesh = some(world.size)
    model, other = build(mesh, seed=1)
    state = state_of(model, other)
    dcp.load(state, storage_reader=HDF5Reader(shared_path / "a.h5"))
    set_state_dict(model, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
    plain, plain_optimizer = build(None, seed=2)
    checkpoint.load(shared_path / "a.h5", model=plain, optimizer=plain_optimizer)
    assert other.param_groups[0]["lr"] == 0.25
    assert_same(whole(state_of(model, other)), state_of(plain, plain_optimizer))


def test_tied_weights_of_the_engine_load_under_both_names(world, some, comm, shared_path):
    model = shard(make_net())
    checkpoint.save(shared_path / "a.h5", model=model, optimizer=adamw(model))
    target = {"model": {name: torch.zeros(11, 13) for name in ("embed.weight", "head.weight")}}
    dcp.load(target, storage_reader=HDF5Reader(shared_path / "a.h5"))
    assert torch.equal(target["model"]["embed.weight"], make_net().embed.weight)
    assert torch.equal(target["model"]["head.weight"], make_net().embed.weight)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
def test_sharded_state_dicts_of_the_engine(world, shared_path, orig):
    """ShardedTensors and DTensors that the engine makes, as torch's functions for checkpoints get them."""
    model = shard(build(None)[0], use_orig_params=orig)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    train(model, optimizer)
    weights, state = ours.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, storage_writer=HDF5Writer(shared_path / "a.h5"))
    fresh = shard(build(None, seed=1)[0], use_orig_params=not orig)
    other = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    checkpoint.load(shared_path / "a.h5", model=fresh, optimizer=other)
    full = ours.StateDictOptions(full_state_dict=True)
    assert_same(
        ours.get_state_dict(fresh, other, options=full)[1], ours.get_state_dict(model, optimizer, options=full)[1]
    )


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.ranks(4, 3)
def test_sharded_tensors(world, shared_path):
    """As FSDP1 has them without a mesh."""
    model = shard(build(None)[0])
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    assert isinstance(state["first.weight"], ShardedTensor)
    dcp.save({"model": state}, storage_writer=HDF5Writer(shared_path / "a.h5"))
    plain, _ = build(None, seed=1)
    checkpoint.load(shared_path / "a.h5", model=plain)
    assert_same(dict(plain.state_dict()), dict(build(None)[0].state_dict()))
    other = shard(build(None, seed=1)[0])
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        target = {"model": other.state_dict()}
        dcp.load(target, storage_reader=HDF5Reader(shared_path / "a.h5"))
        other.load_state_dict(target["model"])
    found = ours.get_model_state_dict(other, options=ours.StateDictOptions(full_state_dict=True))
    assert_same(dict(found), dict(plain.state_dict()))


def layouts(world):
    """Meshes of all ranks, and ways to place a tensor of three dimensions on each."""
    line = init_device_mesh("cpu", (world.size,))
    yield from ((line, [place]) for place in (Shard(0), Shard(1), Shard(2), Replicate()))
    if world.size == 4:
        square = init_device_mesh("cpu", (2, 2))
        for pair in ([Shard(0), Shard(1)], [Shard(1), Shard(2)], [Replicate(), Shard(1)], [Shard(0), Shard(0)]):
            yield square, pair


@pytest.mark.ranks(4, 2)
def test_any_placement_is_loaded_into_any_other(world, shared_path, thorough):
    torch.manual_seed(3)
    values = {
        "odd": torch.randn(7, 5, 3),
        "thin": torch.randn(2, 9, 2).bfloat16(),
        "empty": torch.zeros(3, 0, 2),
        "int": torch.arange(60).view(5, 4, 3),
    }
    found = list(layouts(world))
    for number, (mesh, places) in enumerate(found):
        path = shared_path / f"{number}.h5"
        state = {name: distribute_tensor(value, mesh, places) for name, value in values.items()}
        dcp.save({"model": state}, storage_writer=HDF5Writer(path))
        if world.rank == 0:
            assert open_index(path).tensors["model/odd"].shape == (7, 5, 3)
        for other_mesh, other_places in found if thorough else (found * 2)[number + 1 : number + 4]:
            target = {
                name: distribute_tensor(torch.zeros_like(value), other_mesh, other_places)
                for name, value in values.items()
            }
            dcp.load({"model": target}, storage_reader=HDF5Reader(path))
            for name, value in values.items():
                assert torch.equal(target[name].full_tensor(), value), (name, places, other_places)


def test_replicated_tensors_are_written_once(world, shared_path):
    mesh = init_device_mesh("cpu", (world.size,))
    state = {str(n): distribute_tensor(torch.full((4, 4), float(n)), mesh, [Replicate()]) for n in range(8)}
    dcp.save({"model": state, "plain": torch.ones(3)}, storage_writer=HDF5Writer(shared_path / "a.h5"))
    index = open_index(shared_path / "a.h5")
    assert len(index.extents) == 9
    assert set(index.extents["rank"].tolist()) == set(range(world.size))


def test_async_save_and_a_second_one_after_it(world, shared_path):
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (world.size,))
    columns = distribute_tensor(torch.arange(60.0).view(6, 10), mesh, [Shard(1)])
    state = {"model": {"w": distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)]), "columns": columns}, "epoch": 1}
    writer = HDF5Writer(shared_path / "a.h5")
    for epoch in (1, 2):
        saving = dcp.async_save({**state, "epoch": epoch}, storage_writer=writer, process_group=group)
        state["model"]["w"].to_local().mul_(2)  # what has been staged stays what it was
        saving.result()
        target = {"model": {"w": torch.zeros(6, 5), "columns": torch.zeros(6, 10)}, "epoch": 0}
        dcp.load(target, storage_reader=HDF5Reader(shared_path / "a.h5"))
        assert torch.equal(target["model"]["columns"], torch.arange(60.0).view(6, 10))
        assert target["epoch"] == epoch and torch.equal(target["model"]["w"], torch.full((6, 5), 2.0 ** (epoch - 1)))
    world.comm.Barrier()


def test_over_gloo(world, shared_path):
    group = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"model": {"w": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(1)])}}
    dcp.save(state, storage_writer=HDF5Writer(shared_path / "a.h5"), process_group=group)
    target = {"model": {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)])}}
    dcp.load(target, storage_reader=HDF5Reader(shared_path / "a.h5"), process_group=group)
    assert torch.equal(target["model"]["w"].full_tensor(), torch.arange(35.0).view(7, 5))


def failures_of(call, *arguments, **options):
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **options)
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


class Fails(System):
    """A disk on which a call fails once."""

    def __init__(self, call):
        def failing(*arguments):
            raise OSError(errno.EIO, "")

        setattr(self, call, failing)


@pytest.mark.ranks(4, 2, 3)
def test_columns_are_exchanged_for_rows(world, shared_path, monkeypatch):
    monkeypatch.setattr("hpcfsdp.checkpoint.dcp.columns._LEAST_BYTES", 1)
    mesh = init_device_mesh("cpu", (world.size,))
    values = {f"w{n}": torch.randn(50, 40 + n).to(dtype) for n, dtype in enumerate([torch.float32, torch.bfloat16] * 3)}
    state = {name: distribute_tensor(value, mesh, [Shard(1)]) for name, value in values.items()}
    state |= {"rows": distribute_tensor(torch.randn(9, 4), mesh, [Shard(0)]), "step": 3}
    if world.size == 4:
        state["both"] = distribute_tensor(torch.randn(13, 7), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    dcp.save({"model": state}, storage_writer=HDF5Writer(shared_path / "a.h5"))
    index = open_index(shared_path / "a.h5")
    assert set(index.extents["count"]) == {1}
    ranks = range(world.size)
    assert {tuple(sorted(index.rows_of(f"model/{name}")["rank"])) for name in values} == {tuple(ranks)}
    target = {name: torch.zeros_like(value) for name, value in values.items()}
    dcp.load({"model": target}, storage_reader=HDF5Reader(shared_path / "a.h5"))
    assert all(torch.equal(target[name], value.full_tensor()) for name, value in state.items() if name in target)
    if world.size == 4:
        both = {"both": torch.zeros(13, 7)}
        dcp.load({"model": both}, storage_reader=HDF5Reader(shared_path / "a.h5"))
        assert torch.equal(both["both"], state["both"].full_tensor())


@pytest.mark.parametrize("kind", ["values", "disk"])
def test_an_exchange_that_fails_on_any_rank_is_everyones_error(several, world, shared_path, kind, monkeypatch):
    monkeypatch.setattr("hpcfsdp.checkpoint.dcp.columns._LEAST_BYTES", 1)
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"model": {"w": distribute_tensor(torch.randn(60, 30), mesh, [Shard(1)])}}

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item):
            if world.rank == bad and kind == "values":
                raise RuntimeError("no such value")
            return super().resolve_data(item)

    for bad in range(world.size):
        writer = HDF5Writer(shared_path / "a.h5")
        with using(Fails("pwritev") if world.rank == bad and kind == "disk" else None):
            failures = failures_of(dcp.save, state, storage_writer=writer, planner=Planner())
        assert sorted(failures) == list(range(world.size))
        reason = "no such value" if kind == "values" else os.strerror(errno.EIO)
        assert all(reason in str(error) for error in failures.values())
        assert all(f"rank {bad}: " in str(error) for rank, error in failures.items() if rank != bad)
        world.comm.Barrier()
        assert os.listdir(shared_path) == []
        world.comm.Barrier()


@pytest.mark.parametrize("call", ["open", "pwritev", "fsync"])
def test_a_disk_that_fails_on_any_rank_is_everyones_error(world, shared_path, call):
    path = shared_path / "a.h5"
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"model": {"w": distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])}}
    dcp.save(state, storage_writer=HDF5Writer(path))
    before = path.read_bytes()
    world.comm.Barrier()
    for bad in range(world.size):
        with using(Fails(call) if world.rank == bad else None):
            failures = failures_of(dcp.save, state, storage_writer=HDF5Writer(path))
        assert str(failures[bad]) == f"{path}: cannot write the checkpoint: {os.strerror(errno.EIO)}"
        assert isinstance(failures[bad], CheckpointError)
        assert all("another rank failed" in str(e) for rank, e in failures.items() if rank != bad)
        world.comm.Barrier()
        assert os.listdir(shared_path) == ["a.h5"] and path.read_bytes() == before
        world.comm.Barrier()
    dcp.save(state, storage_writer=HDF5Writer(path))
    world.comm.Barrier()
    assert open_index(path).footer is not None


def test_a_value_that_cannot_be_kept_is_everyones_error(world, shared_path):
    state = {"model": {"w": torch.ones(3)}, **{f"value{rank}": object() for rank in range(world.size)}}
    failures = failures_of(dcp.save, state, storage_writer=HDF5Writer(shared_path / "a.h5"))
    assert failures and all(isinstance(error, CheckpointError) for error in failures.values())
    assert any("is a object, and nothing is pickled" in str(error) for error in failures.values())
    world.comm.Barrier()
    assert os.listdir(shared_path) == []


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (lambda rank: {"rng": torch.Generator().manual_seed(rank).get_state()}, "rng"),
        (lambda rank: {"w": torch.ones(3), "seed": rank}, "seed"),
        (lambda rank: {"model": {"w": torch.ones(3)}, "schedule": {"at": [1, (2, rank)]}}, "schedule.at"),
        (lambda rank: {"model": {"w": torch.ones(3)}, "average": torch.full((2,), float(rank))}, "average"),
        (
            lambda rank: {"model": {"w": torch.ones(3)}, "optim": {"param_groups": [{"lr": rank}]}},
            "optim.param_groups.0.lr",
        ),
    ],
)
def test_values_of_one_name_that_differ_are_refused_with_a_remedy(several, world, shared_path, state, name):
    path = shared_path / "a.h5"
    dcp.save({"model": {"w": torch.zeros(3)}}, storage_writer=HDF5Writer(path))
    before = path.read_bytes()
    failures = failures_of(dcp.save, state(world.rank), storage_writer=HDF5Writer(path))
    assert failures
    for error in failures.values():
        assert f"{name!r} has other values on rank 1 than on rank 0" in str(error)
        assert f"call it '{name}.0', '{name}.1', ..." in str(error)
    world.comm.Barrier()
    assert os.listdir(shared_path) == ["a.h5"] and path.read_bytes() == before


def test_what_each_rank_has_under_a_name_of_its_own_comes_back(world, shared_path):
    path, name = shared_path / "a.h5", f"rng.{world.rank}"
    mine = torch.Generator().manual_seed(world.rank).get_state()
    dcp.save(
        {"model": {"w": torch.ones(3)}, name: mine, "seeds": {str(world.rank): world.rank}},
        storage_writer=HDF5Writer(path),
    )
    found = {"model": {"w": torch.zeros(3)}, name: torch.zeros_like(mine), "seeds": {str(world.rank): -1}}
    dcp.load(found, storage_reader=HDF5Reader(path))
    assert torch.equal(found[name], mine) and found["seeds"] == {str(world.rank): world.rank}


def test_statistics_of_a_model_may_differ_and_are_named(several, world, shared_path, caplog):
    path = shared_path / "a.h5"
    with caplog.at_level("WARNING", logger="hpcfsdp.checkpoint"):
        dcp.save({"model": {"mean": torch.full((2,), float(world.rank))}}, storage_writer=HDF5Writer(path))
    expected = ["the state dict's 'model.mean' has other values on rank 1"] if world.rank == 0 else []
    assert [text.partition(": ")[2].partition(" than")[0] for text in caplog.messages] == expected
    found = {"model": {"mean": torch.zeros(2)}}
    dcp.load(found, storage_reader=HDF5Reader(path))
    assert found["model"]["mean"].unique().item() in range(world.size)


def test_damage_that_one_rank_reads_is_everyones_error(world, shared_path):
    path = shared_path / "a.h5"
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"model": {"w": distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)])}}
    dcp.save(state, storage_writer=HDF5Writer(path))
    if world.rank == 0:
        row = open_index(path).extents[-1]
        with open(path, "r+b") as file:
            file.seek(int(row["byte_offset"]))
            file.write(b"\1")
    world.comm.Barrier()
    failures = failures_of(dcp.load, state, storage_reader=HDF5Reader(path))
    assert set(failures) == {world.size - 1}
    assert isinstance(failures[world.size - 1], CheckpointCorruptError)


def test_ranks_that_read_different_files_are_reported(several, world, shared_path):
    state = {"w": torch.ones(3)}
    for name in ("a.h5", "b.h5"):
        dcp.save({**state, "name": name}, storage_writer=HDF5Writer(shared_path / name))
    world.comm.Barrier()
    mine = shared_path / ("b.h5" if world.rank == 1 else "a.h5")
    failures = failures_of(dcp.load, state, storage_reader=HDF5Reader(mine))
    assert isinstance(failures[0], CheckpointMismatchError) and "rank 1" in str(failures[0])


def test_a_missing_file_is_an_error_on_all_ranks(world, shared_path):
    failures = failures_of(dcp.load, {"w": torch.ones(3)}, storage_reader=HDF5Reader(shared_path / "a.h5"))
    assert set(failures) == set(range(world.size))
    assert all(str(error) == f"{shared_path / 'a.h5'}: No such file or directory" for error in failures.values())
