"""Ranks in two dimensions on the simulated device: shards and replicas, and shards of tensor-parallel models."""

import pytest

from tests.accelerator.programs import EXACT, POLICIES, SIM, SOME_POLICIES, leave_for_later, mesh_of, shard, train
from tests.mpi import mesh_cases, parity
from tests.mpi.parity import Recipe, build, close, reference

pytestmark = pytest.mark.usefixtures("hardware")

HYBRIDS = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("way", "strategy", "original", "offload", "policy"),
    [
        *(("pair", "HYBRID_SHARD", False, False, policy) for policy in POLICIES),
        *(("pair", "_HYBRID_SHARD_ZERO2", True, False, policy) for policy in SOME_POLICIES),
        *(("pair", strategy, strategy == "HYBRID_SHARD", True, "all") for strategy in HYBRIDS),
        *(("mesh", strategy, original, original, "all") for strategy in HYBRIDS for original in (False, True)),
        ("mesh", "HYBRID_SHARD", False, False, "eager"),
    ],
)
def test_shards_and_replicas(world, streams, way, strategy, original, offload, policy):
    recipe, mesh = Recipe("sgd", parts=2, no_sync=True, clip=(0.1, 2.0)), mesh_of((2, 2), ("replicate", "shard"))
    ranks = {"device_mesh": mesh}
    if way == "pair":
        ranks = {"group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    sharded = shard(build(parity.Nested).to(SIM), strategy=strategy, original=original, offload=offload, **ranks)
    leave_for_later(streams, policy)
    close(train(sharded, recipe, SIM), reference(parity.Nested, world.size, recipe), **EXACT)


@pytest.mark.ranks(2, 1, 4)
@pytest.mark.parametrize("policy", SOME_POLICIES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_mesh_of_one_dimension(world, streams, strategy, policy):
    sharded = shard(build(parity.Nested).to(SIM), strategy=strategy, device_mesh=mesh_of((world.size,), ("shard",)))
    leave_for_later(streams, policy)
    close(train(sharded, Recipe("sgd"), SIM), reference(parity.Nested, world.size, Recipe("sgd")), **EXACT)


# Tensor parallelism


class Place(mesh_cases.Place):
    def part(self, tensor):
        return super().part(tensor).to(SIM)


def in_host_memory(trained):
    def moved(tensors):
        return {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}

    return trained._replace(gradients=moved(trained.gradients), parameters=moved(trained.parameters))


@pytest.mark.ranks(4, 2)
@pytest.mark.parametrize(
    ("model", "original", "policy"),
    [
        (mesh_cases.Mlp, False, "all"),
        (mesh_cases.Mlp, True, "eager"),
        (mesh_cases.Frozen, True, "all"),
        (mesh_cases.Sequence, False, "random"),
    ],
)
@pytest.mark.parametrize("shape", mesh_cases.CASES, ids=str)
def test_tensor_parallel_models(world, streams, shape, model, original, policy):
    mesh = mesh_of(shape, ("replicate", "shard", "tensor"))
    at = Place(shape, mesh, mesh["replicate"].get_local_rank() * shape[1] + mesh["shard"].get_local_rank())
    recipe = mesh_cases.Recipe(parts=2)
    sharded = mesh_cases.shard(mesh_cases.build(model).to(SIM), at, use_orig_params=original)
    leave_for_later(streams, policy)
    found = mesh_cases.train(sharded, at, recipe, no_sync=True)
    mesh_cases.close(in_host_memory(found), mesh_cases.expected(model, recipe))
