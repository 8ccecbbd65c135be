from pathlib import Path

import pytest

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.catalog import (
    ABANDONED_AFTER_S,
    abandoned_partials,
    checkpoint_files,
    checkpoint_path,
    latest,
    new_token,
    partial_path,
    was_abandoned,
)
from hpcfsdp.launch import lock


def test_names_sort_like_steps():
    assert checkpoint_path("runs", 40) == Path("runs/step-00000040.h5")


def test_files_come_by_step_not_by_name(tmp_path):
    for name in ["step-9.h5", "step-00000010.h5", "step-2.h5", "step-123456789.h5"]:
        (tmp_path / name).touch()
    assert [path.name for path in checkpoint_files(tmp_path)] == [
        "step-2.h5",
        "step-9.h5",
        "step-00000010.h5",
        "step-123456789.h5",
    ]
    assert latest(str(tmp_path)) == tmp_path / "step-123456789.h5"


def test_other_files_are_passed_over(tmp_path):
    names = [".step-5.h5.partial", "step-5.h5.bak", "xstep-5.h5", "step-.h5", "step--5.h5", "step-5.hdf5", "notes.txt"]
    for name in names:
        (tmp_path / name).touch()
    assert checkpoint_files(tmp_path) == []
    assert latest(tmp_path) is None


def test_a_file_being_written_is_none_of_the_checkpoints(tmp_path):
    path = checkpoint_path(tmp_path, 5)
    assert partial_path(path, "ab") == tmp_path / ".step-00000005.h5.ab.partial"
    partial_path(path, "ab").touch()
    assert latest(tmp_path) is None


def test_a_missing_folder_holds_nothing(tmp_path):
    assert checkpoint_files(tmp_path / "none") == []
    assert latest(tmp_path / "none") is None


def test_the_package_offers_its_names_on_first_use():
    assert checkpoint.latest is latest
    offered = {"CheckpointInfo", "CheckpointManager", "HDF5Reader", "HDF5Writer", "latest", "load", "open", "save"}
    assert offered <= set(checkpoint.__all__)
    assert all(callable(getattr(checkpoint, name)) for name in checkpoint.__all__)
    with pytest.raises(AttributeError, match=r"^module 'hpcfsdp.checkpoint' has no attribute 'missing'$"):
        checkpoint.missing  # noqa: B018


def test_a_partial_file_that_vanishes_is_none_that_was_left(tmp_path, monkeypatch):
    path = tmp_path / "step-5.h5"
    left, gone = (partial_path(path, token) for token in ("left", "gone"))
    left.touch()
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone, left]))
    assert abandoned_partials(path, left.stat().st_mtime + ABANDONED_AFTER_S + 1) == [left]


@pytest.mark.parametrize(
    ("system", "start", "ended"),
    [("boot and namespace", "7", True), ("", "7", False), ("boot and namespace", "", False)],
)
def test_processes_are_looked_for_only_where_the_system_is_known(tmp_path, monkeypatch, system, start, ended):
    """Where it is not, the process may run on another node: only the last write tells whether it has ended."""
    monkeypatch.setattr(lock, "system", lambda: system)
    monkeypatch.setattr(lock, "started", lambda pid: start)
    part = partial_path(tmp_path / "step-5.h5", new_token())
    part.touch()
    monkeypatch.setattr(lock, "runs", lambda pid, began: False)
    last_write_s = part.stat().st_mtime
    assert was_abandoned(part, last_write_s) is ended
    assert was_abandoned(part, last_write_s + ABANDONED_AFTER_S + 1)
