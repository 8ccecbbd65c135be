"""Ranks and nodes that hpcfsdp.init finds on two nodes, and its error if srun and the MPI library do not match."""

import json
from collections import Counter

import pytest

TOPOLOGY = """
import json, os
import torch, torch.distributed as dist
import hpcfsdp

world = hpcfsdp.init("cpu")
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
assert total.item() == world.size * (world.size + 1) / 2
names = ["rank", "size", "node_rank", "num_nodes", "local_rank", "local_size"]
mine = {name: getattr(world, name) for name in names} | {"node": os.environ["SLURMD_NODENAME"]}
everyone = world.comm.gather(mine)
if world.rank == 0:
    print(json.dumps(everyone))
hpcfsdp.finalize()
"""
REFUSED = """
import hpcfsdp
try:
    hpcfsdp.init("cpu")
except hpcfsdp.errors.LaunchError as error:
    raise SystemExit(f"refused: {error}")
"""


@pytest.fixture
def topology(tmp_path):
    script = tmp_path / "topology.py"
    script.write_text(TOPOLOGY)
    return script


def check(step, nodes):
    """`nodes`: for each rank the number of its node, in the order of their lowest ranks."""
    assert step.code == 0, step.stderr
    everyone, count = json.loads(step.stdout), Counter(nodes)
    names = list(dict.fromkeys(one["node"] for one in everyone))
    assert [names.index(one["node"]) for one in everyone] == nodes
    for rank, (one, node) in enumerate(zip(everyone, nodes, strict=True)):
        assert (one["rank"], one["size"]) == (rank, len(nodes))
        assert (one["node_rank"], one["num_nodes"]) == (node, len(count))
        assert (one["local_rank"], one["local_size"]) == (nodes[:rank].count(node), count[node])


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        pytest.param("-N2 -n4 --distribution=block", [0, 0, 1, 1], marks=pytest.mark.slow),
        ("-N2 -n4 --distribution=cyclic", [0, 1, 0, 1]),
        ("-N2 -n3 --distribution=block", [0, 0, 1]),
        pytest.param("-N1 -n2", [0, 0], marks=pytest.mark.slow),
    ],
    ids=["block", "cyclic", "uneven", "one node"],
)
def test_ranks_find_their_nodes(srun, topology, options, nodes):
    check(srun(options, topology).wait(), nodes)


@pytest.mark.slow
def test_a_step_of_each_engine_is_measured_on_two_nodes(srun):
    few = ("--layers", "1", "--width", "16", "--repeats", "1", "--json")
    step = srun("-N2 -n4", "-m", "hpcfsdp", "bench", "step", *few).wait()
    assert step.code == 0, step.stderr
    report = json.loads(step.stdout)
    assert report["topology"] == "2 node(s) of 2 rank(s)"
    assert {"floor", "ddp", "fsdp1", "fsdp2"} < set(report["measured"])
    assert report["measured"]["hpcfsdp_node"]["moved"]["between_nodes"] == pytest.approx(2, rel=0.1)


@pytest.mark.slow
def test_open_mpi_finds_the_nodes_through_pmix(srun, cluster, open_mpi, topology):
    if not cluster.named:
        pytest.skip("Open MPI knows nodes by their host names, and this system gives slurmd no other name")
    if not cluster.speaks_pmix():
        pytest.skip("SLURM's PMIx plug-in does not load (Debian: libpmix-dev)")
    step = srun("-N2 -n4 --distribution=cyclic", topology, python=open_mpi, mpi="pmix").wait()
    check(step, [0, 1, 0, 1])


@pytest.mark.slow
def test_open_mpi_under_pmi2_is_refused_and_both_sides_are_named(srun, open_mpi, tmp_path):
    step = srun("-N2 -n2", "-m", "hpcfsdp", "train", python=open_mpi).wait()
    assert step.code == 3, step.stderr
    assert step.stderr.count("the launcher started 2 processes (PMI_SIZE=2)") == 2
    assert step.stderr.count("MPI library that mpi4py loaded (Open MPI ") == 2
    assert "--mpi=pmix" in step.stderr
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    step = srun("-N2 -n2", script, python=open_mpi).wait()
    assert step.code == 1, step.stderr
    assert step.stderr.count("refused: the launcher started 2 processes (PMI_SIZE=2)") == 2


@pytest.mark.slow
def test_mpich_without_a_plugin_is_refused(srun):
    step = srun("-N2 -n2", "-m", "hpcfsdp", "train", mpi="none").wait()
    assert step.code == 3, step.stderr
    assert "(SLURM_STEP_NUM_TASKS=2)" in step.stderr
    assert "loaded (MPICH " in step.stderr
