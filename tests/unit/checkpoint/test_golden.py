"""Files of every version of the format, kept as users have them, are read by today's code, and by h5py alone."""

import importlib.util
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader

pytestmark = pytest.mark.hdf5

FILES = sorted((Path(__file__).parents[2] / "golden").glob("format-*.h5"))
WORLD_SIZE = 2
LR, BETA1, BETA2, EPS = 0.125, 0.5, 0.75, 1e-3
PARAMS = {"embed.weight": (5, 3), "body.weight": (3, 3), "body.bias": (3,)}
"""Trained, in the order of the model."""
GROUP = [*PARAMS, "short", "empty"]
"""The names in the optimizer's group."""


def version_of(path):
    return re.fullmatch(r"format-(\d+\.\d+)", path.stem)[1]


@pytest.fixture(scope="module", params=FILES, ids=version_of)
def golden(request):
    return request.param


def expected_tensors():
    """Path in the file -> values, as tests/golden/make.py makes them: counting up in quarters, and a step of AdamW.

    bfloat16 as float32, which HDF5 gives for it.
    """
    found = {}
    for index, (name, shape) in enumerate(PARAMS.items()):
        begin = (np.arange(np.prod(shape), dtype=np.float32) / 4 + index).reshape(shape)
        # Of gradients that are all one; moments are corrected for having begun at zero.
        mean, square = np.float32(1 - BETA1), np.float32(1 - BETA2)
        step = LR * (mean / (1 - BETA1)) / (np.sqrt(square / (1 - BETA2)) + EPS)
        found[f"model/{name}"] = begin - np.float32(step)
        found[f"optim/state/{name}/exp_avg"] = np.full(shape, mean)
        found[f"optim/state/{name}/exp_avg_sq"] = np.full(shape, square)
        found[f"optim/state/{name}/step"] = np.float32(1)
    found["model/short"] = np.arange(7, dtype=np.float32) / 4 + 3
    found["model/empty"] = np.zeros((0, 2), np.float32)
    found["model/count"] = np.int64(7)
    found["model/mask"] = np.array([True, False, True])
    return found


DTYPES = {"model/short": "bfloat16", "model/count": "int64", "model/mask": "bool"}
"""Where it is not float32."""


def assert_values(path, values, expected):
    assert values.shape == expected.shape
    if path in PARAMS or path.removeprefix("model/") in PARAMS:
        np.testing.assert_allclose(values, expected, rtol=2e-7)  # torch takes the step in another order
    else:
        np.testing.assert_array_equal(values, expected)


def make_model():
    """The model that was saved, before it was trained."""
    spec = importlib.util.spec_from_file_location("golden_make", FILES[0].parent / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Tiny()


def expected_rng(rank):
    """States of torch and numpy on a rank that has seeded them with its number, and made the model."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        make_model()
        state = torch.get_rng_state().numpy()
    return state, np.random.RandomState(rank).get_state()[1].astype(np.float64)


def test_the_index_says_what_was_saved(golden):
    index = open_index(golden)
    info = index.info
    assert (info.step, info.world_size, info.config) == (3, WORLD_SIZE, {"width": 3})
    assert info.format_version == version_of(golden)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", info.date)
    assert list(info.extra) == ["words", "pairs", "table"]
    assert (info.extra["words"], info.extra["pairs"]) == (["a", "b"], {1: 2.5})
    np.testing.assert_array_equal(info.extra["table"], np.arange(6).reshape(2, 3))
    assert index.links == {"model/head.weight": "model/embed.weight"}
    (group,) = index.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (LR, [BETA1, BETA2], EPS, 0)
    assert sorted(group["params"]) == sorted(GROUP)
    assert index.scalars == {}
    assert {spec.path: (spec.shape, spec.dtype) for spec in index.tensors.values()} == {
        path: (values.shape, DTYPES.get(path, "float32")) for path, values in expected_tensors().items()
    }


def test_every_value_is_what_was_saved(golden):
    index = open_index(golden)
    with BlockReader(index) as reader:
        for path, expected in expected_tensors().items():
            spec = index.tensors[path]
            bits = reader.read(path, 0, spec.numel)
            values = torch.from_numpy(bits).view(getattr(torch, spec.dtype)).reshape(spec.shape)
            assert_values(path, (values.float() if spec.dtype == "bfloat16" else values).numpy(), expected)


def test_random_numbers_of_every_rank_are_what_was_saved(golden):
    index = open_index(golden)
    for rank in range(WORLD_SIZE):
        cpu, numpy = expected_rng(rank)
        np.testing.assert_array_equal(index.rng["torch_cpu"][rank], cpu)
        np.testing.assert_array_equal(index.rng["numpy"][rank][:624], numpy)
        assert index.rng["python"].shape[0] == WORLD_SIZE


def test_every_extent_has_its_checksum_and_both_ranks_wrote(golden):
    index = open_index(golden)
    data = golden.read_bytes()
    for row in index.extents:
        spec = list(index.tensors.values())[row["tensor"]]
        assert row["count"] == 1
        begin = int(row["byte_offset"])
        assert schema.checksum(data[begin : begin + int(row["numel"]) * spec.itemsize]) == row["checksum"]
    assert set(index.extents["rank"].tolist()) == set(range(WORLD_SIZE))


def test_it_is_loaded_into_a_model_and_its_optimizer(golden):
    model = make_model()
    for tensor in model.state_dict().values():
        tensor.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    info = checkpoint.load(golden, model=model, optimizer=optimizer)
    assert info.step == 3
    state = model.state_dict()
    for path, expected in expected_tensors().items():
        if path.startswith("model/"):
            tensor = state[path.removeprefix("model/")]
            assert_values(path, (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(), expected)
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq", "step") if name in PARAMS else ():
            expected = expected_tensors()[f"optim/state/{name}/{key}"]
            assert_values(name + key, optimizer.state[param][key].numpy(), expected)
    assert optimizer.param_groups[0]["lr"] == LR


# What follows uses h5py, numpy and json alone: docs/reference/checkpoint-format.md promises it to a reader of any kind.


def test_h5py_alone_reads_every_value(golden):
    with h5py.File(golden) as file:
        for path, expected in expected_tensors().items():
            assert_values(path, np.asarray(file[path][()]), expected)
        assert file["model/head.weight"] == file["model/embed.weight"]
        assert file["model/short"].attrs["torch_dtype"] == b"bfloat16"
        assert file["model/mask"].attrs["torch_dtype"] == b"bool"
        assert "torch_dtype" not in file["model/count"].attrs


def test_h5py_alone_reads_everything_else(golden):
    with h5py.File(golden) as file:
        marks = dict(file.attrs)
        assert (marks["format"], marks["format_version"].decode()) == (b"hpcfsdp", version_of(golden))
        assert ("about" in marks) == (version_of(golden) != "1.0")
        assert (marks["software"], marks["step"], marks["world_size"], marks["committed"]) == (b"hpcfsdp", 3, 2, 1)
        assert json.loads(file["meta/config"][()]) == {"width": 3}
        (group,) = json.loads(file["optim/param_groups"][()])
        assert (group["lr"], group["betas"], sorted(group["params"])) == (LR, [BETA1, BETA2], sorted(GROUP))
        assert json.loads(file["optim/scalars"][()]) == {}
        assert json.loads(file["extra/values"][()])
        np.testing.assert_array_equal(file["extra/arrays/0"][...], np.arange(6).reshape(2, 3))
        for rank in range(WORLD_SIZE):
            np.testing.assert_array_equal(file["extra/rng/torch_cpu"][rank], expected_rng(rank)[0])


def test_h5py_alone_knows_which_bytes_are_whose(golden):
    raw = golden.read_bytes()
    expected = expected_tensors()
    found = dict.fromkeys(expected, b"")
    with h5py.File(golden) as file:
        table = file["meta/tensors"][...]
        paths = [path.decode() for path in (table["path"] if table.dtype.names else table)]
        for row in file["meta/extents"][...]:
            path = paths[row["tensor"]]
            begin, itemsize = int(row["byte_offset"]), file[path].dtype.itemsize
            if path == "model/short":
                itemsize = 2  # numpy has no bfloat16: h5py shows a float32
            assert begin == file[path].id.get_offset() + int(row["start"]) * itemsize
            found[path] += raw[begin : begin + int(row["numel"]) * itemsize]
        for path in expected:
            values = file[path][()]
            stored = (values.view("<u4") >> 16).astype("<u2") if path == "model/short" else values
            assert found[path] == stored.tobytes()


def test_tables_of_today_name_every_tensor_for_h5py(golden):
    expected = expected_tensors()
    with h5py.File(golden) as file:
        sizes = file["meta/shapes"][...].tolist()
        table = file["meta/tensors"][...]
        assert {
            path.decode(): (tuple(sizes[first : first + ndim]), dtype.decode())
            for path, dtype, first, ndim in table.tolist()
        } == {path: (values.shape, DTYPES.get(path, "float32")) for path, values in expected.items()}
        links = {path.decode(): table["path"][place].decode() for path, place in file["meta/links"][...].tolist()}
        assert links == {"model/head.weight": "model/embed.weight"}
