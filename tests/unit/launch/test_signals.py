import os
import signal

import pytest

from hpcfsdp.launch.signals import STOP_SIGNALS, StopRequest


def test_the_signals_of_schedulers_are_handled():
    assert set(STOP_SIGNALS) == {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


def test_nothing_is_received_at_first():
    with StopRequest() as stop:
        assert stop.received == 0


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted(number):
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_the_first_signal_counts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR2


def test_the_note_stays_after_the_end():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.received == signal.SIGUSR1


def test_handlers_come_back_also_after_an_error():
    def own(*_):
        pass

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    previous = signal.signal(signal.SIGUSR1, own)
    try:
        with pytest.raises(KeyError), StopRequest():
            assert signal.getsignal(signal.SIGUSR1) is not own
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_other_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) is before
