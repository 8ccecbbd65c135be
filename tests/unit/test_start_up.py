"""What a program loads before its first step: each file is a request of every rank to the shared file system."""

import json
from pathlib import Path

import hpcfsdp

ROOT = f"{Path(hpcfsdp.__file__).parent}/"

INIT = """
import json, sys
import hpcfsdp
hpcfsdp.init()
print(json.dumps([name for name in ("sympy", "torch._dynamo") if name in sys.modules]))
hpcfsdp.finalize()
"""
FIRST_STEP = """
import json, sys
opened = set()

def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.add(arguments[0])

sys.addaudithook(note)
MODEL
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
heavy = ("h5py", "jsonargparse", "psutil", "rich", "yaml")
print(json.dumps([sorted(opened), [name for name in heavy if name in sys.modules]]))
"""
PLAIN = "import torch; model = torch.nn.Linear(4, 4)"
SHARDED = """
import hpcfsdp, torch
hpcfsdp.init("cpu")
model = hpcfsdp.FullyShardedDataParallel(torch.nn.Linear(4, 4))
"""


def test_init_loads_nothing_that_takes_seconds(run_python):
    assert json.loads(run_python(INIT)) == []


def test_files_that_are_opened_until_the_first_step(run_python):
    run_python(SHARDED)  # which compiles what was not compiled yet
    plain, sharded = (json.loads(run_python(FIRST_STEP.replace("MODEL", code))) for code in (PLAIN, SHARDED))
    more = set(sharded[0]) - set(plain[0])
    own = {path for path in more if path.startswith(ROOT)}
    assert len(plain[0]) > 1500  # torch's
    assert 0 < len(own) <= 125
    assert len(more - own) <= 20, sorted(more - own)
    assert sharded[1] == []
