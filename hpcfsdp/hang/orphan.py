"""A rank whose launcher has died asks itself to stop: nobody else would.

Ranks are children of a daemon of their launcher on the node (slurmstepd, prted, hydra_pmi_proxy). If it is killed they
train on, but the scheduler can neither signal nor end them, and does not know of their end. Where the daemons of other
ranks live, the job would wait for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger("hpcfsdp.job")

LOOK_EVERY_S = 1.0

_process = 0
"""The process that watches its parent; a forked child does not."""
_parent = 0


def watch() -> None:
    """Not collective. From now on this process gets SIGTERM when its parent dies; may be called again.

    With ``hpcfsdp.preemption()`` all ranks then save a checkpoint and stop. Otherwise the signal ends this rank.
    """
    global _process, _parent
    if _process != os.getpid():
        _process, _parent = os.getpid(), os.getppid()
        threading.Thread(target=_watch, name="hpcfsdp-launcher", daemon=True).start()


def is_orphan() -> bool:
    """Not collective. Whether this process watches its parent, and that has died."""
    return os.getpid() == _process and os.getppid() != _parent


def _watch() -> None:
    # Not PR_SET_PDEATHSIG: it is sent as soon as the thread ends that has started the process.
    while not is_orphan():
        time.sleep(LOOK_EVERY_S)
    log.error("the launcher of this rank (process %d) has died: this rank stops", _parent)
    os.kill(os.getpid(), signal.SIGTERM)
