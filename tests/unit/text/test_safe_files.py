"""What others may have put in place of a file, and what becomes of it."""

import os
import socket
import stat

import pytest

from hpcfsdp.text import safe_files

pytestmark = pytest.mark.timeout(20)  # a pipe would be waited for


def listen(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ODD = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": listen,
    "the user's link to a pipe": lambda path: (os.mkfifo(f"{path}.fifo"), os.symlink(f"{path}.fifo", path)),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("opened", [safe_files.open_to_read, safe_files.open_to_append])
def test_what_is_no_file_is_refused_at_once(tmp_path, kind, opened):
    ODD[kind](tmp_path / "x")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError):
        opened(tmp_path / "x")
    assert len(os.listdir("/dev/fd")) == before


def test_a_device_is_not_read_and_can_be_written_to(tmp_path):
    os.symlink("/dev/null", tmp_path / "x")
    with pytest.raises(OSError, match="is not a regular file"):
        safe_files.open_to_read(tmp_path / "x")
    fd = safe_files.open_to_append(tmp_path / "x")
    assert stat.S_ISCHR(os.fstat(fd).st_mode)
    os.close(fd)


def test_a_link_of_the_user_is_followed_and_one_of_another_user_is_not(tmp_path, give_away):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("text")
    link = tmp_path / "x"
    os.symlink("folder/mine", link)
    folder = os.open(tmp_path, os.O_RDONLY)
    assert safe_files.read(link, 4) == safe_files.read("x", 4, folder=folder) == b"text"
    os.close(safe_files.open_to_append(link))
    give_away(link)
    for refused in (safe_files.open_to_read, safe_files.open_to_append):
        with pytest.raises(PermissionError, match=r"belongs to the user \d+, not to \d+"):
            refused(link)
    with pytest.raises(PermissionError):
        safe_files.read("x", 4, folder=folder)
    os.close(folder)


def test_no_more_is_read_than_allowed_and_nothing_of_another_user_if_asked(tmp_path, give_away):
    path = tmp_path / "x"
    path.write_text("text")
    with pytest.raises(OSError, match="has more than 3 bytes"):
        safe_files.read(path, 3)
    assert safe_files.read(path, 4, own=True) == b"text"
    give_away(path)
    assert safe_files.read(path, 4) == b"text"
    with pytest.raises(PermissionError):
        safe_files.read(path, 4, own=True)


def test_nothing_is_written_through_a_link(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "x"
    victim.write_text("precious")
    for target in (victim, tmp_path / "none"):
        link.symlink_to(target)
        with pytest.raises(FileExistsError):
            safe_files.create(link)
        (tmp_path / ".x.partial").symlink_to(target)
        safe_files.replace(link, b"new")
        assert not link.is_symlink()
        assert link.read_text() == "new"
        link.unlink()
    assert victim.read_text() == "precious"
    assert os.listdir(tmp_path) == ["victim"]


def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    (tmp_path / "x").write_text("old")
    (tmp_path / ".x.partial").write_text("of a process that was killed")
    with pytest.raises(ZeroDivisionError), safe_files.replacing(tmp_path / "x") as file:
        file.write(b"ne")
        assert (tmp_path / "x").read_text() == "old"
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["x"]
    safe_files.replace(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_text() == "new"


def test_a_folder_of_the_user_is_opened_and_no_link_to_one(tmp_path, give_away):
    with safe_files.own_folder(tmp_path / "a", make=True) as folder:
        safe_files.replace("x", b"text", folder=folder)
        with safe_files.own_folder("b", folder=folder, make=True):
            pass
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "x"]
    (tmp_path / "link").symlink_to("a")
    for name, error in (("link", NotADirectoryError), ("a/x", NotADirectoryError), ("none", FileNotFoundError)):
        with pytest.raises(error), safe_files.own_folder(tmp_path / name):
            pass
    give_away(tmp_path / "a")
    with pytest.raises(PermissionError, match="belongs to the user"), safe_files.own_folder(tmp_path / "a", make=True):
        pass
