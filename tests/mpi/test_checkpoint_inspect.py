"""What many ranks wrote, in runs between each other or in files beside the checkpoint, one process looks into."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import HDF5Writer, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.diff import compare
from hpcfsdp.checkpoint.inspect.stats import file_statistics
from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.fsdp import FullyShardedDataParallel


def flip(path, byte):
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def damage_is_found(path, index, file, row):
    """Flip a bit in a row's elements and look; then flip it back."""
    flip(file, int(row["byte_offset"]))
    (fault,) = verify_file(path).faults
    flip(file, int(row["byte_offset"]))
    assert fault.where == list(index.tensors)[int(row["tensor"])]
    assert f"(written by rank {int(row['rank'])}, " in fault.what
    assert verify_file(path).sound


@pytest.fixture
def cut_along_columns(world, comm, shared_path, monkeypatch):
    """A file of short runs, as ranks write it that cannot exchange them for rows."""
    monkeypatch.setattr("hpcfsdp.checkpoint.dcp.writer._world_here", lambda: None)
    mesh = init_device_mesh(world.device.type, (comm.size,))
    whole = torch.arange(24.0 * 16).view(24, 16)
    columns = distribute_tensor(whole, mesh, [Shard(1)])
    path = shared_path / "columns.h5"
    dcp.save({"model": {"columns": columns, "small": torch.ones(3)}}, storage_writer=HDF5Writer(path, step=1))
    return path


@pytest.mark.hdf5
def test_runs_between_each_other(comm, cut_along_columns, shared_path):
    whole = torch.arange(24.0 * 16).view(24, 16)
    other = shared_path / "rows.h5"
    module = torch.nn.Module()
    module.columns, module.small = torch.nn.Parameter(whole), torch.nn.Parameter(torch.ones(3))
    checkpoint.save(other, model=module, step=1)
    if comm.rank == 0:
        index = open_index(cut_along_columns)
        rows = index.rows_of("model/columns")
        assert (rows["count"].max() > 1) == (comm.size > 1)
        assert verify_file(cut_along_columns).sound
        with BlockReader(index) as reader:
            ((_, found),) = file_statistics(index, reader, ["model/columns"])
        assert (found.min, found.max, found.numel) == (0, whole.numel() - 1, whole.numel())
        assert found.norm == pytest.approx(whole.double().norm().item())
        assert compare(index, open_index(other), ["model/*"]).same
        for row in rows:
            damage_is_found(cut_along_columns, index, cut_along_columns, row)
    comm.barrier()


def test_files_beside_the_checkpoint(comm, shared_path):
    path = shared_path / "a.h5"
    torch.manual_seed(0)
    model = FullyShardedDataParallel(torch.nn.Linear(1000, 300))
    checkpoint.save(path, model=model, writer="subfiles")
    if comm.rank == 0:
        index = open_index(path)
        assert index.parts
        report = verify_file(path)
        assert report.sound
        assert report.nbytes > sum(spec.nbytes for spec in index.tensors.values())
        part = shared_path / index.parts[0].name
        beside = index.extents[index.extents["file"] == 1]
        assert len(beside)
        for row in beside[:2]:
            damage_is_found(path, index, part, row)
        flip(part, 100)
        (fault,) = verify_file(path).faults
        assert part.name in fault.what
        flip(part, 100)
        free = int(beside["byte_offset"].min()) - 1
        assert not np.frombuffer(part.read_bytes(), np.uint8)[free]
        flip(part, free)
        assert [fault.what for fault in verify_file(path).faults] == [
            f"byte {free} of {part.name} belongs to nothing, and is 4 instead of 0"
        ]
        part.unlink()
        (fault,) = verify_file(path).faults
        assert "is not next to it" in fault.what
    comm.barrier()
