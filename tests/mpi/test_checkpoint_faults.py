"""Whatever fails on whatever rank while a checkpoint is written: all ranks are told, and no checkpoint is lost."""

import errno
import os
import re
import time

import numpy as np
import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.catalog import partial_path
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.launch.topology import Topology
from tests.disks import Cut, Failing, Logged, Watched, folder_of, power_cuts, using, value_of

pytestmark = pytest.mark.pairs

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


def model_of(value, group=None):
    """A small sharded model, each element of which has a value."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(7, 13)), "v": nn.Parameter(torch.zeros(5))})
    with torch.no_grad():
        for param in model.values():
            param.fill_(value)
    return FullyShardedDataParallel(model, process_group=group, use_orig_params=True)  # no padding in parameters()


BOTH = pytest.mark.parametrize("save", ["posix", "subfiles"], indirect=True)


@pytest.fixture
def save(request, comm, make_comm, shared_path, monkeypatch):
    """``save(value, system)``: write ``a.h5`` with these calls of the system on this rank, and wait for all ranks.

    Its parameter is the writer. Files of nodes are written by two nodes, and hold all tensors.
    """
    writer, models, group = getattr(request, "param", "posix"), {}, None
    if writer == "subfiles":
        monkeypatch.setattr("hpcfsdp.checkpoint.saving.subfiles.LEAST_BYTES", 1)
        group = make_comm(Topology.from_labels([rank % 2 for rank in range(comm.size)]))

    def save_value(value, system=None):
        if value not in models:
            models[value] = model_of(value, group)
        try:
            with using(system):
                return checkpoint.save(shared_path / "a.h5", model=models[value], step=value, writer=writer)
        finally:
            comm.all_gather_object(None)

    return save_value


def content_of(folder):
    """The bytes of all files, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names_of(path):
    """The names of a checkpoint's files."""
    return {path.name, *(part.name for part in open_index(path).parts)}


def cases(comm, save):
    """(rank, number, name of the call, those before it) for all calls of a save over an older file."""
    watched = Watched()
    save(1)
    save(1, watched)
    everyone = comm.all_gather_object(watched.calls)
    assert all({"open", "pwritev", "fsync", "close"} <= set(calls) for calls in everyone)
    return [
        (rank, number, kind, calls[:number]) for rank, calls in enumerate(everyone) for number, kind in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("save", "codes"), [*(("posix", (code,)) for code in CODES), ("subfiles", CODES)], indirect=["save"]
)
@pytest.mark.ranks(2)
def test_a_failure_in_any_call_of_any_rank_is_an_error_on_all_and_keeps_the_old_file(comm, shared_path, save, codes):
    path, told, named = shared_path / "a.h5", set(), set()
    for turn, (rank, number, kind, before) in enumerate(cases(comm, save)):
        code = codes[turn % len(codes)]
        save(1)
        old = content_of(shared_path)
        comm.all_gather_object(None)
        error = None
        try:
            save(2, Failing(number, code) if comm.rank == rank else None)
        except CheckpointError as raised:
            error = raised
        said = comm.all_gather_object(None if error is None else str(error))
        where = f"call {number} of rank {rank}, {kind}: {said}"
        if error is None:  # the parts of the old file were not found, or not removed: they stay
            assert rank == 0 and kind in ("open", "fstat", "lseek", "preadv", "fsync", "unlink", "close"), where
            assert value_of(path) == 2 and len(old) > 1, where
            continue
        text = str(error).removeprefix("" if comm.rank == rank else f"rank {rank}: ")
        if "replace" in before[-3:]:  # the folder is opened, forced to the disk, closed
            in_place = rf"the new a\S*\.h5 is in place, but its name could not be .* disk: {os.strerror(code)}\. "
            assert re.match(f"{re.escape(str(path))}: {in_place}", text), where
        else:
            assert text == f"{path}: cannot write the checkpoint: {os.strerror(code)}", where
        if path.read_bytes() == old["a.h5"]:
            assert content_of(shared_path) == old, where
        else:
            assert value_of(path) == 2, where
            named.add((rank, kind))
        told.add(kind)
        assert set(os.listdir(shared_path)) <= names_of(path) | set(old), where
        comm.all_gather_object(None)
    assert told >= {"open", "ftruncate", "pwritev", "fsync", "close", "replace"}
    assert named <= {(0, "open"), (0, "fsync"), (0, "close")}  # what forces the new name to the disk
    model = model_of(9)
    save(3)
    assert checkpoint.load(path, model=model).step == 3
    assert value_of(checkpoint.save(shared_path / "b.h5", model=model, step=3)) == 3


def test_ranks_that_fail_together_raise_their_own_errors(comm, shared_path, save):
    save(1)
    code = CODES[comm.rank % 3]
    with pytest.raises(CheckpointError, match=os.strerror(code)):
        save(2, Failing(3 if comm.rank == 0 else 0, code, lasting=True))  # rank 0 has made the file before
    assert value_of(shared_path / "a.h5") == 1
    save(3)
    assert value_of(shared_path / "a.h5") == 3


@BOTH
@pytest.mark.parametrize("limits", [[1, 7], [100]])
def test_calls_that_are_cut_short_or_interrupted_on_any_rank_make_no_difference(comm, shared_path, save, limits):
    for rank in range(comm.size):
        value = rank + 2
        save(value, Cut(limits, interruptions=2) if comm.rank == rank else None)
        assert value_of(shared_path / "a.h5") == value
        comm.all_gather_object(None)
    save(1, Cut(limits, interruptions=1))
    assert value_of(shared_path / "a.h5") == 1


def test_a_file_that_only_some_ranks_see_is_everyones_error(several, comm, shared_path, save):
    save(1)
    with pytest.raises(CheckpointError, match="does not see the folder of rank 0: save to a file system that all"):
        save(2, Failing(0, errno.ENOENT) if comm.rank == comm.size - 1 else None)
    assert os.listdir(shared_path) == ["a.h5"]
    assert value_of(shared_path / "a.h5") == 1


# The power goes


def outcome(path):
    """What is found at a path: a value, None, or "damaged"."""
    try:
        return value_of(path)
    except CheckpointCorruptError:
        return "damaged"
    except CheckpointError as error:
        assert "No such file" in str(error)
        return None


@BOTH
@pytest.mark.parametrize("old", [None, 1])
@pytest.mark.parametrize("honest", [True, False], ids=["", "forces nothing"])
@pytest.mark.ranks(2)
def test_after_a_power_cut_at_any_moment_the_old_file_or_the_new_one_is_there(
    comm, shared_path, save, tmp_path, old, honest
):
    if old is not None:
        save(old)
    before = content_of(shared_path)
    comm.all_gather_object(None)
    system = Logged(honest)
    save(2, system)
    events = [event for events in comm.all_gather_object(system.events) for event in events]
    # The ranks take turns: each looks at its part of what may be found when the power is back.
    seen = set()
    for turn, (_, files) in enumerate(power_cuts(before, events, turns=5)):
        if turn % comm.size == comm.rank:
            folder_of(tmp_path / "found", files)
            seen.add(outcome(tmp_path / "found" / "a.h5"))
            seen |= {"partial" for name in files if name.endswith(".partial")}
    seen = set().union(*comm.all_gather_object(seen))
    if honest:
        assert seen - {"partial"} == {old, 2}
    else:  # a file of a node may be missing, and it is chance whether all of a file is ever there
        assert {"damaged"} <= seen - {"partial", None} <= {old, 2, "damaged"}
    assert "partial" in seen


# Others that read, write and remove at the same time


@pytest.mark.ranks(3)
def test_two_groups_of_ranks_that_save_to_one_path_leave_one_of_both(several, world, comm, shared_path):
    side = world.rank % 2
    group = MpiCommunicator(world.comm.Split(side))
    seen = set()
    for turn in range(12):
        value = 10 * turn + 1 + side
        time.sleep(0.002 * ((turn * (1 + side)) % 3))
        path = checkpoint.save(shared_path / "a.h5", model=model_of(value, group), step=value)
        world.comm.Barrier()
        found = value_of(path)
        assert found in (10 * turn + 1, 10 * turn + 2)
        seen.add(found % 10)
        assert os.listdir(shared_path) == ["a.h5"]
        world.comm.Barrier()
    model = model_of(0)
    assert checkpoint.load(shared_path / "a.h5", model=model).step == found
    assert seen <= {1, 2}


def test_ranks_that_load_while_others_save_get_a_whole_file_or_raise(several, world, shared_path):
    saves = world.rank == 0
    group = MpiCommunicator(world.comm.Split(0 if saves else 1))
    path = shared_path / "a.h5"
    if saves:
        checkpoint.save(path, model=model_of(1, group), step=1)
    world.comm.Barrier()
    got, replaced = [], 0
    for turn in range(2, 42):
        if saves:
            checkpoint.save(path, model=model_of(turn, group), step=turn)
            time.sleep(0.01 * (turn % 3))
            continue
        model = model_of(0, group)
        try:
            step = checkpoint.load(path, model=model).step
        except CheckpointReplacedError as error:
            assert "replaced" in str(error)
            step, replaced = 0, replaced + 1
        assert {int(x) for param in model.parameters() for x in param.detach().flatten()} <= {step}
        got.append(step)
    world.comm.Barrier()
    if not saves:
        assert len(got) == 40
        assert [step for step in got if step] == sorted(step for step in got if step)  # never back in time
        assert replaced < 40
    assert value_of(path) == 41


def test_a_file_that_is_removed_during_a_load_is_read_to_its_end_or_missed_by_all(several, world, comm, shared_path):
    paths = [shared_path / f"{n}.h5" for n in range(10)]
    saved = model_of(3)
    for n, path in enumerate(paths):
        checkpoint.save(path, model=saved, step=3)
        model = model_of(0)
        told = None
        if world.rank == 1:
            time.sleep(0.0005 * n)
            os.unlink(path)
        try:
            step = checkpoint.load(path, model=model).step
        except CheckpointError as error:
            assert "No such file or directory" in str(error)
            step, told = 0, type(error)
        assert {int(x) for param in model.parameters() for x in param.detach().flatten()} <= {step}
        assert len(set(comm.all_gather_object((step, told)))) == 1


def test_what_a_killed_save_left_behind_disturbs_no_later_one(comm, shared_path, save):
    save(1)
    left = partial_path(shared_path / "a.h5", "left")
    if comm.rank == 0:
        left.write_bytes(np.random.default_rng(0).bytes(5000))
    comm.all_gather_object(None)
    save(2)
    assert value_of(shared_path / "a.h5") == 2
    assert sorted(os.listdir(shared_path)) == sorted([left.name, "a.h5"])
