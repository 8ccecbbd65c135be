import gc
import json
import logging
import pickle
from dataclasses import replace

import pytest

from hpcfsdp.errors import DifferentCallsError, LaunchError
from hpcfsdp.hang import calls, waits
from hpcfsdp.hang.waits import (
    NOTHING_YET,
    UNKNOWN,
    LongWait,
    Waiting,
    crossed,
    describe,
    key_of,
    pack,
    same_call,
    unpack,
)


class Member:
    def __init__(self, world_ranks=(0, 1), *labels):
        self.world_ranks = world_ranks
        self.labels = labels
        self.key = key_of(self, world_ranks)

    def called(self, number):
        return self.labels[number - 1] if number <= len(self.labels) else NOTHING_YET


class NoBoard:
    def __init__(self):
        self.read, self.written, self.asked = {}, None, []

    def exchange(self, rank, mine, peers):
        self.asked.append((rank, mine, tuple(peers)))
        self.written = mine


@pytest.fixture
def board(monkeypatch):
    made = NoBoard()
    monkeypatch.setattr(waits, "_board", made)
    return made


def pair(they_called=NOTHING_YET, i_called=NOTHING_YET, **changed):
    """Two ranks that wait for each other, and what each has called where the other one waits."""
    mine = Waiting(0, 7, "save", "gather", ("A", 3), (1,), True, {1: (9, i_called)})
    theirs = Waiting(1, 9, "forward", "meet", ("B", 5), (0,), True, {0: (7, they_called)})
    return replace(mine, **changed), theirs


@pytest.fixture(autouse=True)
def nothing_raised(monkeypatch):
    monkeypatch.setattr(waits, "_raised_with", {})


def both(mine, theirs):
    found = {crossed(mine, theirs), crossed(theirs, mine)}
    assert len(found) == 1  # ranks come to the same result
    return found.pop()


def test_ranks_that_wait_for_what_the_other_has_not_called_never_meet():
    assert both(*pair())


def test_ranks_that_have_called_something_else_never_meet():
    assert both(*pair(they_called="meet", i_called="gather"))
    assert both(*pair(they_called="broadcast"))
    assert both(*pair(i_called="broadcast"))


@pytest.mark.parametrize(
    "case",
    {
        "mine is under way there": {"they_called": "gather"},
        "theirs is under way here": {"i_called": "meet"},
        "both are": {"they_called": "gather", "i_called": "meet"},
        "too long ago": {"they_called": UNKNOWN},
        "not waited for": {"missing": (2,)},
        "another thread may go on": {"firm": False},
        "an answer to an earlier wait": {"serial": 8},
        "no answer": {"answers": {}},
    }.items(),
    ids=lambda case: case[0],
)
def test_ranks_that_may_still_meet_do_not_raise(case):
    assert not both(*pair(**case[1]))


def test_the_message_names_the_calls_or_within_one_call_the_collectives():
    mine, theirs = pair()
    assert describe(mine, [theirs]).startswith(
        "ranks wait for each other in different calls: rank 0 is in save, rank 1 is in forward. All ranks must"
    )
    text = describe(mine, [replace(theirs, call="save")])
    assert "rank 0 is in save (gather), rank 1 is in save (meet)" in text
    assert "rank 0 is in gather, rank 1 is in meet" in describe(replace(mine, call=""), [replace(theirs, call="")])


def test_a_wait_answers_those_that_are_missing_and_ends_when_all_know(board):
    own, other = Member((0, 1), "gather"), Member((0, 1))
    watch = LongWait("gather", own, 1)
    assert watch.look(1.0, 0, [1], firm=True) is None
    ((rank, mine, peers),) = board.asked
    assert (rank, peers, mine.answers, mine.missing) == (0, (1,), {}, (1,))
    theirs = Waiting(1, 5, "forward", "meet", (other.key, 1), (0,), True)
    board.read = {1: theirs}
    assert watch.look(1.3, 0, [1], firm=True) is None
    answered = board.asked[-1][1]
    assert answered.answers == {1: (5, NOTHING_YET)}
    board.read = {1: replace(theirs, answers={0: (answered.serial, NOTHING_YET)})}
    assert "rank 1 is in forward" in watch.look(1.6, 0, [1], firm=True)
    watch.end(failed=True)
    assert board.asked[-1][1].over and board.asked[-1][1].crossed
    watch.end(failed=False)
    assert board.asked[-1][1] is None


def test_a_rank_that_comes_after_others_have_raised_raises_once(board):
    own, other = Member((0, 1, 2), "meet"), Member((0, 1, 2))
    gone = Waiting(0, 5, "save", "gather", (other.key, 1), (1, 2), True, {1: (3, NOTHING_YET)}, over=True)
    board.read = {0: gone}
    watch = LongWait("meet", own, 1)
    assert [watch.look(each, 2, [0, 1], firm=True) for each in (1.0, 1.3)] == [
        None,
        None,
    ]  # another error: it may come back
    board.read = {0: replace(gone, crossed=True)}
    assert "rank 0 is in save" in (watch.look(1.6, 2, [0, 1], firm=True) or watch.look(1.9, 2, [0, 1], firm=True))
    later = LongWait("meet", own, 1)
    assert [later.look(each, 2, [0, 1], firm=True) for each in (1.0, 1.3)] == [None, None]


def test_a_rank_that_has_left_may_have_met_this_one(board):
    own, other = Member((0, 1), "meet"), Member((0, 1), "gather")
    board.read = {0: Waiting(0, 5, "save", "gather", (other.key, 1), (1,), True, over=True, crossed=True)}
    watch = LongWait("meet", own, 1)
    assert [watch.look(each, 1, [0], firm=True) for each in (1.0, 1.3)] == [None, None]


def test_of_a_communicator_that_is_gone_nothing_is_known(board):
    own, other = Member((0, 1), "gather"), Member((0, 1))
    key = other.key
    del other
    gc.collect()
    board.read = {1: Waiting(1, 5, "", "meet", (key, 1), (0,), True)}
    LongWait("gather", own, 1).look(1.0, 0, [1], firm=True)
    assert board.asked[-1][1].answers == {1: (5, UNKNOWN)}


def test_communicators_of_the_same_ranks_have_different_keys_that_all_ranks_know():
    first, second, third = Member((5, 7)), Member((5, 7)), Member((5, 8))
    assert first.key[0] == second.key[0] != third.key[0]
    assert first.key[1] + 1 == second.key[1]


def test_a_long_wait_is_logged_more_and_more_rarely(board, monkeypatch, caplog):
    monkeypatch.setenv("HPCFSDP_WAIT_LOG_S", "2")
    watch = LongWait("barrier", Member((4, 6), "barrier"), 1)
    board.read = {6: Waiting(6, 1, "forward", "meet", None, (4,), True)}
    logged = []
    with caplog.at_level(logging.WARNING, "hpcfsdp.comm"):
        for tenth in range(10, 2000):
            caplog.clear()
            watch.look(tenth / 10, 0, [1], firm=True)
            logged += [(tenth / 10, record.getMessage()) for record in caplog.records]
    assert [when for when, _ in logged] == [2, 6, 12, 24, 60, 120, 180]
    assert logged[1][1] == (
        "rank 4 has waited 6 s in barrier for rank(s) 6: rank 6 waits in forward (meet) for rank(s) 4"
    )


def test_no_line_is_logged_where_none_is_wanted(board, monkeypatch, caplog):
    monkeypatch.setenv("HPCFSDP_WAIT_LOG_S", "0")
    watch = LongWait("barrier", Member((0, 1), "barrier"), 1)
    with caplog.at_level(logging.WARNING, "hpcfsdp.comm"):
        watch.look(1e6, 0, [1], firm=True)
    assert not caplog.records


def test_in_a_large_job_the_lowest_rank_that_waits_logs(board, caplog):
    member = Member(tuple(range(40)), "barrier")
    with caplog.at_level(logging.WARNING, "hpcfsdp.comm"):
        for rank in (1, 2):
            LongWait("barrier", member, 1).look(11, rank, [0, *range(3, 40)], firm=True)
    assert [record.getMessage()[:17] for record in caplog.records] == ["rank 1 has waited"]
    assert "and 22 more" in caplog.text


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_an_error(monkeypatch, value):
    monkeypatch.setenv("HPCFSDP_WAIT_LOG_S", value)
    with pytest.raises(LaunchError, match=f"HPCFSDP_WAIT_LOG_S={value}: give a number of seconds"):
        LongWait("barrier", Member(), 1)


def test_values_of_ranks_in_different_calls_are_refused():
    assert same_call([("save", 1), ("save", 2)]) == [1, 2]
    with pytest.raises(DifferentCallsError, match=r"rank 0 is in save, rank 2 in no call of hpcfsdp") as caught:
        same_call([("save", 1), ("save", 2), ("", 3)])
    assert caught.value.raised_on_all_ranks


def test_the_outermost_call_counts():
    @calls.public_call("inner")
    def inner():
        return calls.current()

    @calls.public_call("outer")
    def outer():
        return inner(), calls.within("barrier")

    assert (inner(), outer(), calls.current()) == ("inner", ("outer", "outer: barrier"), "")
    assert calls.within("barrier") == "barrier"


def test_a_generator_is_in_its_call_while_it_runs_only():
    seen = []

    @calls.public_call("walk")
    def walk():
        try:
            seen.append(calls.current())
            yield 1
        finally:
            seen.append(calls.current())

    steps = walk()
    assert (next(steps), calls.current(), seen) == (1, "", ["walk"])
    with pytest.raises(KeyError):
        steps.throw(KeyError())
    assert (calls.current(), seen) == ("", ["walk", "walk"])


def test_a_call_that_fails_is_left():
    @calls.public_call("broken")
    def broken():
        raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert calls.current() == ""


def test_a_backward_counts_while_autograd_runs(monkeypatch):
    running = [True]
    monkeypatch.setattr(calls.backward, "label", 'backward of "Net"')
    monkeypatch.setattr(calls.backward, "is_running", lambda: running[0])
    monkeypatch.setattr(calls.here, "call", "forward")  # computed again for the backward
    assert calls.current() == 'backward of "Net"'
    running[0] = False
    assert calls.current() == "forward"


class Store:
    """As torch's, for one thread."""

    def __init__(self, **values):
        self.values = {f"hpcfsdp/waits/{rank[1:]}": value for rank, value in values.items()}

    def set(self, key, value):
        self.values[key] = value

    def compare_set(self, key, _expected, _desired):
        return self.values.get(key, b"")


@pytest.mark.parametrize(
    "record",
    [
        Waiting(1, 9, "", "meet", None, (), False),
        Waiting(1, 9, "save", "ä", (("ab", 2), 5), (0, 2), True, {0: (7, "gather"), 3: (1, None)}, over=True),
        Waiting(1, 9, "save", "meet", ("order of Model", (3, 4)), (0,), True, crossed=True),
    ],
)
def test_a_record_comes_out_of_the_store_as_it_was(record):
    assert unpack(1, pack(record)) == record


SOUND = json.loads(pack(pair()[1]))


def ran():
    raise AssertionError("a record was executed")


class Code:
    def __reduce__(self):
        return ran, ()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[" * 100_000, b"\xff", pickle.dumps(Code()), pickle.dumps(pair()[1])),
        *(json.dumps(SOUND | {name: {}}).encode() for name in SOUND),
        *(json.dumps({key: value for key, value in SOUND.items() if key != name}).encode() for name in SOUND),
        *(json.dumps(SOUND | {"place": place}).encode() for place in ([], ["a"], ["a", [1]], [["a"], 1], ["a", "b"])),
        *(json.dumps(SOUND | {"answers": answers}).encode() for answers in ([[0]], [[0, 1, 2]], [["0", 1, "x"]], {})),
        json.dumps(SOUND | {"rank": 2}).encode(),
        json.dumps(SOUND | {"more": 1}).encode(),
        json.dumps(SOUND | {"label": "x" * (1 << 20)}).encode(),
    ],
)
def test_what_no_rank_has_written_is_no_record_and_is_not_executed(monkeypatch, text):
    board = waits._Board()
    mine, theirs = pair()
    store = Store(_1=text, _2=pack(replace(theirs, rank=2)))
    monkeypatch.setattr(waits._compat, "default_store", lambda: store)
    board._serve_one(0, mine, (1, 2, 3))
    assert board.read == {2: replace(theirs, rank=2)}
    assert board.written == mine
    assert unpack(0, store.values["hpcfsdp/waits/0"]) == mine


def test_a_number_of_another_kind_of_collective_is_unknown(board):
    own, other = Member((0, 1), "gather"), Member((0, 1))
    board.read = {1: Waiting(1, 5, "", "meet", (other.key, (1, 2)), (0,), True)}
    LongWait("gather", own, 1).look(1.0, 0, [1], firm=True)
    assert board.asked[-1][1].answers == {1: (5, UNKNOWN)}
