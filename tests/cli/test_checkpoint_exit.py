"""A save that is running when the program ends: finalize finishes it; without finalize it is logged and removed."""

import os

import pytest

from hpcfsdp.checkpoint import open_index

PROGRAM = """
import os
import sys
import time

import torch

import hpcfsdp
from hpcfsdp.checkpoint import CheckpointManager
from hpcfsdp.checkpoint.format.disk import SYSTEM, System

class Slow(System):
    def fsync(self, fd):
        time.sleep(0.5)
        if sys.argv[2:] == [str(world.rank)]:
            raise OSError(28, os.strerror(28))
        os.fsync(fd)

world = hpcfsdp.init("cpu")
model = hpcfsdp.FullyShardedDataParallel(torch.nn.Linear(3, 4))
SYSTEM.set(Slow())
manager = CheckpointManager("saved", asynchronous=True)
manager.save(1, model=model)
if sys.argv[1] == "finalize":
    try:
        hpcfsdp.finalize()
    except hpcfsdp.errors.CheckpointError as error:
        print("raised:", error, flush=True)
print("the end", flush=True)
"""


@pytest.fixture
def program(start, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*arguments, ranks=2):
        job = start("program.py", *arguments, ranks=ranks).wait()
        assert job.code == 0, job.stderr
        assert job.stdout.count("the end") == max(1, ranks)
        return job

    return run


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_finalize_waits_for_the_file(program, tmp_path, ranks):
    job = program("finalize", ranks=ranks)
    assert open_index(tmp_path / "saved/step-00000001.h5").info.step == 1
    assert "not committed" not in job.stderr
    assert "raised" not in job.stdout


def test_finalize_raises_the_error_of_a_save_on_every_rank(program, tmp_path):
    job = program("finalize", 1)
    errors = [line for line in job.stdout.splitlines() if line.startswith("raised: ")]
    assert len(errors) == 2
    text = "saved/step-00000001.h5: cannot write the checkpoint: No space left on device"
    assert all(text in line for line in errors)
    assert sum("rank 1: " in line for line in errors) == 1
    assert os.listdir(tmp_path / "saved") == []


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_without_finalize_the_file_is_lost_with_a_message(program, tmp_path, ranks):
    job = program("exit", ranks=ranks)
    text = "saved/step-00000001.h5: was not committed, and is lost: the program has ended before wait(), close() or"
    assert job.stderr.count(text) == 1  # not once for each rank
    assert "Traceback" not in job.stderr
    assert list(tmp_path.glob("saved/*")) == []  # the folder too is missing if the program ended before its creation
