import mmap
import os
import subprocess
import sys

import pytest

from hpcfsdp.errors import LaunchError
from tests.bench.pss import PssReader, Sampler

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="this system does not show memory"
)


def test_the_sampler_sees_a_short_peak():
    sampler = Sampler([os.getpid()])
    before = sampler.start()
    for _ in range(20):
        passing = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE)
        passing[:] = bytes([1]) * len(passing)
        passing.close()
    peak = sampler.stop()
    assert before > 0
    assert peak - before > 31 * MIB
    assert sampler.start() - before < 31 * MIB
    sampler.stop()
    sampler.close()


_SHARER = """
import mmap, sys
file = open(sys.argv[1], "r+b")
shared = mmap.mmap(file.fileno(), 0)
sum(shared[::4096])
print("here", flush=True)
sys.stdin.read()
"""


def test_shared_memory_counts_once():
    fd = os.memfd_create("shared")
    os.ftruncate(fd, 32 * MIB)
    child = subprocess.Popen(
        [sys.executable, "-c", _SHARER, f"/proc/{os.getpid()}/fd/{fd}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "here\n"
    reader = PssReader([os.getpid(), child.pid])
    before = reader.now()
    shared = mmap.mmap(fd, 0)
    shared[:] = bytes([1]) * len(shared)
    after = reader.now()
    assert sum(after) - sum(before) < 16 * MIB  # the child held it all before
    assert sum(reader.begin()) == pytest.approx(sum(after), abs=4 * MIB)
    reader.close()
    shared.close()
    os.close(fd)
    child.communicate()
    assert child.returncode == 0


def test_a_missing_process_is_an_error():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(LaunchError, match=f"memory of processes {child.pid} "):
        Sampler([child.pid])
