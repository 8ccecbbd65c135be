import time

from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.comm.fake import FakeCommunicator


def test_ways_are_called_in_turn_after_a_warmup_and_timed_per_call():
    called = []
    ways = {"a": lambda: called.append("a"), "b": lambda: (called.append("b"), time.sleep(0.02))}
    times = in_turn(FakeCommunicator(), ways, repeats=3, warmup=1, calls=2)
    assert "".join(called) == "ab" + "aabb" * 3
    assert [len(t.seconds) for t in times.values()] == [3, 3]
    assert min(times["b"].seconds) >= 0.02
    assert times["a"].median_s < times["b"].median_s


def test_a_ratio_is_the_median_over_rounds():
    assert Times((2.0, 30.0, 6.0)).ratio_to(Times((1.0, 10.0, 6.0))) == 2.0
