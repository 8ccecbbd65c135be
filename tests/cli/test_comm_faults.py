"""A rank that is killed while others wait for it in a collective: the whole job ends, and nothing is left behind."""

import time

import pytest

from tests.cli.conftest import survivors

SCRIPT = """
import sys, time
import torch
import hpcfsdp

world = hpcfsdp.init("cpu", split_nodes={nodes})
comm = world.communicator
full = comm.alloc(4 * comm.size, torch.float32, gathered=True)
inputs = comm.alloc(4 * comm.size, torch.float32)
big = torch.ones(1 << 20)
comm.all_gather_into_tensor(full, torch.ones(4))
comm.all_reduce(inputs, "sum")
comm.barrier()
open(f"ready-{{world.rank}}", "w").close()
if world.rank == 1:
    time.sleep(1000)
{call}
print("went on", flush=True)
"""

CALLS = {
    "claiming a window": (1, "comm.claim(full)"),
    "gathering into a window": (1, "comm.all_gather_into_tensor(full, torch.ones(4))"),
    "gathering from other nodes": (3, "comm.all_gather_into_tensor(full, torch.ones(4))"),
    "reducing a window": (1, "comm.reduce_scatter_tensor(torch.empty(4), inputs, 'sum')"),
    "reducing by messages": (1, "comm.all_reduce(big, 'sum')"),
    "receiving a broadcast": (1, "comm.broadcast(big, 1)"),
    "making memory": (1, "comm.alloc(8, torch.float32)"),
    "a barrier": (1, "comm.barrier()"),
}


@pytest.mark.parametrize(("nodes", "call"), CALLS.values(), ids=CALLS)
def test_a_rank_killed_while_others_wait_for_it_ends_the_job(start, tmp_path, nodes, call):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(call=call, nodes=nodes))
    job = start(script, ranks=3)
    job.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
    family = job.family()
    victim = next(rank for rank in job.ranks() if number_of(rank) == 1)
    time.sleep(0.3)  # the others come to wait
    victim.kill()
    job.wait()
    assert job.code != 0
    assert "went on" not in job.stdout
    assert not survivors(family)


def number_of(process):
    """The rank of a process, as its launcher has told it."""
    environ = process.environ()
    return int(environ.get("OMPI_COMM_WORLD_RANK") or environ["PMI_RANK"])
