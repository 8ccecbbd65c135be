"""A process that is killed at any step of a save: the old checkpoint stays, and later saves succeed."""

import json
import os
import shutil

import pytest

from hpcfsdp.checkpoint.catalog import ABANDONED_AFTER_S, latest
from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointCorruptError
from tests.cli.conftest import ROOT, survivors

# One process that forks: each child saves, and kills itself before one more call than the child before it.
ALONE = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.single import write_alone
from tests.disks import Killing, Watched

SPECS = [TensorSpec("model/w", (7, 13), "float32"), TensorSpec("model/v", (3,), "bfloat16")]

def write(path, value, system):
    read = lambda spec, start, numel: np.full(numel, value, schema.numpy_dtype(spec.dtype))
    write_alone(path, SPECS, read, step=value, files=Files(system))

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

TOGETHER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import nn
import hpcfsdp
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.files import Files
from tests.disks import Killing, Watched

rank, step = int(sys.argv[2]), sys.argv[3]  # a number of a call, or the name of the first of a kind
world = hpcfsdp.init("cpu")

def save(value, system):
    model = nn.ParameterDict({"w": nn.Parameter(torch.full((7, 13), float(value)))})
    model = hpcfsdp.FullyShardedDataParallel(model)
    checkpoint.save("a.h5", model=model, step=value, files=Files(system))

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


def value_of(path):
    """The step of a file, after every byte has been read. All elements must be equal to it."""
    index = open_index(path)
    with BlockReader(index) as reader:
        found = {int(x) for name in index.tensors for block in reader.blocks(name) for x in block}
    assert found == {index.info.step}, "a mix"
    return index.info.step


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


@pytest.mark.parametrize(("rank", "step"), [(0, "ftruncate"), (1, "pwritev"), (0, "replace")])
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_at_any_call_leaves_the_old_file_or_the_new_one(start, tmp_path, rank):
    _, calls = killed(start, tmp_path, rank, 0)
    for number in range(1, len(calls)):
        killed(start, tmp_path, rank, number)
