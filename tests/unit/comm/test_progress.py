import threading

import pytest

from hpcfsdp.comm import progress
from hpcfsdp.comm.progress import Finished, Running, Sent, complete, run
from hpcfsdp.errors import CommunicationError
from hpcfsdp.hang import waits


class Owner:
    def __init__(self, departed=()):
        self.gone = set(departed)

    def departed(self):
        return self.gone


class Door:
    """Holds after so many looks, or when it is opened."""

    def __init__(self, looks=None, missing=()):
        self.left = looks
        self._missing = missing

    def open(self):
        self.left = 0

    def holds(self):
        if self.left:
            self.left -= 1
        return self.left == 0

    def missing(self):
        return self._missing


def through(*doors, log=None):
    for number, door in enumerate(doors):
        yield door
        if log is not None:
            log.append(number)


def begin(steps, timeout_s=5.0, owner=None):
    return Running(steps, "the work", 3, timeout_s, owner or Owner())


@pytest.fixture(autouse=True)
def nothing_is_left_in_progress():
    yield
    assert not progress._in_progress


def test_work_without_a_wait_is_complete_when_its_call_returns():
    log = []
    work = begin(through(Door(0), Door(0), log=log))
    assert log == [0, 1]
    assert work.is_completed()
    work.wait()


def test_looking_moves_the_work_on():
    log, doors = [], [Door(), Door()]
    work = begin(through(*doors, log=log))
    assert not work.is_completed()
    doors[0].open()
    assert not work.is_completed()
    assert log == [0]
    doors[1].open()
    assert work.is_completed()
    assert log == [0, 1]
    assert work.is_completed()


def test_a_wait_takes_the_steps_to_the_end():
    log = []
    begin(through(Door(1000), Door(3), log=log)).wait()
    assert log == [0, 1]


@pytest.mark.parametrize(
    ("missing", "names"), [((2,), "rank(s) 2"), ((0, 2), "rank(s) 0, 2"), ((), "other ranks")], ids=str
)
def test_a_wait_that_takes_too_long_names_who_is_missing(missing, names):
    work = begin(through(Door(missing=missing)), timeout_s=0.01)
    with pytest.raises(CommunicationError) as caught:
        work.wait()
    assert str(caught.value).startswith(
        f"the work on rank 3: waited 0.01 s for {names}, which did not take part. They hang, have left, or call"
    )
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in str(caught.value)


def test_a_wait_may_have_a_limit_of_its_own():
    work = begin(through(Door(missing=[1])), timeout_s=1000)
    with pytest.raises(CommunicationError, match=r"waited 0\.005 s"):
        work.wait(0.005)


def test_a_rank_that_has_left_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(waits, "LOOK_AFTER_S", 0.0)
    work = begin(through(Door(missing=[0, 1, 2])), owner=Owner([1, 2, 7]))
    with pytest.raises(CommunicationError) as caught:
        work.wait()
    assert str(caught.value) == "the work on rank 3: rank(s) 1, 2 left the program without taking part"


def test_a_rank_that_left_after_its_part_is_no_error(monkeypatch):
    monkeypatch.setattr(waits, "LOOK_AFTER_S", 0.0)
    begin(through(Door(2000, missing=[0])), owner=Owner([1])).wait()


class Broken(Door):
    def holds(self):
        raise CommunicationError("torn")


def failing(error):
    yield Door(2)
    raise error


@pytest.mark.parametrize("steps", [lambda: through(Broken()), lambda: failing(ValueError("bad"))])
def test_an_error_is_kept_until_the_wait_and_raised_at_each(steps):
    work = begin(steps())
    errors = []
    for _ in range(2):
        with pytest.raises((CommunicationError, ValueError), match=r"torn|bad") as caught:
            work.wait()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert work.is_completed()


def test_an_interrupt_within_a_step_is_not_a_success():
    work = begin(failing(KeyboardInterrupt()))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()


def test_steps_that_time_out_are_closed():
    closed = []

    def steps():
        try:
            yield Door()
        finally:
            closed.append(True)

    with pytest.raises(CommunicationError):
        begin(steps(), timeout_s=0.001).wait()
    assert closed


def test_waiting_for_one_work_moves_all_others():
    first, second = Door(), Door()
    log = []

    def opener():
        yield Door(3)
        log.append("opened by the other")
        second.open()

    begin(opener())  # nobody waits for this one
    works = [begin(through(first, log=log)), begin(through(second, log=log))]
    works[1].wait()
    assert log == ["opened by the other", 0]
    assert not works[0].is_completed()
    first.open()
    works[0].wait()


def test_works_may_be_waited_for_in_any_order():
    doors = [Door(50), Door(20), Door(5)]
    works = [begin(through(door)) for door in doors]
    for work in reversed(works):
        work.wait()
    assert all(work.is_completed() for work in works)


def test_an_error_of_a_work_moved_along_does_not_reach_who_waits_for_another():
    failed = begin(failing(ValueError("bad")))
    begin(through(Door(500))).wait()
    assert failed.is_completed()
    with pytest.raises(ValueError, match="bad"):
        failed.wait()


def test_all_works_of_an_owner_can_be_completed():
    mine, other = Owner(), Owner()
    door, log = Door(), []
    begin(through(Door(30), log=log), owner=mine)
    foreign = begin(through(door, log=log), owner=other)
    complete(mine)
    assert log == [0]
    assert not foreign.is_completed()
    door.open()
    complete(other)
    assert log == [0, 0]


def test_a_call_waits_unless_it_is_asked_not_to():
    log = []
    assert run(through(Door(9), log=log), "x", 0, 5.0, False, Owner()) is None
    assert log == [0]
    work = run(through(Door(9), log=log), "x", 0, 5.0, True, Owner())
    assert log == [0]
    work.wait()
    assert log == [0, 0]
    with pytest.raises(ValueError, match="bad"):
        run(failing(ValueError("bad")), "x", 0, 5.0, False, Owner())


def test_finished_work_is_complete():
    assert Finished().is_completed()
    assert Finished().wait() is None


def test_outputs_may_be_used_before_others_have_read_the_inputs():
    read = Door()
    work = begin(through(Door(3), Sent(read.holds, read.missing)))
    assert not work.is_completed()
    work.wait_for_outputs()
    work.wait_for_outputs()
    assert not work.is_completed()
    read.open()
    work.wait()
    work.wait_for_outputs()
    assert work.is_completed()


def test_waiting_for_outputs_ends_with_the_work_where_that_says_nothing_of_them():
    work = begin(through(Door(3), Door(3)))
    work.wait_for_outputs()
    assert work.done


def test_waiting_for_outputs_raises_the_error_of_the_work():
    def failing():
        yield Door(3)
        raise CommunicationError("broken")

    work = begin(failing())
    with pytest.raises(CommunicationError, match="broken"):
        work.wait_for_outputs()
    with pytest.raises(CommunicationError, match="broken"):
        work.wait_for_outputs()


def test_a_wait_is_firm_again_once_a_helper_that_began_collectives_has_ended(monkeypatch):
    found = set()

    class Looks:
        due_s = 0.0

        def __init__(self, label, owner, number):
            pass

        def look(self, waited_s, rank, missing, *, firm):
            found.add(firm)

        def end(self, failed):
            pass

    monkeypatch.setattr(waits, "LOOK_AFTER_S", 0.0)
    monkeypatch.setattr(progress, "LongWait", Looks)
    monkeypatch.setattr(progress, "_threads", set())
    has_begun, ends = threading.Event(), threading.Event()
    helper = threading.Thread(target=lambda: (begin(through(Door(0))), has_begun.set(), ends.wait()), daemon=True)
    helper.start()
    has_begun.wait()
    begin(through(Door(100))).wait()
    assert found == {False}
    ends.set()
    helper.join()
    found.clear()
    begin(through(Door(100))).wait()
    assert found == {True}
