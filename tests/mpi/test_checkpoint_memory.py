"""Versions in memory: whichever ranks are left load the last one that is whole, through the same load as files.

Lost ranks take no part after the loss. Nodes are imagined: the ranks of one machine have a topology of several.
"""

import dataclasses
import gc
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp import checkpoint, fsdp2
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.memory import loading, windows
from hpcfsdp.checkpoint.memory.saving import MemorySaver
from hpcfsdp.checkpoint.memory.windows import Slot
from hpcfsdp.checkpoint.saving import content
from hpcfsdp.errors import UsageError
from hpcfsdp.hang import lost
from hpcfsdp.launch.topology import Topology
from hpcfsdp.world import forget
from tests.mpi.models import adamw, make_net, shard, train_sharded
from tests.mpi.test_checkpoint_manager import contents

pytestmark = pytest.mark.ranks(4, 2)

FRONTS = pytest.mark.parametrize("front", ["flat", "original", "rows"])


@pytest.fixture(autouse=True)
def nothing_is_kept():
    yield
    windows.drop()


def nodes(size, kind):
    """One node; two of them, of one size or not; one for each rank."""
    return {
        "one": Topology.regular(1, size),
        "two": Topology.regular(2, size // 2),
        "uneven": Topology.uneven([1, size - 1]),
        "each": Topology.regular(size, 1),
    }[kind]


def make(front, group, *, seed=0, dropout=0.1):
    """A model of a front on the ranks of `group`, and its optimizer."""
    model = make_net(dropout, seed)
    if front != "rows":
        model = shard(model, group, use_orig_params=front == "original")
    else:
        model.clip_grad_norm_ = lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        for block in model.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
    return model, adamw(model)


def manager_of(folder, own=None, **options):
    """A manager whose messages between nodes go over `own`."""
    manager = checkpoint.CheckpointManager(folder, **{"memory_every": 1, **options})
    if own is not None:
        manager._own_communicator = lambda comm: own
    return manager


def train(manager, model, optimizer, steps, comm, **options):
    losses = []
    for step in steps:
        losses += train_sharded(model, optimizer, [step], comm)
        manager.step(step, model=model, optimizer=optimizer, extra={"step": step}, **options)
    return losses


def values(path):
    """All that a file holds of the training, but for the number of ranks and what belongs to each of them."""
    index = checkpoint.open_index(path)
    with BlockReader(index) as reader:
        found = {name: reader.read(name, 0, spec.numel).tobytes() for name, spec in index.tensors.items()}
    return found, index.tensors, index.links, index.param_groups, index.scalars, index.info.step, index.info.extra


@pytest.mark.parametrize(
    ("front", "kind", "lost"),
    [
        ("flat", "one", [0]),
        ("original", "two", "node 0"),
        ("flat", "uneven", "node 1"),
        ("original", "each", "node 1"),
    ],
)
def test_those_who_are_left_go_on_from_the_last_step(world, make_comm, shared_path, monkeypatch, front, kind, lost):
    monkeypatch.setattr(loading, "_PORTION_BYTES", 1 << 10)
    topology = nodes(world.size, kind)
    comm = make_comm(topology)
    model, optimizer = make(front, comm)
    manager = manager_of(shared_path)
    train(manager, model, optimizer, range(1, 4), comm)
    given = {"model": model, "optimizer": optimizer, "extra": {"step": 3}}
    expected = checkpoint.save(shared_path / "expected.h5", step=3, **given)
    left = sorted(set(range(world.size)) - set(topology.nodes[int(lost[-1])] if lost != [0] else lost))
    if world.rank not in left:
        return
    others = comm.subgroup(left)
    model, optimizer = make(front, others, seed=1)
    manager = manager_of(shared_path)
    info = manager.load_latest(model=model, optimizer=optimizer)
    assert (info.step, info.source, info.world_size, info.extra) == (3, "memory", world.size, {"step": 3})
    assert info.path == shared_path / "step-00000003.h5" and not info.path.exists()
    again = checkpoint.save(shared_path / "again.h5", model=model, optimizer=optimizer, step=3, extra=info.extra)
    assert values(again) == values(expected)
    train(manager, model, optimizer, [4], others)
    assert manager.load_latest(model=model, optimizer=optimizer).step == 4
    assert len(windows.of(shared_path)) == 1


@FRONTS
def test_new_processes_in_the_place_of_a_lost_node_go_on_bit_by_bit(world, make_comm, shared_path, front):
    own = make_comm(nodes(world.size, "two"))
    comm = world.communicator
    model, optimizer = make(front, None)
    manager = manager_of(shared_path, own)
    torch.manual_seed(100 + world.rank)
    train(manager, model, optimizer, range(1, 4), comm)
    losses = train_sharded(model, optimizer, range(4, 6), comm)
    if world.rank in own.topology.nodes[0]:
        windows.drop()
    model, optimizer = make(front, None, seed=1)
    torch.manual_seed(5)
    info = manager_of(shared_path).load_latest(model=model, optimizer=optimizer, fresh=front == "flat")
    assert (info.step, info.source) == (3, "memory")
    assert train_sharded(model, optimizer, range(4, 6), comm) == losses


@pytest.mark.parametrize(
    ("kind", "harm", "step"),
    [
        ("one", "not ended", 2),  # as of a rank that dies while it copies
        ("two", "not ended", 3),  # the partner has it
        ("two", "both not ended", 2),
        ("one", "damaged", 2),
    ],
)
def test_a_version_that_is_not_whole_is_not_used(world, make_comm, shared_path, kind, harm, step):
    comm = make_comm(nodes(world.size, kind))
    model, optimizer = make("flat", comm)
    manager = manager_of(shared_path)
    train(manager, model, optimizer, range(1, 4), comm)
    manager.wait()
    comm.barrier()
    manager._memory.finish()
    (window,) = windows.of(shared_path)
    slots = [pair[1] for (holder, of), pair in window.slots.items() if of == 1 and (holder == 1 or "both" in harm)]
    assert all(slot.step == 3 for slot in slots)
    comm.barrier()
    for slot in slots:
        if harm == "damaged":
            slot._values[8:16] = 255  # the checksum
        else:
            slot.begin()
    comm.barrier()
    info = manager_of(shared_path).load_latest(model=model, optimizer=optimizer)
    assert (info.step, info.source, info.extra) == (step, "memory", {"step": step})


def test_the_newest_of_memory_and_files_is_loaded(world, comm, shared_path):
    model, optimizer = make("flat", None)
    manager = manager_of(shared_path, memory_every=2, every=3)
    found = []
    for step in range(1, 8):
        train(manager, model, optimizer, [step], comm)
        info = manager.load_latest(model=model, optimizer=optimizer)
        found.append(info and (info.step, info.source))
    memory = [None, (2, "memory"), (3, "file"), (4, "memory"), (4, "memory"), (6, "memory"), (6, "memory")]
    assert found == memory
    manager.close()
    assert manager_of(shared_path).load_latest(model=model, optimizer=optimizer).source == "file"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_files_are_saved_while_versions_go_on(comm, shared_path, asynchronous):
    model, optimizer = make("flat", None)
    calls = []
    with manager_of(shared_path, every=2, asynchronous=asynchronous) as manager:
        for step in range(1, 6):
            train_sharded(model, optimizer, [step], comm)
            given = {"model": model, "optimizer": optimizer}
            curve = {"loss": ([step], [0.5])}
            path = manager.step(step, extra=lambda: calls.append(1) or {"a": 1}, metrics=lambda at=curve: at, **given)
            assert (path is not None) == (step % 2 == 0)
            if path is not None:
                expected = checkpoint.save(shared_path / f"{step}.h5", step=step, extra={"a": 1}, **given)
        manager.wait()
        assert manager.latest().name == "step-00000004.h5"
        assert contents(manager.latest()) == contents(expected)
        assert manager.load_latest(**given).step == 5
    assert len(calls) == 5 and checkpoint.open_index(manager.latest()).metrics["loss"][0].tolist() == [4]


@pytest.mark.ranks(4)
def test_replicas_on_other_nodes_are_not_sent(world, make_comm, shared_path):
    own = make_comm(nodes(4, "two"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sent = {}
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.FULL_SHARD):
        hybrid = strategy is ShardingStrategy.HYBRID_SHARD
        model = shard(make_net(), sharding_strategy=strategy, **({"device_mesh": mesh} if hybrid else {}))
        optimizer = adamw(model)
        manager = manager_of(shared_path / strategy.name, own)
        train(manager, model, optimizer, range(1, 4), world.communicator)
        manager._memory.finish()
        sent[hybrid] = own.all_gather_object(manager._memory.sent_bytes)
        elements = sum(window.plan.nbytes for window in windows.of(shared_path / strategy.name))
        expected = checkpoint.save(shared_path / f"{strategy.name}.h5", model=model, optimizer=optimizer, step=3)
        if world.rank in own.topology.nodes[1]:
            windows.drop()
        other = shard(make_net(seed=1))
        its = adamw(other)
        assert manager_of(shared_path / strategy.name).load_latest(model=other, optimizer=its).source == "memory"
        again = checkpoint.save(shared_path / "again.h5", model=other, optimizer=its, step=3)
        assert values(again)[0] == values(expected)[0]
    values_and_places = 3 * 4 * (64 << 10)
    assert sum(sent[False]) > 3 * elements
    assert sum(sent[True]) < min(sum(sent[False]) - 2.9 * elements, values_and_places)


def test_memory_stays_as_it_is(world, make_comm, shared_path):
    def maps():
        gc.collect()
        return sum("memfd:hpcfsdp" in line for line in Path("/proc/self/maps").read_text().splitlines())

    comm = make_comm(nodes(world.size, "two"))
    model, optimizer = make("flat", comm)
    manager = manager_of(shared_path)
    train(manager, model, optimizer, [1], comm)
    held, mapped = windows.held_bytes(), maps()
    for step in range(2, 51):
        manager.step(step, model=model, optimizer=optimizer)
    assert (windows.held_bytes(), maps()) == (held, mapped)
    del model, optimizer
    counts = []
    for turn in range(10):
        others = comm.subgroup(range(world.size))
        model, optimizer = make("flat", others)
        manager = manager_of(shared_path)
        assert manager.load_latest(model=model, optimizer=optimizer).step == 50 + turn
        manager.step(51 + turn, model=model, optimizer=optimizer)
        assert windows.held_bytes() == held
        others.close()
        manager._comms[0][1].close()
        del model, optimizer, manager, others
        counts.append(maps())
    assert counts[-1] <= counts[1]


def test_values_that_outgrow_their_room_get_another_window(comm, shared_path):
    model, optimizer = make("flat", None)
    manager = manager_of(shared_path)
    for step, size in ((1, 10), (2, 10), (3, 100_000), (4, 10)):
        manager.step(step, model=model, optimizer=optimizer, extra={"text": "a" * size})
        assert len(manager.load_latest(model=model, optimizer=optimizer).extra["text"]) == size
        (window,) = windows.of(shared_path)
        assert window.generation == 1 + (step > 2)


def test_a_rank_that_fails_to_copy_is_an_error_on_all(world, comm, shared_path, monkeypatch):
    model, optimizer = make("flat", None)
    manager = manager_of(shared_path)
    train(manager, model, optimizer, range(1, 3), comm)
    with monkeypatch.context() as patch:
        if world.rank == world.size - 1:
            patch.setattr(Slot, "put_values", lambda *_: 1 // 0)
        with pytest.raises(Exception, match="modulo by zero") as caught:
            manager.step(3, model=model, optimizer=optimizer)
    assert caught.value.raised_on_all_ranks
    assert manager.load_latest(model=model, optimizer=optimizer).step == 2
    manager.step(4, model=model, optimizer=optimizer)
    assert manager.load_latest(model=model, optimizer=optimizer).step == 4


def test_ranks_without_mpi_are_refused(gloo, shared_path):
    model, optimizer = make("flat", gloo)
    with pytest.raises(UsageError, match=r"memory_every needs ranks that communicate over MPI: call hpcfsdp\.init"):
        manager_of(shared_path).step(1, model=model, optimizer=optimizer)


def test_a_saver_needs_names_where_the_plan_was_kept_by_a_file(comm, shared_path, monkeypatch):
    model, optimizer = make("flat", None)
    made = []
    real = content.plan_save
    monkeypatch.setattr(content, "plan_save", lambda *args: made.append(1) or real(*args))
    with manager_of(shared_path, memory_every=2, every=3, asynchronous=True) as manager:
        train(manager, model, optimizer, range(1, 10), comm)
    assert len(made) == 1
    with manager_of(shared_path, memory_every=2, every=3, asynchronous=True) as manager:
        train(manager, model, optimizer, range(3, 10), comm)
    assert len(made) == 3  # the first file's is made again, with names
    assert isinstance(manager._memory, MemorySaver)


def test_where_the_job_outlives_ranks_versions_outlive_their_manager(world, make_comm, shared_path, monkeypatch):
    """A rank may be lost after another one has closed its manager; the training is done when all have returned."""
    monkeypatch.setattr(lost, "goes_on", True)
    comm = make_comm(nodes(world.size, "two"))
    model, optimizer = make("flat", comm)
    with manager_of(shared_path) as manager:
        train(manager, model, optimizer, range(1, 3), comm)
    (whole,) = windows.of(shared_path)
    begun = dataclasses.replace(whole, generation=2, token="begun", slots={})  # of a world that was lost at once
    windows.of(shared_path).append(begun)
    manager = manager_of(shared_path)
    info = manager.load_latest(model=model, optimizer=optimizer)
    assert (info.step, info.source) == (2, "memory")
    assert windows.of(shared_path) == [whole]
    forget()
    assert manager.load_latest(model=model, optimizer=optimizer) is None
