import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.saving.pending import StagingRing


def filled(nbytes, value):
    return torch.full((nbytes,), value % 251, dtype=torch.uint8)


def groups(sizes, most):
    """Numbers of pieces that are put in together: as many as the ring holds at once."""
    found, nbytes = [[]], 0
    for number, size in enumerate(sizes):
        nbytes += size
        if nbytes > most:
            found.append([])
            nbytes = size
        found[-1].append(number)
    return found


@settings(deadline=None)
@given(
    size=st.integers(1, 64),
    fractions=st.lists(st.floats(0, 1), max_size=40),
    at_once=st.integers(1, 100),
)
def test_all_bytes_come_out_as_they_went_in_and_never_more_than_the_ring_holds(size, fractions, at_once):
    ring, sizes, most, got = StagingRing(size), [int(part * size) for part in fractions], [0], []

    def consume():
        while taken := ring.take(at_once):
            most[0] = max(most[0], sum(block.memory.numel() for block in taken))
            got.extend((block.key, bytes(block.arrived())) for block in taken)
            ring.release(taken)

    thread = threading.Thread(target=consume)
    thread.start()
    for group in groups(sizes, size):
        pieces = [(number, filled(sizes[number], number)) for number in group]
        assert ring.put(pieces)
        for _, source in pieces:
            source.fill_(255)  # it has been copied
    ring.end()
    thread.join()
    assert got == [(number, bytes([number % 251]) * nbytes) for number, nbytes in enumerate(sizes)]
    assert most[0] <= size


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_pieces_that_wait_never_lie_on_each_other(actions):
    ring, waiting = StagingRing(32), []
    for number, (puts, nbytes) in enumerate(actions):
        if puts:
            if ring.put([(number, filled(nbytes, number))], wait=False):
                waiting.append((number, nbytes))
            else:
                assert waiting  # an empty ring takes anything that fits
        elif waiting:
            blocks = ring.take(0)  # one, and those without bytes behind it
            for block in blocks:
                number, nbytes = waiting.pop(0)
                assert (block.key, bytes(block.arrived())) == (number, bytes([number % 251]) * nbytes)
            ring.release(blocks)
        assert sum(nbytes for _, nbytes in waiting) <= 32


def test_a_full_ring_makes_its_user_wait_until_there_is_room():
    ring = StagingRing(8)
    assert ring.put([("a", filled(6, 1))])
    assert not ring.put([("b", filled(6, 2))], wait=False)
    put = threading.Event()
    thread = threading.Thread(target=lambda: (ring.put([("b", filled(6, 2))]), put.set()))
    thread.start()
    taken = ring.take(100)
    assert [block.key for block in taken] == ["a"]
    assert not put.is_set()
    ring.release(taken)
    thread.join()
    assert [block.key for block in ring.take(100)] == ["b"]


def test_a_reader_that_gives_up_lets_the_other_side_go_on():
    ring = StagingRing(4)
    ring.put([("a", filled(4, 1))])
    thread = threading.Thread(target=lambda: [ring.put([(name, filled(4, 1))]) for name in "bcd"])
    thread.start()
    ring.stop()
    thread.join()
    assert ring.stopped
    assert ring.take(1) == []
    ring.start()
    assert ring.put([("e", filled(4, 5))], wait=False)
    assert bytes(ring.take(1)[0].arrived()) == bytes([5] * 4)


def test_a_piece_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="5 bytes do not fit into a staging ring of 4"):
        StagingRing(4).put([("a", filled(2, 1)), ("b", filled(3, 1))])


def test_a_ring_without_memory_takes_pieces_without_bytes():
    ring = StagingRing(0)
    assert ring.put([("a", filled(0, 1))])
    ring.end()
    (block,) = ring.take(10)
    ring.release([block])
    assert bytes(block.arrived()) == b""
    assert ring.take(10) == []


def test_as_much_is_taken_at_a_time_as_is_asked_for():
    ring = StagingRing(100)
    for number in range(5):
        ring.put([(number, filled(10, number))])
    ring.end()
    assert [[block.key for block in ring.take(25)] for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, caplog):
    def refuse(*sizes, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("no page can be locked\nand a stack of C++")
        return original(*sizes, **options)

    original = torch.empty
    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level("WARNING", "hpcfsdp"):
        ring = StagingRing(1000, pinned=True)
    assert "1000 bytes of memory for copies of a checkpoint are not pinned (no page can be locked)" in caplog.text
    assert ring.put([("a", filled(5, 1))])
    ring.close()
