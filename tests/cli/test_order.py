"""Ranks whose modules run in another order, or another number of times: named within seconds, never a hang."""

import pytest

SCRIPT = """
import torch, torch.nn as nn
import hpcfsdp
import hpcfsdp.engine.order as order
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

world = hpcfsdp.init("cpu", backend={backend!r}, split_nodes={nodes})
if {backend!r} == "gloo":  # of which nobody knows what ranks wait for
    order.PATIENCE_S = 2.0
group = torch.distributed.group.WORLD if {backend!r} == "gloo" else None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, odd):
        layers = [self.first, self.second, self.third]
        if odd:
            {change}
        for layer in layers:
            x = layer(x)
        return x

model = FSDP(Net(), group, auto_wrap_policy=ModuleWrapPolicy({{nn.Linear}}))
for step in range({step} + 1):
    odd = world.rank == 1 and step == {step}
    model(torch.ones(2, 8), odd).sum().backward()
print("came through", flush=True)
world.comm.Barrier()
"""

CHANGES = {
    "another order": ("layers = [self.first, self.third, self.second]", ("'second'", "'third'")),
    "one more": ("layers.append(self.second)", ("'second'",)),
    "one less": ("layers.pop()", ("'third'",)),
}


@pytest.mark.parametrize(
    ("change", "carrier", "step"),
    [
        ("another order", "shared memory", 0),
        ("one more", "shared memory", 2),
        ("one less", "shared memory", 2),
        ("another order", "messages", 2),
        ("one less", "messages", 0),
        ("another order", "gloo", 0),
        ("one more", "gloo", 2),
    ],
)
def test_a_rank_that_leaves_the_order_is_named_with_the_module(start, tmp_path, change, carrier, step):
    statement, named = CHANGES[change]
    backend, nodes = {"shared memory": (None, 1), "messages": (None, 2), "gloo": ("gloo", 1)}[carrier]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(backend=backend, nodes=nodes, change=statement, step=step))
    job = start(script, ranks=2).wait()
    assert job.code != 0
    assert "came through" not in job.stdout
    assert "rank 1" in job.stderr
    assert all(name in job.stderr for name in named), job.stderr
