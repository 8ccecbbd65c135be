"""Folders in which files come and go, and such that may not be read."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.cli import ls, verify
from hpcfsdp.cli.folders import checkpoints_in, size_of
from hpcfsdp.cli.main import main
from hpcfsdp.errors import CheckpointError


@pytest.fixture
def folder(saved, tmp_path):
    """Of a link that leads nowhere, and a checkpoint."""
    os.symlink(tmp_path / "nowhere", tmp_path / "step-00000006.h5")
    shutil.copy(saved, tmp_path / "step-00000007.h5")
    return tmp_path


def test_a_dangling_link_is_listed_with_its_error(folder, capsys):
    assert main(["ls", str(folder), "--json"]) == 1
    dangling, good = json.loads(capsys.readouterr().out)
    assert (dangling["error"]["message"], good["step"]) == ("No such file or directory", 7)
    assert main(["verify", str(folder)]) == 1
    assert "step-00000006.h5: No such file or directory" in capsys.readouterr().out
    assert main(["prune", str(folder), "--keep-last", "2", "--dry-run"]) == 0
    assert "step-00000006.h5" in capsys.readouterr().out


def test_a_file_that_is_removed_while_a_folder_is_listed_is_left_out(folder, capsys, monkeypatch):
    gone = folder / "step-00000008.h5"
    monkeypatch.setattr(ls, "checkpoints_in", lambda of: [*checkpoints_in(of), gone])
    main(["ls", str(folder), "--json"])
    assert [Path(entry["file"]).name for entry in json.loads(capsys.readouterr().out)] == [
        "step-00000006.h5",
        "step-00000007.h5",
    ]
    assert size_of(gone) is None


def test_verify_skips_files_that_a_training_removes_meanwhile(saved, tmp_path, capsys, monkeypatch):
    for step in (1, 2, 3):
        shutil.copy(saved, tmp_path / f"step-0000000{step}.h5")

    def remove_next(path, *arguments):
        (tmp_path / "step-00000002.h5").unlink(missing_ok=True)
        return verify_file(path, *arguments)

    monkeypatch.setattr(verify, "verify_file", remove_next)
    assert main(["verify", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(entry["file"]).name for entry in found] == ["step-00000001.h5", "step-00000003.h5"]
    assert main(["verify", str(tmp_path / "step-00000002.h5")]) == 1  # this one was asked for


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_an_unreadable_folder_is_named(folder, capsys, monkeypatch, verb):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read every folder
    assert main([verb, str(folder)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"hpcfsdp: {folder}: Permission denied\n")


@pytest.mark.parametrize("verb", ["ls", "verify", "show"])
def test_a_file_in_a_folder_without_search_permission_is_named(folder, capsys, monkeypatch, verb):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    path = folder / "step-00000007.h5"
    monkeypatch.setattr(os, "stat", refuse)
    code = main([verb, str(path)])
    monkeypatch.undo()
    assert code == 1
    printed = capsys.readouterr()
    assert f"{path}: Permission denied" in printed.out + printed.err


def test_checkpoints_of_an_empty_folder_and_of_a_run(folder, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="run: no checkpoints in this folder or in its checkpoints/"):
        checkpoints_in(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-3.h5").touch()
    assert checkpoints_in(tmp_path / "run") == [tmp_path / "run" / "checkpoints" / "step-3.h5"]
