"""Programs as jobs of their own. Rank 0 starts them; the other ranks of such a test have nothing to do."""

import functools
import os
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Job
from tests.under_mpi import COMM

__all__ = ["program", "rank_0"]

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = re.compile(r"(OMPI|PMIX|PRTE|PMI|HYDRA|ACCELERATE|FSDP)_|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$|MASTER_")


def rank_0(test):
    """A test that passes on other ranks at once. Not a skip: all ranks report equally many phases."""

    @functools.wraps(test)
    def run(*given, **named):
        return test(*given, **named) if COMM.rank == 0 else None

    return run


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Start a program on some ranks, by its name and source, in an empty folder, and not as a part of this job."""
    for name in filter(LAUNCHED.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    jobs = []

    def start(name, source, *arguments, ranks=2, launcher=()):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        command = ["-m", "tests.programs.program", path, *arguments]
        jobs.append(Job(command, ranks, tmp_path, None, launcher=launcher))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.code is None:
            job.end()
