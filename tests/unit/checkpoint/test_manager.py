"""One process, a plain model. What ranks have to agree on stands in tests/mpi/test_checkpoint_manager.py."""

import errno
import functools
import os
import shutil
import threading
import weakref
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import manager as manager_module, retention
from hpcfsdp.checkpoint.format import catalog, schema
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.memory import windows
from hpcfsdp.checkpoint.saving import pending
from hpcfsdp.checkpoint.saving.pending import Task
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, UsageError
from hpcfsdp.state.tensors import LocalPiece
from tests.disks import using


def layer(fill=1.0):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, fill)
    return model


class Held(System):
    """A disk that forces nothing to itself before it is told to."""

    def __init__(self):
        self.may_go_on = threading.Event()

    def fsync(self, fd):
        assert self.may_go_on.wait(60)
        os.fsync(fd)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, not 0"),
        ({"keep_every": -1}, "keep_every must be at least 1, not -1"),
        ({"staging_bytes": 100}, f"staging_bytes must be at least {schema.BLOCK_BYTES}, not 100"),
        ({"memory_every": 0}, "memory_every must be at least 1, not 0"),
        ({"every": 2.5}, "every must be a whole number, not 2.5"),
        ({"every_s": 0}, "every_s must be a positive number of seconds, not 0"),
        ({"keep_last": 1.5}, "keep_last must be a whole number, not 1.5"),
        ({"keep_every": "3"}, "keep_every must be a whole number, not '3'"),
        ({"directory": None}, "directory must be a path: .*NoneType"),
        ({"asynchronous": True, "writer": "mpio"}, "asynchronous saves are written by 'posix', not by 'mpio'"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, text):
    with pytest.raises(UsageError, match=text):
        checkpoint.CheckpointManager(**{"directory": tmp_path, **arguments})
    assert os.listdir(tmp_path) == []


def test_a_writer_that_there_is_not_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="no writer 'h5'"):
        checkpoint.CheckpointManager(tmp_path, writer="h5")


@pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py has MPI")
def test_a_writer_that_cannot_be_used_here_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match='writer="mpio" needs an h5py that was built for MPI'):
        checkpoint.CheckpointManager(tmp_path, writer="mpio")


def test_a_step_below_the_highest_is_warned_of(tmp_path, caplog):
    manager = checkpoint.CheckpointManager(tmp_path)
    with caplog.at_level("WARNING", "hpcfsdp"):
        for step in (1, 7):
            manager.save(step, model=layer())
        assert caplog.text == ""
        manager.save(3, model=layer())
        manager.save(4, model=layer())
    assert "saved step=4," not in caplog.text
    assert f"saved step=3, but {tmp_path}/step-00000007.h5 has a higher step" in caplog.text


def test_no_error_of_retention_is_one_of_the_save(tmp_path, caplog, monkeypatch):
    manager = checkpoint.CheckpointManager(tmp_path, keep_last=1)
    monkeypatch.setattr(retention, "plan_removal", lambda *args, **kwargs: 1 // 0)
    with caplog.at_level("WARNING", "hpcfsdp"):
        assert manager.save(1, model=layer()).exists()
    assert "old checkpoints were not removed: " in caplog.text


def test_what_savers_of_other_steps_left_behind_long_ago_is_removed(tmp_path):
    old, young = (catalog.partial_path(tmp_path / f"step-0000000{n}.h5", "ab12") for n in (1, 2))
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    checkpoint.CheckpointManager(tmp_path).save(5, model=layer())
    assert sorted(os.listdir(tmp_path)) == [young.name, "step-00000005.h5"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root lists every folder")
def test_a_folder_that_cannot_be_listed_is_reported_as_such(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o300)
    with pytest.raises(CheckpointError, match="closed: the folder cannot be listed: Permission denied"):
        checkpoint.CheckpointManager(tmp_path / "closed").load_latest(model=layer())


def test_an_error_of_listing_is_reported_as_such(tmp_path, monkeypatch):
    def fail(directory):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(catalog, "checkpoint_files", fail)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: the folder cannot be listed: Permission denied"):
        checkpoint.CheckpointManager(tmp_path).load_latest(model=layer())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_saves_under_the_step_and_finds_the_newest(tmp_path, monkeypatch, asynchronous):
    monkeypatch.chdir(tmp_path)
    with checkpoint.CheckpointManager("run/files", asynchronous=asynchronous) as manager:
        assert manager.latest() is None
        assert manager.load_latest(model=layer()) is None
        curve = {"loss": ([1, 2], [0.5, 0.25])}
        path = manager.save(2, model=layer(2.0), extra={"best": np.arange(3)}, config={"width": 3}, metrics=curve)
        manager.save(10, model=layer(10.0))
        manager.wait()
        assert path == tmp_path / "run/files/step-00000002.h5"
        assert manager.latest() == tmp_path / "run/files/step-00000010.h5"
        model = layer()
        assert manager.load_latest(model=model).step == 10
        assert torch.equal(model.weight, torch.full((2, 3), 10.0))
    index = checkpoint.open_index(path)
    assert (index.info.config, index.info.extra["best"].tolist()) == ({"width": 3}, [0, 1, 2])
    assert index.metrics["loss"][1].tolist() == [0.5, 0.25]
    assert sorted(os.listdir(tmp_path / "run/files")) == ["step-00000002.h5", "step-00000010.h5"]


def test_an_asynchronous_save_returns_before_the_disk_has_it(tmp_path):
    disk = Held()
    with using(disk), checkpoint.CheckpointManager(tmp_path, asynchronous=True) as manager:
        model = layer(2.0)
        path = manager.save(1, model=model)
        nn.init.zeros_(model.weight)
        manager.step()
        assert not path.exists()
        disk.may_go_on.set()
        manager.wait()
        assert path.exists()
        checkpoint.load(path, model=model)
        assert torch.equal(model.weight, torch.full((2, 3), 2.0))


def test_a_copy_of_a_tensor_with_holes_that_had_to_wait_for_room_is_not_kept(tmp_path, monkeypatch):
    model, copies, most = nn.Module(), [], [0]
    for number in range(8):
        model.register_buffer(f"b{number}", torch.full((512, 1024), float(number)).t())

    def noted(piece):
        most[0] = max(most[0], sum(copy() is not None for copy in copies))
        values = piece.tensor.detach().numpy().flatten()
        copies.append(weakref.ref(values))
        return torch.from_numpy(values)

    monkeypatch.setattr(LocalPiece, "flat", noted)
    with checkpoint.CheckpointManager(tmp_path, asynchronous=True, staging_bytes=schema.BLOCK_BYTES) as manager:
        path = manager.save(1, model=model)
    with h5py.File(path) as file:
        assert [file[f"model/b{number}"][0, 0] for number in range(8)] == list(range(8))
    assert most[0] == 2  # the last one, and the one before it, which has just gone into the ring


def test_steps_alone_commit_it(tmp_path):
    manager = checkpoint.CheckpointManager(tmp_path, asynchronous=True)
    path = manager.save(1, model=layer())
    under_way = next(iter(pending._uncommitted))
    while not under_way.ended:
        manager.step()
        under_way.wait_for_threads(0.01)
    assert path.exists()
    manager.close()


def test_a_save_in_place_of_the_same_step(tmp_path):
    with checkpoint.CheckpointManager(tmp_path, asynchronous=True, keep_last=1) as manager:
        for fill in (1.0, 2.0):
            manager.save(1, model=layer(fill))
        model = layer(0.0)
        manager.load_latest(model=model)
    assert torch.equal(model.weight, torch.full((2, 3), 2.0))
    assert os.listdir(tmp_path) == ["step-00000001.h5"]


def test_a_model_without_any_bytes(tmp_path):
    with checkpoint.CheckpointManager(tmp_path, asynchronous=True) as manager:
        path = manager.save(1, model=nn.Module())
    assert checkpoint.open_index(path).tensors == {}


def test_what_is_logged(tmp_path, caplog):
    manager = checkpoint.CheckpointManager(tmp_path, keep_last=1, asynchronous=True)
    with caplog.at_level("INFO", "hpcfsdp"), manager:
        first, second = (manager.save(step, model=layer()) for step in (1, 2))
    lines = [record.getMessage() for record in caplog.records]
    size = second.stat().st_size
    assert [line.rsplit(" secs=")[0] for line in lines] == [
        f"saved {first} step=1 bytes={size}",
        f"saved {second} step=2 bytes={size}",
        f"removed {first}",
    ]


def test_a_closed_manager_raises(tmp_path):
    manager = checkpoint.CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    for call in (lambda: manager.save(1, model=layer()), lambda: manager.load_latest(model=layer())):
        with pytest.raises(CheckpointError, match=f"{tmp_path}: this CheckpointManager has been closed"):
            call()


def test_an_exception_within_gives_up_what_is_not_committed(tmp_path, caplog):
    disk = Held()
    manager = checkpoint.CheckpointManager(tmp_path, asynchronous=True)
    with using(disk), caplog.at_level("ERROR", "hpcfsdp"), pytest.raises(KeyboardInterrupt), manager:
        manager.save(1, model=layer())
        raise KeyboardInterrupt
    disk.may_go_on.set()
    assert f"{tmp_path}/step-00000001.h5: was not committed, and is discarded because of an error" in caplog.text
    assert os.listdir(tmp_path) == []
    assert not pending._uncommitted


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    told = r"file/step-00000001\.h5: cannot write the checkpoint: File exists"
    with checkpoint.CheckpointManager(tmp_path / "file", asynchronous=True) as manager:
        manager.save(1, model=layer())
        with pytest.raises(CheckpointError, match=told):
            manager.wait()


def test_a_task_gives_its_result_or_its_error():
    assert Task(Path("a.h5"), lambda: 7).result() == 7
    for error, told in (
        (KeyError("x"), r"^a\.h5: cannot write the checkpoint: KeyError: 'x'$"),
        (CheckpointMismatchError("as it is"), "^as it is$"),
    ):

        def fail(error=error):
            raise error

        task = Task(Path("a.h5"), fail)
        with pytest.raises(CheckpointError, match=told):
            task.result()
        assert task.done()
        assert task.has_failed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_folder_that_was_removed_is_reported_and_made_again(tmp_path, caplog, asynchronous):
    with checkpoint.CheckpointManager(tmp_path / "run", asynchronous=asynchronous) as manager:
        manager.save(1, model=layer())
        manager.wait()
        shutil.rmtree(tmp_path / "run")
        with caplog.at_level("ERROR", "hpcfsdp"):
            manager.save(2, model=layer())
    assert caplog.messages == [
        f"{tmp_path / 'run'} was removed, with all checkpoints in it: this one goes into a new folder"
    ]
    assert [path.name for path in checkpoint.checkpoint_files(tmp_path / "run")] == ["step-00000002.h5"]


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(manager_module, "time", self)

    def monotonic(self):
        return self.now_s

    perf_counter = time = monotonic


def test_a_step_saves_what_is_due(tmp_path, monkeypatch):
    clock, calls = Clock(monkeypatch), []
    with checkpoint.CheckpointManager(tmp_path, every=4, every_s=10, memory_every=3) as manager:
        found = {}
        for step in range(1, 10):
            clock.now_s += 4
            model = layer(step)
            extra = functools.partial(lambda at: calls.append(at) or {}, step)
            path = manager.step(step, model=model, extra=extra, metrics=lambda: {})
            loaded = manager.load_latest(model=layer())
            found[step] = path and path.name, loaded and (loaded.step, loaded.source)
    # A file after 12 s, and every fourth step, which counts as the last one.
    assert found == {
        1: (None, None),
        2: (None, None),
        3: ("step-00000003.h5", (3, "memory")),
        4: ("step-00000004.h5", (4, "file")),
        5: (None, (4, "file")),
        6: (None, (6, "memory")),
        7: ("step-00000007.h5", (7, "file")),
        8: ("step-00000008.h5", (8, "file")),
        9: (None, (9, "memory")),
    }
    assert calls == [3, 4, 6, 7, 8, 9]
    assert checkpoint.CheckpointManager(tmp_path, memory_every=1).load_latest(model=layer()).step == 8


def test_a_version_in_memory_outlives_its_manager_and_an_error(tmp_path):
    with pytest.raises(KeyError), checkpoint.CheckpointManager(tmp_path, memory_every=1) as manager:
        manager.step(5, model=layer(5.0), config={"a": 1}, metrics={"loss": ([1], [0.5])})
        raise KeyError
    del manager
    model = layer()
    with checkpoint.CheckpointManager(tmp_path, memory_every=1) as manager:
        info = manager.load_latest(model=model)
    assert (info.step, info.source, info.config, os.listdir(tmp_path)) == (5, "memory", {"a": 1}, [])
    assert torch.equal(model.weight, torch.full((2, 3), 5.0))
    assert windows.held_bytes() == 0


def test_an_error_on_all_ranks_keeps_versions_in_memory(tmp_path):
    with pytest.raises(CheckpointError), checkpoint.CheckpointManager(tmp_path, memory_every=1) as manager:
        manager.step(5, model=layer(5.0))
        raise CheckpointError("of any kind").on_all_ranks()
    assert checkpoint.CheckpointManager(tmp_path, memory_every=1).load_latest(model=layer()).step == 5
    windows.drop()


def test_another_model_is_refused_as_that_of_a_file(tmp_path):
    with checkpoint.CheckpointManager(tmp_path, memory_every=1) as manager:
        manager.step(1, model=layer())
        with pytest.raises(CheckpointMismatchError):
            manager.load_latest(model=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("step", "arguments", "text"),
    [
        (1, {}, "a step needs its model"),
        (1.5, {"model": layer()}, "step must be a whole number, not 1.5"),
        (-1, {"model": layer()}, "step must be at least 0, not -1"),
    ],
)
def test_a_wrong_step_is_named(tmp_path, step, arguments, text):
    with pytest.raises(UsageError, match=text):
        checkpoint.CheckpointManager(tmp_path, memory_every=1).step(step, **arguments)
