"""Signals in a process of tests."""

import contextlib
import signal

from hpcfsdp.launch.signals import STOP_SIGNALS


@contextlib.contextmanager
def own_handlers():
    """A context after which the handlers of this process are as before, whatever has arrived."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
