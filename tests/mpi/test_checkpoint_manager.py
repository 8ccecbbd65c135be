"""A manager saves while training goes on; all ranks see the same outcome at the same call, and nothing good is lost."""

import errno
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import retention
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.catalog import checkpoint_path
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.saving import content, pending
from hpcfsdp.checkpoint.saving.pending import StagingRing
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    HpcfsdpError,
    UsageError,
)
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.model import communicator_of
from tests.disks import using
from tests.mpi.models import adamw, make_net, shard, train_sharded

pytestmark = pytest.mark.ranks(2, 1)

CAP = schema.BLOCK_BYTES


@pytest.fixture
def trained(comm):
    model = shard(make_net())
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(2), comm)
    return model, optimizer


def names(folder):
    return sorted(os.listdir(folder))


def barrier(comm):
    comm.all_gather_object(None)


def disturb(model, optimizer):
    """Change everything that a checkpoint holds, at once."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-7)
        for buffer in model.buffers():
            buffer.fill_(-7)
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(-7)
    for group in optimizer.param_groups:
        group["lr"] = -7.0
    torch.manual_seed(12345)


def contents(path):
    """Who wrote what, its checksums, and all small values: all that there is but for the date, and places in the file.

    Those differ: asynchronous, small values lie behind the tensors.
    """
    index = checkpoint.open_index(path)
    rng = {name: states.tolist() for name, states in index.rng.items()}
    info = index.info
    return (
        index.tensors,
        index.extents[[name for name in index.extents.dtype.names if name != "byte_offset"]].tolist(),
        index.param_groups,
        index.scalars,
        rng,
        info.step,
        {name: np.asarray(value).tolist() for name, value in info.extra.items()},
    )


class Gate(System):
    """The system, on which a call waits until it may go on, or fails."""

    def __init__(self, call, error=None):
        self.open_gate, self.reached = threading.Event(), threading.Event()
        original = getattr(System, call)

        def guarded(*arguments):
            self.reached.set()
            if error is not None:
                raise OSError(error, os.strerror(error))
            assert self.open_gate.wait(60)
            return original(*arguments)

        setattr(self, call, guarded)


@pytest.mark.ranks(2, 1, 3, 4)
@pytest.mark.transport
def test_what_is_saved_is_what_there_was_at_the_call(comm, shared_path, trained):
    model, optimizer = trained
    table = np.arange(5)
    torch.manual_seed(comm.rank)
    checkpoint.save(shared_path / "now.h5", model=model, optimizer=optimizer, step=2, extra={"table": table})
    gate = Gate("pwritev")
    with using(gate), checkpoint.CheckpointManager(shared_path / "run", asynchronous=True) as manager:
        path = manager.save(2, model=model, optimizer=optimizer, extra={"table": table})
        table[:] = -7
        disturb(model, optimizer)
        manager.step()
        assert not path.exists()
        gate.open_gate.set()
    assert path == checkpoint_path(shared_path / "run", 2)
    assert contents(path) == contents(shared_path / "now.h5")
    barrier(comm)
    assert names(shared_path / "run") == [path.name]


def test_writing_begins_within_the_save_and_two_steps_commit(comm, shared_path, trained):
    model, optimizer = trained
    forced = Gate("fsync")
    forced.open_gate.set()
    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True)
    curve = {"loss": ([1, 2], [0.5, float(comm.rank)])}
    with using(forced):
        path = manager.save(1, model=model, optimizer=optimizer, extra=None if comm.rank else {"a": 1}, metrics=curve)
    under_way = next(iter(pending._uncommitted))
    assert forced.reached.wait(60)  # nobody has called step()
    under_way.wait_for_threads()
    barrier(comm)
    manager.step()
    assert not under_way.ended
    under_way.wait_for_threads()
    barrier(comm)
    manager.step()
    assert under_way.ended
    index = checkpoint.open_index(path)
    assert index.info.extra == {"a": 1}  # rank 0's
    assert index.metrics["loss"][1].tolist() == [0.5, 0.0]
    manager.close()


def test_ranks_that_lay_the_file_out_differently_commit_nothing(comm, shared_path, trained, monkeypatch):
    real = content.build_metadata_image

    def otherwise(*args, **kwargs):
        found = real(*args, **kwargs)
        return replace(found, offsets=(8, *found.offsets[1:])) if comm.rank == comm.size - 1 > 0 else found

    monkeypatch.setattr(content, "build_metadata_image", otherwise)
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        manager.save(1, model=trained[0])
        if comm.size > 1:
            with pytest.raises(
                CheckpointError, match=rf"rank {comm.size - 1} has laid the file out otherwise"
            ) as caught:
                manager.wait()
            assert caught.value.raised_on_all_ranks
    barrier(comm)
    assert names(shared_path) == ([] if comm.size > 1 else ["step-00000001.h5"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_a_rank_does_not_see_is_reported(comm, shared_path, trained, monkeypatch, asynchronous):
    monkeypatch.setattr(pending, "VISIBLE_WITHIN_S", 0.2)
    if comm.size == 1:
        pytest.skip("another rank than 0 is needed")

    class Blind(System):
        def open(self, path, flags, *mode):
            if flags & os.O_ACCMODE == os.O_WRONLY:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(path, flags, *mode)

    system = Blind() if comm.rank == 1 else None
    with using(system), checkpoint.CheckpointManager(shared_path, asynchronous=asynchronous) as manager:
        message = r"step-00000001\.h5: .*does not see the folder of rank 0: save to a file system that all ranks share"
        with pytest.raises(CheckpointError, match=message) as caught:
            manager.save(1, model=trained[0])
            manager.wait()
    assert comm.rank == 1 or str(caught.value).startswith("rank 1: ")
    barrier(comm)
    assert names(shared_path) == []


def test_a_file_that_other_ranks_see_late_is_waited_for(comm, shared_path, trained):
    class Late(System):
        def __init__(self):
            self.looks = 3

        def open(self, path, flags, *mode):
            if flags & os.O_ACCMODE == os.O_WRONLY and self.looks:
                self.looks -= 1
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return os.open(path, flags, *mode)

    system = None if comm.rank == 0 else Late()
    with using(system), checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        path = manager.save(1, model=trained[0])
    assert checkpoint.open_index(path).info.step == 1


def test_an_error_of_any_kind_in_a_thread_is_everyones_and_names_the_file(comm, shared_path, trained):
    class NoMemory(System):
        def pwritev(self, *arguments):
            raise MemoryError("no memory")

    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True)
    with using(NoMemory() if comm.rank == comm.size - 1 else None):
        manager.save(1, model=trained[0])
    with pytest.raises(CheckpointError, match=r"step-0+1\.h5: cannot write the checkpoint: MemoryError: no memory"):
        pending._finish(list(pending._uncommitted))
    manager.close()
    barrier(comm)
    assert names(shared_path) == []


@pytest.mark.parametrize(("step", "text"), [(-1, "at least 0, not -1"), (1.5, "a whole number, not 1.5")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_is_none_is_refused_on_all_ranks(comm, shared_path, trained, asynchronous, step, text):
    with checkpoint.CheckpointManager(shared_path, asynchronous=asynchronous) as manager:
        with pytest.raises(UsageError, match=f"step must be {text}") as caught:
            manager.save(step if comm.rank == comm.size - 1 else 1, model=trained[0])
        assert caught.value.raised_on_all_ranks
    assert names(shared_path) == []


def test_the_path_of_rank_0_counts_also_where_another_has_none(comm, shared_path, trained):
    path = shared_path / "x.h5" if comm.rank == 0 else None
    assert checkpoint.save(path, model=trained[0]) == shared_path / "x.h5"
    with pytest.raises(TypeError if comm.rank == 0 else HpcfsdpError):
        checkpoint.save(None if comm.rank == 0 else shared_path / "y.h5", model=trained[0])


def test_models_that_are_saved_in_turn_have_a_communicator_each_which_close_gives_back(
    comm, shared_path, trained, monkeypatch
):
    made, closed = [], []
    kind = type(comm)
    subgroup, close = kind.subgroup, kind.close

    def note_made(self, ranks):
        made.append(subgroup(self, ranks))
        return made[-1]

    monkeypatch.setattr(kind, "subgroup", note_made)
    monkeypatch.setattr(kind, "close", lambda self: closed.append(self) or close(self))
    models = [trained[0], nn.Linear(2, 2)]
    distinct = len({id(communicator_of(model)) for model in models})
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        for step in range(6):
            manager.save(step, model=models[step % 2])
    assert len(made) == distinct
    assert all(any(one is other for other in closed) for one in made)


class Wide(nn.Module):
    """Larger than the smallest ring on each of up to four ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1100, 1100), nn.Linear(1100, 1501)


def wide(comm):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Wide())
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    return model, optimizer


def test_more_bytes_than_the_ring_holds_go_through_it(comm, shared_path, monkeypatch):
    model, optimizer = wide(comm)
    checkpoint.save(shared_path / "now.h5", model=model, optimizer=optimizer, step=1)
    sizes, deepest = [], [0]
    made, put = StagingRing.__init__, StagingRing.put

    def note_size(self, nbytes, **options):
        sizes.append(nbytes)
        made(self, nbytes, **options)

    def note_depth(self, pieces, **options):
        taken = put(self, pieces, **options)
        deepest[0] = max(deepest[0], self._head - self._tail)
        return taken

    monkeypatch.setattr(StagingRing, "__init__", note_size)
    monkeypatch.setattr(StagingRing, "put", note_depth)
    with checkpoint.CheckpointManager(shared_path, asynchronous=True, staging_bytes=CAP) as manager:
        for step in (1, 2):
            path = manager.save(step, model=model, optimizer=optimizer)
    mine = sum(
        int(row["numel"]) * spec.itemsize
        for spec in checkpoint.open_index(path).tensors.values()
        for row in checkpoint.open_index(path).rows_of(spec.path)
        if row["rank"] == comm.rank
    )
    assert mine > CAP
    assert sizes == [CAP]  # one ring, for both
    assert CAP // 2 < deepest[0] <= CAP
    first = contents(checkpoint_path(shared_path, 1))
    assert first == contents(shared_path / "now.h5")


def test_a_ring_is_no_larger_than_what_there_is_to_save(comm, shared_path, trained, monkeypatch):
    sizes, made = [], StagingRing.__init__
    monkeypatch.setattr(
        StagingRing, "__init__", lambda self, nbytes, **options: sizes.append(nbytes) or made(self, nbytes)
    )
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        manager.save(1, model=trained[0])
    total = sum(comm.all_gather_object(sum(sizes)))
    index = checkpoint.open_index(manager.latest())
    assert len(sizes) == 1
    # Each copy begins at the begin of a cache line.
    assert 0 <= total - sum(spec.nbytes for spec in index.tensors.values()) < 64 * len(index.extents)


def test_what_has_to_be_gathered_is_staged_too(world, comm, shared_path):
    mesh = world.mesh(shard=None)
    whole = torch.arange(48.0).view(12, 4)
    model = nn.Module()
    model.register_buffer("cut", DTensor.from_local(whole.chunk(comm.size)[comm.rank].clone(), mesh, [Shard(0)]))
    model.weight = nn.Parameter(torch.ones(3))
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        path = manager.save(4, model=model)
        model.cut.to_local().zero_()
    with BlockReader(checkpoint.open_index(path)) as reader:
        assert torch.equal(torch.from_numpy(reader.read("model/cut", 0, 48)), whole.view(-1))


def test_a_save_is_committed_at_a_later_step_and_the_next_one_waits_for_it(comm, shared_path, trained):
    model, optimizer = trained
    gate = Gate("replace")
    system = gate if comm.rank == 0 else None
    with using(system), checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        manager.step()  # nothing is under way
        manager.wait()
        first = manager.save(1, model=model, optimizer=optimizer)
        while not comm.broadcast_object(gate.reached.wait(0.01)):
            manager.step()
        for _ in range(5):
            manager.step()
        assert manager.latest() is None
        barrier(comm)
        gate.open_gate.set()
        second = manager.save(2, model=model, optimizer=optimizer)
        assert first.exists()  # the second has waited for it
    assert second.exists()
    barrier(comm)
    assert names(shared_path) == [first.name, second.name]


@pytest.mark.parametrize("call", ["open", "ftruncate", "pwritev", "fsync", "replace"])
@pytest.mark.parametrize("culprit", ["first", "last"])
def test_a_failure_on_any_rank_is_everyones_at_the_same_call(comm, shared_path, trained, call, culprit):
    model, optimizer = trained
    failing = 0 if culprit == "first" or call in ("ftruncate", "replace") else comm.size - 1
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        good = manager.save(1, model=model, optimizer=optimizer)
        manager.wait()
        before = contents(good)
        calls = 0
        broken = Gate(call, errno.ENOSPC) if comm.rank == failing else None
        with pytest.raises(CheckpointError) as caught, using(broken):
            manager.save(2, model=model, optimizer=optimizer)
            while True:
                calls += 1
                manager.step()
        text = str(caught.value)
        assert f"{checkpoint_path(shared_path, 2)}: cannot write the checkpoint: No space left on device" in text
        assert comm.rank == failing or f"rank {failing}: " in text
        assert caught.value.raised_on_all_ranks
        assert len(set(comm.all_gather_object(calls))) == 1
        barrier(comm)
        assert names(shared_path) == [good.name]
        assert contents(good) == before
        manager.step()  # once is enough
        again = manager.save(2, model=model, optimizer=optimizer)
    assert checkpoint.open_index(again).info.step == 2
    assert manager.latest() == again


def test_a_failure_is_raised_by_the_next_save_by_wait_and_by_close(comm, shared_path, trained):
    model, _ = trained
    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True)
    for call in (lambda: manager.save(2, model=model), manager.wait, manager.close):
        with using(Gate("fsync", errno.EIO)):
            manager.save(1, model=model)
        with pytest.raises(CheckpointError, match=r"step-00000001\.h5: .*Input/output error"):
            call()
        barrier(comm)
        assert names(shared_path) == []
    with pytest.raises(CheckpointError, match="has been closed"):
        manager.save(2, model=model)


def test_a_failure_while_a_small_ring_is_full_does_not_hang(comm, shared_path):
    model, optimizer = wide(comm)
    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True, staging_bytes=CAP)
    with using(Gate("pwritev", errno.ENOSPC) if comm.rank == comm.size - 1 else None):
        manager.save(1, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="No space left"):
        manager.wait()
    barrier(comm)
    assert names(shared_path) == []
    manager.save(1, model=model, optimizer=optimizer)
    manager.close()
    assert checkpoint.open_index(manager.latest()).info.step == 1


def test_over_a_process_group_of_gloo(comm, gloo, shared_path):
    model = shard(make_net(), gloo)
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(2), comm)
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        path = manager.save(2, model=model, optimizer=optimizer)
        manager.step()
    checkpoint.save(shared_path / "now.h5", model=model, optimizer=optimizer, step=2)
    assert contents(path) == contents(shared_path / "now.h5")


def test_a_value_that_cannot_be_saved_is_refused_at_the_call(comm, shared_path, trained):
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        with pytest.raises(CheckpointError, match=r"step-00000001\.h5: extra\['x'\] is a object"):
            manager.save(1, model=trained[0], extra={"x": object()})
        manager.save(2, model=trained[0])
    barrier(comm)
    assert names(shared_path) == ["step-00000002.h5"]


def test_an_error_of_one_rank_gives_the_file_up_without_waiting_for_others(comm, shared_path, trained, caplog):
    gate = Gate("fsync")
    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True)
    with using(gate), caplog.at_level("ERROR", "hpcfsdp"), pytest.raises(ZeroDivisionError), manager:
        manager.save(1, model=trained[0])
        raise ZeroDivisionError
    assert "step-00000001.h5: was not committed, and is discarded because of an error" in caplog.text
    gate.open_gate.set()
    barrier(comm)
    assert names(shared_path) == []


def test_finalize_finishes_what_is_under_way(comm, shared_path, trained):
    manager = checkpoint.CheckpointManager(shared_path, asynchronous=True)
    path = manager.save(1, model=trained[0])
    pending._finish(list(pending._uncommitted))  # what hpcfsdp.finalize calls
    assert path.exists()
    assert not pending._uncommitted
    manager.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_retention_after_each_save(comm, shared_path, trained, asynchronous):
    with checkpoint.CheckpointManager(shared_path, keep_last=2, keep_every=4, asynchronous=asynchronous) as manager:
        for step in range(1, 11):
            manager.save(step, model=trained[0])
    barrier(comm)
    assert [path.name for path in checkpoint.checkpoint_files(shared_path)] == [
        f"step-{step:08d}.h5" for step in (4, 8, 9, 10)
    ]


def test_retention_takes_the_files_of_nodes_along(comm, shared_path):
    model, _ = wide(comm)  # tensors that are not so small that they stay in the main file
    with checkpoint.CheckpointManager(shared_path, keep_last=1, writer="subfiles") as manager:
        for step in (1, 2):
            manager.save(step, model=model)
        assert manager.load_latest(model=model).step == 2
    barrier(comm)
    kept = names(shared_path)
    assert "step-00000002.h5" in kept
    assert len(kept) > 1
    assert all(name.startswith("step-00000002.") for name in kept)


def test_what_has_just_been_saved_stays_beside_files_of_higher_steps(comm, shared_path, trained):
    with checkpoint.CheckpointManager(shared_path) as manager:
        for step in (7, 8, 9):
            manager.save(step, model=trained[0])
    with checkpoint.CheckpointManager(shared_path, keep_last=1) as manager:
        manager.save(3, model=trained[0])
    barrier(comm)
    assert names(shared_path) == ["step-00000003.h5", "step-00000009.h5"]


def test_a_checkpoint_that_is_being_read_here_stays_until_it_is_not(comm, shared_path, trained):
    with checkpoint.CheckpointManager(shared_path, keep_last=1) as manager:
        first = manager.save(1, model=trained[0])
        with BlockReader(checkpoint.open_index(first)) as reader:
            manager.save(2, model=trained[0])
            barrier(comm)
            assert first.exists()
            reader.read("model/norm.weight", 0, 3)
            barrier(comm)
        with retention.reading(first):
            manager.save(3, model=trained[0])
            barrier(comm)
            assert names(shared_path) == ["step-00000001.h5", "step-00000003.h5"]
            barrier(comm)
        manager.save(4, model=trained[0])
        barrier(comm)
        assert names(shared_path) == ["step-00000004.h5"]


def damage(path, comm, name="model/norm.weight"):
    """Flip one bit of a tensor: its file opens, and only the rank that reads the bit finds out."""
    barrier(comm)
    if comm.rank == 0:
        offset = int(checkpoint.open_index(path).rows_of(name)["byte_offset"][0])
        with open(path, "r+b") as raw:
            raw.seek(offset)
            byte = raw.read(1)[0]
            raw.seek(offset)
            raw.write(bytes([byte ^ 1]))
    barrier(comm)


def truncate(path, comm):
    barrier(comm)
    if comm.rank == 0:
        os.truncate(path, path.stat().st_size // 2)
    barrier(comm)


def replaced_by_a_folder(path, comm):
    barrier(comm)
    if comm.rank == 0:
        path.unlink()
        path.mkdir()
    barrier(comm)


@pytest.mark.parametrize("once", [False, True], ids=["checked first", "checked while read"])
@pytest.mark.parametrize("harm", [damage, truncate, replaced_by_a_folder])
def test_a_damaged_newest_file_is_skipped_and_reported(comm, shared_path, trained, caplog, harm, once):
    model, optimizer = trained
    with checkpoint.CheckpointManager(shared_path) as manager:
        manager.save(1, model=model, optimizer=optimizer)
        expected = train_sharded(model, optimizer, range(2, 4), comm)
        newest = manager.save(2, model=model, optimizer=optimizer)
        harm(newest, comm)
        fresh = shard(make_net(seed=4))
        fresh_optimizer = adamw(fresh)
        with caplog.at_level("WARNING", "hpcfsdp"):
            info = manager.load_latest(model=fresh, optimizer=fresh_optimizer, fresh=once)
    assert (info.step, info.path) == (1, checkpoint_path(shared_path, 1))
    assert train_sharded(fresh, fresh_optimizer, range(2, 4), comm) == expected
    ((path, reason),) = manager.passed_over
    assert path == newest
    assert len(set(comm.all_gather_object(reason))) == 1
    if comm.rank == 0:
        assert f"{newest} cannot be loaded, trying the one before it: {reason}" in caplog.text
        assert f"using the older checkpoint {info.path} step=1" in caplog.text
    barrier(comm)
    assert newest.exists()  # for whoever wants to know what has happened


def test_a_folder_in_which_all_is_damaged_is_an_error_and_an_empty_one_is_none(comm, shared_path, trained):
    model, _ = trained
    with checkpoint.CheckpointManager(shared_path) as manager:
        assert manager.load_latest(model=model) is None
        for step in (1, 2):
            truncate(manager.save(step, model=model), comm)
        with pytest.raises(
            CheckpointCorruptError, match=r"none of its.*\n  step-0+2\.h5: .*\n  step-0+1\.h5: "
        ) as caught:
            manager.load_latest(model=model)
    assert caught.value.raised_on_all_ranks
    assert [path.name for path, _ in manager.passed_over] == ["step-00000002.h5", "step-00000001.h5"]


def test_a_checkpoint_of_another_model_is_never_passed_over(comm, shared_path, trained):
    with checkpoint.CheckpointManager(shared_path) as manager:
        manager.save(1, model=trained[0])
        manager.save(2, model=FullyShardedDataParallel(nn.Linear(3, 4)))
        with pytest.raises(CheckpointMismatchError, match=r"step-0+2\.h5"):
            manager.load_latest(model=trained[0])
    assert manager.passed_over == ()


def test_load_latest_waits_for_a_save_that_is_under_way(comm, shared_path, trained):
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        manager.save(5, model=trained[0])
        assert manager.load_latest(model=trained[0]).step == 5


def test_retention_leaves_the_last_good_file_when_those_after_it_are_damaged(comm, shared_path, trained, caplog):
    with checkpoint.CheckpointManager(shared_path) as manager:
        for step in (1, 2, 3, 4):
            path = manager.save(step, model=trained[0])
            if step > 2:
                truncate(path, comm)
    removal = retention.plan_removal(shared_path, keep_last=1, keep_every=None)
    assert [path.name for path in removal.going] == ["step-00000001.h5", "step-00000003.h5"]
    assert removal.good == checkpoint_path(shared_path, 2)
    assert list(removal.damaged) == [checkpoint_path(shared_path, step) for step in (4, 3)]


def test_a_file_that_cannot_be_removed_is_reported_and_does_no_other_harm(comm, shared_path, trained, caplog):
    manager = checkpoint.CheckpointManager(shared_path, keep_last=1)
    with caplog.at_level("WARNING", "hpcfsdp"), using(Gate("unlink", errno.EPERM)), manager:
        manager.save(1, model=trained[0])
        manager.save(2, model=trained[0])
    if comm.rank == 0:
        assert "old checkpoints were not removed: " in caplog.text
        assert "step-00000001.h5: cannot be removed: Operation not permitted" in caplog.text
    barrier(comm)
    assert len(names(shared_path)) == 2
