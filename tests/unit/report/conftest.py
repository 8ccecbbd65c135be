"""Runs for tests of reports, read from folders."""

import pytest

from hpcfsdp.report.run_folder import read_run
from tests.example_runs import write_run


@pytest.fixture(scope="session")
def usual(tmp_path_factory):
    """A complete run of 400 steps on 8 ranks, with one restart after a signal in step 200."""
    return read_run(write_run(tmp_path_factory.mktemp("runs") / "usual", 400, every=50))


@pytest.fixture
def written(tmp_path):
    """Write a run with some options, and read it."""

    def write(*arguments, **options):
        return read_run(write_run(tmp_path / "run", *arguments, **options))

    return write
