"""Disks that fail, stop, and forget, and what checkpoints on them hold then. No tests."""

import contextlib
import os
import random
import signal
import time
from collections import namedtuple
from pathlib import Path

from hpcfsdp.checkpoint.format.disk import SYSTEM, System
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader

KINDS = tuple(name for name in vars(System) if not name.startswith("_"))
SECTOR = 512


@contextlib.contextmanager
def using(system):
    """Within it `system` makes the calls of this thread, and of the threads of saves that begin; None: the real one."""
    token = SYSTEM.set(system or System)
    try:
        yield system
    finally:
        SYSTEM.reset(token)


def value_of(path):
    """The step of a checkpoint, all elements of which are that number, after every byte has been read.

    Raises:
        CheckpointError: the file is not whole.
    """
    index = open_index(path)
    with BlockReader(index) as reader:
        found = {int(x) for name in index.tensors for block in reader.blocks(name) for x in block}
    assert found == {index.info.step}, "a mix"
    return index.info.step


class Watched:
    """A ``System`` that makes every call through ``act``, and counts them.

    Attributes:
        calls: the names of the calls so far.
    """

    def __init__(self):
        self.calls = []

    def __getattr__(self, kind):
        if kind not in KINDS:
            raise AttributeError(kind)

        def call(*arguments):
            self.calls.append(kind)
            return self.act(len(self.calls) - 1, kind, arguments)

        return call

    def act(self, number, kind, arguments):
        return getattr(System, kind)(*arguments)


class Failing(Watched):
    """One call, counted from 0, raises; so do all later ones if `lasting`."""

    def __init__(self, number, code, lasting=False):
        super().__init__()
        self.number, self.code, self.lasting = number, code, lasting

    def act(self, number, kind, arguments):
        if number == self.number or (self.lasting and number > self.number):
            if kind == "close":
                os.close(*arguments)  # as Linux has it: the descriptor is gone, whatever is told
            raise OSError(self.code, os.strerror(self.code))
        return super().act(number, kind, arguments)


class Cut(Watched):
    """Every read and write takes at most some bytes, and every call is interrupted so many times before it is made.

    Args:
        limits: drawn from one after the other, over and over.
    """

    def __init__(self, limits, interruptions=0):
        super().__init__()
        self.limits, self.interruptions = limits, interruptions
        self._made = self._pending = 0

    def act(self, number, kind, arguments):
        if self._pending < self.interruptions and kind != "close":
            self._pending += 1
            raise InterruptedError
        self._pending = 0
        if kind in ("pwritev", "preadv"):
            fd, buffers, offset = arguments
            arguments = fd, first_bytes(buffers, self.limits[self._made % len(self.limits)]), offset
            self._made += 1
        return super().act(number, kind, arguments)


class Killing(Watched):
    """The process ends itself before a call, counted from 0; in the middle of it, where that is a write."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def act(self, number, kind, arguments):
        if number == self.number:
            if kind == "pwritev":
                fd, buffers, offset = arguments
                os.pwritev(fd, first_bytes(buffers, sum(memoryview(part).nbytes for part in buffers) // 2), offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().act(number, kind, arguments)


def first_bytes(buffers, limit):
    """Of buffers that follow each other, those that hold the first bytes, at least one."""
    found, left = [], max(1, limit)
    for part in map(memoryview, buffers):
        found.append(part[:left])
        left -= found[-1].nbytes
        if not left:
            break
    return found


# What a disk holds after the power went


Event = namedtuple("Event", "began ended kind file detail")
"""A call that changes the disk. `file` is its inode, or the folder's for names; times are of one clock for all ranks.

kind "write": detail is (offset, bytes); "size": bytes; "sync": None; "name": (name, the name that goes away or None,
the inode that it then has, or None if it goes away itself).
"""


class Logged(Watched):
    """Notes what is done to the disk, for ``Forgetful``. What is done is done.

    Args:
        honest: False: ``fsync`` does nothing.
    """

    def __init__(self, honest=True):
        super().__init__()
        self.honest = honest
        self.events = []

    def act(self, number, kind, arguments):
        began = time.monotonic_ns()
        told = super().act(number, kind, arguments)
        noted = self._noted(kind, arguments, told)
        if noted is not None:
            self.events.append(Event(began, time.monotonic_ns(), *noted))
        return told

    def _noted(self, kind, arguments, told):
        if kind == "pwritev":
            fd, buffers, offset = arguments
            return "write", os.fstat(fd).st_ino, (offset, b"".join(map(bytes, buffers))[:told])
        if kind == "ftruncate":
            return "size", os.fstat(arguments[0]).st_ino, arguments[1]
        if kind == "fsync" and self.honest:
            return "sync", os.fstat(arguments[0]).st_ino, None
        change = self._names_changed(kind, arguments, told)
        return change and ("name", Path(arguments[0]).parent.stat().st_ino, change)

    @staticmethod
    def _names_changed(kind, arguments, told):
        if kind == "open" and arguments[1] & os.O_CREAT:
            return Path(arguments[0]).name, None, os.fstat(told).st_ino
        if kind == "replace":
            source, target = map(Path, arguments)
            return target.name, source.name, target.stat().st_ino
        if kind == "unlink":
            return Path(arguments[0]).name, None, None
        return None


class Forgetful:
    """The disks that a power cut may leave behind.

    Args:
        before: by name, the bytes of files in the folder, all of them on the disk.
        events: of all ranks.
    """

    def __init__(self, before, events):
        self._before = before
        self.events = sorted(events, key=lambda event: event.ended)

    def moments(self):
        """Times at which the power may go: in the middle of each call, and behind it."""
        return sorted(moment for event in self.events for moment in (event.began, event.ended))

    def after(self, moment, dice, luck):
        """By name, the bytes of the files that are found when the power is back.

        What was forced to the disk before the moment is there. Of the rest each call may have been done or not, or
        sector by sector; in an order of its own.

        Args:
            luck: how much of the rest was done, of the names and of the contents; 0: nothing, 1: all.
        """
        begun = [event for event in self.events if event.began <= moment]
        names = dict(self._before)
        of_names, of_contents = luck
        for event in begun:
            if event.kind == "name" and (_forced(event, begun, moment) or dice.random() < of_names):
                target, source, inode = event.detail
                names[target] = inode
                for gone in (source, target if inode is None else None):
                    names.pop(gone, None)
        inodes = {value for value in names.values() if isinstance(value, int)}
        contents = {inode: self._content(inode, begun, moment, dice, of_contents) for inode in sorted(inodes)}
        return {name: contents[value] if isinstance(value, int) else value for name, value in names.items()}

    @staticmethod
    def _content(inode, begun, moment, dice, luck):
        content = bytearray()
        for event in begun:
            if event.file != inode or event.kind not in ("write", "size"):
                continue
            forced = _forced(event, begun, moment)
            if event.kind == "size":
                if forced or dice.random() < luck:
                    content = content[: event.detail] + bytes(max(0, event.detail - len(content)))
                continue
            offset, data = event.detail
            for begin, part in [(offset, data)] if forced else _torn(offset, data, dice, luck):
                content += bytes(max(0, begin + len(part) - len(content)))
                content[begin : begin + len(part)] = part
        return bytes(content)


def _forced(event, begun, moment):
    """Whether a call was followed by one that forced it to the disk, and was over at that moment."""
    return any(
        sync.kind == "sync" and sync.file == event.file and event.ended <= sync.began and sync.ended <= moment
        for sync in begun
    )


def _torn(offset, data, dice, luck):
    """What has come through of a write: all, nothing, or some sectors, the last of them perhaps in part."""
    if dice.random() < luck:
        return [(offset, data)]
    if not luck or dice.random() < 0.5:
        return []
    parts = [(offset + begin, data[begin : begin + SECTOR]) for begin in range(0, len(data), SECTOR)]
    return [(begin, part[: dice.randrange(len(part) + 1)]) for begin, part in parts if dice.random() < 0.6]


def power_cuts(before, events, turns, seed=0):
    """(moment, folder after the cut), for each moment: with all that was done; with all changes of names and only those
    contents that were forced, as journals of file systems like to leave it; and `turns` times by dice.
    """
    disk = Forgetful(before, events)
    dice = random.Random(seed)
    for moment in disk.moments():
        yield moment, disk.after(moment, dice, (1, 1))
        yield moment, disk.after(moment, dice, (1, 0))
        for _ in range(turns):
            luck = dice.choice((0.2, 0.5, 0.95))
            yield moment, disk.after(moment, dice, (luck, luck))


def folder_of(path, found):
    """Files, made in a folder that is emptied of others."""
    path.mkdir(exist_ok=True)
    for name in os.listdir(path):
        if name not in found:
            (path / name).unlink()
    for name, data in found.items():
        (path / name).write_bytes(data)
    return path
