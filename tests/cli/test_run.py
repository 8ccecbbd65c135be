"""``python -m hpcfsdp.run``: programs for torchrun, as they are."""

import re

from tests.cli.conftest import ROOT
from tests.cli.test_docs import assert_losses, example, lines_of_page

FSDP2 = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # before the group is made
dist.init_process_group("gloo", rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy())
fully_shard(model, mesh=mesh)
assert isinstance(model, FSDPModule) and isinstance(model[0].weight, DTensor)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(2):
    loss = model(torch.full((3, 4), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
total = loss.detach()
dist.all_reduce(total)
if rank == 0:
    print(f"argv {sys.argv[1:]} made by {type(model).__mro__[1].__module__} on {dist.get_backend()}")
    print(f"loss {total.item() / ranks:.6f}")
dist.destroy_process_group()
assert not dist.is_initialized()
"""


def test_a_script_of_fsdp1_keeps_its_losses(start, tmp_path):
    job = start("-m", "hpcfsdp.run", example(tmp_path, "torchrun_fsdp.py"), ranks=2).wait()
    assert job.code == 0, job.stderr
    shown = lines_of_page("docs/tutorials/slurm.md", "torchrun --nproc-per-node 2 torchrun_fsdp.py")
    assert_losses(job.stdout.splitlines(), shown)
    assert (tmp_path / "model.pt").exists()


def test_a_script_and_a_module_of_fully_shard(start, tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(FSDP2)
    outputs = []
    for target in (["package/train.py"], ["-m", "package.train"]):
        job = start("-m", "hpcfsdp.run", *target, "--lr", "1", ranks=2, environ={"PYTHONPATH": str(ROOT)}).wait()
        assert job.code == 0, job.stderr
        first, second = job.stdout.splitlines()
        assert first == "argv ['--lr', '1'] made by hpcfsdp.api.fsdp_module on hpcmpi"
        outputs.append(second)
    alone = start("-m", "torch.distributed.run", "--nproc-per-node", 2, "package/train.py", "--lr", "1").wait()
    lines = [line for line in alone.stdout.splitlines() if line.startswith("loss")]
    for line in outputs:
        assert_losses([line], lines)


def test_a_rank_that_is_not_that_of_mpi(start, tmp_path):
    (tmp_path / "train.py").write_text(FSDP2.replace("rank=rank", "rank=0"))
    job = start("-m", "hpcfsdp.run", "train.py", ranks=2).wait()
    assert job.code != 0
    assert "init_process_group was given rank=0, but this is process 1 of 2 of the MPI job" in job.stderr


def test_a_program_that_is_not_there(start):
    job = start("-m", "hpcfsdp.run", "train.py").wait()
    assert job.code != 0
    assert re.search(r"train\.py: there is no such file; -m runs a module", job.stderr)
