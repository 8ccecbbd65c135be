import functools
import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import plan, schema
from hpcfsdp.checkpoint.reader import BlockReader, open_index
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from hpcfsdp.fsdp import FullyShardedDataParallel


@pytest.fixture(scope="module")
def good(tmp_path_factory, make_model, train_steps):
    """A small checkpoint with one of everything."""
    model = make_model(0)
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 1)
    path = tmp_path_factory.mktemp("good") / "a.h5"
    extra = {"array": np.arange(5), "text": "x", "empty": np.zeros((0, 2))}
    return checkpoint.save(path, model=model, optimizer=optimizer, step=7, extra=extra, config={"lr": 0.5})


@pytest.fixture
def damaged(good, tmp_path):
    """A copy that may be changed."""
    return shutil.copy(good, tmp_path / "b.h5")


def error_of(path):
    with pytest.raises(CheckpointError) as caught:
        open_index(path)
    return type(caught.value), str(caught.value)


def test_the_index_lists_tensors_in_file_order_with_shape_and_dtype(good, make_model):
    index = open_index(good)
    model = make_model(0)
    names = [path.removeprefix("model/") for path in index.tensors if path.startswith("model/")]
    assert names == [name for name in model.state_dict() if name != "head.weight"]
    for name in names:
        spec, tensor = index.tensors[f"model/{name}"], model.state_dict()[name]
        assert (spec.shape, f"torch.{spec.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
    assert index.links == {"model/head.weight": "model/embed.weight"}
    assert index.resolve("model/head.weight") is index.tensors["model/embed.weight"]
    assert index.tensors["optim/state/scale/exp_avg"].shape == ()


def test_the_index_holds_the_optimizers_groups_and_the_random_numbers_of_each_rank(good):
    index = open_index(good)
    assert index.param_groups[0]["betas"] == [0.9, 0.999]
    assert sorted(index.param_groups[0]["params"])[:2] == ["embed.weight", "hidden.bias"]
    assert index.scalars == {}
    assert {kind: states.shape[0] for kind, states in index.rng.items()} == {"numpy": 1, "python": 1, "torch_cpu": 1}


def test_a_file_without_an_optimizer_has_no_groups(tmp_path):
    index = open_index(checkpoint.save(tmp_path / "a.h5", model=nn.Linear(1, 1)))
    assert (index.param_groups, index.scalars) == (None, None)


def test_an_unknown_tensor_is_a_key_error(good):
    with pytest.raises(KeyError, match="model/nothing"):
        open_index(good).resolve("model/nothing")


def test_no_such_file(tmp_path):
    path = tmp_path / "a.h5"
    assert error_of(path) == (CheckpointError, f"{path}: No such file or directory")


def test_a_directory(tmp_path):
    assert error_of(tmp_path) == (CheckpointError, f"{tmp_path}: is a directory, not a checkpoint file")


@pytest.mark.parametrize("content", [b"", b"some text\n", b"\x89HDF\r\n\x1a\n", bytes(5000)])
def test_a_file_that_is_not_hdf5(tmp_path, content):
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    kind, message = error_of(path)
    assert kind is CheckpointCorruptError
    assert message.startswith(f"{path}: damaged, or not an HDF5 file (")


@pytest.mark.parametrize("mark", [None, "another", 3, [1, 2]])
def test_a_foreign_hdf5_file(tmp_path, mark):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["model/w"] = np.zeros(3)
        if mark is not None:
            file.attrs["format"] = mark
    assert error_of(path) == (CheckpointCorruptError, f"{path}: an HDF5 file, but not an hpcfsdp checkpoint")


def test_a_file_of_a_newer_format(damaged):
    with h5py.File(damaged, "r+") as file:
        file.attrs["format_version"] = np.bytes_("1.0")
    assert error_of(damaged) == (
        CheckpointError,
        f"{damaged}: has format version 1.0, this hpcfsdp reads {schema.FORMAT_VERSION}: use a newer hpcfsdp",
    )


def test_a_newer_file_of_the_same_major_format_is_read(damaged):
    with h5py.File(damaged, "r+") as file:
        file.attrs["format_version"] = np.bytes_("0.99")
    assert open_index(damaged).info.format_version == "0.99"


def test_a_file_without_the_commit_mark(damaged):
    with h5py.File(damaged, "r+") as file:
        file.attrs["committed"] = np.uint8(0)
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: was never finished: its writer stopped before the commit mark",
    )


@pytest.mark.parametrize("name", [schema.EXTRA_VALUES, schema.CONFIG, schema.PARAM_GROUPS, schema.EXTENTS])
def test_a_small_value_that_was_changed(damaged, name):
    with h5py.File(damaged, "r+") as file:
        raw = bytearray(file[name][()].tobytes())
        raw[-1] ^= 1
        file[name][()] = np.frombuffer(bytes(raw), file[name].dtype).reshape(file[name].shape)
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: damaged: its tables or small values do not have their checksum",
    )


def test_a_small_value_that_was_removed(damaged):
    with h5py.File(damaged, "r+") as file:
        del file[schema.PARAM_GROUPS]
    assert error_of(damaged)[1] == f"{damaged}: damaged: its tables or small values do not have their checksum"


def test_a_tensor_that_another_tool_compressed(damaged):
    with h5py.File(damaged, "r+") as file:
        values = file["model/hidden.weight"][...]
        del file["model/hidden.weight"]
        file.create_dataset("model/hidden.weight", data=values, compression="gzip")
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: model/hidden.weight is not stored as one run of bytes (rewritten by another tool?)",
    )


@pytest.mark.parametrize("shape", [(4, 4), (4, 5)], ids=["moved", "reshaped"])
def test_a_tensor_that_was_rewritten(damaged, shape):
    with h5py.File(damaged, "r+") as file:
        file.move("model/hidden.weight", "aside")
        file["model/hidden.weight"] = np.zeros(shape, np.float32)
    assert error_of(damaged) == (
        CheckpointCorruptError,
        f"{damaged}: damaged: the runs of model/hidden.weight do not tile it",
    )


@pytest.fixture(scope="module")
def many_blocks(tmp_path_factory, run_ranks):
    """Two tensors that three ranks wrote in blocks of 5 elements at most, and a tied name; path and values."""
    path = tmp_path_factory.mktemp("blocks") / "a.h5"
    values = {"w": torch.arange(91.0).view(7, 13), "v": torch.arange(17.0) - 5}

    def write(comm):
        model = nn.ParameterDict({name: nn.Parameter(tensor.clone()) for name, tensor in values.items()})
        model.register_parameter("tied", model["w"])
        checkpoint.save(path, model=FullyShardedDataParallel(model, process_group=comm))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcfsdp.checkpoint.writer.plan_save", functools.partial(plan.plan_save, block_bytes=20))
        assert run_ranks(3, write) == [None] * 3
    return path, values


@given(st.sampled_from(["w", "v", "tied"]), st.data())
@settings(max_examples=150, deadline=None)
def test_reading_any_run_equals_slicing(many_blocks, name, data):
    path, values = many_blocks
    whole = values["w" if name == "tied" else name].flatten().numpy()
    start = data.draw(st.integers(0, whole.size))
    numel = data.draw(st.integers(0, whole.size - start))
    with BlockReader(open_index(path)) as reader:
        read = reader.read(f"model/{name}", start, numel)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, whole[start : start + numel])


def test_blocks_are_the_tensor_run_by_run(many_blocks):
    path, values = many_blocks
    index = open_index(path)
    with BlockReader(index) as reader:
        blocks = list(reader.blocks("model/w"))
    assert max(map(len, blocks)) == 5
    np.testing.assert_array_equal(np.concatenate(blocks), values["w"].flatten().numpy())
    assert sorted(set(index.extents["rank"].tolist())) == [0, 1, 2]


def test_a_read_verifies_the_blocks_that_it_touches_and_no_others(many_blocks, tmp_path):
    path = shutil.copy(many_blocks[0], tmp_path / "b.h5")
    index = open_index(path)
    row = index.extents[index.first_rows["model/w"][0] + 2]
    with open(path, "r+b") as file:
        file.seek(int(row["byte_offset"]))
        file.write(b"\xff")
    with BlockReader(index) as reader:
        start, end = int(row["start"]), int(row["start"] + row["numel"])
        reader.read("model/w", 0, start)
        reader.read("model/w", end, 91 - end)
        for touching in (start - 1, end - 1):
            with pytest.raises(CheckpointCorruptError) as caught:
                reader.read("model/w", touching, 2)
            assert str(caught.value) == (
                f"{path}: damaged: elements {start} to {end} of model/w (written by rank {row['rank']}, bytes from "
                f"{row['byte_offset']}) do not have their checksum"
            )


def test_a_file_cut_off_after_it_was_opened_is_told(many_blocks, tmp_path):
    path = shutil.copy(many_blocks[0], tmp_path / "b.h5")
    index = open_index(path)
    with BlockReader(index) as reader:
        with open(path, "r+b") as file:
            file.truncate(int(index.extents["byte_offset"][index.first_rows["model/v"][0]]) + 1)
        with pytest.raises(CheckpointCorruptError) as caught:
            list(reader.blocks("model/v"))
    assert str(caught.value) == f"{path}: ends in the middle of model/v"


def test_a_file_removed_after_it_was_opened_is_told(damaged):
    index = open_index(damaged)
    damaged.unlink()
    with pytest.raises(CheckpointError) as caught, BlockReader(index):
        pass
    assert str(caught.value) == f"{damaged}: No such file or directory"


# Reads a file whole, after changing it in one place; prints the changes that went unseen. In a process of its own,
# with little memory and time, so that a crash or a loop in libhdf5 is seen as such.
SWEEP = """
import json, random, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (90, 90))
import numpy as np
from hpcfsdp.checkpoint.reader import BlockReader, open_index
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

def everything(path):
    index = open_index(path)
    with BlockReader(index) as reader:
        tensors = {
            name: [spec.dtype, spec.shape, [block.tobytes().hex() for block in reader.blocks(name)]]
            for name, spec in index.tensors.items()
        }
    info = index.info
    return json.dumps(
        [tensors, index.links, index.param_groups, index.scalars, index.rng, info.step, info.world_size, info.date,
         info.software_version, info.format_version, info.extra, info.config],
        default=lambda array: [array.dtype.str, array.shape, array.tobytes().hex()],
    )

source, changed, kind = sys.argv[1:]
data = open(source, "rb").read()
expected = everything(source)
if kind == "flip":
    choose = random.Random(20260102)
    places = [(choose.randrange(len(data)), choose.randrange(8)) for _ in range(300)]
    versions = [(place, data[: place[0]] + bytes([data[place[0]] ^ 1 << place[1]]) + data[place[0] + 1 :])
                for place in places]
    allowed = CheckpointError
else:
    lengths = sorted({*range(0, len(data), len(data) // 150), *range(len(data) - 64, len(data))})
    versions = [(length, data[:length]) for length in lengths]
    allowed = CheckpointCorruptError
unseen, seen = [], 0
for place, version in versions:
    with open(changed, "wb") as file:
        file.write(version)
    try:
        if everything(changed) != expected or kind == "cut":
            unseen.append(place)
    except allowed:
        seen += 1
    except Exception as error:
        unseen.append([place, repr(error)])
print(json.dumps([unseen, seen, len(versions)]))
"""


def test_a_file_cut_off_at_any_length_is_corrupt(good, tmp_path, run_python):
    unseen, seen, count = json.loads(run_python(SWEEP, good, tmp_path / "b.h5", "cut"))
    assert unseen == []
    assert seen == count >= 200


def test_a_single_flipped_bit_is_noticed_or_changes_nothing(good, tmp_path, run_python):
    unseen, seen, count = json.loads(run_python(SWEEP, good, tmp_path / "b.h5", "flip"))
    assert unseen == []
    assert count == 300
    assert seen > 200
