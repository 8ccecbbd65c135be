"""A rank that is killed while others wait for it in a collective: the job ends, and leaves nothing behind."""

import time

import pytest

from tests.cli.conftest import survivors

pytestmark = pytest.mark.fresh

SCRIPT = """
import time
import torch
import hpcfsdp

world = hpcfsdp.init("cpu", split_nodes={nodes})
calls = {calls}  # of each rank but the last, which is killed
last = len(calls)
for rank in range(last):
    if world.rank in (rank, last):
        comm = world.communicator.subgroup([rank, last])
        full = comm.alloc(4 * comm.size, torch.float32, gathered=True)
        inputs = comm.alloc(4 * comm.size, torch.float32)
        big = torch.ones(1 << 20)
        comm.all_gather_into_tensor(full, torch.ones(4))
        comm.all_reduce(inputs, "sum")
        comm.labelled_barrier("begin")
open(f"ready-{{world.rank}}", "w").close()
if world.rank == last:
    time.sleep(1000)
exec(calls[world.rank])
print("went on", flush=True)
"""

CALLS = {
    "in shared memory": (
        1,
        {
            "a labelled barrier": "comm.labelled_barrier('end')",
            "gathering into a window": "comm.all_gather_into_tensor(full, torch.ones(4))",
            "reducing a window": "comm.reduce_scatter_tensor(torch.empty(4), inputs, 'sum')",
            "making memory": "comm.alloc(8, torch.float32)",
        },
    ),
    "by messages": (
        1,
        {
            "reducing": "comm.all_reduce(big, 'sum')",
            "receiving a broadcast": "comm.broadcast(big, 1)",
            "a barrier": "comm.barrier()",
        },
    ),
    "between nodes": (2, {"gathering": "comm.all_gather_into_tensor(full, torch.ones(4))"}),
}
"""Number of nodes, and the call of each rank that waits."""


@pytest.mark.parametrize(("nodes", "calls"), CALLS.values(), ids=CALLS)
def test_a_rank_killed_while_others_wait_for_it_ends_the_job(start, tmp_path, nodes, calls):
    """Each of the others waits in a collective of two, with the rank that is killed."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(calls=list(calls.values()), nodes=nodes))
    ranks = len(calls) + 1
    job = start(script, ranks=ranks)
    job.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
    family = job.family()
    victim = next(rank for rank in job.ranks() if number_of(rank) == ranks - 1)
    time.sleep(0.3)  # until the others wait
    victim.kill()
    job.wait()
    assert job.code != 0
    assert "went on" not in job.stdout
    assert not survivors(family)


def number_of(process):
    """The rank of a process, by its launcher's variables."""
    environ = process.environ()
    return int(environ.get("OMPI_COMM_WORLD_RANK") or environ["PMI_RANK"])
