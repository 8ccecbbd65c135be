import pytest

from hpcfsdp.doctor import machine


def levels(findings):
    return [finding.level for finding in findings]


def gpu_row(uuid, visible=2, **changed):
    gpu = {"device": "cuda:0", "name": "H200", "uuid": uuid, "bytes": 139 << 30}
    return {"host": "n1", "devices_visible": visible, "accelerator": gpu, "accelerator_error": None} | changed


CPU_ROW = {"host": "n1", "devices_visible": 0, "accelerator": None, "accelerator_error": None}


def test_nodes():
    (finding,) = machine.judge_nodes([[0, 1], [2, 3]], ["a", "a", "b", "b"])
    assert (finding.level, finding.what) == ("ok", "2 node(s): a: ranks 0-1, b: ranks 2-3")


def test_uneven_and_cyclic_nodes_are_notes():
    uneven = list(machine.judge_nodes([[0, 1], [2]], ["a", "a", "b"]))
    assert levels(uneven) == ["ok", "note"]
    assert "hybrid sharding" in uneven[1].what
    cyclic = list(machine.judge_nodes([[0, 2], [1, 3]], ["a", "b", "a", "b"]))
    assert levels(cyclic) == ["ok", "note"]
    assert "fine" in cyclic[1].what


def test_many_nodes_are_not_all_listed():
    (finding,) = machine.judge_nodes([[rank] for rank in range(20)], [f"n{rank}" for rank in range(20)])
    assert finding.what.endswith("n7: rank 7, and 12 more")


def test_devices():
    assert levels(machine.judge_devices([[0, 1]], [CPU_ROW, CPU_ROW])) == ["ok"]
    (finding,) = machine.judge_devices([[0, 1]], [gpu_row("a"), gpu_row("b")])
    assert (finding.level, finding.what) == ("ok", "each rank has its own (H200, 139 GiB)")


def test_two_ranks_on_one_gpu_are_a_problem():
    (finding,) = machine.judge_devices([[0, 1, 2]], [gpu_row("a"), gpu_row("b"), gpu_row("a")])
    assert (finding.level, finding.what) == (
        "problem",
        "ranks 0,2 on n1 share one device, which NCCL and its like refuse",
    )
    assert "--gpus-per-task=1" in finding.hint


def test_gpus_on_some_ranks_only_are_a_problem():
    (finding,) = machine.judge_devices([[0, 1]], [gpu_row("a"), CPU_ROW])
    assert (finding.level, finding.what) == ("problem", "rank 1 see no accelerator, the others do")


def test_idle_and_mixed_gpus_are_notes():
    found = machine.judge_devices([[0]], [gpu_row("a", visible=4)])
    assert levels(found) == ["ok", "note"]
    assert "4 visible devices for 1 rank(s)" in found[1].what
    other = gpu_row("b")
    other["accelerator"] = other["accelerator"] | {"name": "A100"}
    assert levels(machine.judge_devices([[0, 1]], [gpu_row("a"), other])) == ["ok", "note"]


def test_a_failing_gpu_is_a_problem():
    (finding,) = machine.judge_devices([[0]], [CPU_ROW | {"accelerator_error": "driver too old"}])
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
    (finding,) = machine.judge_binding([[0, 1]], cores)
    assert (finding.level, finding.what) == ("ok", text)


def test_more_ranks_than_cores_are_a_warning():
    (finding,) = machine.judge_binding([[0, 1, 2], [3]], [{0, 1}] * 4)
    assert (finding.level, finding.what) == ("warning", "ranks 0-2 share 2 core(s)")


def test_ranks_pinned_to_one_core_while_others_are_free_are_a_warning():
    (finding,) = machine.judge_binding([[0, 1, 2]], [{0}, {0}, {1, 2, 3}])
    assert finding.level == "warning"
    assert finding.what == "ranks 0-1 are pinned to the same core(s) 0, while others are free"
    assert "--bind-to none" in finding.hint


def test_equal_cores_of_different_nodes_are_different_cores():
    assert levels(machine.judge_binding([[0], [1]], [{0}, {0}])) == ["ok"]


def test_threads():
    def rows(threads, chosen=None):
        return [{"cores": "0-3", "threads": threads, "omp_num_threads": chosen}] * 2

    assert levels(machine.judge_threads([[0, 1]], rows(2))) == ["ok"]
    (finding,) = machine.judge_threads([[0, 1]], rows(4, "4"))
    assert finding.level == "warning"
    assert finding.what == "ranks 0-1 run 8 threads (OMP_NUM_THREADS=4) on 4 core(s)"
    assert "OMP_NUM_THREADS=2" in finding.hint
    assert not list(machine.judge_threads([[0]], [{"cores": "0"}]))


def test_one_thread_each_is_fine_even_where_ranks_share_cores():
    rows = [{"cores": "0", "threads": 1, "omp_num_threads": "1"}] * 3
    assert levels(machine.judge_threads([[0, 1, 2]], rows)) == ["ok"]


def test_torch_on_a_file_system_that_nodes_share_is_a_note():
    shared = {"torch_folder": "/home/me/venv/torch", "torch_file_system": "nfs4"}
    (finding,) = machine.judge_files([[0], [1]], [shared, shared])
    assert (finding.level, finding.area) == ("note", "files")
    assert "/home/me/venv/torch (nfs4)" in finding.what
    assert "docs/how-to/launching.md" in finding.hint
    assert not list(machine.judge_files([[0, 1]], [shared, shared]))
    for kind in ("xfs", None):
        local = shared | {"torch_file_system": kind}
        assert not list(machine.judge_files([[0], [1]], [local, local]))
