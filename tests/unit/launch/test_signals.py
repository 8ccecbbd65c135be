import os
import signal
import threading

import pytest

from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.signals import STOP_SIGNALS, StopSignals, ignore_stop_signals
from tests.signals import own_handlers


@pytest.fixture(autouse=True)
def handlers_come_back():
    with own_handlers():
        yield


def test_the_signals_of_schedulers_are_handled():
    assert set(STOP_SIGNALS) == {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


def test_nothing_is_received_at_first():
    with StopSignals() as stop:
        assert stop.received == 0


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted(number):
    with StopSignals() as stop:
        os.kill(os.getpid(), number)
        assert stop.received == number


def test_the_first_signal_counts():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR2


def test_the_note_stays_after_the_end():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.received == signal.SIGUSR1


def test_once_a_signal_has_arrived_no_other_ends_the_process():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.received == signal.SIGUSR2


def test_no_signal_ends_a_process_that_ignores_them():
    ignore_stop_signals()
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def test_another_thread_is_refused():
    caught = []

    def enter():
        try:
            StopSignals().__enter__()
        except LaunchError as error:
            caught.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]


def test_handlers_come_back_also_after_an_error():
    def own(*_):
        pass

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    previous = signal.signal(signal.SIGUSR1, own)
    try:
        with pytest.raises(KeyError), StopSignals():
            assert signal.getsignal(signal.SIGUSR1) is not own
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_other_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) is before
