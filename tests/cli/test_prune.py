"""hpcfsdp prune, which people run on login nodes."""

import json
import os
import shutil
import time

import h5py
import pytest

pytestmark = pytest.mark.usefixtures("no_mpi")


@pytest.fixture
def folder(tmp_path, saved):
    """A run with checkpoints of steps 1 to 6, the newest of them damaged, and partial files of killed saves."""
    path = tmp_path / "run" / "checkpoints"
    path.mkdir(parents=True)
    for step in range(1, 7):
        shutil.copy(saved, path / f"step-0000000{step}.h5")
    (path / "step-00000006.h5").write_bytes(saved.read_bytes()[:3000])
    for name, age_s in (("best.h5.old", 7200), ("step-00000002.h5.new", 0)):
        partial = path / f".{name}.partial"
        partial.touch()
        os.utime(partial, (time.time() - age_s,) * 2)
    return path


def left(folder):
    return "".join(sorted(path.name[12] for path in folder.glob("step-*.h5")))


def test_prune_removes_and_lists_files(hpcfsdp, folder):
    done = hpcfsdp("prune", folder, "--keep-last", 1, "--keep-every", 3, "--json")
    assert done.code == 0, done.stderr
    assert left(folder) == "356"  # 5 is the newest that is good
    found = json.loads(done.stdout)
    assert not found["dry_run"]
    assert [(entry["step"], entry["goes"]) for entry in found["files"]] == [
        (1, True),
        (2, True),
        (3, False),
        (4, True),
        (5, False),
        (6, False),
        (None, True),
    ]
    assert found["files"][5]["error"]["message"].startswith("truncated: 3.0 of ")
    assert [path.name for path in folder.glob(".*")] == [".step-00000002.h5.new.partial"]


def test_a_dry_run_lists_the_same_files_and_removes_nothing(command, folder):
    before = sorted(os.listdir(folder))
    done = command("prune", folder.parent, "--keep-last", 2, "--dry-run")
    assert done.code == 0, done.stderr
    assert sorted(os.listdir(folder)) == before
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert rows[0] == ["step", "file", "size", "what", "note"]
    assert [(row[0], row[3]) for row in rows[1:]] == [
        *((str(step), "would go") for step in (1, 2, 3, 4)),
        ("5", "stays"),
        ("6", "stays"),
        ("", "would go"),
    ]
    assert rows[6][4].startswith("truncated")
    assert command("prune", folder, "--keep-last", 2).stdout.count("removed") == 5


def test_prune_never_removes_what_a_user_has_named(command, folder, saved):
    mine = [folder / name for name in ("best.h5", "my_model.h5", "step-1.h5.bak", "xstep-00000001.h5", "step-one.h5")]
    for path in mine:
        shutil.copy(saved, path)
    assert command("prune", folder, "--keep-last", 1).code == 0
    assert all(path.exists() for path in mine)
    assert not (folder / "step-00000001.h5").exists()


def test_prune_leaves_files_of_other_programs_that_are_named_after_steps(command, folder):
    foreign = folder / "step-00000002.h5"
    with h5py.File(foreign, "w") as file:
        file["x"] = [1.0]
    assert command("prune", folder, "--keep-last", 1).code == 0
    assert left(folder) == "256"


def test_prune_removes_nothing_where_every_file_is_damaged(command, folder):
    for path in folder.glob("step-*.h5"):
        path.write_bytes(b"no HDF5")
    assert command("prune", folder, "--keep-last", 1).code == 0
    assert left(folder) == "123456"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "choose which files stay: --keep-last N, --keep-every K, or both"),
        (["--keep-last", 0], 2, "keep_last must be at least 1, not 0"),
        (["--keep-last", "x"], 2, "invalid int value: 'x'"),
    ],
)
def test_wrong_options_are_refused(command, folder, arguments, code, text):
    done = command("prune", folder, *arguments)
    assert (done.code, text in done.stderr) == (code, True), done.stderr
    assert left(folder) == "123456"


def test_a_missing_folder_is_named(command, tmp_path):
    done = command("prune", tmp_path / "nowhere", "--keep-last", 1)
    assert done.code == 1
    assert f"{tmp_path}/nowhere: No such file or directory" in done.stderr
