"""A checkpoint holds the model and the run, whoever wrote it and whoever reads it; and a failure loses nothing."""

import errno
import os
import re
import time

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.catalog import ABANDONED_AFTER_S, partial_path
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    DifferentCallsError,
    DisagreementError,
)
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.params.layout import FlatLayout
from tests.disks import using
from tests.mpi.models import (
    Block,
    Net,
    adamw,
    make_net,
    plain_copy,
    shard,
    train_plain,
    train_sharded,
    whole_parameters,
)

pytestmark = pytest.mark.ranks(2, 1, 3)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def trained(comm, steps=3, dropout=0.0, group=None):
    model = shard(make_net(dropout), group)
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(steps), comm)
    return model, optimizer


@pytest.mark.ranks(2, 1, 3, 4)
@pytest.mark.transport
@pytest.mark.hdf5
def test_ten_steps_saved_and_ten_more_are_bitwise_twenty(comm, shared_path):
    torch.manual_seed(comm.rank)
    uninterrupted, optimizer = trained(comm, 0, dropout=0.3)
    torch.manual_seed(comm.rank)
    expected = train_sharded(uninterrupted, optimizer, range(20), comm)

    first, first_optimizer = trained(comm, 0, dropout=0.3)
    torch.manual_seed(comm.rank)
    train_sharded(first, first_optimizer, range(10), comm)
    checkpoint.save(shared_path / "ten.h5", model=first, optimizer=first_optimizer, step=10)

    torch.manual_seed(999)
    second, second_optimizer = trained(comm, 2, dropout=0.3)  # not fresh: everything must be replaced
    info = checkpoint.load(shared_path / "ten.h5", model=second, optimizer=second_optimizer)
    assert (info.step, info.world_size) == (10, comm.size)
    assert train_sharded(second, second_optimizer, range(10, 20), comm) == expected[10:]
    assert same(second, uninterrupted)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "rmsprop", "adagrad"])
@pytest.mark.ranks(2)
def test_optimizers_go_on_as_if_nothing_had_been(comm, shared_path, kind):
    def make(model):
        return {
            "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
            "sgd": lambda p: torch.optim.SGD(p, 1e-2),
            "momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
            "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True),
            "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
        }[kind](model.parameters())

    model = shard(make_net())
    optimizer = make(model)
    train_sharded(model, optimizer, range(3), comm)
    optimizer.param_groups[0]["lr"] *= 0.5
    checkpoint.save(shared_path / "x.h5", model=model, optimizer=optimizer, step=3)
    again = shard(make_net(seed=5))
    again_optimizer = make(again)
    checkpoint.load(shared_path / "x.h5", model=again, optimizer=again_optimizer)
    assert again_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    expected = train_sharded(model, optimizer, range(3, 6), comm)
    assert train_sharded(again, again_optimizer, range(3, 6), comm) == expected
    assert same(model, again)


@pytest.mark.ranks(4, 3)
@pytest.mark.transport
@pytest.mark.hdf5
def test_any_number_of_ranks_loads_any_file(world, comm, shared_path):
    # Each number of ranks, 1 up to all, saves and loads within this one start of processes.
    def group_of(ranks):
        part = world.comm.Split(0 if world.rank < ranks else 1)
        return MpiCommunicator(part) if world.rank < ranks else None

    groups = {ranks: group_of(ranks) for ranks in range(1, world.size + 1)}
    plain = make_net()
    expected = train_plain(plain, adamw(plain), range(8))
    for writers, group in groups.items():
        if group is not None:
            model, optimizer = trained(group, 4, group=group)
            checkpoint.save(shared_path / f"{writers}.h5", model=model, optimizer=optimizer, step=4)
    world.comm.Barrier()
    for writers in groups:
        for group in (g for g in groups.values() if g is not None):
            model = shard(make_net(seed=7), group)
            optimizer = adamw(model)
            info = checkpoint.load(shared_path / f"{writers}.h5", model=model, optimizer=optimizer)
            assert info.world_size == writers
            got = train_sharded(model, optimizer, range(4, 8), group)
            torch.testing.assert_close(got, expected[4:], rtol=1e-5, atol=0)
            if group.size == writers:
                bitwise, bitwise_optimizer = trained(group, 4, group=group)
                train_sharded(bitwise, bitwise_optimizer, range(4, 8), group)
                assert same(model, bitwise)


def test_ranks_beyond_those_that_wrote_draw_numbers_of_their_own(world, comm, shared_path):
    alone = MpiCommunicator(world.comm.Split(world.rank))
    if world.rank == 0:
        checkpoint.save(shared_path / "one.h5", model=shard(make_net(), alone))
    world.comm.Barrier()
    model = shard(make_net())
    drawn = []
    for _ in range(2):
        checkpoint.load(shared_path / "one.h5", model=model)
        drawn.append(comm.all_gather_object(torch.rand(4).tolist()))
    assert drawn[0] == drawn[1]
    assert len({tuple(numbers) for numbers in drawn[0]}) == comm.size


def test_plain_and_sharded_models_read_each_others_files(comm, shared_path):
    model, optimizer = trained(comm)
    checkpoint.save(shared_path / "sharded.h5", model=model, optimizer=optimizer, step=3)
    plain = Net()
    plain_optimizer = adamw(plain)
    checkpoint.load(shared_path / "sharded.h5", model=plain, optimizer=plain_optimizer)
    checkpoint.save(shared_path / "plain.h5", model=plain, optimizer=plain_optimizer, step=3)
    again = shard(make_net(seed=3))
    again_optimizer = adamw(again)
    checkpoint.load(shared_path / "plain.h5", model=again, optimizer=again_optimizer)
    assert same(model, again)
    expected = train_sharded(model, optimizer, range(3, 6), comm)
    torch.testing.assert_close(train_plain(plain, plain_optimizer, range(3, 6)), expected, rtol=1e-5, atol=0)
    assert train_sharded(again, again_optimizer, range(3, 6), comm) == expected


def test_other_units_load_the_same_file(comm, shared_path):
    model, optimizer = trained(comm)
    checkpoint.save(shared_path / "blocks.h5", model=model, optimizer=optimizer, step=3)
    whole = FullyShardedDataParallel(make_net(seed=3))
    whole_optimizer = adamw(whole)
    checkpoint.load(shared_path / "blocks.h5", model=whole, optimizer=whole_optimizer)
    expected = train_sharded(model, optimizer, range(3, 6), comm)
    torch.testing.assert_close(train_sharded(whole, whole_optimizer, range(3, 6), comm), expected, rtol=1e-5, atol=0)


def test_every_parameter_stands_under_its_own_name_with_its_own_shape(comm, shared_path):
    model, optimizer = trained(comm)
    path = checkpoint.save(shared_path / "named.h5", model=model, optimizer=optimizer, step=3)
    whole = whole_parameters(model, shared_path / "again.h5")
    with h5py.File(path) as file:
        assert set(file["model"]) == set(Net().state_dict())
        for name, tensor in Net().state_dict().items():
            assert file["model"][name].shape == tuple(tensor.shape)
            assert np.array_equal(file["model"][name][...], whole[name].numpy())
        assert file["model/head.weight"] == file["model/embed.weight"]  # tied: one dataset, two names
        assert file["optim/state/blocks.0.up.weight/exp_avg"].shape == (29, 13)
        assert file["optim/state/blocks.0.up.weight/step"][()] == 3
        assert file.attrs["committed"] == 1
        # A rank's part of a dataset is one run of bytes, and the runs tile it.
        rows = file["meta/extents"][...]
        names = [name.decode() for name in file["meta/tensors"]["path"]]
        runs = rows[rows["tensor"] == names.index("model/blocks.0.up.weight")]
        assert runs["numel"].sum() == 29 * 13
        assert len(set(runs["rank"])) == len(runs)


def test_extra_and_config_come_back_on_every_rank(comm, shared_path):
    extra = {"schedule": {"last": [1, 2.5, None, "x"]}, "table": torch.arange(6).view(2, 3), "flag": True}
    path = checkpoint.save(shared_path / "extra.h5", model=shard(make_net()), step=7, extra=extra, config={"lr": 1e-3})
    info = checkpoint.load(path, model=shard(make_net()))
    assert info.extra["schedule"] == extra["schedule"]
    assert info.extra["table"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert info.extra["flag"] is True
    assert (info.config, info.step, info.path) == ({"lr": 1e-3}, 7, path)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList([Block()])
        self.norm = nn.LayerNorm(12)
        self.added = nn.Linear(2, 2)


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(comm, shared_path):
    checkpoint.save(shared_path / "net.h5", model=shard(make_net()))
    other = shard(Narrow())
    before = [param.detach().clone() for param in other.parameters()]
    drawn = torch.get_rng_state()
    with pytest.raises(CheckpointMismatchError) as caught:
        checkpoint.load(shared_path / "net.h5", model=other)
    message = str(caught.value)
    for line in (
        "missing in the file: added.weight [2, 2]",
        "differing: norm.weight is [13] float32 in the file, [12] float32 in the model",
        "unexpected in the file: blocks.1.up.weight [29, 13]",
        "unexpected in the file: head.weight [11, 13]",
    ):
        assert line in message
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())


def test_an_optimizer_that_was_not_saved_or_has_other_groups_is_refused(comm, shared_path):
    model, optimizer = trained(comm, 1)
    checkpoint.save(shared_path / "without.h5", model=model)
    with pytest.raises(CheckpointMismatchError, match="holds no optimizer"):
        checkpoint.load(shared_path / "without.h5", model=model, optimizer=optimizer)
    checkpoint.save(shared_path / "one_group.h5", model=model, optimizer=optimizer)
    first, *rest = model.parameters()
    two_groups = torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.5}])
    with pytest.raises(CheckpointMismatchError, match="no group of the checkpoint has these"):
        checkpoint.load(shared_path / "one_group.h5", model=model, optimizer=two_groups)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="after wrapping the model"):
        checkpoint.save(shared_path / "stranger.h5", model=model, optimizer=stranger)


def damage(path, name, byte):
    """Flip a bit of a tensor."""
    with h5py.File(path) as file:
        offset = file[name].id.get_offset() + byte
    with open(path, "r+b") as raw:
        raw.seek(offset)
        flipped = bytes([raw.read(1)[0] ^ 16])
        raw.seek(offset)
        raw.write(flipped)


def tensors_of(names, value):
    """A plain model of tensors, each element of which has a value."""
    return nn.ParameterDict({name: nn.Parameter(torch.full((100,), value)) for name in names})


def test_a_damaged_block_is_found_by_some_rank_and_changes_nothing_on_any(comm, shared_path):
    model, optimizer = trained(comm)
    path = checkpoint.save(shared_path / "damaged.h5", model=model, optimizer=optimizer)
    if comm.rank == 0:
        damage(path, "model/blocks.1.down.weight", 41)
    comm.all_gather_object(None)
    again = shard(make_net(seed=3))
    again_optimizer = adamw(again)
    before = [param.detach().clone() for param in again.parameters()]
    with pytest.raises(CheckpointCorruptError, match=r"blocks\.1\.down\.weight.*checksum"):
        checkpoint.load(path, model=again, optimizer=again_optimizer, fresh=False)
    assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
    assert not again_optimizer.state


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_a_fresh_model_is_read_once_and_is_nan_on_all_ranks_after_damage_to_any_tensor(
    comm, shared_path, monkeypatch, original, thorough
):
    model = shard(make_net(), use_orig_params=original)
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(2), comm)
    path = checkpoint.save(shared_path / "fresh.h5", model=model, optimizer=optimizer)

    def check_rows(self, places):
        raise AssertionError("it is read twice")

    monkeypatch.setattr(BlockReader, "check_rows", check_rows)
    again = shard(make_net(seed=3), use_orig_params=original)
    again_optimizer = adamw(again)
    for name, spec in list(open_index(path).tensors.items())[:: 1 if thorough else 4]:
        if comm.rank == 0:
            damage(path, name, spec.nbytes - 1)
        comm.all_gather_object(None)
        before = [param.detach().clone() for param in again.parameters()]
        with pytest.raises(CheckpointCorruptError, match=rf"{re.escape(name)}.*checksum") as caught:
            checkpoint.load(path, model=again, optimizer=again_optimizer)
        nan = [param.isnan() for param in again.parameters() if param.numel()]
        if name.startswith("optim/"):  # it gets new memory, before anything changes
            assert all(torch.equal(a, b) for a, b in zip(before, again.parameters(), strict=True))
        else:
            # A flat parameter has gaps between parameters.
            assert all(found.all() if original else found.any() for found in nan)
            assert "are NaN now" in str(caught.value)
        assert not again_optimizer.state
        comm.all_gather_object(None)
        if comm.rank == 0:
            damage(path, name, spec.nbytes - 1)  # back again
        comm.all_gather_object(None)
        checkpoint.load(path, model=again, fresh=True)
        assert same(model, again)


def test_a_model_is_fresh_on_all_ranks_or_on_none(several, comm, shared_path):
    model, _ = trained(comm, 0)
    path = checkpoint.save(shared_path / "a.h5", model=model)
    with pytest.raises(DisagreementError, match="fresh"):
        checkpoint.load(path, model=model, fresh=comm.rank == 1)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.ranks(4, 3)
def test_the_ranks_of_a_node_check_a_file_together_and_each_node_what_it_loads(comm, shared_path, monkeypatch, nodes):
    model, _ = trained(comm, 0)
    path = checkpoint.save(shared_path / "shared.h5", model=model)
    index = open_index(path)
    whole, node = dict(make_net().named_parameters()), comm.rank % nodes
    monkeypatch.setattr("hpcfsdp.checkpoint.format.disk._system_id", lambda: str(node))
    real, checked = BlockReader.check_rows, []

    def check_rows(self, places):
        checked.extend(places.tolist())
        real(self, places)

    monkeypatch.setattr(BlockReader, "check_rows", check_rows)
    for other in (Net(), shard(make_net(seed=3))):
        checked.clear()
        checkpoint.load(path, model=other, fresh=False)
        on_node = [places for of, places in comm.all_gather_object((node, checked)) if of == node]
        places = sorted(place for of in on_node for place in of)
        assert len(set(places)) == len(places)
        if nodes == 1 or isinstance(other, Net):  # it is whole on every rank
            assert places == list(range(len(index.extents)))
            assert all(on_node)
        if isinstance(other, Net):
            assert all(torch.equal(param, whole[name]) for name, param in other.named_parameters())
        else:
            assert same(model, other)
    if comm.size == 4 and nodes == 2:  # the halves of a sharded model are on different nodes
        assert 0 < len(places) < len(index.extents)


def test_ranks_that_load_different_tensors_check_all_of_their_own_before_anything_changes(comm, shared_path):
    names = [f"p{number}" for number in range(8)]
    path = checkpoint.save(shared_path / "parts.h5", model=tensors_of(names, 1.0))
    for name in names[1:]:
        if comm.rank == 0:
            damage(path, f"model/{name}", 40)
        comm.all_gather_object(None)
        model = tensors_of(names, 0.0)
        with pytest.raises(CheckpointCorruptError, match=f"{name}.*checksum") as caught:
            checkpoint.load(path, model=model, names=names[:1] if comm.rank % 2 else names, fresh=False)
        assert "a part of the model" not in str(caught.value)
        assert not any(param.any() for param in model.parameters())
        comm.all_gather_object(None)
        if comm.rank == 0:
            damage(path, f"model/{name}", 40)  # back again


def test_a_truncated_file_is_refused_on_every_rank(comm, shared_path):
    model = shard(make_net())
    path = checkpoint.save(shared_path / "short.h5", model=model)
    if comm.rank == 0:
        os.truncate(path, path.stat().st_size // 2)
    comm.all_gather_object(None)
    with pytest.raises(CheckpointCorruptError, match=r"short\.h5"):
        checkpoint.load(path, model=model)


def test_a_missing_file_is_named_on_every_rank(comm, shared_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.h5: No such file"):
        checkpoint.load(shared_path / "nowhere.h5", model=shard(make_net()))


@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "replace"])
def test_a_failure_of_any_rank_is_everyones_and_loses_nothing(comm, shared_path, call, culprit):
    model, optimizer = trained(comm, 1)
    path = checkpoint.save(shared_path / "kept.h5", model=model, optimizer=optimizer, step=1)
    train_sharded(model, optimizer, range(1, 2), comm)
    failing = 0 if culprit == "first" or call == "replace" else comm.size - 1

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    system = System()
    if comm.rank == failing:
        setattr(system, call, fail)
    with pytest.raises(CheckpointError, match=r"kept\.h5.*No space left on device") as caught, using(system):
        checkpoint.save(path, model=model, optimizer=optimizer, step=2)
    assert comm.rank == failing or f"rank {failing}: " in str(caught.value)
    comm.all_gather_object(None)
    assert os.listdir(shared_path) == ["kept.h5"]
    assert checkpoint.load(path, model=model, optimizer=optimizer).step == 1
    checkpoint.save(path, model=model, optimizer=optimizer, step=3)
    assert checkpoint.open_index(path).info.step == 3


def test_a_file_left_by_a_killed_writer_is_no_checkpoint_and_hinders_no_save(comm, shared_path):
    path = checkpoint.checkpoint_files(shared_path)
    assert path == []
    target = shared_path / "step-00000004.h5"
    if comm.rank == 0:
        for token, age_s in (("old", 2 * ABANDONED_AFTER_S), ("new", 0)):
            partial_path(target, token).write_bytes(b"half")
            os.utime(partial_path(target, token), (time.time() - age_s,) * 2)
    comm.all_gather_object(None)
    assert checkpoint.latest(shared_path) is None
    checkpoint.save(target, model=shard(make_net()), step=4)
    assert checkpoint.latest(shared_path) == target
    # The young one may be another job's, which is just writing it.
    assert sorted(os.listdir(shared_path)) == [partial_path(target, "new").name, target.name]


def test_ranks_with_different_optimizers_raise_before_anything_is_written(comm, shared_path):
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    model = shard(make_net())
    kind = torch.optim.SGD if comm.rank else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1)
    train_sharded(model, optimizer, range(1), comm)
    with pytest.raises(DisagreementError, match="plan of the checkpoint"):
        checkpoint.save(shared_path / "never.h5", model=model, optimizer=optimizer)
    assert os.listdir(shared_path) == []


def test_saving_over_a_process_group(world, shared_path):
    model = shard(plain_copy(make_net()), world.process_group)
    path = checkpoint.save(shared_path / "gloo.h5", model=model, step=2)
    assert checkpoint.load(path, model=shard(make_net(seed=2), world.process_group)).step == 2


def test_a_step_that_differs_between_ranks_is_refused(comm, shared_path):
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    with pytest.raises(DisagreementError, match=rf"step differs .* rank 0 has 0, rank {comm.size - 1} has 1"):
        checkpoint.save(shared_path / "x.h5", model=shard(make_net()), step=int(comm.rank == comm.size - 1))
    assert os.listdir(shared_path) == []


DIVERGENCES = {
    "path": (r"path differs .*rank 0 has /.*/0\.h5, rank 1 has /.*/1\.h5", lambda rank: {"path": f"{rank}.h5"}),
    "extra": (r"extra\['a'\]\[1\] differs .*rank 0 has 0, rank 1 has 1", lambda rank: {"extra": {"a": [7, rank]}}),
    "array": (
        r"extra\['a'\] differs .*an array \[2\] of float32",
        lambda rank: {"extra": {"a": torch.full((2,), rank / 2)}},
    ),
    "one more": (
        r"extra\['b'\] differs .*rank 0 has nothing",
        lambda rank: {"extra": {"a": 1, **({"b": 2} if rank == 1 else {})}},
    ),
    "names": (r"names differs .*rank 0 has None, rank.* \['x'\]", lambda rank: {"names": ["x"] if rank else None}),
    "writer": (r"writer differs .*posix.*subfiles", lambda rank: {"writer": "subfiles" if rank == 1 else "posix"}),
    "optimizer": (
        r"optimizer differs .*rank 0 has an optimizer, .* none",
        lambda rank: {"optimizer": None} if rank else {},
    ),
    "lr": (
        r"param_groups\[0\]\['lr'\] differs .*rank 0 has 0\.1, rank 1 has 0\.2",
        lambda rank: {"lr": 0.1 * (rank + 1)},
    ),
}


@pytest.mark.parametrize("what", DIVERGENCES)
def test_what_ranks_give_differently_is_named_before_anything_is_written(several, shared_path, what):
    message, given = DIVERGENCES[what]
    arguments = {"path": "x.h5", **given(several.rank)}
    model = shard(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.pop("lr", 0.1))
    path = shared_path / arguments.pop("path")
    with pytest.raises(DisagreementError, match=f"checkpoint.save: {message}"):
        checkpoint.save(path, model=model, **{"optimizer": optimizer, **arguments})
    assert os.listdir(shared_path) == []


def test_paths_to_load_that_differ_are_named(several, shared_path):
    model = shard(make_net())
    for name in ("0.h5", "1.h5"):
        checkpoint.save(shared_path / name, model=model)
    with pytest.raises(DisagreementError, match=r"checkpoint.load: path differs .*rank 0 has .*0\.h5, rank"):
        checkpoint.load(shared_path / f"{min(several.rank, 1)}.h5", model=model)


def test_ranks_other_than_the_first_need_to_give_neither_path_nor_extra(several, shared_path):
    model, mine = shard(make_net()), several.rank == 0
    path = checkpoint.save(shared_path / "x.h5" if mine else None, model=model, extra={"a": 1} if mine else None)
    assert path == shared_path / "x.h5"
    assert checkpoint.load(path if mine else None, model=model).extra == {"a": 1}


def test_ranks_in_different_calls_name_both(several, shared_path):
    model = shard(make_net())
    path = checkpoint.save(shared_path / "x.h5", model=model)
    manager = checkpoint.CheckpointManager(shared_path)
    calls = {
        "checkpoint.save": lambda: checkpoint.save(path, model=model),
        "checkpoint.load": lambda: checkpoint.load(path, model=model),
        "CheckpointManager.load_latest": lambda: manager.load_latest(model=model),
    }
    for first, other in (("checkpoint.save", "checkpoint.load"), ("CheckpointManager.load_latest", "checkpoint.save")):
        both = rf"(?=.*rank 0 (is in|calls) {first})(?=.*ranks? [1-9].* (in|calls) {other})"
        with pytest.raises(DifferentCallsError, match=both):
            calls[other if several.rank else first]()
    assert checkpoint.load(path, model=model).step == 0  # nobody waits for anybody


def test_units_of_many_parameters_are_planned_in_time_linear_in_them(comm, shared_path, monkeypatch):
    # Counted, not timed: how often the layout is asked for a run.
    model = FullyShardedDataParallel(nn.ParameterList([torch.ones(3) for _ in range(60)]))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    calls, edges, runs = [], FlatLayout.param_edges, FlatLayout.runs

    def counted(*arguments, **options):
        found = runs(*arguments, **options)
        calls.extend(found)
        return found

    monkeypatch.setattr(FlatLayout, "param_edges", lambda *arguments: calls.append(1) or edges(*arguments))
    monkeypatch.setattr(FlatLayout, "runs", counted)
    checkpoint.save(shared_path / "many.h5", model=model, optimizer=optimizer)
    assert 3 * 60 <= len(calls) <= 2 * 3 * 60  # a parameter and two tensors of its state, for this rank and for all


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_a_file_does_not_know_how_the_model_was_sharded(world, comm, shared_path, strategy, original):
    def sharded(seed):
        groups = None
        if "HYBRID" in strategy and comm.size == 4:
            row = [0, 1] if comm.rank < 2 else [2, 3]
            groups = comm.subgroup(row), comm.subgroup([comm.rank % 2, comm.rank % 2 + 2])
        return shard(
            make_net(seed=seed), groups, sharding_strategy=ShardingStrategy[strategy], use_orig_params=original
        )

    plain = make_net()
    expected = train_plain(plain, adamw(plain), range(6))
    path = shared_path / "a.h5"
    model = sharded(0)
    optimizer = adamw(model)
    losses = train_sharded(model, optimizer, range(3), comm)
    checkpoint.save(path, model=model, optimizer=optimizer)

    again = sharded(5)
    resumed = adamw(again)
    checkpoint.load(path, model=again, optimizer=resumed)
    losses += train_sharded(again, resumed, range(3, 6), comm)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    for other in (shard(make_net(seed=6)), make_net(seed=7)):  # sharded in full, and not at all
        fresh = adamw(other)
        checkpoint.load(path, model=other, optimizer=fresh)
        if isinstance(other, FullyShardedDataParallel):
            went_on = train_sharded(other, fresh, range(3, 6), comm)
        else:
            went_on = train_plain(other, fresh, range(3, 6))
        torch.testing.assert_close(went_on, expected[3:], rtol=1e-5, atol=0)


def test_units_on_other_ranks_than_the_model_are_refused_by_name(comm, shared_path):
    if comm.size < 2:
        pytest.skip("needs ranks that differ")
    half = comm.subgroup([comm.rank])
    for strangers_first in (False, True):
        groups = [half, comm] if strangers_first else [comm, half]
        model = nn.ModuleList(FullyShardedDataParallel(nn.Linear(4, 4), group) for group in groups)
        with pytest.raises(CheckpointError, match=r"has process groups of its own, over 1 ranks, but the model is on"):
            checkpoint.save(shared_path / "apart.h5", model=model)
    comm.all_gather_object(None)
    assert not (shared_path / "apart.h5").exists()
