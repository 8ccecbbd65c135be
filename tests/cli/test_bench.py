import json
import sys
from pathlib import Path

import pytest


def test_bench_collectives(hpcfsdp):
    job = hpcfsdp("bench", "collectives", "--sizes", "0.01", "1", "--repeats", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], len(report["measured"])) == (2, 8)
    for one in report["measured"]:
        assert {"hpcfsdp shared", "gloo"} & set(one["ways"])
        assert all(len(way["seconds"]) == 2 and way["median_s"] > 0 for way in one["ways"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("collectives", "--sizes", "0.01", "--repeats", "1"),
        ("step", "--layers", "1", "--width", "16", "--repeats", "1"),
        ("checkpoint", "--bytes", "40KB", "--tensors", "5", "--repeats", "1"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_measurements_between_imagined_nodes(start, tmp_path, arguments):
    where = ("--folder", str(tmp_path)) if arguments[0] == "checkpoint" else ()
    job = start("-m", "hpcfsdp", "bench", *arguments, *where, "--split-nodes", "2", "--json", ranks=2).wait(250)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert report["topology"] == "2 node(s) of 1 rank(s)"
    if arguments[0] == "step":  # gathers and reductions send the parameters once each; the root is gathered once
        sent = {engine: one["moved"]["between_nodes"] for engine, one in report["measured"].items() if "moved" in one}
        assert sent["hpcfsdp_node"] == pytest.approx(2, rel=0.1) and sent["hpcfsdp_rows_node"] == pytest.approx(2, 0.1)
        assert 2.2 < sent["hpcfsdp"] == sent["hpcfsdp_rows"] < 3


def test_one_process_cannot_be_divided_into_nodes(command):
    job = command("bench", "host", "--split-nodes", "2")
    assert job.code == 2
    assert "--split-nodes divides the ranks of a node" in job.stderr


@pytest.mark.slow
def test_bench_backends(hpcfsdp):
    job = hpcfsdp("bench", "backends", "--layers", "1", "--width", "16", "--repeats", "2", ranks=2)
    assert job.code == 0, job.stderr
    rows = [line.split(" | ")[:2] for line in job.stdout.splitlines()[2:]]
    assert rows == [[f"| {engine}", way] for engine in ("ddp", "fsdp1", "fsdp2") for way in ("gloo", "hpcmpi")]


SMALL = ("--layers", "1", "--width", "16", "--repeats", "1")


def test_bench_step_measures_every_engine_with_equal_losses(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "ddp", "fsdp1", "fsdp2", "hpcfsdp", "hpcfsdp_rows"]
    assert all(len(one["seconds"]) == 1 and one["hpcfsdp_ratio"] > 0 for one in measured.values())
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-4)
    assert measured["floor"]["loss"] > losses[0]
    assert measured["hpcfsdp"]["moved"] == {"between_nodes": 0, "copied": 0, "gathered": 0}


@pytest.mark.slow
def test_bench_step_with_tensor_parallelism(hpcfsdp):
    job = hpcfsdp("bench", "step", *SMALL, "--fused", "--tensor", "2", "--json", ranks=4)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["floor", "fsdp1", "fsdp2", "hpcfsdp", "hpcfsdp_rows"]
    losses = [one["loss"] for engine, one in measured.items() if engine != "floor"]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)


def test_bench_host(hpcfsdp):
    one_rank = {"OMPI_COMM_WORLD_SIZE": "1"}  # as under mpirun -n 1
    job = hpcfsdp("bench", "host", "--units", "2", "--repeats", "2", "--json", environ=one_rank)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], report["units"]) == (8, 2)
    assert list(report["measured"])[:5] == ["plain", "fsdp1", "fsdp1_orig", "fsdp2", "hpcfsdp"]
    for one in report["measured"].values():
        assert "skipped" in one or (len(one["seconds"]) == 2 and "median_over_plain_s" in one)


@pytest.mark.slow
def test_bench_memory(start):
    job = start("-m", "hpcfsdp", "bench", "memory", *SMALL, "--json", ranks=2).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "plain", "ddp", "fsdp1", "fsdp2"]
    for one in measured.values():
        assert one["baseline_bytes"] > one["peak_bytes"] > one["analytic_bytes"] // 2
        assert len(one["steps_bytes"]) == 1
        assert one["hpcfsdp_ratio"] > 0


@pytest.mark.slow
def test_bench_plan(hpcfsdp, command, tmp_path):
    job = hpcfsdp("bench", "plan", *SMALL, "--split-nodes", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "hpcfsdp_rows", "hpcfsdp_node", "hpcfsdp_rows_node"]
    assert all(one["planned_s"] > 0 and one["planned_bytes"] > 0 for one in measured.values())
    rates = tmp_path / "machine.json"
    rates.write_text(job.stdout)
    model = ("--params", "1e7", "--layers", "2", "--sequence", "64", "--ranks", "4", "--ranks-per-node", "2")
    planned = command("plan", *model, "--device", "cpu", "--links", rates, "--json")
    assert planned.code == 0, planned.stderr
    assert "measured" in json.loads(planned.stdout)["machine"]["links"]["between"]["source"]


@pytest.mark.slow
def test_bench_optim_state(start):
    shape = ("--layers", "2", "--width", "24", "--repeats", "2")
    job = start("-m", "hpcfsdp", "bench", "optim-state", *shape, "--json", ranks=3).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert measured["parameters"] == 2 * (24 * 24 + 24)
    assert len(measured["times"]) == 7
    for engines in measured["times"].values():
        assert list(engines) == ["fsdp1", "hpcfsdp"]
        assert all(len(one["seconds"]) == 2 and one["hpcfsdp_ratio"] > 0 for one in engines.values())
    kinds = [(one["way"], one["engine"], one["ranks"]) for one in measured["memory"]]
    assert len(set(kinds)) == len(kinds) == 3 * 2 * 2


@pytest.mark.slow
def test_bench_whole_tensors(hpcfsdp):
    shape = ("--matrices", "4", "--width", "16", "--repeats", "2")
    job = hpcfsdp("bench", "whole-tensors", *shape, "--json", ranks=2)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    sums = {way: one["sum"] for way, one in report["measured"].items()}
    assert len(sums) == 4 and len(report["ratios"]) == 4
    assert sums["hpcfsdp"] == pytest.approx(sums["fsdp2, full_tensor"], rel=1e-4)
    job = hpcfsdp("bench", "whole-tensors", "--matrices", "3", ranks=2)
    assert job.code == 2
    assert "--matrices 3 has to be a multiple of the 2 ranks" in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_bench_checkpoint_measures_every_way_and_leaves_no_files(start, tmp_path, ranks):
    size = ("--bytes", "40KB", "--tensors", "13", "--folder", str(tmp_path))
    job = start("-m", "hpcfsdp", "bench", "checkpoint", *size, "--repeats", "1", "--json", ranks=ranks).wait(250)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert measured.pop("tensors") == 13
    assert 35_000 < measured.pop("bytes") <= 40_000
    assert {task: list(ways) for task, ways in measured.items()} == {
        "save": ["raw", "hpcfsdp", "dcp", "safetensors", "h5py on rank 0"],
        "load": ["raw", "hpcfsdp", "hpcfsdp, fresh", "dcp", "safetensors"],
        "load, cached": ["raw", "hpcfsdp", "hpcfsdp, fresh", "dcp", "safetensors"],
        "training held": ["hpcfsdp", "memcpy"],
        "in memory": ["xxh3"],
        "save columns": ["hpcfsdp", "dcp"],
    }
    assert all(len(one["seconds"]) == 1 and one["median_s"] > 0 for ways in measured.values() for one in ways.values())
    assert list(tmp_path.iterdir()) == []


def test_bench_checkpoint_refuses_a_full_disk(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--bytes", "100TiB", "--folder", str(tmp_path), ranks=2)
    assert job.code == 1
    assert job.stdout == ""
    assert f"{tmp_path}: " in job.stderr
    assert "bytes are needed" in job.stderr
    assert "choose another --folder" in job.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "what"), [(["host"], "host"), (["gpu", "--imagined-ranks", "4"], "--imagined")])
def test_measurements_of_one_process_refuse_several_ranks(command, monkeypatch, arguments, what):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    job = command("bench", *arguments)
    assert job.code == 2
    assert what in job.stderr
    assert "measures one process, and the launcher started 2" in job.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["collectives", "--sizes", "-1"],
        ["collectives", "--sizes", "1e-7"],  # less than a byte
        ["collectives", "--repeats", "0"],
        ["step", "--width", "12"],
        ["gpu", "--dtype", "fp8"],
        ["step", "--report", "runs/gpu"],
        ["gpu", "--report", "runs/gpu"],  # without an accelerator
        ["checkpoint", "--on-devices"],
        ["checkpoint", "--bytes", "0"],
        ["checkpoint", "--bytes", "1 Gb"],
        ["checkpoint", "--tensors", "0"],
    ],
)
def test_wrong_arguments_are_refused(command, arguments):
    job = command("bench", *arguments)
    assert job.code == 2
    assert job.stderr.startswith("hpcfsdp: bench: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["nothing"], "invalid choice: 'nothing'"), (["step", "--tensor", "3"], "--tensor 3 has to divide the 2 rank(s)")],
    ids=["before MPI", "within MPI"],
)
def test_ranks_print_a_wrong_argument_once(hpcfsdp, arguments, text):
    job = hpcfsdp("bench", *arguments, "--json", ranks=2)
    assert job.code == 2
    assert job.stderr.count(text) == 1
    assert text in json.loads(job.stdout)["error"]["message"]


def test_an_error_of_all_ranks_is_printed_once_without_the_class(hpcfsdp, tmp_path):
    job = hpcfsdp("bench", "checkpoint", "--bytes", "100TiB", "--folder", str(tmp_path), "--json", ranks=2)
    assert job.code == 1
    lines = [line for line in job.stderr.splitlines() if "bytes are needed" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"hpcfsdp: {tmp_path}: ")
    assert json.loads(job.stdout)["error"]["exit_code"] == 1


@pytest.mark.slow
def test_bench_all_compares_two_runs(command, start, tmp_path):
    mpirun = f"{Path(sys.executable).parent / 'mpirun'} --map-by :OVERSUBSCRIBE"
    arguments = ("bench", "all", "--small", "--mpirun", mpirun, "--out", "new.json", "--figure", "new.svg")
    job = start("-m", "hpcfsdp", *arguments, cwd=tmp_path).wait(120)
    assert job.code == 0, job.stderr
    assert job.stdout.index("| benchmark | ratio |") < job.stdout.index("## step") < job.stdout.index("## host")
    assert (tmp_path / "new.svg").stat().st_size > 0
    job = start("-m", "hpcfsdp", *arguments[:5], "--compare", "new.json", "--json", cwd=tmp_path).wait(120)
    assert job.code == 0, job.stderr
    changes = json.loads(job.stdout)["changes"]
    assert {change["part"] for change in changes} == {"step", "host"}
    assert {change["verdict"] for change in changes} <= {"same", "better", "worse"}


def test_bench_all_runs_without_mpirun_alone(hpcfsdp):
    job = hpcfsdp("bench", "all", "--small", ranks=2)
    assert job.code == 2
    assert "all measures one process, and the launcher started 2" in job.stderr


def test_bench_scale(command):
    job = command("bench", "scale", "--world-sizes", "12")
    assert job.code == 2
    assert "--world-sizes 12 is no multiple of 8" in job.stderr


def test_bench_all_looks_for_the_folder_of_its_output_first(command):
    job = command("bench", "all", "--small", "--mpirun", "no-such-mpirun", "--out", "/no/such/folder/x.json")
    assert job.code == 2
    assert "there is no folder /no/such/folder" in job.stderr
