"""The scripts of jobs/ as far as they go without their scheduler. tests/slurm submits those for SLURM."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcfsdp import checkpoint
from tests.cli.conftest import ROOT

JOBS = ROOT / "jobs"
SCRIPTS = [path for path in sorted(JOBS.iterdir()) if path.suffix in (".sbatch", ".pbs", ".flux")]
SUBMIT = {".sbatch": "sbatch", ".pbs": "qsub", ".flux": "flux batch"}


def bash(script, cwd, **environ):
    foreign = ("SLURM", "PBS", "FLUX", "PMI", "OMPI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    command = ["bash", str(script)]
    environ = {**kept, **allowed, **environ}
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_that_is_not_submitted_names_the_command_for_it(script, tmp_path):
    done = bash(script, tmp_path)
    assert done.returncode != 0
    assert re.search(rf"submit this script with {SUBMIT[script.suffix]}$", done.stderr, re.MULTILINE)
    assert not list(tmp_path.iterdir())


def test_the_script_for_pbs_trains_a_rank_for_each_line_of_the_node_file(tmp_path):
    bin_folder = Path(sys.executable).parent
    if not (bin_folder / "mpirun").exists():
        pytest.skip("pytest runs in an environment without an mpirun")
    shutil.copytree(JOBS, tmp_path / "jobs")
    (tmp_path / ".venv").symlink_to(bin_folder.parent)
    (tmp_path / "nodes").write_text("node1\nnode1\n")
    script = tmp_path / "jobs/one-node.pbs"
    text = script.read_text()
    assert text.count("--run_dir runs/one-node") == 1
    script.write_text(text.replace("--run_dir runs/one-node", "--run_dir run --steps 3"))
    done = bash(script, tmp_path, PBS_O_WORKDIR=str(tmp_path), PBS_NODEFILE=str(tmp_path / "nodes"))
    assert done.returncode == 0, done.stderr
    info = checkpoint.open_index(checkpoint.latest(tmp_path / "run/checkpoints")).info
    assert (info.step, info.world_size) == (3, 2)


def sections(definition):
    """The sections of an Apptainer definition: name -> lines."""
    found, lines = {}, []
    for line in definition.read_text().splitlines():
        if line.startswith("%"):
            found[line[1:]] = lines = []
        else:
            lines.append(line)
    return found


def test_files_that_the_container_copies_exist_and_are_those_that_pip_needs():
    copied = [line.split()[0] for line in sections(JOBS / "container.def")["files"] if line.strip()]
    assert not [name for name in copied if not (ROOT / name).exists()]
    assert {"hpcfsdp", "setup.py", "setup.cfg", "README.md", "LICENSE", "constraints.txt"} <= set(copied)


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_commands_of_the_container_are_clean(section):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    commands = "\n".join(sections(JOBS / "container.def")[section])
    command = ["shellcheck", "--shell=sh", "-"]
    done = subprocess.run(command, input=commands, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_table_in_the_documentation_lists_every_file():
    text = (ROOT / "docs/how-to/jobs.md").read_text()
    listed = set(re.findall(r"^\| \[`([\w.-]+)`\]\(\.\./\.\./jobs/\1\)", text, re.MULTILINE))
    assert listed == {path.name for path in JOBS.iterdir()}
