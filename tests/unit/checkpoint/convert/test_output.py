import os

import pytest

from hpcfsdp.checkpoint.convert.output import new_files, new_folder
from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.disk import System
from tests.disks import using


def fill(fds, text):
    for fd in fds.values():
        disk.write(fd, [memoryview(text)], 0)


def texts(folder):
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


class Stopped(System):
    """Ends as a power cut does at the n-th change of a name."""

    def __init__(self, after):
        self.left = after

    def step(self):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def replace(self, path, target):
        self.step()
        os.replace(path, target)

    def unlink(self, path):
        if not path.name.endswith(".partial"):
            self.step()
        os.unlink(path)


def test_an_old_and_a_new_file_are_never_taken_together(tmp_path):
    names = [tmp_path / name for name in ("one", "two", "index")]
    for after in range(20):
        with new_files(dict.fromkeys(names, 3), force=True, replaced=[]) as fds:
            fill(fds, b"old")
        stale = tmp_path / "stale"
        stale.write_text("old")
        try:
            with using(Stopped(after)), new_files(dict.fromkeys(names, 3), force=True, replaced=[stale]) as fds:
                fill(fds, b"new")
        except KeyboardInterrupt:
            found = texts(tmp_path)
            assert "index" not in found or len(set(found.values())) == 1
            assert not [name for name in found if name.endswith(".partial")]
        else:
            assert texts(tmp_path) == {"one": "new", "two": "new", "index": "new"}
            break
    assert after > 4


def test_one_file_takes_the_place_of_another_at_once(tmp_path):
    path = tmp_path / "one"
    path.write_text("old")
    with pytest.raises(ValueError), new_files({path: 3}, force=True) as fds:
        fill(fds, b"new")
        raise ValueError
    assert texts(tmp_path) == {"one": "old"}
    with new_files({path: 3}, force=True) as fds:
        fill(fds, b"new")
        assert path.read_text() == "old"
    assert texts(tmp_path) == {"one": "new"}


def test_a_folder_that_fails_leaves_the_old_one(tmp_path):
    target = tmp_path / "a"
    for force in (False, True):
        with new_folder(target, 0, force=force, mark="x") as folder:
            (folder / "x").write_text(str(force))
    assert texts(target) == {"x": "True"}
    with pytest.raises(ValueError), new_folder(target, 0, force=True, mark="x") as folder:
        (folder / "x").write_text("half")
        raise ValueError
    assert texts(target) == {"x": "True"}
    assert os.listdir(tmp_path) == ["a"]


def test_folders_that_were_made_go_again(tmp_path):
    with pytest.raises(ValueError), new_files({tmp_path / "b" / "c" / "d": 1}, force=False):
        raise ValueError
    with (
        pytest.raises(ValueError),
        new_folder(tmp_path / "b" / "c" / "d", 1, force=False, mark="x"),
    ):
        raise ValueError
    assert os.listdir(tmp_path) == []
