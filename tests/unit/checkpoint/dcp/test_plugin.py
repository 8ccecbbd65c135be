"""Storage for torch's distributed checkpoints. The ranks run one after the other in one process."""

import dataclasses
import errno
import gc
import os
import pickle
import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer, open_index
from hpcfsdp.checkpoint.dcp.reader import read_box
from hpcfsdp.checkpoint.format import entry_names as names
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.cli.main import main
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointReplacedError
from hpcfsdp.params.layout import Box
from tests.disks import using
from tests.unit.checkpoint.examples import equal, grids, part

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class GivenPlanner:
    """A planner of one rank, of which the items are given."""

    def __init__(self, state):
        self.state = state

    def lookup_object(self, index):
        return self.state[index.fqn, index.offset]

    def resolve_data(self, item):
        return self.lookup_object(item.index)


def item_of(name, tensor, box, shape):
    index = MetadataIndex(name, box.offsets)
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def ranks_of(whole, owners):
    """Plan and planner of each rank.

    Args:
        whole: tensors by name.
        owners: (rank, name, box) of everything.
    """
    size = 1 + max(rank for rank, *_ in owners)
    states, items = [{} for _ in range(size)], [[] for _ in range(size)]
    for rank, name, box in owners:
        items[rank].append(item_of(name, whole[name], box, whole[name].shape))
        states[rank][name, torch.Size(box.offsets)] = part(whole[name], box)
    return [SavePlan(own, planner_data={}) for own in items], [GivenPlanner(state) for state in states]


def saved_by_ranks(path, plans, planners, **options):
    """What ``dcp.save`` does on several ranks, one after the other."""
    writers = [HDF5Writer(path, **options) for _ in plans]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plans = [writer.prepare_local_plan(plan) for writer, plan in zip(writers, plans, strict=True)]
    plans = [pickle.loads(pickle.dumps(plan)) for plan in writers[0].prepare_global_plan(plans)]
    results = [w.write_data(plan, p).wait() for w, plan, p in zip(writers, plans, planners, strict=True)]
    writers[0].finish(None, pickle.loads(pickle.dumps(results)))
    return path


@given(grids(), st.data())
def test_any_boxes_of_ranks_become_the_tensor_and_any_box_is_read(tmp_path_factory, grid, data):
    shape, boxes = grid
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]))
    whole = {"model.x": torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)}
    owners = [(data.draw(st.integers(0, 3)), "model.x", box) for box in boxes]
    path = saved_by_ranks(tmp_path_factory.mktemp("a") / "a.h5", *ranks_of(whole, owners))
    index = open_index(path)
    [spec] = index.tensors.values()
    assert (spec.path, spec.shape) == ("model/model.x", shape)
    low = [data.draw(st.integers(0, size)) for size in shape]
    box = Box(tuple(low), tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, low, strict=True)))
    for verify in (True, False):
        with BlockReader(index, verify=verify) as blocks:
            found = read_box(blocks, spec, box)
        assert torch.equal(torch.from_numpy(found).view(dtype), part(whole["model.x"], box).reshape(-1))


def test_columns_of_a_large_tensor_are_strided_extents(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcfsdp.checkpoint.dcp.reader.AT_ONCE", 1 << 20)
    whole = {"w": torch.randn(3000, 1000)}
    boxes = [Box((0, 0), (3000, 300)), Box((0, 300), (3000, 450)), Box((0, 750), (3000, 250))]
    path = saved_by_ranks(tmp_path / "a.h5", *ranks_of(whole, [(rank, "w", box) for rank, box in enumerate(boxes)]))
    index = open_index(path)
    assert len(index.extents) == 9 and set(index.extents["count"]) == {1048, 904}
    assert main(["verify", str(path)]) == 0
    target = {"w": torch.zeros(3000, 1000)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, storage_reader=HDF5Reader(path))
    assert torch.equal(target["w"], whole["w"])
    with BlockReader(index) as blocks:
        found = read_box(blocks, index.tensors["model/w"], Box((5, 299), (2000, 2)))
    assert torch.equal(torch.from_numpy(found).view(2000, 2), whole["w"][5:2005, 299:301])


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0, 0), (2, 2))], r"the parts on 1 rank\(s\) do not cover each element of model/w, \[4, 2\]"),
        (
            [Box((0, 0), (3, 2)), Box((2, 0), (2, 2))],
            r"the parts on 2 rank\(s\) do not cover each element of model/w, \[4, 2\]",
        ),
        ([Box((0, 0), (4, 2)), Box((3, 0), (2, 2))], r"rank 1 has a block of size \[2, 2\] at \[3, 0\] of model/w"),
    ],
)
def test_parts_that_are_not_a_whole_are_refused(tmp_path, boxes, message):
    plans, planners = ranks_of({"w": torch.zeros(4, 2)}, [(rank, "w", box) for rank, box in enumerate(boxes)])
    with pytest.raises(CheckpointError, match=message):
        saved_by_ranks(tmp_path / "a.h5", plans, planners)
    assert os.listdir(tmp_path) == []


def test_a_planner_that_gives_something_else_than_it_planned_is_refused(tmp_path):
    plans, planners = ranks_of({"w": torch.zeros(4)}, [(0, "w", Box((0,), (4,)))])
    planners[0].state = {key: value.double() for key, value in planners[0].state.items()}
    with pytest.raises(CheckpointError, match=r"planned as \[4\] float32, the planner gives \[4\] float64"):
        saved_by_ranks(tmp_path / "a.h5", plans, planners)
    assert os.listdir(tmp_path) == []


def test_ranks_that_disagree_on_a_tensor_are_refused(tmp_path):
    one, _ = ranks_of({"w": torch.zeros(4)}, [(0, "w", Box((0,), (2,)))])
    other, _ = ranks_of({"w": torch.zeros(4).half()}, [(0, "w", Box((2,), (2,)))])
    with pytest.raises(CheckpointError, match=r"model/w is \[4\] float16 on rank 1, \[4\] float32 on rank 0"):
        HDF5Writer(tmp_path / "a.h5").prepare_global_plan([*one, *other])


def test_the_layout_is_the_same_whatever_values_come_later(tmp_path):
    """Values that are no tensors are known when tensors have been written, and must not move them."""
    state = {"model": {"a": torch.arange(20000.0), "b": torch.arange(5)}, "none": 0}
    long = {**state, "none": "x" * 300000, "more": [(torch.arange(4000),)] * 20}
    with pytest.warns(UserWarning, match="single process"):
        for name, content in (("a.h5", state), ("b.h5", long)):
            dcp.save(content, storage_writer=HDF5Writer(tmp_path / name))
    one, other = open_index(tmp_path / "a.h5"), open_index(tmp_path / "b.h5")
    assert one.extents["byte_offset"].tolist() == other.extents["byte_offset"].tolist()
    assert other.info.extra["none"] == "x" * 300000
    assert main(["verify", str(tmp_path / "b.h5")]) == 0


def make(seed=0, width=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5 ** (seed + 1), betas=(0.5, 0.75))


def train(model, optimizer, steps=2):
    for step in range(steps):
        model(torch.full((3, 3), float(step)) + torch.eye(3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def state_of(model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optim": state}


@ALONE
@pytest.mark.parametrize("outer", ["optim", "optimizer"])
def test_what_the_plug_in_saves_the_engine_loads(tmp_path, outer):
    model, optimizer = make()
    train(model, optimizer)
    state = state_of(model, optimizer)
    state[outer] = state.pop("optim")
    dcp.save({**state, "epoch": 3}, storage_writer=HDF5Writer(tmp_path / "a.h5", step=7, extra={"word": "b"}))
    expected = train(model, optimizer)
    model, optimizer = make(1)
    info = checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert (info.step, info.extra) == (7, {"epoch": 3, "word": "b"})
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert all(map(torch.equal, train(model, optimizer), expected))


@ALONE
@pytest.mark.parametrize("outer", ["optim", "optimizer"])
def test_what_the_engine_saves_the_plug_in_loads(tmp_path, outer):
    model, optimizer = make()
    train(model, optimizer)
    extra = {"words": ["a", "b"], "nested": {"n": 1, "array": np.arange(3)}}
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer, extra=extra)
    expected = train(model, optimizer)
    model, optimizer = make(1)
    state = state_of(model, optimizer)
    target = {"model": state["model"], outer: state["optim"], "extra": {"words": 0, "nested": {"n": 0}}}
    dcp.load(target, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target[outer])
    assert target["extra"] == {"words": ["a", "b"], "nested": {"n": 1}}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(map(torch.equal, train(model, optimizer), expected))


@ALONE
def test_a_state_dict_of_all_kinds_comes_back(tmp_path):
    state = {
        "model": {"w": torch.randn(3, 4), "half": torch.randn(5).bfloat16(), "flag": torch.tensor(True)},
        "optim": {
            "state": {"w": {"step": 3, "m": torch.randn(3, 4), "odd": "text"}},
            "param_groups": [
                {"params": ["w"], "lr": torch.tensor(0.5), "betas": (0.5, 0.75), "array": np.arange(3)},
                {"params": [], "lr": torch.tensor(0.25)},
            ],
        },
        "list": [torch.ones(2), {"a": 1}, [torch.zeros(1)]],
        "nothing": None,
        "pair": (1, (torch.arange(3), b"\0\1")),
        "number": float("nan"),
    }
    dcp.save(state, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    target = {
        "model": {key: torch.zeros_like(value) for key, value in state["model"].items()},
        "optim": {
            "state": {"w": {"step": 0, "m": torch.zeros(3, 4), "odd": 0}},
            "param_groups": [
                {"params": 0, "lr": torch.tensor(0.0), "betas": 0, "array": 0},
                {"params": 0, "lr": torch.tensor(0.0)},
            ],
        },
        "list": [torch.zeros(2), {"a": 0}, [torch.ones(1)]],
        **dict.fromkeys(("nothing", "pair", "number"), 0),
    }
    dcp.load(target, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    assert equal(target, state)
    index = open_index(tmp_path / "a.h5")
    assert [group["lr"] for group in index.param_groups] == [0.5, 0.25]
    assert index.scalars == {"w/step": 3}


@ALONE
def test_a_models_state_dict_alone_loads_with_and_without_outer_keys(tmp_path):
    model, _ = make()
    dcp.save(model.state_dict(), storage_writer=HDF5Writer(tmp_path / "a.h5"))
    for wrap in (lambda state: state, lambda state: {"model": state}):
        other = make(1)[0].state_dict()
        dcp.load(wrap(other), storage_reader=HDF5Reader(tmp_path / "a.h5"))
        assert equal(dict(other), dict(model.state_dict()))
    fresh, _ = make(1)
    checkpoint.load(tmp_path / "a.h5", model=fresh)
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))


@ALONE
def test_stateful_objects_in_one_outer_dict(tmp_path):
    class App:
        def __init__(self, seed):
            self.model, self.optimizer = make(seed)

        def state_dict(self):
            return state_of(self.model, self.optimizer)

        def load_state_dict(self, state):
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    app = App(0)
    train(app.model, app.optimizer)
    dcp.save({"app": app}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    expected, other = train(app.model, app.optimizer), App(1)
    dcp.load({"app": other}, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    assert all(map(torch.equal, train(other.model, other.optimizer), expected))
    model, optimizer = make(2)
    checkpoint.load(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert all(map(torch.equal, train(model, optimizer), expected))


@ALONE
def test_state_dicts_that_are_not_flattened(tmp_path):
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"a.b": torch.ones(2), "n": 1}, storage_writer=HDF5Writer(tmp_path / "a.h5"), planner=planner)
    target = {"a.b": torch.zeros(2), "n": 0}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, storage_reader=HDF5Reader(tmp_path / "a.h5"), planner=planner)
    assert equal(target, {"a.b": torch.ones(2), "n": 1})


@ALONE
def test_values_are_converted_to_the_targets_dtype_and_into_views(tmp_path):
    dcp.save({"w": torch.arange(12.0).view(3, 4)}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    memory = torch.zeros(4, 6, dtype=torch.float64)
    dcp.load({"w": memory.t()[1:4]}, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    assert torch.equal(memory.t()[1:4], torch.arange(12.0, dtype=torch.float64).view(3, 4))
    assert memory[:, 0].count_nonzero() == 0


@ALONE
def test_the_path_may_be_given_as_checkpoint_id(tmp_path):
    writer, reader = HDF5Writer(), HDF5Reader()
    for name, value in (("a.h5", 1.0), ("b.h5", 2.0)):
        dcp.save({"w": torch.tensor(value)}, storage_writer=writer, checkpoint_id=tmp_path / name)
    for name, value in (("a.h5", 1.0), ("b.h5", 2.0)):
        target = {"w": torch.tensor(0.0)}
        dcp.load(target, storage_reader=reader, checkpoint_id=str(tmp_path / name))
        assert target["w"] == value
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5"]


def test_what_checkpoint_ids_are_for_these(tmp_path):
    (tmp_path / "a.h5").touch()
    assert HDF5Writer.validate_checkpoint_id(tmp_path / "new.h5") and HDF5Reader.validate_checkpoint_id(
        tmp_path / "a.h5"
    )
    assert not HDF5Writer.validate_checkpoint_id(tmp_path) and not HDF5Writer.validate_checkpoint_id("s3://a/b.h5")
    assert not HDF5Reader.validate_checkpoint_id(tmp_path) and not HDF5Reader.validate_checkpoint_id(tmp_path / "b.h5")


def failure_of(call, *arguments, **options):
    """The error of the one rank that there is."""
    with pytest.raises(CheckpointException) as caught:
        call(*arguments, **options)
    [(error, _)] = caught.value.failures.values()
    return error


@ALONE
def test_without_a_path(tmp_path):
    for error in (
        failure_of(dcp.save, {"w": torch.ones(1)}, storage_writer=HDF5Writer()),
        failure_of(dcp.load, {"w": torch.ones(1)}, storage_reader=HDF5Reader()),
    ):
        assert isinstance(error, CheckpointError) and "no path: give one to HDF5" in str(error)


@ALONE
def test_unsupported_ways_of_saving_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    caching = dcp.DefaultSavePlanner(enable_plan_caching=True)
    dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(path), planner=caching)
    error = failure_of(dcp.save, {"w": torch.ones(1)}, storage_writer=HDF5Writer(path), planner=caching)
    assert "enable_plan_caching=False" in str(error)
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(path), use_collectives=False)


@ALONE
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model": {"a": torch.ones(1)}, "job": {"when": object()}}, r"'job.when' is a object, and nothing is pickled"),
        ({"model": {"a/b": torch.ones(1)}}, r"'model.a/b' has a key with /"),
        ({"model": {"a\n": torch.ones(1)}}, r"cannot be the name of a dataset"),
        ({"model": {"a": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}}, r"'model/a' has dtype float4_e2m1fn_x2"),
        ({"model": {"a": torch.ones(1)}, "word": 1}, r"extra\['word'\] is in the state dict too"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, state, message):
    path = tmp_path / "a.h5"
    dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(path))
    before = path.read_bytes()
    error = failure_of(dcp.save, state, storage_writer=HDF5Writer(path, extra={"word": 2}))
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"{path}: ")
    assert re.search(message, str(error)), error
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.h5"]


@ALONE
@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "replace", "ftruncate"])
@pytest.mark.parametrize("turn", range(4))
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, call, turn):
    path = tmp_path / "a.h5"
    dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(path))
    before, system, turns = path.read_bytes(), System(), iter(range(100))
    real = getattr(System, call)

    def failing(*arguments):
        if next(turns) == turn:
            raise OSError(errno.ENOSPC, "")
        return real(*arguments)

    setattr(system, call, failing)
    try:
        with using(system):
            dcp.save({"model": {"w": torch.zeros(300), "b": torch.zeros(2)}}, storage_writer=HDF5Writer(path))
    except CheckpointException as caught:
        [(error, _)] = caught.failures.values()
        assert isinstance(error, CheckpointError)
        if open_index(path).tensors["model/w"].shape == (1,):  # else the new file has got its name
            assert str(error) == f"{path}: cannot write the checkpoint: {os.strerror(errno.ENOSPC)}"
            assert path.read_bytes() == before
        else:
            assert "is in place, but its name could not be forced to the disk: No space" in str(error)
    else:
        assert next(turns) <= turn, "the failure has not been told"
        assert open_index(path).tensors["model/w"].shape == (300,)
    assert os.listdir(tmp_path) == ["a.h5"]


@ALONE
def test_a_save_that_is_given_up_leaves_nothing(tmp_path):
    class Stops(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan):
            raise RuntimeError("stop")

    writer = HDF5Writer(tmp_path / "a.h5")
    assert str(failure_of(dcp.save, {"w": torch.ones(1)}, storage_writer=writer, planner=Stops())) == "stop"
    assert len(os.listdir(tmp_path)) == 1
    writer.reset()
    assert os.listdir(tmp_path) == []
    failure_of(dcp.save, {"w": torch.ones(1)}, storage_writer=writer, planner=Stops())
    del writer
    gc.collect()
    assert os.listdir(tmp_path) == []


@ALONE
def test_a_planner_that_changes_the_plan_at_the_end_is_refused(tmp_path):
    class Fewer(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return dataclasses.replace(new_plan, items=new_plan.items[:1])

    writer = HDF5Writer(tmp_path / "a.h5")
    error = failure_of(dcp.save, {"w": torch.ones(1), "v": torch.ones(1)}, storage_writer=writer, planner=Fewer())
    assert "finish_plan changed this rank's items" in str(error)
    assert os.listdir(tmp_path) == []


@ALONE
def test_a_planner_that_only_has_pickled_values_is_refused(tmp_path):
    class Pickles(dcp.DefaultSavePlanner):
        lookup_object = None

    error = failure_of(dcp.save, {"n": 1}, storage_writer=HDF5Writer(tmp_path / "a.h5"), planner=Pickles())
    assert "'n' is no tensor, and the planner Pickles has no lookup_object" in str(error)
    assert os.listdir(tmp_path) == []


@ALONE
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda path: path.unlink(), CheckpointError),
        (lambda path: path.write_bytes(b""), CheckpointCorruptError),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), CheckpointCorruptError),
        (lambda path: path.write_bytes(b"a" * 5000), CheckpointCorruptError),
    ],
    ids=["missing", "empty", "short", "other"],
)
def test_a_bad_file_raises_the_error_of_load(tmp_path, damage, kind):
    path = tmp_path / "a.h5"
    dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(path))
    damage(path)
    reader, target = HDF5Reader(path), {"w": torch.zeros(1)}
    error = failure_of(dcp.load, target, storage_reader=reader)
    assert type(error) is kind and str(error).startswith(f"{path}: ")
    assert target["w"] == 0
    with pytest.raises(kind):
        list(reader.read_metadata().state_dict_metadata.items())
    with pytest.raises(kind):
        reader.prepare_local_plan(None)


@ALONE
def test_damaged_elements_are_reported_unless_they_are_not_to_be_verified(tmp_path):
    path = tmp_path / "a.h5"
    dcp.save({"w": torch.ones(8), "v": torch.ones(8)}, storage_writer=HDF5Writer(path))
    begin = int(open_index(path).rows_of("model/w")["byte_offset"][0])
    with open(path, "r+b") as file:
        file.seek(begin + 4)
        file.write(b"\0\0\0\0")
    target = {"w": torch.zeros(8)}
    error = failure_of(dcp.load, target, storage_reader=HDF5Reader(path))
    assert isinstance(error, CheckpointCorruptError) and "model/w" in str(error)
    dcp.load(target, storage_reader=HDF5Reader(path, verify=False))
    assert target["w"].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    other = {"v": torch.zeros(8)}
    dcp.load(other, storage_reader=HDF5Reader(path))  # what is not asked for is not read
    assert other["v"].sum() == 8


def test_ranks_that_read_different_files_are_reported(tmp_path):
    with pytest.warns(UserWarning, match="single process"):
        for name in ("a.h5", "b.h5"):
            dcp.save({"w": torch.ones(1), "name": name}, storage_writer=HDF5Writer(tmp_path / name))
    readers = [HDF5Reader(tmp_path / name) for name in ("a.h5", "a.h5", "b.h5")]
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]
    assert readers[0].prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(
        CheckpointMismatchError, match=r"rank 0 reads .*a\.h5, rank 2 .*b\.h5, which is another checkpoint"
    ):
        readers[0].prepare_global_plan(plans)


@ALONE
def test_a_file_that_is_replaced_while_it_is_loaded_is_reported(tmp_path):
    class Slow(dcp.DefaultLoadPlanner):
        def finish_plan(self, central_plan):
            dcp.save({"w": torch.zeros(1)}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
            return central_plan

    dcp.save({"w": torch.ones(1)}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    target = {"w": torch.full((1,), 2.0)}
    error = failure_of(dcp.load, target, storage_reader=HDF5Reader(tmp_path / "a.h5"), planner=Slow())
    assert isinstance(error, CheckpointReplacedError) and target["w"] == 2


@ALONE
def test_what_the_file_does_not_hold_is_an_error_of_torch(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    reader = HDF5Reader(tmp_path / "a.h5")
    assert "Missing key in checkpoint state_dict: v" in str(
        failure_of(dcp.load, {"v": torch.ones(2)}, storage_reader=reader)
    )
    assert "Size mismatch" in str(failure_of(dcp.load, {"w": torch.ones(3)}, storage_reader=reader))
    target = {"v": torch.ones(2), "w": torch.zeros(2)}
    dcp.load(target, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert target["w"].sum() == 2


@ALONE
def test_nothing_is_pickled_into_the_file(tmp_path):
    model, optimizer = make()
    train(model, optimizer)
    dcp.save({**state_of(model, optimizer), "pair": (1, {"a": "b"})}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    index = open_index(tmp_path / "a.h5")
    raw = (tmp_path / "a.h5").read_bytes()
    tables = b"".join(raw[begin : begin + size] for begin, size in index.footer.regions)
    assert b"torch\n" not in tables and b"\x80\x02" not in tables and b"PK\x03\x04" not in tables


@ALONE
def test_commands_read_such_files(tmp_path, capsys):
    model, optimizer = make()
    train(model, optimizer)
    path = str(tmp_path / "a.h5")
    dcp.save(state_of(model, optimizer), storage_writer=HDF5Writer(path, step=7))
    for arguments in (["ls", path], ["show", path], ["show", path, "0.weight"], ["verify", path]):
        assert main(arguments) == 0
    assert "0.weight" in capsys.readouterr().out


@ALONE
def test_torchs_own_converter_reads_through_the_reader(tmp_path):
    """An empty state dict is filled with all that there is, as torch's tools ask for it."""
    model, optimizer = make()
    train(model, optimizer)
    state = {**state_of(model, optimizer), "epoch": 3}
    dcp.save(state, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    metadata = HDF5Reader(tmp_path / "a.h5").read_metadata()
    target = {}
    for name in metadata.state_dict_metadata:
        found = metadata.state_dict_metadata[name]
        value = torch.zeros(found.size, dtype=found.properties.dtype) if hasattr(found, "size") else None
        names.set_at(target, metadata.planner_data[name], value)
    dcp.load(target, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    assert equal(dict(target["model"]), dict(state["model"]))
    assert target["epoch"] == 3 and target["optim"]["param_groups"] == state["optim"]["param_groups"]


@ALONE
@pytest.mark.parametrize(
    "state", [{"encoder.model.w": 0.0}, {"teacher": {"model": {"w": 0.0}}}, {"w": 0.0, "model.v": 0.0}]
)
def test_no_tensor_is_loaded_for_a_name_that_is_not_in_the_file(tmp_path, state):
    dcp.save({"model": {"w": torch.tensor(1.0)}}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    state = {
        key: torch.tensor(0.0) if value == 0 else {"model": {"w": torch.tensor(0.0)}} for key, value in state.items()
    }
    error = failure_of(dcp.load, state, storage_reader=HDF5Reader(tmp_path / "a.h5"))
    assert "Missing key in checkpoint state_dict: " in str(error)


@ALONE
def test_a_partial_load_takes_no_tensor_for_another(tmp_path):
    path = tmp_path / "a.h5"
    dcp.save({"model": {"w": torch.tensor(1.0)}}, storage_writer=HDF5Writer(path))

    def load(**state):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, storage_reader=HDF5Reader(path), planner=planner)

    state = {"model": {"w": torch.tensor(0.0)}, "ema": {"model": {"w": torch.tensor(0.0)}}}
    load(**state)
    assert (state["model"]["w"], state["ema"]["model"]["w"]) == (1, 0)
    bare = {"ema.model.w": torch.tensor(0.0), "w": torch.tensor(0.0)}
    error = failure_of(load, **bare)
    assert isinstance(error, CheckpointMismatchError)
    assert str(error).startswith(f"{path}: holds 'w' only under other outer keys")
    assert not any(bare.values())


@ALONE
def test_modules_called_model_are_distinguished_from_outer_keys(tmp_path):
    saved = {"norm.weight": torch.tensor(1.0), "model.norm.weight": torch.tensor(2.0)}
    dcp.save({"model": saved}, storage_writer=HDF5Writer(tmp_path / "a.h5"))
    for wrap in (lambda state: state, lambda state: {"model": state}):
        state = {name: torch.tensor(0.0) for name in saved}
        dcp.load(wrap(state), storage_reader=HDF5Reader(tmp_path / "a.h5"))
        assert state == saved


@ALONE
@pytest.mark.parametrize("kind", ["numbers", "no list"])
def test_an_optimizer_without_names_is_sound_and_does_not_load(tmp_path, capsys, kind):
    """As ``optimizer.state_dict()`` is."""
    model, optimizer = make()
    train(model, optimizer)
    state, path = optimizer.state_dict(), tmp_path / "a.h5"
    if kind == "no list":
        del state["param_groups"][0]["params"]
    dcp.save({"model": model.state_dict(), "optimizer": state}, storage_writer=HDF5Writer(path))
    assert main(["verify", str(path)]) == 0
    assert main(["show", str(path)]) == 0
    assert "optimizer_groups:" in capsys.readouterr().out
    words = "listed as [0, 1," if kind == "numbers" else "not listed, but must be listed by name"
    with pytest.raises(CheckpointMismatchError, match=re.escape(words)) as caught:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert str(caught.value).startswith(f"{path}: its optimizer's parameters are {words}")
    checkpoint.load(path, model=make(1)[0])
