"""Through how many files of the package a walk leads, measured by a profile of calls: bounds on its structure."""

import inspect
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision

ROOT = f"{Path(hpcfsdp.__file__).parent}/"

INIT = """
import hpcfsdp
init = hpcfsdp.init
sys.setprofile(files)
init()
sys.setprofile(None)
print(json.dumps([files.calls, [name for name in ("sympy", "torch._dynamo") if name in sys.modules]]))
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


class Files:
    """A profiler that counts calls of the package's functions by file.

    Calls within comm/ count as the file through which the engine has entered it: each transport has a walk of its own.
    A note in the ring of events, like a log line, leads no reader anywhere, and does not count; nor does a
    call of torch through ``_compat``.

    Args:
        until: stop as soon as this module begins to load.
    """

    def __init__(self, root, until=None):
        self.root, self.until = root, until
        self.calls = {}

    def __call__(self, frame, event, _argument):
        if self.until in sys.modules:
            sys.setprofile(None)
        elif event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no class, no module
            file, caller = self.file(frame), frame.f_back
            while caller is not None and not self.file(caller):
                caller = caller.f_back
            within = caller is not None and file.startswith("comm/") and self.file(caller).startswith("comm/")
            if file and not within and file not in ("hang/events.py", "_compat.py"):
                self.calls[file] = self.calls.get(file, 0) + 1

    def file(self, frame):
        name = frame.f_code.co_filename
        return name[len(self.root) :] if name.startswith(self.root) else ""


def files_of(action):
    """How often `action` calls functions of each file."""
    files = Files(ROOT)
    sys.setprofile(files)
    try:
        action()
    finally:
        sys.setprofile(None)
    return files.calls


def check(walk, calls, most):
    listed = "\n".join(f"  {file}: {count} calls" for file, count in calls.items())
    assert 0 < len(calls) <= most, f"{walk} leads through {len(calls)} files, of at most {most}:\n{listed}"


def test_a_file_counts_once_and_a_transport_as_the_file_through_which_it_is_entered():
    comm = FakeCommunicator(0, 2)
    full = torch.zeros(4)
    calls = files_of(lambda: [comm.all_gather_into_tensor(full, full[:2].clone()) for _ in range(2)])
    assert calls == {"comm/communicator.py": 2}


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("mixed", [None, MixedPrecision(torch.bfloat16)], ids=["float32", "bfloat16"])
def test_forward_and_backward_of_a_unit(original, mixed):
    model = FullyShardedDataParallel(
        nn.Linear(4, 4), process_group=FakeCommunicator(0, 2), use_orig_params=original, mixed_precision=mixed
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(2):  # which makes what later steps find: the first has no order of units yet, nor a step before
        step()
        optimizer.step()
        optimizer.zero_grad()
    check("a step", files_of(step), 12)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_optim_state_dict(original):
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=FakeCommunicator(), use_orig_params=original)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.optim_state_dict(model, optimizer)  # which finds names that are kept
    walk = files_of(lambda: FullyShardedDataParallel.optim_state_dict(model, optimizer))
    check("optim_state_dict", walk, 24)


def test_init_before_torch(run_python):
    code = f"import inspect, json, sys\n{inspect.getsource(Files)}\nfiles = Files({ROOT!r}, until='torch')\n{INIT}"
    calls, heavy = json.loads(run_python(code))
    check("init", calls, 7)
    assert heavy == []  # a second or more, and thousands of small files, on every rank that shards nothing


def test_files_that_are_opened_until_the_first_step(run_python):
    """On a file system that nodes share, each is a request of every rank."""
    plain, sharded = (json.loads(run_python(FIRST_STEP.replace("MODEL", code))) for code in (PLAIN, SHARDED))
    more = set(sharded[0]) - set(plain[0])
    own = {path for path in more if path.startswith(ROOT)}
    assert len(plain[0]) > 1500  # torch's
    assert 0 < len(own) <= 154
    assert len(more - own) <= 20, sorted(more - own)
    assert sharded[1] == []
