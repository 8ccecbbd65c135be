import mmap

import pytest
import torch

from hpcfsdp.doctor import bandwidth, traffic

FIRST = {"interfaces": {"lo": ["127.0.0.1"], "ib0": ["10.1.0.4"]}}


def levels(findings):
    return [finding.level for finding in findings]


def result(**changed):
    return {"bytes": 16 << 20, "seconds": 0.01, "gb_per_s": 1.68, "correct": True} | changed


def test_the_address_of_rank_0_and_its_interface():
    (finding,) = traffic.judge_address({"address": "10.1.0.4", "error": None}, FIRST, several_nodes=True)
    assert (finding.level, finding.what) == ("ok", "rank 0 is reached at 10.1.0.4 (interface ib0)")
    assert not list(traffic.judge_address(None, FIRST, several_nodes=True))


def test_loopback_is_fine_on_one_node_only():
    network = {"address": "127.0.0.1", "error": None}
    assert levels(traffic.judge_address(network, FIRST, several_nodes=False)) == ["ok"]
    assert levels(traffic.judge_address(network, FIRST, several_nodes=True)) == ["problem"]


def test_an_unreachable_rank_0_is_a_problem():
    network = {"address": None, "error": "no address of rank 0's host (10.1.0.4) is reached by every rank"}
    (finding,) = traffic.judge_address(network, FIRST, several_nodes=True)
    assert (finding.level, finding.what) == ("problem", network["error"])
    assert "allow TCP" in finding.hint
    (finding,) = traffic.judge_address(network, {"interfaces": {"lo": ["127.0.0.1"]}}, several_nodes=True)
    assert "bring up a network interface" in finding.hint


@pytest.mark.parametrize(
    ("wanted", "level"),
    [(None, "note"), ("ib0", "ok"), ("ib", "ok"), ("=ib0", "ok"), ("^lo", "ok"), ("eth0", "warning"), ("eth,ib", "ok")],
)
def test_the_interface_of_nccl_must_exist_on_every_node(wanted, level):
    table = [FIRST | {"host": "n1"}, FIRST | {"host": "n2"}]
    finding = traffic.judge_nccl_interface(wanted, {"address": "10.1.0.4"}, table)
    assert finding.level == level
    if wanted is None:
        assert "NCCL_SOCKET_IFNAME=ib0" in finding.hint
    if wanted == "eth0":
        assert finding.what.endswith("on n1, n2")


def test_shared_memory():
    assert traffic.judge_memory({"way": "memfd", "error": None}, 2).level == "ok"
    assert traffic.judge_memory({"way": "private", "error": None}, 2).level == "ok"
    assert traffic.judge_memory({"way": "file", "error": None}, 2).level == "note"
    failed = traffic.judge_memory({"way": None, "error": "rank 1: no memory"}, 2)
    assert (failed.level, "rank 1: no memory" in failed.what) == ("problem", True)


def test_a_small_dev_shm_is_only_a_note():
    assert not list(traffic.judge_shm([{"host": "a", "shm_bytes": 8 << 30}, {"host": "b", "shm_bytes": None}]))
    (finding,) = traffic.judge_shm([{"host": "a", "shm_bytes": 64 << 20}])
    assert (finding.level, "64 MiB on a" in finding.what) == ("note", True)


def test_bandwidth():
    measured = {"all-gather": result(), "reduce-scatter": result(gb_per_s=0.05), "other": result(correct=False)}
    found = list(traffic.judge_bandwidth(measured))
    assert levels(found) == ["ok", "warning", "problem"]
    assert found[0].what == "all-gather: 1.68 GB/s per rank (16 MiB from others in 10.0 ms)"
    assert found[2].what == "other: the result is wrong"
    assert levels(traffic.judge_bandwidth({})) == ["note"]


def test_a_collective_that_moves_no_bytes_has_no_bandwidth():
    (found,) = traffic.judge_bandwidth({"all-gather in shared memory": result(gb_per_s=None, seconds=5e-5)})
    assert (found.level, "GB/s" in found.what) == ("ok", False)
    assert found.what == "all-gather in shared memory: 0.050 ms until 16 MiB from others can be read; no bytes move"


def test_links():
    link = {"latency_s": 5e-6, "bytes_per_s": 1.2e10, "ranks": 8, "bytes": 1 << 23}
    found = list(traffic.judge_links({"within": None, "between": link}))
    assert [(each.area, each.level) for each in found] == [("links", "ok")]
    assert found[0].what == "between nodes: 12.00 GB/s per rank, 5.0 us a message (8 ranks)"


def test_the_kind_of_shared_memory_is_read_from_the_maps():
    maps = """\
7f0000000000-7f0000001000 rw-s 00000000 00:01 12 /memfd:hpcfsdp (deleted)
7f0000001000-7f0000002000 rw-s 00000000 00:19 13 /dev/shm/hpcfsdp-ab12 (deleted)
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
"""
    assert bandwidth.way_of(maps, 0x7F0000000000) == "memfd"
    assert bandwidth.way_of(maps, 0x7F0000001FFF) == "file"
    assert bandwidth.way_of(maps, 0x7F0000002000) == "private"
    assert bandwidth.way_of(maps, 0x1000) == "private"


def test_memory_of_this_process_is_private():
    memory = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
    with open("/proc/self/maps") as file:
        assert bandwidth.way_of(file.read(), memory.data_ptr()) == "private"
