"""Tests of tests/mpi once more, now with ranks on two nodes: messages between them leave shared memory."""

import re

import pytest

from tests.slurm.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_transport_tests_pass_on_two_nodes(srun):
    step = srun("-N2 -n4 --wait=60", "-m", "pytest", "tests/mpi", "--with-mpi", "-m", "transport", cwd=ROOT).wait(600)
    assert step.code == 0, step.stdout + step.stderr
    assert re.search(r"=== \d+ passed", step.stdout), step.stdout
