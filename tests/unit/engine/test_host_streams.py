"""The queues of the CPU: what goes on in the background, and what each wait waits for."""

import pytest

from hpcfsdp.comm.progress import Running, Sent
from hpcfsdp.engine.streams import HostStreams, Stream, Wait
from hpcfsdp.errors import CommunicationError


class Owner:
    def departed(self):
        return set()


class Door:
    """Holds after so many looks, None: when it is opened."""

    def __init__(self, looks=None):
        self.left = looks

    def holds(self):
        if self.left:
            self.left -= 1
        return self.left == 0

    def missing(self):
        return []


def gather(received, read, error=None):
    """The work of a gather that first receives, and is over when others have read what it sends."""

    def steps():
        yield received
        if error is not None:
            raise error
        yield Sent(read.holds, read.missing)

    return Running(steps(), "the gather", 0, 5.0, Owner())


def test_a_unit_computes_before_others_have_read_what_this_rank_sends():
    streams, doors = HostStreams(), [Door(), Door(), Door()]
    works = [gather(Door(3), door) for door in doors]
    events = [streams.launch(Stream.GATHER, lambda _, work=work: work) for work in works]
    streams.wait(Stream.COMPUTE, events[1], Wait.VALUES_GATHERED)
    assert [work._has_outputs() for work in works[:2]] == [True, True]
    assert not any(work.done for work in works)
    for door in doors:
        door.left = 0
    streams.wait(Stream.COMPUTE, events[0], Wait.GATHERED_IN_VAIN)
    assert works[0].done
    assert streams.record(Stream.GATHER) is events[2]
    streams.wait(Stream.HOST, events[2], Wait.SHARDS_READ)
    assert all(work.done for work in works)
    assert streams.record(Stream.GATHER) is None


def test_work_proceeds_while_nobody_waits():
    streams, read = HostStreams(), Door(0)
    work = gather(Door(8), read)
    streams.launch(Stream.GATHER, lambda _: work)
    for _ in range(8):
        streams.proceed()
    assert work.done
    streams.proceed()
    streams.drain()


def test_a_gather_that_failed_raises_once():
    streams = HostStreams()
    work = gather(Door(2), Door(0), CommunicationError("broken"))
    event = streams.launch(Stream.GATHER, lambda _: work)
    streams.proceed()
    with pytest.raises(CommunicationError, match="broken"):
        streams.wait(Stream.COMPUTE, event, Wait.VALUES_GATHERED)
    streams.wait(Stream.COMPUTE, event, Wait.GATHERED_IN_VAIN)
    streams.drain()
