import logging
import threading

import pytest

from hpcfsdp.output import profile as profiling
from hpcfsdp.output.profile import Phase, SimpleProfiler, Spent, profile

logger = logging.getLogger("hpcfsdp.test_profile")
MIB = 1 << 20


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)``: let time pass. It does not pass by itself."""
    now = [100.0]

    def let(seconds):
        now[0] += seconds

    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])
    return let


@pytest.fixture
def debug(caplog):
    """Debug messages of the logger go to `caplog`."""
    with caplog.at_level(logging.DEBUG, logger.name):
        yield caplog


def test_seconds_bytes_and_turns_of_each_phase(clock, debug):
    with SimpleProfiler("save", logger) as profiler:
        with profile(Phase.OBJECT_GATHER):
            clock(0.5)
        clock(4)  # counts for no phase
        for numel in (3, 5):
            with profile(Phase.TENSOR_ALL_GATHER, numel * MIB):
                clock(numel)
    assert profiler.spent == {Phase.OBJECT_GATHER: Spent(0.5, 0, 1), Phase.TENSOR_ALL_GATHER: Spent(8.0, 8 * MIB, 2)}


def test_a_phase_has_the_time_alone_that_no_phase_inside_has(clock, debug):
    with SimpleProfiler("save", logger) as profiler, profile(Phase.PREPROCESSING, 10):
        clock(1)
        with profile(Phase.OBJECT_GATHER):
            clock(2)
            with profile(Phase.PREPROCESSING, 5):  # again, within itself
                clock(4)
            with profile(Phase.RESHARDING):
                clock(8)
            clock(16)
        clock(32)
    assert profiler.spent == {
        Phase.PREPROCESSING: Spent(37.0, 15, 2),
        Phase.OBJECT_GATHER: Spent(18.0, 0, 1),
        Phase.RESHARDING: Spent(8.0, 0, 1),
    }
    assert sum(spent.seconds for spent in profiler.spent.values()) == 63


def test_a_line_for_the_log(clock, debug):
    with SimpleProfiler("save", logger):
        with profile(Phase.TENSOR_ALL_GATHER, 3 * MIB // 2):
            clock(1.25)
        with profile(Phase.DEVICE_TO_HOST):
            clock(0.5)
        with profile(Phase.TENSOR_ALL_GATHER, MIB):
            clock(1)
        clock(1)
        assert debug.messages == []
    assert debug.messages == ["save: 3.750 s; tensor all-gather 2.250 s in 2 (2.5 MiB), device to host 0.500 s in 1"]
    assert debug.records[0].levelno == logging.DEBUG


def test_phases_have_readable_names():
    assert [phase.value for phase in Phase] == [
        "preprocessing",
        "object gather",
        "tensor all-gather",
        "device to host",
        "resharding",
    ]


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_nothing_is_recorded_unless_the_log_takes_debug_messages(clock, caplog, level):
    with (
        caplog.at_level(level, logger.name),
        SimpleProfiler("save", logger) as profiler,
        profile(Phase.RESHARDING, 3),
    ):
        clock(1)
    assert profiler.spent == {}
    assert caplog.messages == []


def test_without_a_profiler_a_phase_is_any_context(debug):
    with profile(Phase.RESHARDING, 3), profile(Phase.RESHARDING):
        pass
    assert debug.messages == []


def test_a_profiler_within_another_one_takes_what_happens_in_it(clock, debug):
    with SimpleProfiler("outer", logger) as outer, profile(Phase.PREPROCESSING):
        clock(1)
        with SimpleProfiler("inner", logger) as inner:
            clock(2)
            with profile(Phase.RESHARDING):
                clock(4)
        with profile(Phase.OBJECT_GATHER):
            clock(8)
    assert inner.spent == {Phase.RESHARDING: Spent(4.0, 0, 1)}
    assert outer.spent == {Phase.PREPROCESSING: Spent(7.0, 0, 1), Phase.OBJECT_GATHER: Spent(8.0, 0, 1)}
    assert debug.messages == [
        "inner: 6.000 s; resharding 4.000 s in 1",
        "outer: 15.000 s; object gather 8.000 s in 1, preprocessing 7.000 s in 1",
    ]


def test_a_profiler_with_a_silent_log_hides_the_outer_one(clock, debug):
    silent = logging.getLogger("hpcfsdp.test_profile_silent")
    silent.setLevel(logging.ERROR)
    outer, inner = SimpleProfiler("outer", logger), SimpleProfiler("inner", silent)
    with outer, inner, profile(Phase.RESHARDING):
        clock(1)
    assert (outer.spent, inner.spent) == ({}, {})


def test_what_was_spent_before_an_error_counts(clock, debug):
    profiler = SimpleProfiler("save", logger)
    with pytest.raises(KeyError), profiler, profile(Phase.PREPROCESSING), profile(Phase.RESHARDING, 7):
        clock(1)
        raise KeyError
    assert profiler.spent == {Phase.RESHARDING: Spent(1.0, 7, 1), Phase.PREPROCESSING: Spent(0.0, 0, 1)}
    assert debug.messages == ["save: 1.000 s; resharding 1.000 s in 1 (0.0 MiB), preprocessing 0.000 s in 1"]
    with profile(Phase.RESHARDING):  # there is no profiler any more
        clock(1)
    assert profiler.spent[Phase.RESHARDING].turns == 1


def test_threads_have_profilers_of_their_own(clock, debug):
    def work():
        with profile(Phase.RESHARDING):
            pass

    with SimpleProfiler("save", logger) as profiler:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert profiler.spent == {}
