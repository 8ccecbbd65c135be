import errno
import os
import shutil
import time

import h5py
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import retention
from hpcfsdp.checkpoint.format.catalog import ABANDONED_AFTER_S, checkpoint_path, partial_path
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.retention import is_part, which_to_remove
from hpcfsdp.errors import CheckpointError, UsageError
from tests.disks import using

STEPS = st.lists(st.integers(0, 300), max_size=30)
NUMBERS = st.none() | st.integers(1, 40)


@given(STEPS, NUMBERS, NUMBERS)
def test_the_newest_and_multiples_stay_and_all_else_goes(steps, keep_last, keep_every):
    gone = which_to_remove(steps, keep_last=keep_last, keep_every=keep_every)
    kept = set(steps) - gone
    assert gone <= set(steps)
    assert not steps or max(steps) in kept
    if keep_last is None and keep_every is None:
        assert not gone
        return
    newest = set(sorted(set(steps))[-(keep_last or 1) :])
    assert newest <= kept
    for step in set(steps) - newest:
        assert (step in kept) == (keep_every is not None and step % keep_every == 0)


@given(STEPS, NUMBERS, NUMBERS)
def test_what_stays_once_stays_when_asked_again(steps, keep_last, keep_every):
    kept = set(steps) - which_to_remove(steps, keep_last=keep_last, keep_every=keep_every)
    assert which_to_remove(kept, keep_last=keep_last, keep_every=keep_every) == set()


@given(st.lists(st.integers(1, 300), unique=True, min_size=1).map(sorted), NUMBERS, NUMBERS)
def test_a_training_that_removes_after_each_save_keeps_what_one_removal_at_the_end_would(steps, keep_last, keep_every):
    kept = set()
    for step in steps:
        kept.add(step)
        kept -= which_to_remove(kept, keep_last=keep_last, keep_every=keep_every)
    assert kept == set(steps) - which_to_remove(steps, keep_last=keep_last, keep_every=keep_every)


@pytest.mark.parametrize(("rules", "name"), [((1.5, None), "keep_last"), ((None, "3"), "keep_every")])
def test_numbers_that_are_not_whole_are_refused(rules, name):
    with pytest.raises(UsageError, match=rf"^{name} must be a whole number, not "):
        which_to_remove([1], keep_last=rules[0], keep_every=rules[1])


@pytest.mark.parametrize(("rules", "name"), [((0, None), "keep_last"), ((None, -3), "keep_every")])
def test_numbers_that_are_not_positive_are_refused(rules, name):
    with pytest.raises(UsageError, match=rf"^{name} must be at least 1, not "):
        which_to_remove([1], keep_last=rules[0], keep_every=rules[1])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("good") / "a.h5", model=nn.Linear(3, 2)).read_bytes()


@pytest.fixture
def make(tmp_path, good):
    """``make(good="13", bad="2")``: files of steps, of one digit each, good ones and truncated ones."""

    def make_files(good_steps="", bad=""):
        for step in good_steps:
            checkpoint_path(tmp_path, int(step)).write_bytes(good)
        for step in bad:
            checkpoint_path(tmp_path, int(step)).write_bytes(good[: len(good) // 2])
        return tmp_path

    return make_files


def steps(paths):
    return "".join(str(int(path.stem.removeprefix("step-"))) for path in paths)


@given(st.data())
def test_the_last_good_one_never_goes(tmp_path_factory, good, data):
    folder = tmp_path_factory.mktemp("files")
    are_good = data.draw(st.dictionaries(st.integers(0, 20), st.booleans(), max_size=8))
    for step, is_good in are_good.items():
        checkpoint_path(folder, step).write_bytes(good if is_good else good[:100])
    rules = {"keep_last": data.draw(NUMBERS), "keep_every": data.draw(NUMBERS)}
    removal = retention.plan_removal(folder, **rules)
    retention.remove(removal.going)
    left = {int(path.stem.removeprefix("step-")) for path in checkpoint.checkpoint_files(folder)}
    good_steps = [step for step, is_good in are_good.items() if is_good]
    if good_steps:
        assert set(are_good) - left == which_to_remove(are_good, **rules) - {max(good_steps)}
    else:
        assert left == set(are_good)


def test_what_is_damaged_is_reported(make):
    removal = retention.plan_removal(make("12", bad="34"), keep_last=1, keep_every=None)
    assert (steps(removal.going), steps(removal.staying), steps([removal.good])) == ("13", "24", "2")
    assert steps(removal.damaged) == "43"
    assert all(reason.startswith("truncated") for reason in removal.damaged.values())


def test_the_target_of_a_link_that_stays_stays(make):
    folder = make("123", bad="6")
    for step, target in ((4, "step-00000001.h5"), (5, checkpoint_path(folder, 2))):
        checkpoint_path(folder, step).symlink_to(target)
    removal = retention.plan_removal(folder, keep_last=1, keep_every=4)
    retention.remove(removal.going)
    assert steps(removal.staying) == "12456"  # 4 by the rules, 5 since it is the newest good one
    assert all(checkpoint_path(folder, step).exists() for step in (4, 5))


def test_files_that_are_spared_open_or_being_read_stay(make):
    folder = make("1234")
    paths = [checkpoint_path(folder, step) for step in range(5)]
    with retention.reading(paths[1]), BlockReader(checkpoint.open_index(paths[2])):
        removal = retention.plan_removal(folder, keep_last=1, keep_every=None)
        assert steps(removal.going) == "3"
        assert retention.plan_removal(folder, keep_last=1, keep_every=None, spare=[paths[3]]).going == ()
        with retention.reading(paths[1]):
            pass
        assert retention.in_use(paths) == {paths[1], paths[2]}
    assert retention.in_use(paths) == set()


def test_what_is_open_is_looked_up_once_for_all_files(make, monkeypatch):
    looks, look = [], retention._open_files
    monkeypatch.setattr(retention, "_open_files", lambda: looks.append(1) or look())
    retention.plan_removal(make("12345"), keep_last=1, keep_every=None)
    assert len(looks) == 1


def part_of(folder, name):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(f"{name}.") and is_part(path))


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("how", ["copied", "written by another program"])
def test_parts_that_a_copy_in_the_folder_names_stay(tmp_path, how, replaced):
    first = checkpoint_path(tmp_path, 1)
    model = nn.Linear(300, 300)
    checkpoint.save(first, model=model, writer="subfiles")
    parts = part_of(tmp_path, first.stem)
    assert parts
    best = tmp_path / "best.h5"
    if how == "copied":
        shutil.copy(first, best)
    else:
        layout = h5py.VirtualLayout((1,), "f4")
        layout[0] = h5py.VirtualSource(parts[0], "model/weight", (90000,))[0]
        with h5py.File(best, "w") as file:
            file.create_virtual_dataset("x", layout)
    (tmp_path / "other.h5").write_bytes(b"\x89HDF\r\n\x1a\n of another kind")
    checkpoint.save(tmp_path / "whole.h5", model=model)
    if replaced:
        checkpoint.save(first, model=model, writer="subfiles")
    else:
        retention.remove([first])
    assert set(parts) <= set(part_of(tmp_path, first.stem))
    if how == "copied":
        checkpoint.load(best, model=model)
    best.unlink()
    checkpoint.save(first, model=model, writer="subfiles")
    assert len(part_of(tmp_path, first.stem)) == 2
    retention.remove([first])
    assert part_of(tmp_path, first.stem) == parts  # which nobody names any more; abandoned in an hour


def test_nothing_is_opened_where_nothing_is_to_go(make, monkeypatch):
    folder = make("12")
    monkeypatch.setattr(retention, "open_index", None)
    assert retention.plan_removal(folder, keep_last=2, keep_every=None).staying == tuple(
        checkpoint.checkpoint_files(folder)
    )


def test_a_file_that_cannot_be_removed_is_named_and_those_after_it_are_left(make):
    folder = make("123")

    class Failing(System):
        def unlink(self, path):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    removal = retention.plan_removal(folder, keep_last=1, keep_every=None)
    message = r"step-00000001\.h5: cannot be removed: Permission denied"
    with pytest.raises(CheckpointError, match=message), using(Failing()):
        retention.remove(removal.going)
    assert len(checkpoint.checkpoint_files(folder)) == 3


def test_a_file_that_is_gone_already_is_no_error(make):
    folder = make("123")
    removal = retention.plan_removal(folder, keep_last=1, keep_every=None)
    checkpoint_path(folder, 1).unlink()
    retention.remove(removal.going)
    assert steps(checkpoint.checkpoint_files(folder)) == "3"


def test_a_reader_of_a_removed_file_reads_on(make):
    folder = make("12")
    index = checkpoint.open_index(checkpoint_path(folder, 1))
    with BlockReader(index) as reader:
        retention.remove([checkpoint_path(folder, 1)])
        assert torch.from_numpy(reader.read("model/weight", 0, 6)).isfinite().all()


def test_old_partial_files_are_found_and_young_ones_and_others_are_not(tmp_path):
    now_s = time.time()
    old = partial_path(checkpoint_path(tmp_path, 1), "ab"), partial_path(checkpoint_path(tmp_path, 1), "cd")
    young = partial_path(checkpoint_path(tmp_path, 2), "ab")
    old += (partial_path(tmp_path / "best.h5", "ab"),)
    others = tmp_path / ".notes.partial", tmp_path / "step-00000001.h5.ab.partial"
    (tmp_path / ".folder.ab.partial").mkdir()
    os.utime(tmp_path / ".folder.ab.partial", (0, 0))
    for path in (*old, young, *others):
        path.touch()
        if path is not young:
            os.utime(path, (now_s - 2 * ABANDONED_AFTER_S,) * 2)
    assert retention.abandoned(tmp_path, now_s) == sorted(old)
