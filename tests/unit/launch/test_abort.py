import io
import os
import sys
from types import SimpleNamespace

import pytest

from hpcfsdp import env
from hpcfsdp.errors import CheckpointCorruptError
from hpcfsdp.launch import abort


@pytest.fixture
def hook(monkeypatch):
    """The exception hook before, and the exit codes with which MPI was aborted."""
    codes = []

    def quiet(*_):
        pass

    monkeypatch.setattr(sys, "excepthook", quiet)
    monkeypatch.setattr(abort, "OUTPUT_GRACE_S", 0)
    world = SimpleNamespace(rank=2, size=3, Abort=codes.append)
    monkeypatch.setitem(
        sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world, Is_finalized=lambda: False))
    )
    return quiet, codes


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("x"), 1), (CheckpointCorruptError("x"), 4), (KeyboardInterrupt(), 130)]
)
def test_an_uncaught_error_is_printed_with_its_rank_and_ends_the_job_with_its_exit_code(hook, capsys, error, code):
    abort.install(SimpleNamespace(rank=2, size=3))
    sys.excepthook(type(error), error, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"hpcfsdp: rank 2 of 3 on {env.host_name()}: ")
    assert type(error).__name__ in lines[-1]
    assert hook[1] == [code]


def test_an_exit_code_is_one_that_says_error(hook):
    for code in (0, 256, 3):
        abort.abort("x", code)
    assert hook[1] == [1, 1, 3]


def test_only_errors_of_this_project_choose_their_exit_code(hook):
    class Foreign(Exception):
        exit_code = 0

    abort.install(SimpleNamespace(rank=2, size=3))
    sys.excepthook(Foreign, Foreign(), None)
    assert hook[1] == [1]


def test_the_job_ends_though_nothing_can_be_printed(hook, monkeypatch):
    abort.install(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert hook[1] == [1]


def test_a_single_process_keeps_its_hook(hook):
    abort.install(SimpleNamespace(rank=0, size=1))
    assert sys.excepthook is hook[0]


def test_the_traceback_is_not_lost_in_another_hook_that_collects_output(hook, capsys, monkeypatch):
    abort.install(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.excepthook(ValueError, ValueError("x"), None)
    assert "ValueError: x" in capsys.readouterr().err


def test_a_forked_child_prints_its_traceback_and_leaves_the_job_alone(hook, capsys, monkeypatch):
    abort.install(SimpleNamespace(rank=2, size=3))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    sys.excepthook(ValueError, ValueError("x"), None)
    assert "ValueError: x" in capsys.readouterr().err
    assert hook[1] == []
