"""Checkpoints of a file for each node: read like those of one file, by us and by HDF5 alone; and never half of one."""

import errno
import os

import h5py
import numpy as np
import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import retention
from hpcfsdp.checkpoint.format.catalog import ABANDONED_AFTER_S, checkpoint_files
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.footer import packed_bytes
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.saving import subfiles
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError
from hpcfsdp.launch.topology import Topology
from tests.disks import using
from tests.mpi.models import adamw, make_net, shard, train_sharded

pytestmark = pytest.mark.ranks(3)


@pytest.fixture
def team(world, make_comm, monkeypatch):
    """All ranks, as if they were on two nodes; tensors of any size are divided."""
    monkeypatch.setattr(subfiles, "LEAST_BYTES", 1)
    whole = Topology.regular(1, world.size)
    return make_comm(whole.split(2) if world.size > 1 else whole)


@pytest.fixture
def model(team):
    return shard(make_net(), team)


def nodes(team):
    return team.topology.num_nodes


def names(path):
    return sorted(file.name for file in path.iterdir())


def parts_in(path, stem="x"):
    return sorted(path.glob(f"{stem}.*.node-*.h5"))


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def everything(path):
    """All tensors of a checkpoint, through this reader."""
    index = open_index(path)
    with BlockReader(index) as reader:
        return {name: reader.read(name, 0, spec.numel) for name, spec in index.tensors.items()}


@pytest.mark.ranks(3, 1, 4)
@pytest.mark.hdf5
def test_what_is_loaded_is_what_was_saved_by_any_ranks(team, model, comm, shared_path):
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(3), team)
    checkpoint.save(shared_path / "x.h5", model=model, optimizer=optimizer, step=3, writer="subfiles")
    assert len(parts_in(shared_path)) == nodes(team)
    assert checkpoint_files(shared_path) == []
    again = shard(make_net(seed=5))  # over all ranks on one node
    again_optimizer = adamw(again)
    info = checkpoint.load(shared_path / "x.h5", model=again, optimizer=again_optimizer)
    assert (info.step, info.world_size) == (3, comm.size)
    assert same(model, again)
    assert train_sharded(again, again_optimizer, range(3, 5), comm) == train_sharded(
        model, optimizer, range(3, 5), team
    )
    plain = make_net(seed=6)
    checkpoint.load(shared_path / "x.h5", model=plain)
    checkpoint.save(shared_path / "y.h5", model=plain)
    third = shard(make_net(seed=7), team)
    checkpoint.load(shared_path / "y.h5", model=third)
    checkpoint.load(shared_path / "x.h5", model=model)
    assert same(model, third)


@pytest.mark.hdf5
def test_hdf5_alone_shows_whole_tensors(team, model, shared_path):
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(1), team)
    checkpoint.save(shared_path / "x.h5", model=model, optimizer=optimizer, writer="subfiles")
    checkpoint.save(shared_path / "plain.h5", model=model, optimizer=optimizer)
    if team.rank == 0:
        expected, got = everything(shared_path / "plain.h5"), everything(shared_path / "x.h5")
        assert list(got) == list(expected)
        with h5py.File(shared_path / "x.h5") as file:
            for name, values in expected.items():
                assert got[name].tobytes() == values.tobytes()
                assert file[name].is_virtual == bool(file[name].shape)
                np.testing.assert_array_equal(file[name][()].reshape(-1), values)
            assert not file["model/blocks.0.up.weight"].is_virtual or file["model/blocks.0.up.weight"].shape == (29, 13)
        for part in parts_in(shared_path):
            with h5py.File(part) as file:
                assert file.attrs["format"] == b"hpcfsdp-part"
                assert file.attrs["checkpoint"] == b"x.h5"
            with pytest.raises(CheckpointError, match=r"a part of the checkpoint x\.h5"):
                open_index(part)


def test_small_tensors_stay_in_the_checkpoint(team, model, shared_path, monkeypatch):
    monkeypatch.setattr(subfiles, "LEAST_BYTES", 29 * 13 * 4)
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    index = open_index(shared_path / "x.h5")
    away = {name for name in index.tensors if index.rows_of(name)["file"].any()}
    assert away == {f"model/blocks.{block}.{layer}.weight" for block in (0, 1) for layer in ("up", "down")}
    monkeypatch.setattr(subfiles, "LEAST_BYTES", 1 << 30)
    checkpoint.save(shared_path / "y.h5", model=model, writer="subfiles")
    assert open_index(shared_path / "y.h5").parts == ()
    assert parts_in(shared_path, "y") == []


def test_a_part_that_is_missing_or_another_is_named(team, model, shared_path):
    for name in "xy":
        checkpoint.save(shared_path / f"{name}.h5", model=model, writer="subfiles")
    if team.rank == 0:
        first, other = parts_in(shared_path)[0], parts_in(shared_path, "y")[0]
        kept = first.read_bytes()
        first.write_bytes(other.read_bytes())
        with pytest.raises(CheckpointCorruptError, match=f"{first.name}: damaged, or not the part that x.h5"):
            everything(shared_path / "x.h5")
        first.write_bytes(kept[:-1])
        with pytest.raises(
            CheckpointCorruptError, match=f"{first.name}: truncated: x.h5 knows it with {len(kept)} bytes"
        ):
            everything(shared_path / "x.h5")
        for place in (len(kept) - 1, len(kept) - packed_bytes(0)):
            damaged = bytearray(kept)
            damaged[place] ^= 1
            first.write_bytes(damaged)
            with pytest.raises(CheckpointCorruptError, match=first.name):
                everything(shared_path / "x.h5")
        row = next(row for row in open_index(shared_path / "x.h5").extents if row["file"] == 1)
        damaged = bytearray(kept)
        damaged[int(row["byte_offset"])] ^= 1
        first.write_bytes(damaged)
        with pytest.raises(
            CheckpointCorruptError, match=rf"x\.h5: damaged.*of {first.name}\) do not have their checksum"
        ):
            everything(shared_path / "x.h5")
        first.unlink()
        with pytest.raises(CheckpointError, match=f"{first.name}, which has a part of its tensors"):
            everything(shared_path / "x.h5")
    team.barrier()
    with pytest.raises(CheckpointCorruptError, match=r"node-0\.h5, which has a part of its tensors, is not next to it"):
        checkpoint.load(shared_path / "x.h5", model=shard(make_net(seed=2), team))


def test_parts_go_with_the_checkpoint_that_named_them(team, model, shared_path):
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    old, index = parts_in(shared_path), open_index(shared_path / "x.h5")
    team.barrier()
    with BlockReader(index) as reader:
        team.barrier()
        checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
        assert len(parts_in(shared_path)) == nodes(team)
        assert not set(old) & set(parts_in(shared_path))
        with pytest.raises(CheckpointReplacedError):
            reader.read("model/blocks.0.up.weight", 0, 1)
    team.barrier()
    if team.rank == 0:
        retention.remove([shared_path / "x.h5"])
        assert names(shared_path) == []
    team.barrier()
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    checkpoint.save(shared_path / "x.h5", model=model)
    assert names(shared_path) == ["x.h5"]


def test_parts_that_another_name_of_the_checkpoint_needs_stay(team, model, shared_path):
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    kept = parts_in(shared_path)
    if team.rank == 0:
        os.link(shared_path / "x.h5", shared_path / "best.h5")
        for part in kept:
            os.utime(part, (0, 0))
    team.barrier()
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    assert set(kept) < set(parts_in(shared_path))
    checkpoint.load(shared_path / "best.h5", model=shard(make_net(seed=3), team))


def test_what_a_killed_save_left_behind_is_removed_when_it_is_old(team, model, shared_path):
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    named = parts_in(shared_path)
    left = ["x.0123abcd.node-0.h5", ".x.0123abcd.node-1.h5.0123abcd.partial", ".x.h5.0123abcd.partial"]
    others = ["z.0123abcd.node-0.h5", "x.best.h5", "notes.txt"]
    if team.rank == 0:
        for name in left + others:
            (shared_path / name).write_bytes(b"")
            os.utime(shared_path / name, (0, 0))
        for part in named:
            os.utime(part, (0, 0))
        now = (shared_path / "x.h5").stat().st_mtime
        found = retention.abandoned_parts(shared_path, now)
        assert {path.name for path in found} == {left[0], left[1], others[0]}
        assert retention.abandoned_parts(shared_path, ABANDONED_AFTER_S) == []
    team.barrier()
    checkpoint.save(shared_path / "y.h5", model=model)
    assert set(left) < set(names(shared_path))
    checkpoint.save(shared_path / "x.h5", model=model, writer="subfiles")
    assert not set(left) & set(names(shared_path))
    assert set(others) < set(names(shared_path))
    if team.rank == 0:
        (shared_path / "x.h5").write_bytes((shared_path / "x.h5").read_bytes()[:-9])
        for part in parts_in(shared_path):
            os.utime(part, (0, 0))
        assert retention.abandoned_parts(shared_path, now, "x") == []  # whose they are cannot be known


class Failing(System):
    """The n-th call of one kind finds no room."""

    def __init__(self, name, number):
        self._left = number
        setattr(self, name, lambda *args: self._fail(getattr(System, name), *args))

    def _fail(self, call, *args):
        self._left -= 1
        if self._left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call(*args)


@pytest.mark.parametrize("name", ["open", "ftruncate", "pwritev", "fsync", "replace"])
def test_whatever_fails_on_the_first_or_last_rank_leaves_the_old_checkpoint(team, model, shared_path, name):
    path = shared_path / "x.h5"
    checkpoint.save(path, model=model, step=1, writer="subfiles")
    before, failures = names(shared_path), 0
    for rank in sorted({0, team.size - 1}):
        for number in range(1, 40):
            system = Failing(name, number) if team.rank == rank else System()
            try:
                with using(system):
                    checkpoint.save(path, model=model, step=2, writer="subfiles")
            except CheckpointError as error:
                assert "No space left" in str(error)
                failures += 1
            else:
                break
            team.barrier()
            step = open_index(path).info.step
            # Rank 0 may fail to force the new name to the disk: then the new checkpoint is there, and is whole.
            if step == 1:
                assert names(shared_path) == before
            everything(path)
            team.barrier()
            checkpoint.save(path, model=model, step=1, writer="subfiles")
            before = names(shared_path)
        checkpoint.save(path, model=model, step=1, writer="subfiles")
        before = names(shared_path)
        # Parts of a checkpoint are kept that may come back, should the disk not know yet that it has been replaced.
        old = retention.abandoned_parts(shared_path, path.stat().st_mtime + 2 * ABANDONED_AFTER_S)
        assert len(before) == 1 + nodes(team) + len(old)
        assert len(old) <= nodes(team) * failures
        assert not old or name in ("open", "fsync")
    assert failures
