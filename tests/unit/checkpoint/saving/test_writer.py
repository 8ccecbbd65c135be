import errno
import itertools
import os
import re
import shutil
import stat
import subprocess
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.saving.content import memory_of_blocks
from hpcfsdp.checkpoint.saving.plan import plan_save
from hpcfsdp.errors import CheckpointError, DisagreementError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.tensors import GatherBuffer, replicated
from tests.disks import using

pytestmark = pytest.mark.hdf5


def layer(fill=1.0):
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, fill)
    return model


def test_save_returns_the_absolute_path_and_makes_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.save("new/folder/a.h5", model=layer()) == tmp_path / "new/folder/a.h5"
    assert os.listdir(tmp_path / "new/folder") == ["a.h5"]


def test_every_tensor_stands_under_its_own_name_with_shape_and_values(tmp_path, make_model, train_steps):
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 2)
    path = checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    with h5py.File(path) as file:
        assert set(file["model"]) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert file["model"][name].shape == tuple(tensor.shape)
            np.testing.assert_array_equal(file["model"][name][()], expected.numpy())
        assert set(file["optim/state"]) == {name for name, _ in model.named_parameters()}
        for name, param in model.named_parameters():
            for key, value in optimizer.state[param].items():
                assert file["optim/state"][name][key].shape == tuple(value.shape)
                np.testing.assert_array_equal(file["optim/state"][name][key][()], value.numpy())


def test_tied_names_are_one_dataset(tmp_path, make_model):
    with h5py.File(checkpoint.save(tmp_path / "a.h5", model=make_model(0))) as file:
        assert file["model/head.weight"] == file["model/embed.weight"]
        assert file["model/head.weight"].shape == (5, 4)


def test_buffers_that_are_not_persistent_are_left_out(tmp_path, make_model):
    with h5py.File(checkpoint.save(tmp_path / "a.h5", model=make_model(0))) as file:
        assert "scratch" not in file["model"]
        assert "brief" in file["model"]


def test_the_file_describes_itself(tmp_path):
    path = checkpoint.save(tmp_path / "a.h5", model=layer(), step=12, config={"lr": [0.1]}, extra={"best": 2.5})
    with h5py.File(path) as file:
        assert file.attrs["format"] == b"hpcfsdp"
        assert file.attrs["software_version"] == hpcfsdp.__version__.encode()
        assert (file.attrs["step"], file.attrs["world_size"], file.attrs["committed"]) == (12, 1, 1)
    info = checkpoint.open_index(path).info
    assert (info.path, info.step, info.world_size, info.format_version) == (path, 12, 1, schema.FORMAT_VERSION)
    assert (info.config, info.extra) == ({"lr": [0.1]}, {"best": 2.5})


def test_a_module_name_with_a_slash_can_be_read_back(tmp_path):
    model = nn.ModuleDict({"a/b": layer(3.0)})
    checkpoint.save(tmp_path / "a.h5", model=model)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["model/a/b.weight"].shape == (2, 3)
    other = nn.ModuleDict({"a/b": layer()})
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert torch.equal(other["a/b"].weight, model["a/b"].weight)


def test_names_that_cannot_both_be_in_a_file_are_reported(tmp_path):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2))
    model.add_module("w/x", layer())
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=model)
    assert str(caught.value) == (
        f"{tmp_path}/a.h5: 'model/w' and 'model/w/x.weight' cannot both be in a file: rename one of them"
    )
    assert os.listdir(tmp_path) == []


def test_a_model_without_parameters_keeps_its_buffers(tmp_path):
    model = nn.BatchNorm1d(2, affine=False)
    model.running_mean.fill_(3)
    checkpoint.save(tmp_path / "a.h5", model=model)
    other = nn.BatchNorm1d(2, affine=False)
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert other.running_mean.tolist() == [3, 3]


def test_a_lazily_conjugated_buffer_is_written_as_its_values(tmp_path):
    model = layer()
    model.register_buffer("b", torch.tensor([1 + 2j]).conj())
    checkpoint.save(tmp_path / "a.h5", model=model)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["model/b"][...].tolist() == [1 - 2j]


def test_a_tensor_with_holes_is_written_in_row_major_order(tmp_path):
    model = layer()
    model.register_buffer("b", torch.arange(6).view(2, 3).t())
    with h5py.File(checkpoint.save(tmp_path / "a.h5", model=model)) as file:
        assert file["model/b"][...].tolist() == [[0, 3], [1, 4], [2, 5]]


def previous(tmp_path):
    """A folder with a good checkpoint of ones, and its path."""
    return checkpoint.save(tmp_path / "a.h5", model=layer(1.0), step=1)


def assert_kept(path):
    """The previous file is whole, and nothing else is in its folder."""
    assert os.listdir(path.parent) == ["a.h5"]
    model = layer(0.0)
    assert checkpoint.load(path, model=model).step == 1
    assert torch.equal(model.weight, torch.ones(2, 3))


def test_a_new_file_takes_the_place_of_the_previous_one(tmp_path):
    path = previous(tmp_path)
    checkpoint.save(path, model=layer(2.0), step=2)
    assert os.listdir(tmp_path) == ["a.h5"]
    assert checkpoint.open_index(path).info.step == 2


class Failing(System):
    """Has one call fail from its `after`-th time on, counted from 0."""

    def __init__(self, call, error, after=0):
        self.left = after
        self._inner = getattr(System, call)
        self._error = error
        setattr(self, call, self._fail)

    def _fail(self, *arguments):
        if self.left == 0:
            raise self._error
        self.left -= 1
        return self._inner(*arguments)


# Of one rank: the tensors' bytes are written in one call, and each region of the rest and the footer in one.
CALLS = [
    ("open", errno.EACCES, 0),
    ("ftruncate", errno.EFBIG, 0),
    ("pwritev", errno.ENOSPC, 0),
    ("pwritev", errno.ENOSPC, 1),
    ("pwritev", errno.EIO, 3),
    ("fsync", errno.EIO, 0),
    ("fsync", errno.EIO, 1),
    ("replace", errno.EACCES, 0),
]


@pytest.mark.parametrize(("call", "number", "after"), CALLS)
def test_a_disk_that_fails_is_named_and_the_previous_file_kept(tmp_path, call, number, after):
    path = previous(tmp_path)
    system = Failing(call, OSError(number, os.strerror(number)), after)
    with pytest.raises(CheckpointError) as caught, using(system):
        checkpoint.save(path, model=layer(2.0), step=2)
    assert str(caught.value) == f"{path}: cannot write the checkpoint: {os.strerror(number)}"
    assert system.left == 0
    assert_kept(path)


def test_the_file_is_on_disk_before_it_gets_its_name_and_its_name_before_save_returns(tmp_path):
    events = []

    class Noting(System):
        def pwritev(self, fd, *arguments):
            events.append("write")
            return os.pwritev(fd, *arguments)

        def fsync(self, fd):
            events.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.fsync(fd)

        def replace(self, source, target):
            events.append("replace")
            os.replace(source, target)

    with using(Noting()):
        checkpoint.save(tmp_path / "a.h5", model=layer())
    partial = events[1]
    assert partial.startswith(f"{tmp_path}/.a.h5.")
    assert partial.endswith(".partial")
    assert [event for event, _ in itertools.groupby(events)] == [
        *("write", partial),  # tensors
        *("write", partial),  # what makes it a checkpoint
        *("replace", str(tmp_path)),
    ]


@pytest.mark.parametrize("call", ["ftruncate", "pwritev", "fsync", "replace"])
def test_an_interrupted_save_leaves_the_previous_file_alone(tmp_path, call):
    path = previous(tmp_path)
    with pytest.raises(KeyboardInterrupt), using(Failing(call, KeyboardInterrupt())):
        checkpoint.save(path, model=layer(2.0), step=2)
    assert_kept(path)


class Halting(System):
    """Takes 7 bytes at a time, and every other call is interrupted by a signal before it does anything."""

    calls = 0

    def pwritev(self, fd, buffers, offset):
        self.calls += 1
        if self.calls % 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return os.pwrite(fd, b"".join(buffers)[:7], offset)


def test_writes_that_take_few_bytes_at_a_time_are_gone_on_with(tmp_path, make_model):
    system, model, other = Halting(), make_model(0), make_model(1)
    with using(system):
        checkpoint.save(tmp_path / "a.h5", model=model)
    assert system.calls > 100
    checkpoint.load(tmp_path / "a.h5", model=other)
    assert all(torch.equal(a, other.state_dict()[name]) for name, a in model.state_dict().items())


def test_a_disk_that_takes_no_byte_is_an_error_and_not_a_loop(tmp_path):
    class Full(System):
        def pwritev(self, *_):
            return 0

    with pytest.raises(CheckpointError, match="cannot write the checkpoint: a write took no byte"), using(Full()):
        checkpoint.save(tmp_path / "a.h5", model=layer())
    assert os.listdir(tmp_path) == []


def test_too_little_room_is_reported_in_bytes_before_anything_is_written(tmp_path, monkeypatch):
    path = previous(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=31))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(path, model=layer(2.0), step=2)
    told = re.fullmatch(rf"{path}: (\d+) bytes are needed, 31 are free on that file system", str(caught.value))
    assert 32 < int(told[1]) < 1 << 20
    assert_kept(path)


def test_a_directory_of_that_name_is_refused(tmp_path):
    path = tmp_path / "a.h5"
    path.mkdir()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(path, model=layer())
    assert str(caught.value) == f"{path}: cannot write the checkpoint: there is a directory of that name"
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "file/a.h5", model=layer())
    assert str(caught.value) == f"{tmp_path}/file/a.h5: cannot write the checkpoint: File exists"


def test_a_place_where_nothing_can_be_written_is_named():
    with pytest.raises(CheckpointError, match=r"^/proc/x\.h5: "):
        checkpoint.save("/proc/x.h5", model=layer())


def test_a_file_that_cannot_be_created_is_named_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcfsdp.checkpoint.saving.temporary.partial_path", lambda *_: tmp_path / "none" / "x.partial")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=layer())
    assert str(caught.value) == f"{tmp_path}/a.h5: cannot write the checkpoint: No such file or directory"


@pytest.mark.parametrize("limit", [600, 3000])
def test_a_limit_on_the_size_of_files_is_an_error_and_not_a_crash(tmp_path, limit):
    code = f"""
import resource, torch
from hpcfsdp import checkpoint
from hpcfsdp.errors import CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    checkpoint.save("a.h5", model=torch.nn.Linear(2, 2))
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/a.h5: cannot write the checkpoint: File too large\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_no_failure_of_the_file(tmp_path, number):
    refused = []

    class NoFolders(System):
        def fsync(self, fd):
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                refused.append(fd)
                raise OSError(number, "no such call")
            os.fsync(fd)

    with using(NoFolders()):
        path = checkpoint.save(tmp_path / "a.h5", model=layer(), step=4)
    assert checkpoint.open_index(path).info.step == 4
    assert len(refused) == 1


def test_two_savers_of_one_path_write_into_two_files(tmp_path):
    class SavingInside(System):
        saved = False

        def pwritev(self, *arguments):
            if not self.saved:
                self.saved = True
                checkpoint.save(tmp_path / "a.h5", model=layer(2.0), step=2)
            return os.pwritev(*arguments)

    with using(SavingInside()):
        checkpoint.save(tmp_path / "a.h5", model=layer(1.0), step=1)
    other = layer(9.0)
    assert checkpoint.load(tmp_path / "a.h5", model=other).step == 1
    assert torch.equal(other.weight, layer(1.0).weight)
    assert os.listdir(tmp_path) == ["a.h5"]


@pytest.mark.parametrize("step", ["x", 3.7, None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "a.h5", model=layer(), step=step)
    assert os.listdir(tmp_path) == []


def test_names_in_any_script_stand_in_the_file(tmp_path):
    model = torch.nn.Module()
    model.register_buffer("größe", torch.ones(3))
    path = checkpoint.save(tmp_path / "a.h5", model=model)
    model.get_buffer("größe").zero_()
    checkpoint.load(path, model=model)
    assert model.get_buffer("größe").tolist() == [1, 1, 1]
    with h5py.File(path) as file:
        assert list(file["model"]) == ["größe"]


def test_a_value_in_extra_that_cannot_be_kept_is_named(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=layer(), extra={"a": object()})
    assert str(caught.value).startswith(f"{tmp_path}/a.h5: extra['a'] is a object, and nothing is pickled")
    assert os.listdir(tmp_path) == []


def test_a_configuration_that_is_not_json_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=layer(), config={"a": object()})
    assert str(caught.value).startswith(f"{tmp_path}/a.h5: config must hold JSON values only: ")
    assert "object" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_group_option_that_cannot_be_kept_is_named(tmp_path):
    model = layer()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "schedule": object()}], lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    assert str(caught.value).startswith(
        f"{tmp_path}/a.h5: param_groups[0]['schedule'] is a object, and nothing is pick"
    )


def test_an_unsupported_dtype_is_refused_by_name(tmp_path):
    model = layer()
    model.register_buffer("tiny", torch.empty(2, dtype=torch.bits8))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "a.h5", model=model)
    assert str(caught.value) == (
        f"{tmp_path}/a.h5: 'model/tiny' has dtype bits8, which checkpoints do not support: convert it"
    )
    assert os.listdir(tmp_path) == []


MARKED = [torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
OTHERS = [torch.float16, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.int8]


@pytest.mark.parametrize("dtype", MARKED + OTHERS, ids=str)
def test_a_buffer_of_any_dtype_comes_back_bit_by_bit(tmp_path, dtype):
    bits = torch.arange(64, dtype=torch.uint8) if dtype != torch.bool else torch.arange(64, dtype=torch.uint8) % 2
    model, other = layer(), layer()
    model.register_buffer("b", bits.view(dtype))
    other.register_buffer("b", torch.zeros_like(model.b))
    path = checkpoint.save(tmp_path / "a.h5", model=model)
    checkpoint.load(path, model=other)
    assert torch.equal(other.b.view(torch.uint8), bits)
    with h5py.File(path) as file:
        mark = file["model/b"].attrs.get(schema.DTYPE_ATTRIBUTE)
        assert mark == (str(dtype).removeprefix("torch.").encode() if dtype in MARKED else None)


@pytest.mark.parametrize(("call", "number"), [("pwritev", errno.ENOSPC), ("fsync", errno.EIO), ("open", errno.EMFILE)])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_is_every_ranks_error(tmp_path, run_ranks, failing, call, number):
    path = previous(tmp_path)
    system = Failing(call, OSError(number, os.strerror(number)), after=1 if (call, failing) == ("open", 0) else 0)

    def body(comm):
        model = nn.ParameterDict({"w": nn.Parameter(torch.arange(12.0))})
        with using(system if comm.rank == failing else None):
            checkpoint.save(path, model=FullyShardedDataParallel(model, process_group=comm), step=2)

    results = run_ranks(3, body)
    message = f"{path}: cannot write the checkpoint: {os.strerror(number)}"
    assert [(type(error), str(error)) for error in results] == [
        (CheckpointError, message if rank == failing else f"rank {failing}: {message}") for rank in range(3)
    ]
    assert all(error.raised_on_all_ranks for error in results)
    assert_kept(path)


COLLECTIVES = ("all_gather_object", "broadcast_object", "all_gather", "all_reduce", "gather", "scatter", "all_to_all")


def count_collectives(comm):
    """The names of all calls from now on; in each other, the outer one alone."""
    made, inside = [], []
    for name in COLLECTIVES:
        real = getattr(comm, name)

        def counted(*arguments, name=name, real=real, **options):
            made.extend([] if inside else [name])
            inside.append(name)
            try:
                return real(*arguments, **options)
            finally:
                inside.pop()

        setattr(comm, name, counted)
    return made


@pytest.mark.parametrize(("original", "optimizer", "most"), [(False, False, 3), (False, True, 4), (True, True, 5)])
def test_a_save_takes_few_collectives(tmp_path, run_ranks, original, optimizer, most):
    """Each exchange of objects is two. With original parameters, ranks may hold state of different ones."""

    def body(comm):
        model = FullyShardedDataParallel(nn.Linear(6, 5), process_group=comm, use_orig_params=original)
        adam = torch.optim.Adam(model.parameters()) if optimizer else None
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if optimizer:
            adam.step()
        made = count_collectives(comm)
        checkpoint.save(tmp_path / "a.h5", model=model, optimizer=adam)
        return made

    for made in run_ranks(2, body):
        assert made.count("all_gather_object") <= most
        assert sorted(set(made)) == ["all_gather_object", "broadcast_object", "gather"]
        assert made.count("broadcast_object") == made.count("gather") == 2


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_every_rank_writes_its_share_and_the_file_is_the_same(tmp_path, run_ranks, number):
    path = tmp_path / "a.h5"
    values = torch.arange(40.0)

    def body(comm):
        model = nn.ParameterDict({"w": nn.Parameter(values.clone())})
        checkpoint.save(path, model=FullyShardedDataParallel(model, process_group=comm))

    assert run_ranks(number, body) == [None] * number
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["model/w"][...], values.numpy())
        assert sorted(file[schema.EXTENTS]["rank"].tolist()) == list(range(number))


def test_ranks_with_different_buffers_raise_before_anything_is_written(tmp_path, run_ranks):
    def body(comm):
        model = nn.Linear(4, 4)
        model.register_buffer("b", torch.zeros(2 + comm.rank))
        checkpoint.save(tmp_path / "a.h5", model=FullyShardedDataParallel(model, process_group=comm))

    for error in run_ranks(2, body):
        assert type(error) is DisagreementError
        assert "the plan of the checkpoint (the tensors of model and optimizer) differs between ranks" in str(error)
    assert os.listdir(tmp_path) == []


def test_the_memory_of_a_gathered_tensor_is_free_before_the_next_one_is_gathered():
    class Buffer(GatherBuffer):
        def __init__(self):
            self.memory = {0: torch.empty(6)}

        def gather(self):
            values = np.arange(6, dtype=np.float32)
            self.values, self.memory[0].data = weakref.ref(values), torch.from_numpy(values)

        scatter = None

    buffer = Buffer()
    tensors = [replace(replicated("w", buffer.memory[0]), buffer=buffer)]
    memory_of = memory_of_blocks(plan_save([("model", tensor) for tensor in tensors], 1), tensors)
    buffer.gather()
    assert memory_of(0).view(torch.float32).tolist() == list(range(6))
    assert buffer.values() is not None
    buffer.free()
    assert buffer.values() is None
