"""``python -m tests.bench``."""

import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT


@pytest.fixture
def bench(start):
    """Run ``python -m tests.bench arguments`` to its end."""

    def run(*arguments, **options):
        return start("-m", "tests.bench", *arguments, cwd=ROOT, **options).wait(250)

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nothing"], 2, "invalid choice: 'nothing'"),
        (["optim-state", "--width", "12"], 2, "not a multiple of 8"),
        (["collectives", "--sizes", "1e-7"], 2, "not a size in MiB"),  # less than a byte
        (["host", "--split-nodes", "2"], 2, "--split-nodes divides the ranks of a node"),
        (["gpu-report"], 2, "this process sees none"),
        (["scale", "--world-sizes", "12"], 2, "--world-sizes 12 is no multiple of 8"),
        (["all", "--small", "--mpirun", "none", "--out", "/no/such/folder/x.json"], 2, "there is no folder /no/such"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_arguments_are_refused(bench, arguments, code, text):
    job = bench(*arguments)
    assert job.code == code
    assert text in job.stderr


def test_host(bench):
    one_rank = {"OMPI_COMM_WORLD_SIZE": "1"}  # as under mpirun -n 1
    job = bench("host", "--units", "2", "--repeats", "2", "--json", environ=one_rank)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], report["units"]) == (8, 2)
    assert list(report["measured"])[:5] == ["plain", "fsdp1", "fsdp1_orig", "fsdp2", "hpcfsdp"]
    for one in report["measured"].values():
        assert "skipped" in one or (len(one["seconds"]) == 2 and "median_over_plain_s" in one)


def test_collectives(bench):
    job = bench("collectives", "--sizes", "0.01", "1", "--repeats", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    assert (report["ranks"], len(report["measured"])) == (2, 8)
    for one in report["measured"]:
        assert {"hpcfsdp shared", "gloo"} & set(one["ways"])
        assert all(len(way["seconds"]) == 2 and way["median_s"] > 0 for way in one["ways"].values())


SMALL = ("--layers", "1", "--width", "16", "--repeats", "1")


@pytest.mark.slow
def test_backends(bench):
    job = bench("backends", "--layers", "1", "--width", "16", "--repeats", "2", ranks=2)
    assert job.code == 0, job.stderr
    rows = [line.split(" | ")[:2] for line in job.stdout.splitlines()[2:]]
    assert rows == [[f"| {engine}", way] for engine in ("ddp", "fsdp1", "fsdp2") for way in ("gloo", "hpcmpi")]


@pytest.mark.slow
def test_memory(bench):
    job = bench("memory", *SMALL, "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "plain", "ddp", "fsdp1", "fsdp2"]
    for one in measured.values():
        assert one["baseline_bytes"] > one["peak_bytes"] > one["analytic_bytes"] // 2
        assert len(one["steps_bytes"]) == 1
        assert one["hpcfsdp_ratio"] > 0


@pytest.mark.slow
def test_plan_memory(bench):
    job = bench("plan-memory", *SMALL, "--split-nodes", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert list(measured) == ["hpcfsdp", "hpcfsdp_rows", "hpcfsdp_node", "hpcfsdp_rows_node"]
    assert all(one["peak_bytes"] > 0 and one["planned_bytes"] > 0 for one in measured.values())


@pytest.mark.slow
def test_optim_state(bench):
    job = bench("optim-state", "--layers", "2", "--width", "24", "--repeats", "2", "--json", ranks=3)
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
def test_whole_tensors(bench):
    job = bench("whole-tensors", "--matrices", "4", "--width", "16", "--repeats", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    report = json.loads(job.stdout)
    sums = {way: one["sum"] for way, one in report["measured"].items()}
    assert len(sums) == 4 and len(report["ratios"]) == 4
    assert sums["hpcfsdp"] == pytest.approx(sums["fsdp2, full_tensor"], rel=1e-4)
    job = bench("whole-tensors", "--matrices", "3", ranks=2)
    assert job.code == 2
    assert "--matrices 3 has to be a multiple of the 2 ranks" in job.stderr


@pytest.mark.slow
def test_all_compares_two_runs(bench, tmp_path):
    small = ("all", "--small", "--mpirun", f"{Path(sys.executable).parent / 'mpirun'} --map-by :OVERSUBSCRIBE")
    kept, figure = tmp_path / "new.json", tmp_path / "new.svg"
    job = bench(*small, "--out", kept, "--figure", figure)
    assert job.code == 0, job.stderr
    assert job.stdout.index("| benchmark | ratio |") < job.stdout.index("## step") < job.stdout.index("## host")
    assert figure.stat().st_size > 0
    job = bench(*small, "--compare", kept, "--json")
    assert job.code == 0, job.stderr
    changes = json.loads(job.stdout)["changes"]
    assert {change["part"] for change in changes} == {"step", "host"}
    assert {change["verdict"] for change in changes} <= {"same", "better", "worse"}


def test_all_starts_ranks_itself(bench):
    job = bench("all", "--small", ranks=2)
    assert job.code == 2
    assert "all measures one process, and the launcher started 2" in job.stderr


@pytest.mark.slow
def test_data(bench, tmp_path):
    job = bench("data", "--samples", "64", "--repeats", "1", "--folder", tmp_path, "--json")
    assert job.code == 0, job.stderr
    measured = json.loads(job.stdout)["measured"]
    assert len(measured) == 18
    assert all(one["first_s"][0] > 0 for one in measured.values())


@pytest.mark.slow
def test_collectives_between_imagined_nodes(bench):
    job = bench("collectives", "--sizes", "0.01", "--repeats", "1", "--split-nodes", "2", "--json", ranks=2)
    assert job.code == 0, job.stderr
    assert json.loads(job.stdout)["topology"] == "2 node(s) of 1 rank(s)"
