"""Readers of HDF5 that do without its library."""

import h5py
import numpy as np
import pyfive
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import HDF5Writer
from hpcfsdp.fsdp2 import fully_shard
from hpcfsdp.state_dict import get_state_dict


def read(group, path=""):
    """The attributes of groups, and the values of datasets, by path."""
    found = {f"{path}@{name}": value for name, value in group.attrs.items()}
    for name in group:
        child = group[name]
        found |= read(child, f"{path}/{name}") if hasattr(child, "keys") else {f"{path}/{name}": child[()]}
    return found


def save(path, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(300, 80))
    model = fully_shard(model) if way == "dcp" else hpcfsdp.FullyShardedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    if way == "dcp":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state, "epoch": 3}, storage_writer=HDF5Writer(path))
        return path
    extra, metrics = {"seen": np.arange(3)}, {"loss": ([1, 2], [0.5, 0.25])}
    return checkpoint.save(path, model=model, optimizer=optimizer, extra=extra, metrics=metrics, writer=way)


@pytest.mark.parametrize("way", ["posix", "dcp"])
def test_pyfive_reads_what_h5py_reads(world, shared_path, way):
    path = save(shared_path / "a.h5", way)
    if world.rank == 0:
        with h5py.File(path) as file:
            expected = read(file)
        found = read(pyfive.File(str(path)))
        assert set(found) == set(expected)
        assert {"@format", "@step", "/model/0.weight", "/meta/tensors"} <= set(found)
        for name, value in expected.items():
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name


def test_pyfive_opens_a_checkpoint_of_several_files(world, shared_path):
    path = save(shared_path / "a.h5", "subfiles")
    if world.rank == 0:
        assert pyfive.File(str(path)).attrs["format"] == b"hpcfsdp"
        (part,) = shared_path.glob("a.*.node-0.h5")
        with h5py.File(part) as file:
            expected = read(file)
        found = read(pyfive.File(str(part)))
        assert found["@checkpoint"] == b"a.h5"
        assert {name: np.asarray(value).tobytes() for name, value in found.items()} == {
            name: np.asarray(value).tobytes() for name, value in expected.items()
        }
