"""The start of a job: what ``init`` exchanges, what stops it, and many ranks."""

import json
import os
import re

import pytest

from tests.cli.conftest import TINY

RECORD = """
import json, pickle
from collections import Counter
from mpi4py import MPI

calls, received = Counter(), Counter()

class Recorded(MPI.Intracomm):
    pass

def record(name, nbytes):
    original = getattr(MPI.Intracomm, name)

    def call(self, *arguments, **options):
        result = original(self, *arguments, **options)
        calls[name] += 1
        received[name] += nbytes(arguments, result)
        return result

    setattr(Recorded, name, call)

def buffer(arguments, result):
    return memoryview(arguments[1] if len(arguments) > 1 else arguments[0]).nbytes

for name in ("Allgather", "Allgatherv", "Allreduce", "Alltoall", "Bcast"):
    record(name, buffer)
for name in ("allgather", "allreduce", "alltoall", "bcast", "gather", "scatter"):
    record(name, lambda arguments, result: len(pickle.dumps(result)))
for name in ("Barrier", "Dup", "Split", "Split_type"):
    record(name, lambda arguments, result: 0)
MPI.COMM_WORLD = Recorded(MPI.COMM_WORLD)

import hpcfsdp
world = hpcfsdp.init("cpu", split_nodes=2)
mine = sum(received.values()), sum(calls.values())
everyone = world.comm.gather(mine)
if everyone:
    print(json.dumps([max(nbytes for nbytes, _ in everyone), max(count for _, count in everyone)]))
hpcfsdp.finalize()
"""


def test_messages_of_init_grow_by_four_bytes_for_each_rank(start):
    (few, calls), (many, same_calls) = (
        json.loads(start("-c", RECORD, ranks=ranks).wait().stdout.splitlines()[-1]) for ranks in (2, 4)
    )
    assert many - few == 2 * 4  # the lowest rank on the node of each rank
    assert 0 < few < 400
    assert calls == same_calls <= 18


SHARED_GPUS = """
import torch
from hpcfsdp import accelerator
accelerator.device_type = lambda: "cuda"
accelerator.device_count = lambda: 2
accelerator.is_accelerator = lambda device: device.type == "cuda"
accelerator.make_current = lambda device: None
accelerator.describe = lambda device: accelerator.Hardware("H200", f"GPU-{device.index}", 1 << 37)
torch.cuda.init = torch.empty = torch.zeros = None  # no memory is taken
import hpcfsdp
hpcfsdp.init()
"""


def test_more_ranks_than_gpus_are_refused_once_on_all_ranks(start):
    job = start("-c", SHARED_GPUS, ranks=3).wait()
    text = (
        r"LaunchError: rank 0 on \S+: 3 rank\(s\) on this node use 2 device\(s\): local ranks \[0, 2\] share one "
        r"\(number 0, GPU-0\), .*at most one rank for each device.*--gpus-per-task=1"
    )
    assert len(re.findall(text, job.stderr)) == 1, job.stderr
    assert job.code == 3


def test_a_driver_that_fails_on_one_rank_is_an_error_on_all_ranks(start):
    fail = """
from mpi4py import MPI
def fail(device):
    if MPI.COMM_WORLD.rank == 1:
        raise RuntimeError("CUDA error: out of memory")
accelerator.make_current = fail
import hpcfsdp
"""
    job = start("-c", SHARED_GPUS.replace("import hpcfsdp\n", fail), ranks=2).wait()
    assert len(re.findall(r"LaunchError: rank 1 on \S+: CUDA error: out of memory", job.stderr)) == 1, job.stderr
    assert job.code == 3


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}


def test_a_training_in_an_allocation_without_srun_is_refused(hpcfsdp, tmp_path):
    done = hpcfsdp("train", *TINY, environ=ALLOCATION)
    assert (done.code, done.stdout) == (3, "")
    assert (
        "allocation of SLURM's job 7, which has 8 tasks, but not in a step of it: it would train alone" in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert not os.listdir(tmp_path)


def test_a_program_in_an_allocation_without_srun_is_warned(start):
    job = start("-c", "import hpcfsdp; print(hpcfsdp.init('cpu').size); hpcfsdp.finalize()", environ=ALLOCATION).wait()
    assert (job.code, job.stdout) == (0, "1\n")
    assert job.stderr.count("RuntimeWarning: this process is in the allocation of SLURM's job 7") == 1


MANY = """
import json
import torch
import hpcfsdp

for parts in (1, 8):
    world = hpcfsdp.init("cpu", split_nodes=parts)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = hpcfsdp.FullyShardedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    everyone = world.comm.gather((losses, world.num_nodes, world.local_size))
    if everyone:
        print(json.dumps(everyone))
    hpcfsdp.finalize()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_ranks_start_and_step_on_one_machine(start):
    job = start("-c", MANY, ranks=64).wait(timeout=1700)
    assert job.code == 0, job.stderr
    assert "Traceback" not in job.stderr
    losses = []
    for line, nodes in zip(job.stdout.splitlines(), (1, 8), strict=True):
        everyone = json.loads(line)
        assert everyone == [[everyone[0][0], nodes, 64 // nodes]] * 64
        losses.append(everyone[0][0])
    first, second = losses[0]
    assert second < first
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
