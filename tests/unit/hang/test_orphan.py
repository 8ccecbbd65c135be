"""A process that watches its parent."""

import os
import subprocess
import sys
import time

import pytest

# The child writes its number, then waits for the signal. It has to be no child of pytest, but of a process that dies.
CHILD = """
import os, signal, sys, time
from hpcfsdp.launch import orphan

orphan.LOOK_EVERY_S = 0.05
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
orphan.watch()
orphan.watch()
assert not orphan.is_orphan()
print(os.getpid(), flush=True)
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.3)  # no second signal comes
print("stopped", got, orphan.is_orphan(), flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.timeout(120)
def test_a_process_whose_parent_is_killed_gets_sigterm_once():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        child = int(parent.stdout.readline())
        assert os.getpgid(child) == os.getpgid(0)
        time.sleep(0.2)
        assert parent.poll() is None
        parent.kill()
        assert parent.stdout.readline() == "stopped [15] True\n"


def test_a_forked_child_is_no_orphan_of_the_launcher():
    code = (
        "import os; from hpcfsdp.launch import orphan; orphan.watch(); "
        "pid = os.fork(); ok = not orphan.is_orphan(); "
        "os._exit(not ok) if pid == 0 else None; "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
