"""A process that is killed at any step of a save: the old checkpoint stays, and later saves succeed."""

import json
import os
import shutil

import pytest

from hpcfsdp.checkpoint.format.catalog import ABANDONED_AFTER_S, latest
from hpcfsdp.errors import CheckpointCorruptError
from tests.cli.conftest import ROOT, survivors
from tests.disks import value_of

# One process that forks: each child saves, and kills itself before one more call than the child before it.
ALONE = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone
from tests.disks import Killing, Watched, using

SPECS = [TensorSpec("model/w", (7, 13), "float32"), TensorSpec("model/v", (3,), "bfloat16")]

def write(path, value, system):
    read = lambda spec, start, numel: np.full(numel, value, schema.numpy_dtype(spec.dtype))
    with using(system):
        write_alone(path, SPECS, read, step=value)

watched = Watched()
write("old.h5", 1, watched)
codes = []
for number in range(len(watched.calls) + 1):
    os.mkdir(str(number))
    os.link("old.h5", f"{number}/a.h5")
    child = os.fork()
    if not child:
        write(f"{number}/a.h5", 2, Killing(number))
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
write("again.h5", 3, None)
print(json.dumps([watched.calls, codes]))
"""

# As ALONE, for every writer of one process, and killed before any change that Python makes in the folder.
WRITERS = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.checkpoint.convert.peft import export_peft
from hpcfsdp.launch.lock import RunLock
from hpcfsdp.observe.records import EventsFile, MetricsFile

torch.set_num_threads(1)
folder, model = Path("w"), torch.nn.Linear(3, 4)
folder.mkdir()
torch.save(model.state_dict(), "in.pt")
import_checkpoint("in.pt", "in.h5")
lora = {f"model.lora_{part}.default.weight": torch.ones(2, 2) for part in "AB"}
torch.save(lora, "lora.pt")
import_checkpoint("lora.pt", "lora.h5")

def records():
    RunLock(folder).acquire()
    metrics, events = MetricsFile(folder / "metrics.jsonl", resume_step=1), EventsFile(folder / "events.jsonl")
    for file in (metrics, events):
        file.write({"step": 1})
        file.close()

def state_dict():
    dcp.save(model.state_dict(), storage_writer=checkpoint.HDF5Writer(folder / "a.h5"), no_dist=True)

WRITERS = {
    "posix": lambda: checkpoint.save(folder / "a.h5", model=model),
    "subfiles": lambda: checkpoint.save(folder / "a.h5", model=model, writer="subfiles"),
    "dcp": state_dict,
    "import": lambda: import_checkpoint("in.pt", folder / "a.h5", force=True),
    "safetensors": lambda: export_checkpoint("in.h5", folder / "a.safetensors", force=True),
    "shards": lambda: export_checkpoint("in.h5", folder / "a", shard_bytes=1),
    "shards again": lambda: export_checkpoint("in.h5", folder / "a", shard_bytes=1, force=True),
    "pt": lambda: export_checkpoint("in.h5", folder / "a.pt", force=True),
    "to dcp": lambda: export_checkpoint("in.h5", folder / "a", format="dcp"),
    "to dcp again": lambda: export_checkpoint("in.h5", folder / "a", format="dcp", force=True),
    "peft": lambda: export_peft("lora.h5", folder / "a", {"peft_type": "LORA"}),
    "records": records,
}
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree")

def in_child(write, number):
    # How a child ends that writes, and kills itself before its change of that number.
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [number]

    def look(event, arguments):
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes and str(arguments[0]).startswith(("w/", os.getcwd() + "/w/")):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    try:
        write()
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

def empty(folder):
    for path in folder.iterdir():
        empty(path) if path.is_dir() else path.unlink()
        if path.is_dir():
            path.rmdir()

def hidden():
    return sorted(str(path) for path in folder.rglob(".*") if path.name != ".metadata")

found = {}
for name, write in WRITERS.items():
    found[name] = []
    for number in range(100):
        empty(folder)
        first = in_child(write, 1000) if name.endswith("again") else 0
        codes, left = [first, in_child(write, number)], hidden()
        codes += [in_child(write, 1000)] if codes[1] else []
        found[name].append((codes, left, hidden()))
        if not codes[1]:
            break
print(json.dumps(found))
"""

TOGETHER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import hpcfsdp
from hpcfsdp import checkpoint
from tests.disks import Killing, Watched, using

rank, step = int(sys.argv[2]), sys.argv[3]  # a number of a call, or the name of the first of a kind
world = hpcfsdp.init("cpu")

def save(value, system):
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((7, 13), float(value)))})
    model = hpcfsdp.FullyShardedDataParallel(model)
    with using(system):
        checkpoint.save("a.h5", model=model, step=value)

if rank < 0:
    save(3, None)
else:
    watched = Watched()
    save(1, watched)
    with open(f"calls-{world.rank}", "w") as file:
        json.dump(watched.calls, file)
    save(2, Killing(int(step) if step.isdigit() else watched.calls.index(step)) if world.rank == rank else None)
hpcfsdp.finalize()
"""


def partials(folder):
    return sorted(folder.glob(".*.partial"))


def check_left(folder):
    """A partial file of a killed save is not a checkpoint, or a complete one that has not been renamed."""
    for left in partials(folder):
        try:
            assert value_of(left) == 2
        except CheckpointCorruptError as error:
            assert str(error).startswith(f"{left}: ")


def make_old(paths):
    for path in paths:
        os.utime(path, (path.stat().st_mtime - 2 * ABANDONED_AFTER_S,) * 2)


def test_a_process_that_is_killed_at_any_call_leaves_the_old_file_or_the_new_one(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    job = start(script, ROOT).wait()
    assert job.code == 0, job.stderr
    calls, codes = json.loads(job.stdout)
    assert codes == [-9] * len(calls) + [0]
    left = 0
    for number in range(len(codes)):
        folder = tmp_path / str(number)
        assert value_of(folder / "a.h5") == (2 if "replace" in calls[:number] else 1)
        check_left(folder)
        assert latest(folder) is None  # a partial file is none of a run's checkpoints
        left += len(partials(folder))
    assert left >= calls.index("replace") - 1  # from when it is made until it has its name
    assert value_of(tmp_path / "again.h5") == 3


def test_after_a_kill_of_any_writer_the_next_one_succeeds_and_nothing_hidden_stays(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WRITERS)
    job = start(script, ROOT).wait()
    assert job.code == 0, job.stderr
    for name, turns in json.loads(job.stdout).items():
        *kills, (codes, *_) = turns
        assert codes == [0, 0], name
        # The lock of a run is made in one step, and leaves nothing hidden.
        assert name == "records" or sum(bool(left) for _, left, _ in kills) > 1, name
        for codes, left, hidden in kills:
            # What was killed after its last change of a name is whole, and not replaced without force.
            refused = codes == [0, -9, 1] and not left and name in ("to dcp", "shards", "peft")
            assert (codes == [0, -9, 0] or refused) and hidden == [], (name, codes, left, hidden)


def killed(start, tmp_path, rank, step):
    """Kill one of two ranks at a call of a save, and check the remaining files; the folder, and the calls of a save."""
    script = tmp_path / "script.py"
    script.write_text(TOGETHER)
    folder = tmp_path / f"{rank}-{step}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    job = start(script, ROOT, rank, step, ranks=2, cwd=folder)
    job.wait_for(lambda: job.family() or job.process.poll() is not None)
    family = job.family()
    job.wait()
    assert job.code != 0
    assert not survivors(family)
    calls = json.loads((folder / f"calls-{rank}").read_text())
    number = step if isinstance(step, int) else calls.index(step)
    assert number < len(calls)
    named = rank == 0 and "replace" in calls[:number]
    found = value_of(folder / "a.h5")
    # Once all ranks have written, a rank that dies may or may not have been waited for.
    assert found == (2 if named else 1) or (rank > 0 and calls[number] == "close" and found == 2)
    check_left(folder)
    return folder, calls


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("rank", "step"), [pytest.param(0, "ftruncate", marks=pytest.mark.slow), (1, "pwritev"), (0, "replace")]
)
def test_a_rank_that_is_killed_leaves_the_old_file_and_no_process(start, tmp_path, rank, step):
    folder, _ = killed(start, tmp_path, rank, step)
    assert partials(folder)


def test_an_old_partial_file_of_a_killed_rank_is_removed(start, tmp_path):
    folder, _ = killed(start, tmp_path, 1, "fsync")
    left = partials(folder)
    assert len(left) == 1
    young = left[0].with_name(left[0].name.replace(".partial", "0.partial"))
    shutil.copy(left[0], young)  # this may be a file that another job is just writing
    make_old(left)
    job = start(tmp_path / "script.py", ROOT, -1, 0, ranks=2, cwd=folder).wait()
    assert job.code == 0, job.stderr
    assert value_of(folder / "a.h5") == 3
    assert partials(folder) == [young]


@pytest.mark.fresh
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_at_any_call_leaves_the_old_file_or_the_new_one(start, tmp_path, rank):
    _, calls = killed(start, tmp_path, rank, 0)
    for number in range(1, len(calls)):
        killed(start, tmp_path, rank, number)
