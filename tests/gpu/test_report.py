"""``make gpu-report``: all parts, small; with them golden traces, and one process as a rank of several."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu import golden
from tests.gpu.processes import run_alone

pytestmark = pytest.mark.ranks(1)
MPIRUN = f"{Path(sys.executable).parent / 'mpirun'} --map-by :OVERSUBSCRIBE"


def command(folder, *arguments):
    report = ("--folder", str(folder), "--small", "--ranks", "1", "--mpirun", MPIRUN, *arguments)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # which leaving the job took away
    return run_alone("-m", "tests.gpu.command", "bench", "gpu-report", *report, **as_root)


@pytest.fixture(scope="module")
def folder(alone, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "runs" / "gpu"
    done = command(folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder / 'report.md'}\n"
    return folder


@pytest.fixture(scope="module")
def parts(folder):
    return json.loads((folder / "report.json").read_text())["parts"]


def test_every_part_passes(folder, parts):
    assert list(parts) == ["doctor", "golden", "tests-1", "tests-2", "step-imagined", "checkpoint"]
    assert all("error" not in part and part["seconds"] > 0 for part in parts.values())
    page = (folder / "report.md").read_text()
    assert [page.count(f"\n## {name}\n") for name in parts] == [1] * len(parts)
    assert "ready to train" in parts["doctor"]["text"]
    assert "passed" in parts["tests-2"]["text"].splitlines()[-2]
    assert page.index("![ratios](report.svg)") < page.index("| benchmark | ratio |")
    assert (folder / "report.svg").stat().st_size > 0


def test_steps_are_the_golden_ones(parts):
    assert [line.split(": ")[0] for line in parts["golden"]["text"].splitlines()[1:-1]] == list(golden.CASES)
    assert parts["golden"]["text"].count("none other") == len(golden.CASES)


def test_one_process_stands_for_a_rank_of_several(parts):
    measured = parts["step-imagined"]["measured"]
    assert "as rank 0 of 8" in measured["about"]
    assert {"floor", "fsdp2", "hpcfsdp"} <= set(measured["engines"])
    assert all(one["peak_bytes"] > 0 and len(one["seconds"]) == 1 for one in measured["engines"].values())
    assert measured["engines"]["hpcfsdp"]["peak_bytes"] <= measured["engines"]["fsdp2"]["peak_bytes"]


def test_saves_are_those_of_models_on_devices(parts):
    measured = parts["checkpoint"]["measured"]
    assert {task: list(ways) for task, ways in measured.items() if isinstance(ways, dict)} == {
        "save": ["hpcfsdp", "dcp"],
        "load": ["hpcfsdp", "dcp"],
        "training held": ["hpcfsdp", "memcpy"],
    }


def test_a_second_call_runs_what_has_failed_alone(folder, parts):
    report = json.loads((folder / "report.json").read_text())
    report["parts"]["golden"]["error"] = {"message": "as if"}
    (folder / "report.json").write_text(json.dumps(report))
    again = command(folder, "--compare", str(folder / "report.json"), "--json")
    assert again.returncode == 0, again.stderr
    now = json.loads(again.stdout)
    assert {name for name, part in now["parts"].items() if part != parts[name]} == {"golden"}
    assert {change["verdict"] for change in now["changes"]} == {"same"}
