import mmap

import torch

from hpcfsdp.doctor import speed
from hpcfsdp.launch.topology import Topology


def test_the_kind_of_shared_memory_is_read_from_the_maps():
    maps = """\
7f0000000000-7f0000001000 rw-s 00000000 00:01 12 /memfd:hpcfsdp (deleted)
7f0000001000-7f0000002000 rw-s 00000000 00:19 13 /dev/shm/hpcfsdp-ab12 (deleted)
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
"""
    assert speed.way_of(maps, 0x7F0000000000) == "memfd"
    assert speed.way_of(maps, 0x7F0000001FFF) == "file"
    assert speed.way_of(maps, 0x7F0000002000) == "private"
    assert speed.way_of(maps, 0x1000) == "private"


def test_memory_of_this_process_is_private():
    memory = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    with open("/proc/self/maps") as file:
        assert speed.way_of(file.read(), memory.data_ptr()) == "private"


def test_who_measures_links_with_whom():
    even = Topology.regular(2, 3)
    assert speed.members(even, 4, between=False) == [3, 4, 5]
    assert speed.members(even, 4, between=True) == [1, 4]
    uneven = Topology.uneven([3, 2])
    assert speed.members(uneven, 2, between=True) == [2]
    assert speed.members(uneven, 4, between=True) == [1, 4]
