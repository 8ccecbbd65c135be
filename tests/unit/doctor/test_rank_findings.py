import pytest

from hpcfsdp.doctor import rank_findings
from hpcfsdp.doctor.rank_findings import is_shared


def levels(findings):
    return [finding.level for finding in findings]


def gpu_row(lowest_rank, visible=2, far=False, **changed):
    gpu = {"device": "cuda:0", "name": "H200", "nbytes": 139 << 30, "lowest_rank": lowest_rank, "far": far}
    row = {"host": "n1", "devices_visible": visible, "accelerator": gpu, "accelerator_error": None, "cores": "0-15"}
    return row | changed


CPU_ROW = {"host": "n1", "devices_visible": 0, "accelerator": None, "accelerator_error": None}


def test_nodes():
    (finding,) = rank_findings.judge_nodes([[0, 1], [2, 3]], ["a", "a", "b", "b"])
    assert (finding.level, finding.what) == ("ok", "2 node(s): a: ranks 0-1, b: ranks 2-3")


def test_uneven_and_cyclic_nodes_are_notes():
    uneven = list(rank_findings.judge_nodes([[0, 1], [2]], ["a", "a", "b"]))
    assert levels(uneven) == ["ok", "note"]
    assert "hybrid sharding" in uneven[1].what
    cyclic = list(rank_findings.judge_nodes([[0, 2], [1, 3]], ["a", "b", "a", "b"]))
    assert levels(cyclic) == ["ok", "note"]
    assert "fine" in cyclic[1].what


def test_many_nodes_are_not_all_listed():
    (finding,) = rank_findings.judge_nodes([[rank] for rank in range(20)], [f"n{rank}" for rank in range(20)])
    assert finding.what.endswith("n7: rank 7, and 12 more")


def test_devices():
    assert levels(rank_findings.judge_devices([[0, 1]], [CPU_ROW, CPU_ROW])) == ["ok"]
    (finding,) = rank_findings.judge_devices([[0, 1]], [gpu_row(0), gpu_row(1)])
    assert (finding.level, finding.what) == ("ok", "each rank has its own (H200, 139 GiB)")


def test_two_ranks_on_one_gpu_are_a_problem():
    (finding,) = rank_findings.judge_devices([[0, 1, 2]], [gpu_row(0), gpu_row(1), gpu_row(0)])
    assert (finding.level, finding.what) == (
        "problem",
        "ranks 0, 2 on n1 share one device, which NCCL and its like refuse",
    )
    assert "--gpus-per-task=1" in finding.hint


def test_gpus_on_some_ranks_only_are_a_problem():
    (finding,) = rank_findings.judge_devices([[0, 1]], [gpu_row(0), CPU_ROW])
    assert (finding.level, finding.what) == ("problem", "rank 1 see no accelerator, the others do")


def test_idle_and_mixed_gpus_are_notes():
    found = rank_findings.judge_devices([[0]], [gpu_row(0, visible=4)])
    assert levels(found) == ["ok", "note"]
    assert "4 visible devices for 1 rank(s)" in found[1].what
    other = gpu_row(1)
    other["accelerator"] = other["accelerator"] | {"name": "A100"}
    assert levels(rank_findings.judge_devices([[0, 1]], [gpu_row(0), other])) == ["ok", "note"]


def test_ranks_whose_cores_are_far_from_their_device_are_a_warning():
    good, bad = rank_findings.judge_devices([[0, 1]], [gpu_row(0), gpu_row(1, far=True)])
    assert (good.level, bad.level) == ("ok", "warning")
    assert bad.what.startswith("rank 1 may run on no core next to the device")
    assert "--gpu-bind=closest" in bad.hint


def test_one_core_for_each_rank_is_a_warning_beside_a_device():
    good, bad = rank_findings.judge_devices([[0, 1]], [gpu_row(0, cores="0"), gpu_row(1, cores="1-2")])
    assert (good.level, bad.level) == ("ok", "warning")
    assert bad.what.startswith("ranks 0-1 have 3 core(s) for 2 rank(s): MPI waits by polling")
    assert levels(rank_findings.judge_devices([[0, 1]], [gpu_row(0, cores="0-1"), gpu_row(1, cores="2-3")])) == ["ok"]


def variables(connections=None, accelerator=True, **given):
    return {"variables": given, "device_connections": connections, "accelerator": accelerator}


def test_variables_are_listed_and_those_that_differ_are_a_warning():
    assert list(rank_findings.judge_variables([variables(), variables()])) == []
    rows = [variables(NCCL_ALGO="Ring", NCCL_DEBUG="WARN", CUDA_VISIBLE_DEVICES=f"{n}") for n in range(3)]
    (listed,) = rank_findings.judge_variables(rows)
    assert (listed.level, listed.what) == ("ok", "CUDA_VISIBLE_DEVICES for each rank, NCCL_ALGO=Ring, NCCL_DEBUG=WARN")
    del rows[1]["variables"]["NCCL_ALGO"]
    differ, listed = rank_findings.judge_variables(rows)
    assert (differ.level, differ.what) == ("warning", "ranks differ: NCCL_ALGO: Ring on ranks 0, 2; unset on rank 1")
    assert listed.what == "CUDA_VISIBLE_DEVICES for each rank, NCCL_DEBUG=WARN"


def test_one_queue_for_all_streams_is_a_warning_on_accelerators():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    listed, bad = rank_findings.judge_variables([variables(1, **{name: "1"})] * 2)
    assert (listed.what, bad.level) == (f"{name}=1", "warning")
    assert bad.what.startswith(f"{name}=1 on ranks 0-1: all streams share one queue")
    assert levels(rank_findings.judge_variables([variables(8, **{name: "8"})])) == ["ok"]
    assert levels(rank_findings.judge_variables([variables(1, accelerator=None, **{name: "1"})])) == ["ok"]


def test_a_failing_gpu_is_a_problem():
    (finding,) = rank_findings.judge_devices([[0]], [CPU_ROW | {"accelerator_error": "driver too old"}])
    assert (finding.level, "driver too old" in finding.what) == ("problem", True)


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        ([{0, 1}, {0, 1}], "each rank may run on 2 core(s)"),
        ([{0}, {1}], "each rank may run on 1 core(s)"),
        ([{0, 1}, {2}], "each rank may run on 1 to 2 core(s)"),
    ],
)
def test_ranks_with_a_core_each_are_well_bound(cores, text):
    (finding,) = rank_findings.judge_binding([[0, 1]], cores)
    assert (finding.level, finding.what) == ("ok", text)


def test_more_ranks_than_cores_are_a_warning():
    (finding,) = rank_findings.judge_binding([[0, 1, 2], [3]], [{0, 1}] * 4)
    assert (finding.level, finding.what) == ("warning", "ranks 0-2 share 2 core(s)")


def test_ranks_pinned_to_one_core_while_others_are_free_are_a_warning():
    (finding,) = rank_findings.judge_binding([[0, 1, 2]], [{0}, {0}, {1, 2, 3}])
    assert finding.level == "warning"
    assert finding.what == "ranks 0-1 are pinned to the same core(s) 0, while others are free"
    assert "--bind-to none" in finding.hint


def test_equal_cores_of_different_nodes_are_different_cores():
    assert levels(rank_findings.judge_binding([[0], [1]], [{0}, {0}])) == ["ok"]


def test_threads():
    def rows(threads, chosen=None):
        return [{"cores": "0-3", "threads": threads, "omp_num_threads": chosen}] * 2

    assert levels(rank_findings.judge_threads([[0, 1]], rows(2))) == ["ok"]
    (finding,) = rank_findings.judge_threads([[0, 1]], rows(4, "4"))
    assert finding.level == "warning"
    assert finding.what == "ranks 0-1 run 8 threads (OMP_NUM_THREADS=4) on 4 core(s)"
    assert "OMP_NUM_THREADS=2" in finding.hint
    assert not list(rank_findings.judge_threads([[0]], [{"cores": "0"}]))


def test_one_thread_each_is_fine_even_where_ranks_share_cores():
    rows = [{"cores": "0", "threads": 1, "omp_num_threads": "1"}] * 3
    assert levels(rank_findings.judge_threads([[0, 1, 2]], rows)) == ["ok"]


def test_torch_on_a_file_system_that_nodes_share_is_a_note():
    shared = {"torch_folder": "/home/me/venv/torch", "torch_file_system": "nfs4"}
    (finding,) = rank_findings.judge_files([[0], [1]], [shared, shared])
    assert (finding.level, finding.area) == ("note", "files")
    assert "/home/me/venv/torch (nfs4)" in finding.what
    assert "docs/how-to/launching.md" in finding.hint
    assert not list(rank_findings.judge_files([[0, 1]], [shared, shared]))
    for kind in ("xfs", None):
        local = shared | {"torch_file_system": kind}
        assert not list(rank_findings.judge_files([[0], [1]], [local, local]))


FIRST = {"interfaces": {"lo": ["127.0.0.1"], "ib0": ["10.1.0.4"]}}


def result(**changed):
    return {"bytes": 16 << 20, "seconds": 0.01, "gb_per_s": 1.68, "correct": True} | changed


def test_the_address_of_rank_0_and_its_interface():
    (finding,) = rank_findings.judge_address({"address": "10.1.0.4", "error": None}, FIRST, several_nodes=True)
    assert (finding.level, finding.what) == ("ok", "rank 0 is reached at 10.1.0.4 (interface ib0)")
    assert not list(rank_findings.judge_address(None, FIRST, several_nodes=True))


def test_loopback_is_fine_on_one_node_only():
    network = {"address": "127.0.0.1", "error": None}
    assert levels(rank_findings.judge_address(network, FIRST, several_nodes=False)) == ["ok"]
    assert levels(rank_findings.judge_address(network, FIRST, several_nodes=True)) == ["problem"]


def test_an_unreachable_rank_0_is_a_problem():
    network = {"address": None, "error": "no address of rank 0's host (10.1.0.4) is reached by every rank"}
    (finding,) = rank_findings.judge_address(network, FIRST, several_nodes=True)
    assert (finding.level, finding.what) == ("problem", network["error"])
    assert "allow TCP" in finding.hint
    (finding,) = rank_findings.judge_address(network, {"interfaces": {"lo": ["127.0.0.1"]}}, several_nodes=True)
    assert "bring up a network interface" in finding.hint


@pytest.mark.parametrize(
    ("wanted", "level"),
    [(None, "note"), ("ib0", "ok"), ("ib", "ok"), ("=ib0", "ok"), ("^lo", "ok"), ("eth0", "warning"), ("eth,ib", "ok")],
)
def test_the_interface_of_nccl_must_exist_on_every_node(wanted, level):
    table = [FIRST | {"host": "n1"}, FIRST | {"host": "n2"}]
    finding = rank_findings.judge_nccl_interface(wanted, {"address": "10.1.0.4"}, table)
    assert finding.level == level
    if wanted is None:
        assert "NCCL_SOCKET_IFNAME=ib0" in finding.hint
    if wanted == "eth0":
        assert finding.what.endswith("on n1, n2")


def test_shared_memory():
    assert rank_findings.judge_memory({"way": "memfd", "error": None}, 2).level == "ok"
    assert rank_findings.judge_memory({"way": "private", "error": None}, 2).level == "ok"
    assert rank_findings.judge_memory({"way": "file", "error": None}, 2).level == "note"
    failed = rank_findings.judge_memory({"way": None, "error": "rank 1: no memory"}, 2)
    assert (failed.level, "rank 1: no memory" in failed.what) == ("problem", True)


def test_a_small_dev_shm_is_only_a_note():
    assert not list(rank_findings.judge_shm([{"host": "a", "shm_bytes": 8 << 30}, {"host": "b", "shm_bytes": None}]))
    (finding,) = rank_findings.judge_shm([{"host": "a", "shm_bytes": 64 << 20}])
    assert (finding.level, "64 MiB on a" in finding.what) == ("note", True)


def test_bandwidth():
    measured = {"all-gather": result(), "reduce-scatter": result(gb_per_s=0.05), "other": result(correct=False)}
    found = list(rank_findings.judge_bandwidth(measured))
    assert levels(found) == ["ok", "warning", "problem"]
    assert found[0].what == "all-gather: 1.68 GB/s per rank (16 MiB from others in 10.0 ms)"
    assert found[2].what == "other: the result is wrong"
    assert levels(rank_findings.judge_bandwidth({})) == ["note"]


def test_a_collective_that_moves_no_bytes_has_no_bandwidth():
    (found,) = rank_findings.judge_bandwidth({"all-gather in shared memory": result(gb_per_s=None, seconds=5e-5)})
    assert (found.level, "GB/s" in found.what) == ("ok", False)
    assert found.what == "all-gather in shared memory: 0.050 ms until 16 MiB from others can be read; no bytes move"


def test_links():
    link = {"latency_s": 5e-6, "bytes_per_s": 1.2e10, "ranks": 8, "bytes": 1 << 23}
    found = list(rank_findings.judge_links({"within": None, "between": link}))
    assert [(each.area, each.level) for each in found] == [("links", "ok")]
    assert found[0].what == "between nodes: 12.00 GB/s per rank, 5.0 us a message (8 ranks)"


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "gpfs", "beegfs", "wekafs", "fuse.glusterfs", "fuse.ceph"])
def test_file_systems_that_nodes_share(kind):
    assert is_shared(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "squashfs", "fuse.squashfuse_ll"])
def test_file_systems_of_one_node(kind):
    assert not is_shared(kind)
