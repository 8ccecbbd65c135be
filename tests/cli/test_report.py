"""``hpcfsdp report`` as users start it. tests/report opens its page in a browser."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT
from tests.example_runs import write_run


def test_the_page_is_written_into_the_folder_and_its_path_printed(command, tmp_path):
    run = write_run(tmp_path / "run", 60, every=20)
    done = command("report", run)
    assert (done.code, done.stdout, done.stderr) == (0, f"{run / 'report.html'}\n", "")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_goes_where_it_is_asked_for(command, tmp_path):
    run = write_run(tmp_path / "run", 60, every=20)
    done = command("report", run, "--out", tmp_path / "my page.html")
    assert done.code == 0 and (tmp_path / "my page.html").exists()
    assert not (run / "report.html").exists()


def test_json_has_the_facts_and_findings_of_the_page(command, tmp_path):
    run = write_run(tmp_path / "run", 400, every=50, slow_from=100, end="error")
    done = command("report", run, "--json")
    assert done.code == 0
    found = json.loads(done.stdout)
    assert (found["status"], found["step"], found["total_steps"]) == ("failed", 400, 400)
    assert found["message"] == "rank 3: CUDA out of memory"
    topics = {problem["topic"]: problem["severity"] for problem in found["problems"]}
    assert topics["failed"] == "bad" and topics["straggler"] == "warning"
    assert not (run / "report.html").exists(), "only with --out"
    assert command("report", run, "--json", "--out", tmp_path / "x.html").code == 0
    assert (tmp_path / "x.html").exists()


@pytest.mark.parametrize("name", ["none", "file", "empty", "damaged", "runs"])
def test_folders_that_are_no_run(command, tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_bytes(b"\x00\x01\n")
    write_run(tmp_path / "runs" / "one", 5, every=5)
    code, message = {
        "none": (2, "there is no such folder: give the run_dir of a training"),
        "file": (2, "is a file: give the folder of a run"),
        "empty": (1, "no step has been recorded: metrics.jsonl and events.jsonl are missing or empty"),
        "damaged": (1, "1 line(s) of metrics.jsonl and events.jsonl are damaged"),
        "runs": (1, "has folders of runs in it (one): give one of them"),
    }[name]
    for verb in ("report", "watch"):
        done = command(verb, tmp_path / name, *(["--once"] if verb == "watch" else []))
        assert done.code == code and "Traceback" not in done.stderr
        if verb == "report" or name in ("none", "file"):
            assert message in done.stderr


def test_a_page_that_cannot_be_written(command, tmp_path):
    run = write_run(tmp_path / "run", 5, every=5)
    done = command("report", run, "--out", tmp_path)
    assert done.code == 2 and "is a folder: give the name of a file" in done.stderr
    done = command("report", run, "--out", tmp_path / "none" / "x.html")
    assert done.code == 1 and "cannot be written: No such file or directory; --out FILE" in done.stderr


def test_neither_mpi_nor_torch_is_loaded(hpcfsdp, no_mpi, tmp_path):
    run = write_run(tmp_path / "run", 20, every=10)
    assert hpcfsdp("report", run).code == 0
    assert hpcfsdp("watch", run, "--once").code == 0


@pytest.mark.slow
def test_a_real_training_and_what_it_resumed(start, tiny, tmp_path):
    """Two starts of a training on 2 ranks; whatever its version of the folder has is on the page."""
    run = tmp_path / "a run"
    for steps in (4, 3):
        train = ["--train.run_steps", steps, "--train.steps", 20, "--checkpoint.every", 2, "--eval.bytes", 512]
        job = start("-m", "hpcfsdp", "train", *tiny, *train, ranks=2).wait()
        assert job.code == 0, job.stderr
    job = start("-m", "hpcfsdp", "report", run, "--json", "--out", tmp_path / "x.html").wait()
    assert job.code == 0, job.stderr
    found = json.loads(job.stdout)
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in last if record["kind"] == "train"}
    assert (found["step"], found["total_steps"], found["loss"]) == (7, 20, losses[7])
    assert (found["checkpoints"], found["last_checkpoint_step"], found["world_size"]) == (4, 7, 2)
    assert not [problem for problem in found["problems"] if problem["severity"] == "bad"]
    page = (tmp_path / "x.html").read_text()
    assert "step-00000007.h5" in page and f"{losses[7]:.4g}" in page and "data.<wbr>paths" in page


PAGE = (ROOT / "docs/how-to/report.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_commands_of_the_page_in_the_documentation(tmp_path, number):
    """Each ends with 0, and prints the lines that follow it there."""
    write_run(tmp_path / "runs" / "mine", 60, every=20)
    for command, *lines in (part.splitlines() for part in BLOCKS[number].split("$ ")[1:]):
        shell = f'hpcfsdp() {{ "{sys.executable}" -m hpcfsdp "$@"; }}; {command}'
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-c", shell], check=False, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert not lines or done.stdout.splitlines() == lines


def test_the_documentation_has_all_figures(tmp_path):
    """Titles of figures, in the order of the page."""
    from hpcfsdp.report.figures import figures_of
    from hpcfsdp.report.run_folder import read_run

    table = PAGE.split("## How to read the figures")[1].split("##")[0].lower()
    for figure in figures_of(read_run(write_run(tmp_path, 60, every=20))):
        if figure.name != "lr":
            assert figure.title.lower() in table
