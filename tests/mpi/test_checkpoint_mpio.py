"""The writer that goes through HDF5 and MPI-IO: the same bytes as plain writes. Runs whole in ``make test-mpio``."""

import errno
import os
import re

import h5py
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.saving import content, mpio
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import CheckpointError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from tests.disks import using
from tests.mpi.models import adamw, make_net, shard, train_sharded

pytestmark = pytest.mark.hdf5

needs_mpi = pytest.mark.skipif(
    not h5py.get_config().mpi, reason="this h5py has no MPI: make test-mpio has one that does"
)


class Kinds(nn.Module):
    """Dtypes that HDF5 must not convert, a tensor of several calls, a scalar, and something empty."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.big = nn.Parameter(torch.randn(37, 5, 61, generator=generator))
        for number, dtype in enumerate(
            (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool)
        ):
            self.register_buffer(f"kind{number}", torch.randn(5, 7, generator=generator).to(dtype))
        nans = torch.tensor([0x7F81, -0x3F, -0x8000], dtype=torch.int16)  # bfloat16: signalling, negative; minus zero
        self.register_buffer("nan", nans.view(torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.fixture
def one_date(monkeypatch):
    """Files that are written at different times are otherwise equal."""
    real = content.root_attributes
    monkeypatch.setattr(content, "root_attributes", lambda *args: {**real(*args), "date": "2026-01-02T03:04:05+00:00"})


def both(path, **arguments):
    """The bytes that both writers make of the same."""
    found = []
    for writer in ("mpio", "posix"):
        checkpoint.save(path / f"{writer}.h5", writer=writer, **arguments)
        found.append((path / f"{writer}.h5").read_bytes())
    return found


@needs_mpi
def test_the_bytes_are_those_of_plain_writes(comm, shared_path, one_date):
    model = shard(make_net())
    optimizer = adamw(model)
    train_sharded(model, optimizer, range(2), comm)
    written, expected = both(shared_path, model=model, optimizer=optimizer, step=2, extra={"a": 1})
    assert written == expected
    again = shard(make_net(seed=3))
    again_optimizer = adamw(again)
    checkpoint.load(shared_path / "mpio.h5", model=again, optimizer=again_optimizer)
    for left, right in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


@needs_mpi
def test_every_kind_of_tensor_is_written_raw(comm, shared_path, one_date, monkeypatch):
    monkeypatch.setattr(mpio, "BLOCKS_AT_ONCE", 1)
    model = FullyShardedDataParallel(Kinds())
    written, expected = both(shared_path, model=model)
    assert written == expected


@needs_mpi
def test_long_tensors_take_several_calls(comm, shared_path, one_date, monkeypatch):
    monkeypatch.setattr(mpio, "BLOCKS_AT_ONCE", 2)
    real = content.plan_save
    monkeypatch.setattr(content, "plan_save", lambda tensors, ranks: real(tensors, ranks, 1 << 10))
    calls = []
    call = mpio._CollectiveBlocks._blocks
    monkeypatch.setattr(
        mpio._CollectiveBlocks, "_blocks", lambda self, *args: calls.append(args[0]) or call(self, *args)
    )
    model = FullyShardedDataParallel(Kinds())
    written, expected = both(shared_path, model=model)
    assert written == expected
    assert max(map(calls.count, calls)) > 2


@needs_mpi
def test_a_part_of_the_ranks_saves(world, shared_path, one_date):
    part = MpiCommunicator(world.comm.Split(world.rank % 2))
    path = shared_path / str(world.rank % 2)
    if part.rank == 0:
        path.mkdir()
    part.barrier()
    written, expected = both(path, model=shard(make_net(), part))
    assert written == expected


@needs_mpi
@pytest.mark.ranks(2)
def test_hybrid_shards(comm, shared_path, one_date):
    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("replicate", "shard"))
    model = shard(make_net(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    written, expected = both(shared_path, model=model)
    assert written == expected


class Failing(System):
    """No room, on one rank, from a call on."""

    def __init__(self, fails, name):
        if fails:
            setattr(self, name, self.fail)

    def fail(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@needs_mpi
@pytest.mark.parametrize("name", ["fallocate", "pwritev", "fsync", "replace"])
def test_a_failure_of_rank_0_is_everyones_and_loses_nothing(comm, shared_path, name):
    model = shard(make_net())
    checkpoint.save(shared_path / "x.h5", model=model, step=1)
    before = (shared_path / "x.h5").read_bytes()
    with pytest.raises(CheckpointError, match="No space left"), using(Failing(comm.rank == 0, name)):
        checkpoint.save(shared_path / "x.h5", model=model, step=2, writer="mpio")
    comm.barrier()
    assert [path.name for path in shared_path.iterdir()] == ["x.h5"]
    assert (shared_path / "x.h5").read_bytes() == before


@needs_mpi
def test_bytes_that_one_rank_cannot_get_are_everyones_error(comm, shared_path, monkeypatch):
    real = mpio.bytes_in_memory

    def failing(plan, tensors):
        def bytes_of(index):
            if comm.rank == comm.size - 1 and plan.blocks["tensor"][index] > 2:
                raise RuntimeError("the GPU is gone")
            return real(plan, tensors)(index)

        return bytes_of

    monkeypatch.setattr(mpio, "bytes_in_memory", failing)
    with pytest.raises(Exception, match="the GPU is gone"):
        checkpoint.save(shared_path / "x.h5", model=shard(make_net()), writer="mpio")
    comm.barrier()
    assert list(shared_path.iterdir()) == []
    monkeypatch.undo()
    checkpoint.save(shared_path / "x.h5", model=shard(make_net()), writer="mpio")


@pytest.mark.skipif(h5py.get_config().mpi, reason="this h5py has MPI")
def test_an_h5py_without_mpi_is_reported(comm, shared_path):
    with pytest.raises(CheckpointError, match=r"^writer=\"mpio\" needs an h5py that was built for MPI.*posix"):
        checkpoint.save(shared_path / "x.h5", model=shard(make_net()), writer="mpio")
    assert list(shared_path.iterdir()) == []


def test_a_writer_that_does_not_exist_is_named(comm, shared_path):
    with pytest.raises(CheckpointError, match=re.escape("no writer 'subfile': choose one of posix, mpio, subfiles;")):
        checkpoint.save(shared_path / "x.h5", model=shard(make_net()), writer="subfile")
