import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.comm.communicator import Grid
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.units.groups import resolve_mesh
from hpcfsdp.units.unit_mesh import UnitMesh

COMM, SHARD, REPLICATE, DATA = (FakeCommunicator(*place) for place in ((1, 4), (1, 2), (2, 3), (5, 6)))
GRID = np.arange(6).reshape(3, 2)
PAIR = {"shard": SHARD, "replicate": REPLICATE}
LINE = UnitMesh(Strategy.FULL_SHARD, {"shard": COMM}, COMM, np.arange(4)[None, :])
COPIES = UnitMesh(Strategy.NO_SHARD, {"replicate": COMM}, COMM, np.arange(4)[:, None])
HYBRID = UnitMesh(Strategy.HYBRID_SHARD, PAIR, DATA, GRID)


def test_a_communicator_by_the_names_of_its_dimensions():
    assert (LINE.comm(), LINE.comm("shard"), LINE.comm("shard", "tensor")) == (COMM, COMM, COMM)
    assert (COPIES.comm(), COPIES.comm("replicate"), COPIES.comm("shard").size) == (COMM, COMM, 1)
    assert (HYBRID.comm(), HYBRID.comm("replicate", "shard"), HYBRID.comm("shard")) == (DATA, DATA, SHARD)


def test_ranks_of_a_pair_that_is_not_the_world_are_a_grid():
    comm = UnitMesh(Strategy.HYBRID_SHARD, PAIR, None, None).comm()
    assert type(comm) is Grid
    assert (comm.rank, comm.size) == (5, 6)


def test_a_dimension_that_there_is_not_has_one_rank():
    assert [LINE.size(*dims) for dims in ((), ("shard",), ("replicate",), ("tensor", "shard"))] == [4, 4, 1, 4]
    assert [COPIES.size(*dims) for dims in ((), ("shard",), ("replicate",))] == [4, 1, 4]
    assert LINE.is_first("replicate", "tensor")
    assert not LINE.is_first()
    assert COPIES.is_first("shard")
    assert not HYBRID.is_first("replicate")


def test_the_communicators_that_connect_all_ranks():
    assert LINE.subgroups() == [COMM]
    assert HYBRID.subgroups() == [DATA]
    assert UnitMesh(Strategy.HYBRID_SHARD, PAIR, None, None).subgroups() == [SHARD, REPLICATE]
    alone = FakeCommunicator()
    assert UnitMesh(Strategy.FULL_SHARD, {"shard": alone}, alone, np.zeros((1, 1))).subgroups() == []


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [(LINE, [[0], [1], [2], [3]]), (COPIES, [[0, 1, 2, 3]]), (HYBRID, [[0, 2, 4], [1, 3, 5]])],
    ids=["full", "no", "hybrid"],
)
def test_the_ranks_that_have_each_shard(mesh, expected):
    assert mesh.copies.tolist() == expected


def test_names_of_dimensions_without_process_groups():
    with pytest.raises(RuntimeError, match=r"call hpcfsdp.init\(\) first"):
        LINE.ranks("shard")


def test_a_mesh_with_and_without_its_tensor_parallel_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        whole = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("shard", "tensor"))
        plain = resolve_mesh(None, whole["shard"], None)
        mesh = plain.with_tensor(whole["tensor"])
        assert (mesh.size(), mesh.size("shard"), mesh.size("tensor")) == (8, 4, 2)
        assert [comm.size for comm in mesh.subgroups()] == [4, 2]
        assert (mesh.comm("tensor").rank, mesh.is_first("tensor")) == (1, False)
        assert mesh.tensor_mesh == whole["tensor"]
        again = mesh.with_tensor(None)
        assert (again.along, again.tensor, again.tensor_mesh) == (plain.along, None, None)
    finally:
        dist.destroy_process_group()
