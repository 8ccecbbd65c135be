import itertools
import logging
import random
import re
import threading
import time
from types import SimpleNamespace

import pytest

from hpcfsdp.engine import order as orders
from hpcfsdp.engine.order import Order
from hpcfsdp.errors import CommunicationError, DisagreementError
from hpcfsdp.hang import waits

A, B, C = ("forward", "a"), ("forward", "b"), ("backward", "b")


class Store:
    """Counters by name, as the store of torch.distributed has them."""

    def __init__(self):
        self.counts, self.keys, self._lock = {}, set(), threading.Lock()

    def add(self, key, amount):
        with self._lock:
            self.keys.add(key)
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

    def delete_key(self, key):
        with self._lock:
            return self.counts.pop(key, None) is not None


@pytest.fixture
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr("hpcfsdp._compat.default_store", lambda: made)
    return made


@pytest.fixture
def impatient(monkeypatch):
    """Ranks give up soon: for events that other ranks never reach."""
    monkeypatch.setattr(orders, "PATIENCE_S", 0.2)


@pytest.fixture
def no_store(monkeypatch):
    monkeypatch.setattr("hpcfsdp._compat.default_store", lambda: None)


def alone(size=2, confirm=True):
    """The order of rank 0, and the notes with which it meets the others."""
    notes = []
    comm = SimpleNamespace(rank=0, size=size, labelled_barrier=lambda note, _flag: notes.append(note))
    return Order(comm, "7", confirm=confirm), notes


def go(order, *events):
    order.begin()
    for event in events:
        order.note(event)


# The first pass


def test_each_event_of_the_first_pass_is_confirmed_and_a_known_path_costs_no_call(store):
    order, notes = alone()
    go(order, A, B, C)
    assert notes == [
        "the forward of 'a' (event 1 of step 1)",
        "the forward of 'b' (event 2 of step 1)",
        "the backward of 'b' (event 3 of step 1)",
    ]
    order.begin()
    assert notes[3:] == ["the end of a step (event 4 of step 1)"]
    for event in (A, B, C):
        order.note(event)
    for _ in range(3):
        go(order, A, B, C)
    assert len(notes) == 4
    assert store.counts == {}


def test_a_module_called_again_in_a_pass_is_an_event_of_its_own(no_store):
    order, notes = alone()
    go(order, A, A)
    assert [note.split("(")[1] for note in notes] == ["event 1 of step 1)", "event 2 of step 1)"]
    assert order.path() == ["the forward of 'a'"] * 2


def test_ranks_that_differ_in_the_first_pass_are_both_named_on_both(run_ranks, store):
    def body(comm):
        go(Order(comm, "7", confirm=True), A, [B, C][comm.rank])

    for error in run_ranks(2, body):
        assert type(error) is CommunicationError
        assert "the forward of 'b' (event 2 of step 1)" in str(error)
        assert "the backward of 'b' (event 2 of step 1)" in str(error)


@pytest.mark.parametrize(("size", "confirm"), [(1, True), (2, False)])
def test_one_rank_and_ranks_that_compare_digests_confirm_nothing(store, size, confirm):
    order, notes = alone(size, confirm)
    go(order, A, B)
    go(order, B, A)
    assert notes == []
    assert store.counts == {}


# Later passes


def test_a_new_path_is_confirmed_in_the_store_once_all_ranks_reach_it(run_ranks, store):
    def body(comm):
        order, met, known = Order(comm, "7", confirm=True), [], []
        go(order, A, B)
        go(order, A, B)
        comm.labelled_barrier = lambda note, _flag: met.append(note)
        for path in ((A, C), (A, C), (A, B), (A, C)):
            go(order, *path)
            comm.barrier()
            known.append(len(store.keys))
            comm.barrier()
        return met, known

    # The second time only the end of the new path was left to confirm.
    assert run_ranks(3, body) == [([], [1, 2, 2, 2])] * 3
    assert set(store.counts.values()) == {0b111}


def test_the_error_of_a_rank_that_leaves_the_known_path_alone_names_what_it_did_before(store, impatient):
    order, _ = alone(size=4)
    go(order, A, B)
    go(order, A, B)
    order.begin()
    order.note(A)
    with pytest.raises(DisagreementError) as caught:
        order.note(C)
    assert str(caught.value) == (
        "rank 0 reached the backward of 'b' (event 2 of step 3), where in earlier steps it reached the forward of 'b'; "
        "3 of 4 ranks did not. All ranks must call the same modules in the same order, and equally often: give every "
        "rank the same number of batches, take branches that depend on data on all ranks or on none, and where a "
        "module is left out by chance (layer drop) draw that from a torch.Generator with one seed for all ranks"
    )


def test_all_events_of_earlier_steps_are_named(run_ranks, store, monkeypatch):
    def body(comm):
        order = Order(comm, "7", confirm=True)
        for event in (A, B):
            go(order, event)
        order.begin()
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(orders, "PATIENCE_S", 0.2)
            order.note(C)

    error, _ = run_ranks(2, body)
    assert "where in earlier steps it reached the forward of 'a' or the forward of 'b'; 1 of 2 ranks" in str(error)


def test_ranks_that_leave_the_known_path_for_different_places_all_raise(run_ranks, store, impatient):
    def body(comm):
        order = Order(comm, "7", confirm=True)
        go(order, A)
        go(order, [B, C][comm.rank])

    first, second = run_ranks(2, body)
    assert type(first) is type(second) is DisagreementError
    assert str(first).startswith("rank 0 reached the forward of 'b' (event 1 of step 2), where in earlier steps it")
    assert str(second).startswith("rank 1 reached the backward of 'b' (event 1 of step 2), where in earlier steps it")


def test_a_pass_that_goes_on_where_others_ended_raises(store, impatient):
    order, _ = alone()
    go(order, A)
    go(order, A)
    with pytest.raises(DisagreementError, match=r"reached the forward of 'b' .*it reached the end of a step; 1 of 2"):
        order.note(B)


def test_the_same_event_of_another_step_or_engine_is_another_event(store, impatient):
    keys = []
    for label in ("7", "8"):
        order = Order(SimpleNamespace(rank=0, size=2, labelled_barrier=lambda note, _flag: None), label, confirm=True)
        go(order, A)
        for _ in range(2):
            order.begin()
            with pytest.raises(DisagreementError):
                order.note(B)
            order.forget()
            keys.append(set(store.counts))
    assert [len(found) for found in keys] == [1, 2, 3, 4]


@pytest.mark.parametrize("size", [2, 70])
def test_a_long_wait_is_logged_as_others_are_before_it_is_given_up(store, monkeypatch, caplog, request, size):
    class GiveUp(logging.Handler):
        def emit(self, record):
            monkeypatch.setattr(orders, "PATIENCE_S", 0.0)

    handler = GiveUp()
    waits.log.addHandler(handler)
    request.addfinalizer(lambda: waits.log.removeHandler(handler))
    monkeypatch.setattr(waits, "LOOK_AFTER_S", 0.02)
    monkeypatch.setenv("HPCFSDP_WAIT_LOG_S", "0.15")
    order, _ = alone(size)
    go(order, A)
    order.begin()
    with caplog.at_level(logging.WARNING, "hpcfsdp.comm"), pytest.raises(DisagreementError):
        order.note(B)
    (record,) = caplog.records
    assert re.fullmatch(
        r"rank 0 has waited \d+ s in the forward of 'b' \(event 1 of step 2\), where in earlier steps it reached the "
        r"forward of 'a' for rank\(s\) 1(, \d+)*( and 53 more)?",
        record.getMessage(),
    )
    assert len(store.counts) == -(-size // 32)


def test_ranks_of_several_words_are_confirmed_when_all_have_come(store, monkeypatch):
    came = threading.Thread(target=lambda: [store.add(store_key(place), 1 << place % 32) for place in range(1, 70)])

    def store_key(place):
        while not (found := [key for key in store.keys if key.endswith(f"/{place // 32}")]):
            time.sleep(0.001)
        return found[0]

    order, _ = alone(size=70)
    go(order, A)
    order.begin()
    came.start()
    order.note(B)
    came.join()
    monkeypatch.setattr(orders, "PATIENCE_S", 0.2)
    assert set(store.counts.values()) == {2**32 - 1, 2**6 - 1}
    order.forget()
    order.begin()
    with pytest.raises(DisagreementError, match="69 of 70 ranks did not"):
        order.note(C)


def test_a_rank_answers_which_event_it_has_reached(store):
    order, _ = alone()
    go(order, A, B)
    assert order.called((1, 2)) == "the forward of 'b' (event 2 of step 1), where in earlier steps it reached nothing"
    assert order.called((1, 3)) == order.called((2, 1)) == waits.NOTHING_YET
    order.begin()
    assert order.called((1, 1)) is waits.UNKNOWN
    order.note(A)
    came, asked = order.called((2, 1)), []
    store.add = lambda key, amount: asked.append([order.called((2, depth)) for depth in (1, 2, 3)]) or 3
    order.note(C)
    label = "the backward of 'b' (event 2 of step 2), where in earlier steps it reached the forward of 'b'"
    assert asked == [[came, label, waits.NOTHING_YET]]
    assert order.called((2, 2)) == label


def test_without_a_store_ranks_meet_at_each_new_event(no_store):
    order, notes = alone()
    go(order, A)
    go(order, B)
    assert notes[-1] == "the forward of 'b' (event 1 of step 2)"


# What is known


def test_digests_are_equal_if_and_only_if_the_paths_are():
    found = {}
    events = [A, B, C, ("forward", "a', 'b")]
    paths = [path for length in range(5) for path in itertools.product(events, repeat=length)]
    for _ in range(2):
        order, _ = alone(confirm=False)
        for path in reversed(paths):
            go(order, *path)
            assert found.setdefault(path, order.digest) == order.digest
    assert len(set(found.values())) == len(paths)
    assert found[()] == ""


def test_what_comes_next_is_known_while_there_was_one_way_to_go():
    order, _ = alone(confirm=False)
    order.begin()
    assert order.upcoming("forward") is None
    for event in (A, B, C):
        order.note(event)
    assert order.upcoming("backward") is None
    order.begin()
    assert order.upcoming("forward") == "a"
    order.note(A)
    assert order.upcoming("forward") == "b"
    assert order.upcoming("backward") is None
    order.note(B)
    assert order.upcoming("backward") == "b"
    order.note(C)
    assert order.upcoming("end") == ""
    go(order, A, C)
    order.begin()
    assert order.upcoming("forward") == "a"
    order.note(A)
    assert order.upcoming("forward") is None
    assert order.upcoming("backward") is None


def test_what_comes_after_a_forward_that_is_computed_once_more():
    """In a backward the next unit is known whether units compute again or not; if another one does, it comes first."""
    events = [
        *(("forward", name) for name in "abcd"),
        *(("backward", "d"), ("forward", "d"), ("backward", "c"), ("forward", "a"), ("forward", "b")),
        *(("backward", "b"), ("backward", "a"), ("forward", "a")),
    ]
    order, _ = alone(confirm=False)
    go(order, *events)
    order.begin()
    found = []
    for event in events:
        order.note(event)
        found.append(order.upcoming("backward"))
    assert found == [None, None, None, "d", "c", "c", "a", None, "b", "a", None, None]


def test_the_path_is_what_was_done_since_the_pass_began():
    order, _ = alone(confirm=False)
    assert order.path() == []
    go(order, A, C)
    assert order.path() == ["the forward of 'a'", "the backward of 'b'"]
    order.begin()
    assert order.path() == []


def test_a_pass_that_was_broken_off_did_not_end_and_what_it_did_is_known(store):
    order, notes = alone()
    go(order, A, B)
    order.forget()
    assert (order.path(), order.digest) == ([], "")
    go(order, A, B)
    assert [note for note in notes if "end" in note] == []
    assert len(notes) == 2
    assert store.counts == {}


# Many orders


def events_of(order):
    """All that is remembered, in the order in which it came."""
    found, left = [], [order._root]
    while left:
        node = left.pop()
        found.append((node.digest, node.event))
        left += node.children.values()
    return found


def dropped_layers(seed, layers=12):
    """A pass in which layers are left out at random, the same ones on all ranks."""
    chosen = [layer for layer in range(layers) if random.Random(seed * layers + layer).random() < 0.5]
    return [("forward", str(layer)) for layer in chosen] + [("backward", str(layer)) for layer in reversed(chosen)]


def test_layers_left_out_at_random_do_not_fill_the_memory(no_store):
    order, _ = alone()
    sizes = []
    for step in range(2000):
        go(order, *dropped_layers(step))
        sizes.append(len(events_of(order)))
    most = orders.MOST_PATHS * (2 * 12 + 1)
    assert max(sizes) < most
    assert sum(sizes[100:200]) * 0.9 < sum(sizes[-100:]) < sum(sizes[100:200]) * 1.1


def test_a_path_that_is_taken_again_and_again_is_never_forgotten(no_store):
    order, notes = alone()
    go(order, A, B, C)
    for step in range(300):
        go(order, *dropped_layers(step))
        order.begin()
        before = len(notes)
        go(order, A, B, C)
        assert len(notes) == before


def test_ranks_forget_the_same_paths_and_leave_nothing_in_the_store(run_ranks, store, monkeypatch):
    monkeypatch.setattr(orders, "MOST_PATHS", 5)

    def body(comm):
        order = Order(comm, "7", confirm=True)
        for step in range(40):
            go(order, *dropped_layers(step % 9, layers=4))
            if step % 7 == 0:
                order.forget()
        return events_of(order)

    one, other = run_ranks(2, body)
    assert one == other
    assert len(store.counts) == 1


def test_a_path_that_an_error_broke_off_may_be_forgotten_while_others_go_on_from_its_end(no_store, monkeypatch):
    monkeypatch.setattr(orders, "MOST_PATHS", 2)
    order, notes = alone()
    order.begin()
    order.note(A)
    order.forget()
    go(order, A, B)
    go(order, C)
    go(order, A, B)
    before = len(notes)
    go(order, A, B)
    assert len(notes) == before
