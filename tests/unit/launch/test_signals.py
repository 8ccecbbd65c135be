import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

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


def test_entering_again_takes_the_signals_back_from_other_code():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals() as stop:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        stop.__enter__()
        assert stop.received == 0
        assert [signal.getsignal(number) for number in STOP_SIGNALS] == [stop._note] * 3
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


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


def test_a_handler_that_was_set_meanwhile_stays():
    with StopSignals():
        ignore_stop_signals()
    for number in STOP_SIGNALS:
        assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_outlive_what_a_scheduler_sends_to_all(method):
    """See children.py: in an interpreter of its own, whose helpers have not been started before."""
    program = Path(__file__).with_name("children.py")
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", program, method],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found = json.loads(done.stdout)
    assert len(found) == 9
    assert [name for name, is_well in found.items() if not is_well] == []


def test_a_child_that_is_no_process_of_multiprocessing_ends_by_sigterm():
    with StopSignals() as stop:
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGUSR2)  # as before
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        assert not stop.received
