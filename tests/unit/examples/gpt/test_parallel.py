from types import SimpleNamespace

import pytest

from hpcfsdp.comm.mesh import plan_mesh
from hpcfsdp.errors import LaunchError
from hpcfsdp.examples.gpt.parallel import Share, make_mesh, share_of
from hpcfsdp.examples.gpt.run_config import MeshConfig
from hpcfsdp.launch.topology import Topology


class Mesh:
    """A planned mesh as one rank sees it."""

    def __init__(self, plan, rank):
        self.mesh_dim_names, self.shape = plan.names, plan.shape
        place = plan.ranks.index(rank)
        self._place = {}
        for name, extent in reversed(list(zip(plan.names, plan.shape, strict=True))):
            place, self._place[name] = divmod(place, extent)

    def get_local_rank(self, name):
        return self._place[name]


def worlds(topology):
    """The world of one rank; its meshes are planned only."""
    for rank in range(topology.size):

        def mesh(rank=rank, **dimensions):
            return Mesh(plan_mesh(topology, dimensions), rank)

        yield SimpleNamespace(rank=rank, size=topology.size, num_nodes=topology.num_nodes, mesh=mesh)


@pytest.mark.parametrize(
    ("config", "names", "shape"),
    [
        (MeshConfig(1, 2), ("shard", "tensor"), (4, 2)),
        (MeshConfig(1, 8), ("shard", "tensor"), (1, 8)),
        (MeshConfig(2, 1), ("replicate", "shard"), (2, 4)),
        (MeshConfig(2, 2), ("replicate", "shard", "tensor"), (2, 2, 2)),
        (MeshConfig("nodes", 1), ("replicate", "shard"), (4, 2)),
        (MeshConfig("nodes", 2), ("replicate", "shard", "tensor"), (4, 1, 2)),
    ],
)
def test_the_mesh_has_the_configured_dimensions_and_shards_over_the_rest(config, names, shape):
    for world in worlds(Topology.regular(num_nodes=4, ranks_per_node=2)):
        made = make_mesh(config, world)
        assert (made.mesh_dim_names, made.shape) == (names, shape)


@pytest.mark.parametrize("config", [MeshConfig(), MeshConfig("nodes", 1)])
def test_a_run_that_only_shards_has_no_mesh(config):
    for world in worlds(Topology.regular(num_nodes=1, ranks_per_node=3)):
        assert make_mesh(config, world) is None
        assert share_of(None, world) == Share(world.rank, 3, 1)


BLOCK, CYCLIC = Topology.regular(2, 4), Topology(((0, 2, 4, 6), (1, 3, 5, 7)))


@pytest.mark.parametrize(
    ("topology", "config"),
    [
        (BLOCK, MeshConfig(1, 2)),
        (BLOCK, MeshConfig(2, 2)),
        (BLOCK, MeshConfig(2, 1)),
        (BLOCK, MeshConfig("nodes", 4)),
        (CYCLIC, MeshConfig(2, 2)),
        (CYCLIC, MeshConfig("nodes", 4)),
    ],
)
def test_each_shard_of_each_replica_has_its_own_data_and_tensor_parallel_ranks_share_theirs(topology, config):
    shares, tensor_places = {}, {}
    for world in worlds(topology):
        mesh = make_mesh(config, world)
        shares[world.rank] = share_of(mesh, world)
        tensor_places[world.rank] = mesh.get_local_rank("tensor") if config.tensor > 1 else 0
    size = 8 // config.tensor
    assert {(share.size, share.copies) for share in shares.values()} == {(size, config.tensor)}
    for part in range(size):
        ranks = [rank for rank, share in shares.items() if share.rank == part]
        assert sorted(tensor_places[rank] for rank in ranks) == list(range(config.tensor))
        assert len({topology.node_rank(rank) for rank in ranks}) == 1  # tensor-parallel ranks share a node


def test_an_order_of_ranks_that_fits_no_mesh_is_refused():
    for world in worlds(CYCLIC):
        with pytest.raises(LaunchError, match=r"mesh shard=. x tensor=2: this mesh cannot follow the order"):
            make_mesh(MeshConfig(1, 2), world)
