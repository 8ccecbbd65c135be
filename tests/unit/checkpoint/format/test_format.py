"""A file is what docs/reference/checkpoint-format.md specifies, read here by that page alone.

With struct, xxhash, numpy and h5py.
"""

import io
import json
import struct

import h5py
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import schema

pytestmark = pytest.mark.hdf5


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_model, train_steps):
    """A file with one of everything, the model, and its optimizer."""
    model = make_model(0)
    model.register_buffer("tiny", torch.tensor([0.5, -2]).to(torch.float8_e5m2))
    optimizer = torch.optim.AdamW(model.parameters())
    train_steps(model, optimizer, 2)
    path = checkpoint.save(
        tmp_path_factory.mktemp("format") / "a.h5",
        model=model,
        optimizer=optimizer,
        step=7,
        extra={"a": np.arange(3), 5: float("inf")},
        config={"b": [1]},
        metrics={"loss": ([1, 2], [2.5, 1.25])},
    )
    return path.read_bytes(), model, optimizer


def read_footer(data):
    """(regions, digest), after checking the file as the page says."""
    file_bytes, count, digest, own, magic = struct.unpack("<QQQQ8s", data[-40:])
    assert magic == b"hpcfsdp\n"
    assert file_bytes == len(data)
    table = data[-40 - 16 * count : -40]
    assert own == xxhash.xxh3_64_intdigest(table + struct.pack("<QQQ", file_bytes, count, digest))
    regions = list(struct.iter_unpack("<QQ", table))
    end = 0
    for begin, nbytes in regions:
        assert begin >= end
        end = begin + nbytes
    assert end <= len(data) - 40 - 16 * count
    assert digest == xxhash.xxh3_64_intdigest(b"".join(data[begin : begin + nbytes] for begin, nbytes in regions))
    return regions


def opened(data):
    return h5py.File(io.BytesIO(data), "r")


def test_the_footer_checks_all_that_is_no_tensor_and_the_rest_is_zero(saved):
    data = saved[0]
    regions = read_footer(data)
    covered = np.zeros(len(data) - 40 - 16 * len(regions), bool)
    with opened(data) as file:
        for row in file["meta/extents"]:
            itemsize = file[file["meta/tensors"]["path"][row["tensor"]]].id.get_type().get_size()
            nbytes = int(row["numel"]) * itemsize
            begin = int(row["byte_offset"])
            assert row["count"] == 1
            assert row["stride"] == row["numel"]
            assert row["file"] == 0
            assert not covered[begin : begin + nbytes].any()
            covered[begin : begin + nbytes] = True
            assert row["checksum"] == xxhash.xxh3_64_intdigest(data[begin : begin + nbytes])
    for begin, nbytes in regions:
        assert not covered[begin : begin + nbytes].any()
        covered[begin : begin + nbytes] = True
    assert not np.frombuffer(data[: len(covered)], np.uint8)[~covered].any()


def test_hdf5_knows_nothing_of_the_footer(saved):
    data = saved[0]
    regions = read_footer(data)
    without = data[: len(data) - 40 - 16 * len(regions)]
    with opened(data) as file, opened(without) as other:
        assert file.id.get_filesize() == len(data)
        assert list(file["model"]) == list(other["model"])
        np.testing.assert_array_equal(file["model/hidden.weight"], other["model/hidden.weight"])


def test_the_tables_describe_the_datasets(saved):
    data, model, _ = saved
    with opened(data) as file:
        shapes = file["meta/shapes"][...]
        paths = [path.decode() for path in file["meta/tensors"]["path"]]
        for path, row in zip(paths, file["meta/tensors"], strict=True):
            first, ndim = int(row["first_dim"]), int(row["ndim"])
            assert tuple(shapes[first : first + ndim]) == file[path].shape
            if path.startswith("model/"):
                tensor = model.state_dict()[path.removeprefix("model/")]
                assert f"torch.{row['dtype'].decode()}" == str(tensor.dtype)
            mark = file[path].attrs.get("torch_dtype")
            marked = row["dtype"] == b"bool" or b"float8" in row["dtype"] or row["dtype"] == b"bfloat16"
            assert mark == (row["dtype"] if marked else None)
        (link,) = file["meta/links"]
        assert (link["path"], paths[link["tensor"]]) == (b"model/head.weight", "model/embed.weight")
        assert file["model/head.weight"] == file["model/embed.weight"]
        order = file["meta/extents"][...][["tensor", "start"]].tolist()
        assert order == sorted(order)


def test_h5py_shows_every_value(saved):
    data, model, optimizer = saved
    with opened(data) as file:
        for name, tensor in model.state_dict().items():
            dataset = file["model"][name]
            expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            expected = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e5m2 else expected
            np.testing.assert_array_equal(dataset[()], expected.numpy())
        for name, param in model.named_parameters():
            for key, value in optimizer.state[param].items():
                np.testing.assert_array_equal(file[f"optim/state/{name}/{key}"][()], value.numpy())
        groups = json.loads(file["optim/param_groups"][()].decode("ascii"))
        assert set(groups[0]["params"]) == {name for name, _ in model.named_parameters()}
        assert json.loads(file["optim/scalars"][()]) == {}
        assert json.loads(file["meta/config"][()]) == {"b": [1]}
        values = json.loads(file["extra/values"][()])
        (pairs,) = values.values()
        entries = dict(map(tuple, ((key, str(value)) for key, value in pairs)))
        assert entries == {"a": "{'__array__': '0'}", 5: "inf"}
        assert file["extra/arrays/0"][...].tolist() == [0, 1, 2]
        assert file["extra/rng/torch_cpu"].shape[0] == 1
        loss = file["metrics/loss"]
        assert {key: bytes(value) for key, value in loss.attrs.items()} == {
            "NX_class": b"NXdata", "axes": b"step", "signal": b"value",
        }  # fmt: skip
        assert (loss["step"][...].tolist(), loss["value"][...].tolist()) == ([1, 2], [2.5, 1.25])


def test_attributes_of_the_root_group_say_what_it_is(saved):
    with opened(saved[0]) as file:
        attributes = dict(file.attrs)
    assert attributes.pop("date").decode().endswith("+00:00")
    assert attributes.pop("software_version")
    assert attributes == {
        "format": b"hpcfsdp",
        "format_version": b"1.1",
        "about": schema.ABOUT.encode(),
        "step": 7,
        "world_size": 1,
        "committed": 1,
    }


def test_the_first_attribute_tells_a_stranger_what_the_file_is(saved):
    with opened(saved[0]) as file:
        about = file.attrs["about"].decode()
        assert sorted(file.attrs)[0] == "about"  # h5dump goes by the alphabet
        assert "h5py.File(FILE)['model/NAME'][()]" in about  # and this works:
        name = next(iter(file["model"]))
        assert file[f"model/{name}"][()].size
    assert about.isascii()
    assert all(word in about for word in ("checkpoint", "hpcfsdp show FILE", "checkpoint-format.md"))


def test_tensors_of_64_kib_begin_at_a_page_and_extents_hold_4_mib(tmp_path):
    path = checkpoint.save(tmp_path / "b.h5", model=nn.Linear(1 << 7, 1 << 7))
    with h5py.File(path) as file:
        assert file["model/weight"].id.get_offset() % 4096 == 0
    path = checkpoint.save(tmp_path / "a.h5", model=nn.Linear(1 << 10, 5 << 9, bias=False))
    with h5py.File(path) as file:
        assert file["model/weight"].id.get_offset() % 4096 == 0
        assert file["meta/extents"]["numel"].tolist() == [1 << 20, 1 << 20, 1 << 19]
