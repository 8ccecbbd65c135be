import os

import pytest

from tests.cli.conftest import ROOT


def test_help_lists_the_verbs_and_exit_codes(hpcfsdp, command):
    done = hpcfsdp("--help")
    assert done.code == 0
    assert command("-h").stdout == command("help").stdout == done.stdout
    assert all(f"\n  {verb} " in done.stdout for verb in ("train", "ls", "show"))
    assert "75 checkpointed after a signal" in done.stdout


def test_version(command):
    from hpcfsdp import __version__

    assert command("--version").stdout == f"hpcfsdp {__version__}\n"


def test_no_verb_is_a_usage_error(command):
    done = command()
    assert (done.code, done.stdout) == (2, "")
    assert "which verb?" in done.stderr


def test_unknown_verb_suggests_the_nearest(command):
    done = command("trian")
    assert done.code == 2
    assert "unknown verb 'trian'; did you mean 'train'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["train", "ls", "show"])
def test_each_verb_has_help_that_needs_no_mpi(hpcfsdp, verb, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise SystemExit('MPI was loaded')")
    done = hpcfsdp(verb, "--help", environ={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.code == 0, done.stderr
    assert f"hpcfsdp {verb}" in done.stdout
