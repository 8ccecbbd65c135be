"""A file before it has its name: whatever call fails, the file that had the name is whole, and nothing else stays."""

import errno
import itertools
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.catalog import ABANDONED_AFTER_S, partial_path
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.index import check_extents, open_index
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, SavePlan, plan_alone
from hpcfsdp.checkpoint.saving.temporary import BlockWriter
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from tests.disks import Cut, Failing, Forgetful, Logged, Watched, folder_of, power_cuts, using, value_of

SPECS = (
    TensorSpec("model/w", (7, 13), "float32"),
    TensorSpec("model/v", (3,), "bfloat16"),
    TensorSpec("model/empty", (0, 2), "float32"),
    TensorSpec("optim/state/w/step", (), "int64"),
)
CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


def elements(value):
    def read(spec, start, numel):
        return np.full(numel, value, schema.numpy_dtype(spec.dtype))

    return read


def write(path, value, system=None):
    with using(system):
        return write_alone(path, SPECS, elements(value), step=value)


def calls_of(folder):
    watched = Watched()
    write(folder / "dry.h5", 1, watched)
    (folder / "dry.h5").unlink()
    return watched.calls


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_whatever_call_fails_the_old_file_or_the_new_one_is_there_and_nothing_else(tmp_path, code):
    calls = calls_of(tmp_path)
    assert set(calls) >= {"open", "close", "ftruncate", "pwritev", "fsync", "replace"}
    path = write(tmp_path / "a.h5", 1)
    old = path.read_bytes()
    for number, kind in enumerate(calls):
        named = "replace" in calls[:number]
        try:
            write(path, 2, Failing(number, code))
        except CheckpointError as error:
            if named:  # it is the folder that could not be forced to the disk
                told = f"{path}: the new a.h5 is in place, but its name could not be forced to the disk: "
                assert str(error).startswith(f"{told}{os.strerror(code)}. ")
            else:
                assert str(error) == f"{path}: cannot write the checkpoint: {os.strerror(code)}"
        else:
            pytest.fail(f"call {number}, {kind}, failed and nobody was told")
        assert (value_of(path) == 2) if named else (path.read_bytes() == old)
        assert os.listdir(tmp_path) == ["a.h5"]
        write(path, 1)
        old = path.read_bytes()


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_disk_that_fails_for_good_leaves_the_old_file(tmp_path, code):
    path = write(tmp_path / "a.h5", 1)
    calls = calls_of(tmp_path)
    for number in range(calls.index("replace") + 1):
        with pytest.raises(CheckpointError, match=os.strerror(code)):
            write(path, 2, Failing(number, code, lasting=True))
        assert value_of(path) == 1
        # The file with another name could not be removed. It is in nobody's way.
        assert all(name == "a.h5" or name.endswith(".partial") for name in os.listdir(tmp_path))
    write(path, 3)
    assert value_of(path) == 3


@pytest.mark.parametrize("limits", [[1], [3, 1000], [511]])
@pytest.mark.parametrize("interruptions", [0, 2])
def test_calls_that_are_cut_short_or_interrupted_make_no_difference(tmp_path, limits, interruptions):
    cut = write(tmp_path / "a.h5", 5, Cut(limits, interruptions))
    assert value_of(cut) == 5
    assert open_index(cut).footer.regions == open_index(write(tmp_path / "b.h5", 5)).footer.regions


def test_what_savers_of_the_path_left_behind_long_ago_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "a.h5"
    old, young = partial_path(path, "old"), partial_path(path, "young")
    other = partial_path(tmp_path / "b.h5", "old")
    for left in (old, young, other):
        left.write_bytes(b"half")
    for left in (old, other):
        os.utime(left, (left.stat().st_mtime - 2 * ABANDONED_AFTER_S,) * 2)
    write(path, 1)
    assert sorted(os.listdir(tmp_path)) == sorted(["a.h5", young.name, other.name])


def test_names_of_folders_that_are_made_are_forced_to_the_disk(tmp_path):
    forced = []

    class Noting(System):
        def fsync(self, fd):
            forced.append(os.readlink(f"/dev/fd/{fd}"))
            os.fsync(fd)

    write(tmp_path / "a/b/c.h5", 1, Noting())
    assert forced[:2] == [str(tmp_path / "a"), str(tmp_path)]
    assert forced[-1] == str(tmp_path / "a/b")
    made = len(forced)
    write(tmp_path / "a/b/c.h5", 2, Noting())
    assert str(tmp_path) not in forced[made:]


def test_what_cannot_be_removed_is_no_reason_to_fail(tmp_path):
    path = tmp_path / "a.h5"
    old = partial_path(path, "old")
    old.write_bytes(b"half")
    os.utime(old, (old.stat().st_mtime - 2 * ABANDONED_AFTER_S,) * 2)
    write(path, 1, Failing(0, errno.EPERM))  # the first call is the one that removes it
    assert value_of(path) == 1


# The power goes


def logged_save(folder, value, honest=True):
    """The files before, the events, the files after."""
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    system = Logged(honest)
    write(folder / "a.h5", value, system)
    return before, system.events


def outcome(path):
    """What is found at a path: a value, None, or "damaged"."""
    try:
        return value_of(path)
    except CheckpointCorruptError:
        return "damaged"
    except CheckpointError as error:
        assert "No such file" in str(error)
        return None


@pytest.mark.parametrize("old", [None, 1])
def test_after_a_power_cut_at_any_moment_the_old_file_or_the_new_one_is_there(tmp_path, old):
    live, found = tmp_path / "live", tmp_path / "found"
    live.mkdir()
    if old is not None:
        write(live / "a.h5", old)
    before, events = logged_save(live, 2)
    seen = set()
    for _, files in power_cuts(before, events, turns=25):
        folder_of(found, files)
        seen.add(outcome(found / "a.h5"))
        for name in files:
            if name.endswith(".partial"):  # no checkpoint until it has its name: whole, or refused
                assert outcome(found / name) in (2, "damaged")
    assert seen == {old, 2}
    last = max(event.ended for event in events)
    for seed in range(20):  # once the save has returned, the new file is there to stay
        files = Forgetful(before, events).after(last, random.Random(seed), (0.5, 0.5))
        assert files.keys() == {"a.h5"}
        folder_of(found, files)
        assert outcome(found / "a.h5") == 2


def test_a_disk_that_forces_nothing_to_the_disk_is_found_out(tmp_path):
    live, found = tmp_path / "live", tmp_path / "found"
    live.mkdir()
    write(live / "a.h5", 1)
    before, events = logged_save(live, 2, honest=False)
    seen = [outcome(folder_of(found, files) / "a.h5") for _, files in power_cuts(before, events, turns=25)]
    assert set(seen) == {1, 2, "damaged"}  # the model of the disk does forget, and what is half is refused


# Extents


@st.composite
def plans(draw):
    """Tensors, blocks of them in file order, some of runs with a stride, and by whom each is written."""
    specs, blocks = [], []
    for index in range(draw(st.integers(1, 4))):
        rows, columns = draw(st.integers(0, 6)), draw(st.integers(1, 6))
        specs.append(TensorSpec(f"model/{index}", (rows, columns), draw(st.sampled_from(["float32", "bfloat16"]))))
        if rows > 1 and draw(st.booleans()):  # cut along the columns
            edges = sorted({0, columns, *draw(st.lists(st.integers(0, columns), max_size=3))})
            blocks += [(index, rows, low, high - low, columns) for low, high in itertools.pairwise(edges)]
        else:
            numel = rows * columns
            edges = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
            blocks += [(index, 1, low, high - low, high - low) for low, high in itertools.pairwise(edges)]
    found = np.zeros(len(blocks), BLOCK_DTYPE)
    for row, (tensor, count, start, numel, stride) in zip(found, blocks, strict=True):
        row["tensor"], row["count"], row["start"], row["numel"], row["stride"] = tensor, count, start, numel, stride
        row["rank"] = draw(st.integers(0, 2))
    gaps = draw(st.lists(st.integers(0, 20), min_size=len(specs), max_size=len(specs)))
    return SavePlan(tuple(specs), found, (), 3), gaps


def laid_out(plan, gaps):
    offsets, end = [], 0
    for spec, gap in zip(plan.specs, gaps, strict=True):
        offsets.append(end + gap)
        end += gap + spec.nbytes
    return offsets, end


def checked(plan, rows, size, regions=()):
    return check_extents("a.h5", {spec.path: spec for spec in plan.specs}, rows, list(regions), size)


@given(plans(), st.lists(st.integers(1, 50), min_size=1, max_size=3))
@settings(max_examples=150)
def test_each_rank_writes_where_the_table_says_under_its_checksum(tmp_path_factory, made, limits):
    plan, gaps = made
    offsets, size = laid_out(plan, gaps)
    values = {spec.path: np.random.default_rng(7).bytes(spec.nbytes) for spec in plan.specs}

    def bytes_of(place):
        block, spec = plan.blocks[place], plan.specs[plan.blocks[place]["tensor"]]
        whole = np.frombuffer(values[spec.path], np.uint8).reshape(spec.numel, spec.itemsize)
        starts = int(block["start"]) + np.arange(block["count"]) * int(block["stride"])
        return np.concatenate([whole[first : first + int(block["numel"])] for first in starts]).reshape(-1)

    path = tmp_path_factory.mktemp("blocks") / "a"
    fd, sums = disk.create(path, size), []
    with using(Cut(limits)):
        for rank in range(plan.num_ranks):
            own = plan.blocks_of(rank)
            sums.append(BlockWriter(fd, plan, offsets, bytes_of).write(own).tobytes())
    disk.close(fd)
    content = path.read_bytes()
    for spec, offset in zip(plan.specs, offsets, strict=True):
        assert content[offset : offset + spec.nbytes] == values[spec.path]
    rows = plan.extent_rows(offsets, sums)
    checked(plan, rows, size)
    for place, row in enumerate(rows):
        assert row["checksum"] == schema.checksum(bytes_of(place).tobytes())
        assert row["byte_offset"] == offsets[row["tensor"]] + int(row["start"]) * plan.specs[row["tensor"]].itemsize


def fault(name):
    """Decorator of a function that spoils a table of extents in one place, or returns None where it cannot."""

    def keep(function):
        FAULTS[name] = function
        return function

    return keep


FAULTS = {}


@fault("gap")
def _(rows, at, plan):
    return np.delete(rows, at)


@fault("twice")
def _(rows, at, plan):
    return np.insert(rows, at, rows[at])


@fault("shorter")
def _(rows, at, plan):
    rows["numel"][at] -= 1


@fault("longer")
def _(rows, at, plan):
    rows["numel"][at] += 1


@fault("moved")
def _(rows, at, plan):
    rows["start"][at] += 1


@fault("unsorted")
def _(rows, at, plan):
    other = next((n for n in range(len(rows)) if rows[n]["tensor"] != rows[at]["tensor"]), None)
    if other is None:
        return None
    rows[[at, other]] = rows[[other, at]]


@fault("another tensor")
def _(rows, at, plan):
    rows["tensor"][at] = len(plan.specs)


@fault("no run")
def _(rows, at, plan):
    rows["count"][at] = 0


@fault("too many runs")
def _(rows, at, plan):
    rows["count"][at] = 0xFFFFFFFF


@fault("huge stride")
def _(rows, at, plan):
    if rows["count"][at] == 1:
        return None
    rows["stride"][at] = 1 << 63


@fault("beyond the file")
def _(rows, at, plan):
    rows["byte_offset"][at] += 1 << 20


@fault("beyond any file")
def _(rows, at, plan):
    rows["byte_offset"][at] = (1 << 64) - 8


@given(plans(), st.sampled_from(sorted(FAULTS)), st.data())
@settings(max_examples=400)
def test_a_table_of_extents_with_a_fault_is_refused(made, name, data):
    plan, gaps = made
    offsets, size = laid_out(plan, gaps)
    if not len(plan.blocks):
        return
    rows = plan.extent_rows(offsets, [bytes(8 * len(plan.blocks_of(rank))) for rank in range(3)])
    before = rows.copy()
    changed = FAULTS[name](rows, data.draw(st.integers(0, len(rows) - 1)), plan)
    rows = rows if changed is None else changed
    if np.array_equal(rows, before):
        return
    with pytest.raises(CheckpointCorruptError, match=r"^a\.h5: (damaged|truncated): "):
        checked(plan, rows, size)


def test_tensors_that_lie_on_something_else_are_refused():
    plan = plan_alone(SPECS[:2])
    rows = plan.extent_rows([0, 364], [bytes(16)])
    checked(plan, rows, 370)
    for regions in ([(0, 1)], [(363, 364)], [(100, 104)]):
        with pytest.raises(CheckpointCorruptError, match="two of its byte ranges overlap"):
            checked(plan, rows, 400, regions)
    rows["byte_offset"][1] -= 1
    with pytest.raises(CheckpointCorruptError, match="two of its byte ranges overlap"):
        checked(plan, rows, 400)


@pytest.mark.parametrize("shape", [(1 << 61,), (1 << 40, 1 << 40), (1 << 62, 4)])
def test_sizes_that_no_file_has_are_refused(shape):
    specs = (TensorSpec("model/w", shape, "float64"),)
    rows = np.zeros(1, schema.EXTENT_DTYPE)
    rows["count"], rows["numel"] = 1, specs[0].numel & ((1 << 64) - 1)
    rows["stride"] = rows["numel"]
    with pytest.raises(CheckpointCorruptError, match="beyond any file"):
        check_extents("a.h5", {spec.path: spec for spec in specs}, rows, [], 1000)
