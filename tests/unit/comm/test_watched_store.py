"""torch's store where ranks may be lost, next to the one that it passes calls on to."""

import datetime
import gc
import threading
import weakref

import pytest
import torch.distributed as dist

from hpcfsdp.comm.backend import watched_store
from hpcfsdp.comm.backend.watched_store import WatchedStore
from hpcfsdp.errors import RankLostError
from hpcfsdp.hang import lost


@pytest.fixture
def store():
    return WatchedStore(dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=77), False))


def test_torch_reaches_every_call_of_it(store):
    seen = dist.PrefixStore("group", store)
    seen.set("a", "1")
    assert seen.get("a") == b"1"
    assert seen.compare_set("b", "", "2") == seen.compare_set("b", "", "3") == b"2"
    assert seen.add("c", 2) == 2
    assert seen.check(["a", "b"]) and not seen.check(["d"])
    seen.append("a", "x")
    seen.multi_set(["e", "f"], ["5", "6"])
    assert seen.multi_get(["a", "e", "f"]) == [b"1x", b"5", b"6"]
    seen.wait(["a"])
    assert seen.delete_key("a") and seen.num_keys() == store.num_keys()
    store.queue_push("q", "7")
    assert (store.queue_len("q"), store.queue_pop("q")) == (1, b"7")
    assert store.timeout == datetime.timedelta(seconds=77)


def test_it_waits_for_a_key_that_comes(store):
    threading.Timer(0.05, lambda: store.set("late", "1")).start()
    assert store.get("late") == b"1"


def test_a_wait_ends_at_its_timeout_and_when_ranks_are_lost(store, monkeypatch):
    with pytest.raises(dist.DistStoreError, match=r"waited 0\.01 s in the store for never"):
        store.wait(["never"], datetime.timedelta(seconds=0.01))

    def check(waited_for):
        raise RankLostError(waited_for)

    monkeypatch.setattr(lost, "check", check)
    for wait in (store.get, lambda key: store.multi_get([key]), lambda key: store.wait([key]), store.queue_pop):
        with pytest.raises(RankLostError, match="torch's store, for never"):
            wait("never")


def test_a_server_that_has_gone_is_a_loss_where_ranks_are_lost(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=9), False)
    store = WatchedStore(dist.TCPStore("127.0.0.1", server.port, None, False, datetime.timedelta(seconds=9), False))
    del server
    with pytest.raises(dist.DistNetworkError):
        store.add("a", 1)

    def check(waited_for):
        raise RankLostError(waited_for)

    monkeypatch.setattr(lost, "news", lambda _: True)
    monkeypatch.setattr(lost, "check", check)
    for call in (lambda: store.set("a", "1"), lambda: store.add("a", 1)):
        with pytest.raises(RankLostError, match="torch's store"):
            call()


def test_a_rank_that_waits_for_a_hung_server_does_not_hang_itself_and_ends_those_that_do(store, monkeypatch):
    seen = []

    class Watch:
        def beat(self):
            seen.append("waits")

        def end_hung(self, limit_s):
            seen.append(limit_s)
            answers.set()

    answers = threading.Event()
    monkeypatch.setattr(watched_store, "_ATTEND_EVERY_S", 0.01)
    monkeypatch.setattr(watched_store.env, "hang_s", lambda: 0.1)
    monkeypatch.setattr(lost, "current", Watch())
    slow = WatchedStore(store)
    store.check = lambda keys: answers.wait(5)
    assert slow.check(["a"])
    assert seen[0] == "waits" and seen[-1] == 0.1
    reference = weakref.ref(slow)
    del slow
    assert reference() is None or [gc.collect(), reference()][-1] is None
