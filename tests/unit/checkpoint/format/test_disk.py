"""Whole ranges are read and written, however little a system call does at a time."""

import errno
import os
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.disk import System, reason
from tests.disks import Cut, Failing, Watched, using

LIMITS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a"


def views(parts):
    return [memoryview(bytes(part)) for part in parts]


@given(LIMITS, st.integers(0, 3), st.lists(st.binary(max_size=50), max_size=8), st.integers(0, 100))
@settings(max_examples=100)
def test_what_is_cut_short_or_interrupted_is_written_and_read_whole(
    tmp_path_factory, limits, interruptions, parts, offset
):
    path = tmp_path_factory.mktemp("cut") / "a"
    with using(Cut(limits, interruptions)):
        data = b"".join(parts)
        fd = disk.create(path, offset + len(data))
        disk.write(fd, views(parts), offset)
        disk.sync(fd)
        assert disk.size(fd) == offset + len(data)
        disk.close(fd)
        assert path.read_bytes() == bytes(offset) + data
        fd = disk.open_to_read(path)
        buffer = bytearray(b"\xff" * (len(data) + 7))
        assert disk.read(fd, memoryview(buffer), offset) == len(data)
        assert bytes(buffer) == data + b"\xff" * 7
        disk.close(fd)


@settings(deadline=None)
@given(
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    interruptions=st.integers(0, 2),
    nbytes=st.integers(1, 12),
    count=st.integers(1, 9),
    gap=st.integers(0, 5),
    offset=st.integers(0, 40),
)
def test_runs_apart_are_written_whole_and_nothing_between_them(
    tmp_path_factory, limits, interruptions, nbytes, count, gap, offset
):
    path = tmp_path_factory.mktemp("runs") / "file"
    stride = nbytes + gap
    before = bytes([255]) * (offset + count * stride)
    path.write_bytes(before)
    data = bytes(place % 251 for place in range(count * nbytes))
    with using(Cut(limits, interruptions)):
        fd = disk.open_to_write(path)
        disk.write_runs(fd, memoryview(data), count, offset, stride)
        disk.close(fd)
    whole = bytearray(before)
    for number in range(count):
        whole[offset + number * stride : offset + number * stride + nbytes] = data[number * nbytes :][:nbytes]
    assert path.read_bytes() == bytes(whole)


def test_more_buffers_than_a_call_takes_are_written(path):
    watched = Watched()
    fd = disk.create(path, 0)
    with using(watched):
        disk.write(fd, views(bytes([n % 251]) for n in range(3000)), 0)
    disk.close(fd)
    assert path.read_bytes() == bytes(n % 251 for n in range(3000))
    assert watched.calls.count("pwritev") == 3


def test_buffers_that_are_not_bytes_are_written_as_such(path):
    fd = disk.create(path, 0)
    with using(Cut([5])):
        disk.write(fd, [memoryview(bytes(range(48))).cast("d"), memoryview(b"")], 0)
    disk.close(fd)
    assert path.read_bytes() == bytes(range(48))


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(path):
    fd = disk.create(path, 0)
    with pytest.raises(OSError, match="took no byte") as caught, using(SimpleNamespace(pwritev=lambda *_: 0)):
        disk.write(fd, views([b"abc"]), 0)
    assert caught.value.errno == errno.EIO
    disk.close(fd)


def test_a_file_is_created_of_holes_and_never_over_another(path):
    disk.close(disk.create(path, 1000))
    assert path.read_bytes() == bytes(1000)
    path.write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        disk.create(path, 5)
    assert path.read_bytes() == b"kept"


def test_a_file_of_which_no_size_can_be_set_leaves_no_open_descriptor(path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)), using(Failing(1, errno.EDQUOT)):
        disk.create(path, 10)
    assert os.listdir("/proc/self/fd") == before


def test_a_signal_does_not_close_a_descriptor_twice(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with using(Failing(0, errno.EINTR)):
        disk.close(fd)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_force_names_to_the_disk_is_let_be(tmp_path, code):
    with using(Failing(1, code)) as watched:
        disk.sync_folder(tmp_path)
    assert watched.calls == ["open", "fsync", "close"]


def test_a_folder_that_may_not_be_read_is_let_be(tmp_path):
    with using(Failing(0, errno.EACCES)) as watched:
        disk.sync_folder(tmp_path)
    assert watched.calls == ["open"]


def test_names_that_are_not_forced_to_the_disk_are_an_error(tmp_path):
    with using(Failing(1, errno.EIO)) as watched, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.sync_folder(tmp_path)
    assert watched.calls == ["open", "fsync", "close"]


def test_removing_what_is_not_there_is_done(path):
    disk.remove(path)
    path.write_bytes(b"")
    disk.remove(path)
    assert not path.exists()


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/zero"):
        with pytest.raises(OSError, match="is not a regular file") as caught:
            disk.open_to_read(path)
        assert reason(caught.value) == "is not a regular file"
    with pytest.raises(IsADirectoryError):
        disk.open_to_read(tmp_path)


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(path):
    """Between looking at it and opening it."""

    class Swapping(System):
        @staticmethod
        def open(name, flags):
            path.unlink()
            os.mkfifo(path)
            return os.open(name, flags)

    path.write_text("x")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="is not a regular file"), using(Swapping()):
        disk.open_to_read(path)
    assert os.listdir("/proc/self/fd") == before


def test_holes_are_not_allocated(path):
    path.write_bytes(b"x" * 10)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"y")
    fd = disk.open_to_read(path)
    try:
        assert 11 <= disk.allocated(fd) < 1 << 20
        assert disk.next_data(fd, 0) == 0
        assert (1 << 30) - (1 << 16) < disk.next_data(fd, 1 << 20) <= 1 << 30
        assert disk.next_data(fd, (1 << 30) + (1 << 20)) is None
    finally:
        disk.close(fd)


def test_a_file_system_that_knows_no_holes_has_allocated_all(path):
    class Unknowing(System):
        @staticmethod
        def lseek(fd, offset, whence):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with path.open("wb") as file:
        file.truncate(1 << 30)
    with using(Unknowing()):
        fd = disk.open_to_read(path)
        try:
            assert disk.allocated(fd) == 1 << 30
            assert disk.next_data(fd, 5) == 5
        finally:
            disk.close(fd)
