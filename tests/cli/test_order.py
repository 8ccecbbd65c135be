"""Ranks that run modules in another order, or another number of times: an error within seconds, never a hang."""

import pytest

SCRIPT = """
import torch, torch.nn as nn
import hpcfsdp
import hpcfsdp.engine.order as order
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.launch.topology import Topology
from hpcfsdp.wrap import ModuleWrapPolicy

class Net(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.change = change

    def forward(self, x, odd):
        layers = [self.first, self.second, self.third]
        if odd:
            layers = {
                "another order": [self.first, self.third, self.second],
                "one more": [*layers, self.second],
                "one less": layers[:2],
            }[self.change]
        for layer in layers:
            x = layer(x)
        return x

def train(change, last, group):
    model = FSDP(Net(change), group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for step in range(last + 1):
        odd = world.rank == 1 and step == last
        model(torch.ones(2, 8), odd).sum().backward()
    return "came through"
"""

OVER_MPI = """
world = hpcfsdp.init("cpu")
for change, nodes, last in CASES:
    group = MpiCommunicator(world.comm.Dup(), Topology.regular(nodes, world.size // nodes), timeout_s=60)
    try:
        text = train(change, last, group)
    except hpcfsdp.errors.HpcfsdpError as error:
        text = f"{type(error).__name__}: {error}"
    found = world.comm.allgather(text)
    if world.rank == 0:
        print(*found, sep="|", flush=True)
"""

OVER_GLOO = """
world = hpcfsdp.init("cpu", backend="gloo")
order.PATIENCE_S = 2.0  # over gloo a rank cannot ask what the others wait for
print(train(CHANGE, LAST, torch.distributed.group.WORLD), flush=True)
world.comm.Barrier()
"""

NAMED = {"another order": ("'second'", "'third'"), "one more": ("'second'",), "one less": ("'third'",)}
"""The modules that messages name."""


def run(start, tmp_path, text):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + text)
    return start(script, ranks=2).wait()


def check(change, text):
    assert "rank 1" in text
    assert all(name in text for name in NAMED[change]), text


def test_all_ranks_raise_and_name_the_rank_that_breaks_the_order_with_its_module(start, tmp_path):
    cases = [  # change, nodes (one shares memory, two send messages), step
        ("another order", 1, 0),
        ("one more", 1, 2),
        ("one less", 1, 2),
        ("another order", 2, 2),
        ("one less", 2, 0),
    ]
    job = run(start, tmp_path, f"CASES = {cases}" + OVER_MPI)
    found = job.stdout.splitlines()
    assert len(found) == len(cases), job.stdout + job.stderr
    for (change, *_), line in zip(cases, found, strict=True):
        for text in line.split("|"):
            assert text.partition(": ")[0].endswith("Error"), line
            check(change, text)


@pytest.mark.parametrize(
    ("change", "step"), [("another order", 0), pytest.param("one more", 2, marks=pytest.mark.slow)]
)
def test_a_rank_that_breaks_the_order_over_gloo_is_named_with_its_module(start, tmp_path, change, step):
    job = run(start, tmp_path, f"CHANGE, LAST = {change!r}, {step}" + OVER_GLOO)
    assert job.code != 0
    assert "came through" not in job.stdout
    check(change, job.stderr)
