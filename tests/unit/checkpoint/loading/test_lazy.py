import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import reader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.loading import lazy
from hpcfsdp.errors import CheckpointCorruptError

SHAPE = (4, 3, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of several dtypes and a tied name, and the tensors in it."""
    torch.manual_seed(0)
    model = nn.Module()
    for name, dtype in [("single", torch.float32), ("brain", torch.bfloat16), ("tiny", torch.float8_e4m3fn)]:
        model.register_buffer(name, torch.randn(SHAPE).to(dtype))
    model.register_buffer("wave", torch.randn(SHAPE, dtype=torch.complex64))
    model.register_buffer("one", torch.tensor(2.5))
    model.register_buffer("none", torch.zeros(0, 3))
    model.register_buffer("again", model.single)
    path = tmp_path_factory.mktemp("lazy") / "a.h5"
    checkpoint.save(path, model=model, step=4, metrics={"loss": ([1, 2], [0.5, 0.25])})
    return path, dict(model.named_buffers(remove_duplicate=False))


indices = st.tuples(
    *(
        st.one_of(
            st.integers(-size, size - 1),
            st.builds(
                slice,
                st.none() | st.integers(-size - 1, size + 1),
                st.none() | st.integers(-size - 1, size + 1),
                st.none() | st.integers(1, 3),
            ),
        )
        for size in SHAPE
    )
)


@given(st.sampled_from(["single", "brain", "tiny", "wave", "again"]), indices, st.integers(0, 3), st.booleans())
@settings(max_examples=200)
def test_any_index_gives_what_torch_gives(saved, name, key, length, dots):
    path, tensors = saved
    key = key[:length]
    if dots:
        key = (..., *key[length // 2 :]) if length % 2 else (*key, ...)
    expected = tensors[name].view(torch.uint8)[key] if name == "tiny" else tensors[name][key]
    with checkpoint.open(path) as file:
        found = file[f"model/{name}"][key]
    assert found.dtype == tensors[name].dtype
    assert torch.equal(found.view(torch.uint8) if name == "tiny" else found, expected)


def test_a_checkpoint_is_a_mapping_of_paths(saved):
    path, tensors = saved
    with checkpoint.open(path) as file:
        assert len(file) == len(list(file)) == len(tensors)
        assert "model/again" in file
        assert "model/nothing" not in file
        assert file.info.step == 4
        assert file.param_groups is None
        assert [array.tolist() for array in file.metrics["loss"]] == [[1, 2], [0.5, 0.25]]
        tensor = file["model/brain"]
        assert (tensor.shape, tensor.dtype, tensor.numel, tensor.nbytes, tensor.ndim, len(tensor)) == (
            SHAPE,
            "bfloat16",
            60,
            120,
            3,
            4,
        )
        assert repr(tensor) == "<LazyTensor model/brain: [4, 3, 5] bfloat16>"
        with pytest.raises(KeyError, match=r"holds no tensor 'model/sinle'.*model/single"):
            file["model/sinle"]


def test_scalars_and_empty_tensors(saved):
    path, _ = saved
    with checkpoint.open(path) as file:
        assert file["model/one"][()].item() == file["model/one"][...].item() == 2.5
        assert file["model/none"][:].shape == (0, 3)
        with pytest.raises(TypeError, match="without dimensions"):
            len(file["model/one"])


def test_as_a_numpy_array_elements_are_numbers(saved):
    path, tensors = saved
    with checkpoint.open(path) as file:
        for name in ("single", "brain", "tiny", "wave", "one", "none"):
            array = np.asarray(file[f"model/{name}"])
            expected = tensors[name] if name in ("single", "wave") else tensors[name].float()
            assert array.shape == tuple(expected.shape)
            np.testing.assert_array_equal(array, expected.numpy())
        assert np.asarray(file["model/single"], dtype=np.float64).dtype == np.float64


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((0, 0, 0, 0), "4 indices for a tensor of 3 dimensions"),
        (4, "4 is outside of dimension 0, which has 4 elements"),
        ((0, -4), "-4 is outside of dimension 1, which has 3 elements"),
        (slice(None, None, -1), "a step of -1 is not supported"),
        ((..., 0, ...), "at most one"),
        ([0, 1], r"\[0, 1\] is not supported as an index"),
        (None, "None is not supported as an index"),
    ],
)
def test_an_index_that_is_not_supported_is_reported(saved, key, message):
    with checkpoint.open(saved[0]) as file, pytest.raises(IndexError, match=message):
        file["model/single"][key]


def test_only_what_is_asked_for_is_read(tmp_path):
    model = nn.Linear(1 << 10, 1 << 12, bias=False)  # 16 MiB: four blocks
    path = checkpoint.save(tmp_path / "a.h5", model=model)
    index = checkpoint.open_index(path)
    row = index.rows_of("model/weight")[2]
    with open(path, "r+b") as file:
        file.seek(int(row["byte_offset"]) + 5)
        file.write(b"\xff\xff")
    with checkpoint.open(path) as file:
        weight = file["model/weight"]
        assert torch.equal(weight[:2048, 7], model.weight[:2048, 7])
        with pytest.raises(CheckpointCorruptError, match="do not have their checksum"):
            weight[2047:2049]
    with checkpoint.open(path, verify=False) as file:
        assert torch.equal(file["model/weight"][2049], model.weight[2049])


@given(indices, st.sampled_from([1, 12, 40, 1000]), st.sampled_from([0, 8, 1000]), st.integers(1, 5))
def test_any_grouping_of_reads_gives_what_torch_gives(saved, key, at_once, gap, runs):
    path, tensors = saved
    with (
        pytest.MonkeyPatch.context() as patch,
        checkpoint.open(path) as file,
    ):
        patch.setattr(reader, "_RUNS_BYTES", at_once)
        patch.setattr(reader, "_GAP_BYTES", gap)
        patch.setattr(lazy, "_RUNS_AT_ONCE", runs)
        assert torch.equal(file["model/single"][key], tensors["single"][key])


class Reads(reader.BlockReader):
    """A reader without a file that records requests: (first element, number of elements)."""

    def __init__(self):
        self.asked = []

    def read_all(self, wanted):
        self.asked += [(start, len(output)) for _, start, output in wanted]

    def read(self, path, start, numel):
        self.asked.append((start, numel))
        return np.zeros(numel, np.uint8)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("shape", "key", "asked"),
    [
        ((8, 2 * MIB), np.s_[::3], [(0, 2 * MIB), (6 * MIB, 2 * MIB), (12 * MIB, 2 * MIB)]),  # those rows alone
        ((8, 40 * MIB), np.s_[2:4], [(80 * MIB, 80 * MIB)]),  # in one piece, to where it belongs
        ((400, 400, 8), np.s_[:, :, 0], [(0, 400 * 400 * 8 - 7)]),  # not one read for each row
        ((40 * MIB,), np.s_[::1000], [(0, 16777001), (16778000, 16777001), (33556000, 8387001)]),
        ((40 * MIB,), np.s_[:: 20 * MIB], [(0, 1), (20 * MIB, 1)]),
        ((40 * MIB,), np.s_[5:5], []),
    ],
)
def test_what_is_read_is_little_more_than_what_is_asked_for(shape, key, asked):
    reads = Reads()
    found = lazy.LazyTensor("model/a", TensorSpec("model/a", shape, "uint8"), reads)[key]
    assert found.shape == torch.empty(shape, device="meta")[key].shape
    assert reads.asked == asked


def test_a_long_range_is_not_walked_through():
    reads = Reads()
    spec = TensorSpec("model/a", (2, 1 << 55), "uint8")
    found = lazy.LazyTensor("model/a", spec, reads)[1, 3 :: 1 << 54]
    assert found.shape == (2,)
    assert reads.asked == [((1 << 55) + 3, 1), ((1 << 55) + (1 << 54) + 3, 1)]


def test_to_ask_whether_a_tensor_is_there_looks_for_no_nearest(saved, monkeypatch):
    monkeypatch.setattr(lazy, "nearest", lambda *_: pytest.fail("looked for the nearest"))
    with checkpoint.open(saved[0]) as file:
        assert "model/nothing" not in file
        assert 3 not in file
        assert file.get("model/nothing") is None
        assert file.get("model/nothing", 5) == 5
        assert file.get("model/one")[()].item() == file.get("model/again").shape[0] - 1.5


def test_looking_into_a_file_needs_no_mpi(saved):
    code = f"""
import sys
from hpcfsdp import checkpoint
import numpy
with checkpoint.open({str(saved[0])!r}) as file:
    numpy.asarray(file["model/brain"])
print(sorted({{"torch", "mpi4py"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
