"""A thread that advances collectives while the program computes. Optional: it takes time of a core."""

from __future__ import annotations

import atexit
import os
import threading

from hpcfsdp.comm import progress

_SLEEP_S = 0.0001
"""Between two looks: a link of 10 GB/s moves 1 MB meanwhile, less than a network's buffers hold."""

_ended = threading.Event()
_thread: threading.Thread | None = None
_process = 0
"""The thread's: a process that was forked from it has no such thread."""


def start() -> None:
    """Not collective. Have a thread advance all collectives of this process, until ``stop``.

    MPI must have been started with MPI_THREAD_MULTIPLE.
    """
    global _thread, _process
    if _thread is None:
        _process = os.getpid()
        _ended.clear()
        _thread = threading.Thread(target=_run, name="hpcfsdp-progress", daemon=True)
        _thread.start()
        atexit.register(stop)  # before MPI ends


def stop() -> None:
    """Not collective. End the thread, if there is one."""
    global _thread
    thread, _thread = _thread, None
    if thread is not None and os.getpid() == _process:
        _ended.set()
        progress.begun.set()
        thread.join()
        atexit.unregister(stop)


def _run() -> None:
    while not _ended.is_set():
        progress.begun.wait()
        progress.begun.clear()
        while progress.needs_thread() and not _ended.wait(_SLEEP_S):
            progress.advance_all()
