"""The memory that processes may use: the machine's, or the limit of a control group around them."""

import os
from pathlib import Path

import pytest

from hpcfsdp.comm.mpi import node_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
V2, V1 = "0::/job/step\n", "7:cpu:/job\n4:memory,hugetlb:/job/step\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        (V2, {}, MACHINE),
        (V2, {"job/step/memory.max": "max", "job/memory.max": "4096"}, 4096),
        (V2, {"job/step/memory.max": "8192", "job/memory.max": "max"}, 8192),
        (V2, {"memory.max": "12288"}, 12288),  # in a container, where the path is that outside
        (V1, {"memory/job/step/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        (V1, {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        (V1, {"cpu/job/memory.limit_in_bytes": "1", "memory/job/step/memory.limit_in_bytes": "8192"}, 8192),
        (None, {"memory.max": "1"}, MACHINE),
    ],
)
def test_the_lowest_limit_counts(monkeypatch, groups, files, limit):
    def read(path):
        found = groups if str(path) == "/proc/self/cgroup" else files.get(str(path).removeprefix("/sys/fs/cgroup/"))
        if found is None:
            raise FileNotFoundError(path)
        return found

    monkeypatch.setattr(Path, "read_text", read)
    assert node_memory.memory_limit.__wrapped__() == limit
