"""States and classes of sharded modules, ``ignored_params``, ``dp_mesh_dims``, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.models import MLP, check_training, close, data_of, mesh_of, reference


def test_each_unit_has_a_state(fsdp, mesh):
    model = nn.Sequential(MLP(4), MLP(4))
    units = (*model, model)
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh)
    states = {fsdp.fully_shard.state(unit) for unit in units}
    assert len(states) == 3 and None not in states
    assert fsdp.fully_shard.state(model[0].in_proj) is None


def test_only_units_change_their_class(fsdp, mesh):
    model = fsdp.fully_shard(nn.Sequential(MLP(4), MLP(4), MLP(4)), mesh=mesh)
    assert isinstance(model, nn.Sequential) and isinstance(model, fsdp.FSDPModule)
    assert type(model).__name__ == "FSDPSequential"
    assert not any(isinstance(module, fsdp.FSDPModule) for module in model[0].modules())
    assert type(model[:2]) is nn.Sequential


def test_modules_that_are_refused(fsdp, mesh):
    for container in (nn.ModuleList([MLP(4)]), nn.ModuleDict({"only": MLP(4)})):
        with pytest.raises(ValueError):
            fsdp.fully_shard(container, mesh=mesh)
    model = fsdp.fully_shard(MLP(4), mesh=mesh)
    with pytest.raises((ValueError, AssertionError)):
        fsdp.fully_shard(model, mesh=mesh)


def test_ignored_parameters_within_distributed_data_parallel(fsdp, mesh, world):
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.layer, self.offset = inner, nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.layer(self.inner(x)) - self.offset

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 4, 4)).square().sum()

    model = Around(Around(nn.Linear(4, 4))).double()
    losses, expected = reference(model, world, loss_of)
    ignored = set(model.inner.inner.parameters())
    for unit in (model.inner.layer, model.inner):
        fsdp.fully_shard(unit, mesh=mesh, ignored_params=ignored)
    sharded = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    assert sharded == ["inner.offset", "inner.layer.weight", "inner.layer.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    outer = DistributedDataParallel(model)
    optim = torch.optim.Adam(outer.parameters(), lr=1e-2)
    for step, mean in enumerate(losses):
        loss = loss_of(outer, world.rank, step)
        loss.backward()
        with implicit_replication():
            optim.step()
            optim.zero_grad()
        close(world.comm.allreduce(loss.detach()) / world.size, mean)
    for name, param in model.named_parameters():
        close(param, expected[name])


# dp_mesh_dims


def distribute(model, mesh, tp=None):
    """Put parameters on `mesh`, replicated but along its dimension `tp`."""

    def partition(name, module, mesh):
        for key, param in list(module.named_parameters(recurse=False)):
            cut = Shard(0 if name == "in_proj" else 1) if key == "weight" else Replicate()
            placements = [cut if dim == tp else Replicate() for dim in mesh.mesh_dim_names]
            setattr(module, key, nn.Parameter(distribute_tensor(param, mesh, placements)))

    return distribute_module(model, mesh, partition)


def beside(param):
    """Along the dimension of a parameter that tensor parallelism does not cut."""
    return Shard(1 if any(placement.is_shard(0) for placement in param.placements) else 0)


def train(fsdp, world, mesh, **options):
    """Train an ``MLP`` on `mesh`, compare it with one process, and return its parameters by name."""
    tp = "tp" if "tp" in mesh.mesh_dim_names else None

    def loss_of(model, rank, step):
        x = data_of(rank // (2 if tp else 1) + 10 * step, 2, 8)
        if isinstance(model, fsdp.FSDPModule):
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return model(x).sum()

    model = MLP(8).double()
    expected = reference(model, world, loss_of)
    distribute(model, mesh, tp)
    fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=beside if tp else None, **options)
    check_training(model, world, loss_of, expected, foreach=False)
    return dict(model.named_parameters())


@pytest.mark.parametrize("reshard", [True, False])
def test_data_parallel_dimension(fsdp, world, reshard):
    mesh, dims = mesh_of(fsdp=world.size), fsdp.DataParallelMeshDims(shard="fsdp")
    for param in train(fsdp, world, mesh, dp_mesh_dims=dims, reshard_after_forward=reshard).values():
        assert (param.device_mesh, param.placements) == (mesh, (Shard(0),))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "replicate, shard",
    [("a", "b"), (None, ("a", "b")), (("one", "a"), "b")],
    ids=["one and one", "shards over two", "replicas over two"],
)
def test_data_parallel_dimensions(fsdp, world, replicate, shard):
    dims = fsdp.DataParallelMeshDims(replicate=replicate, shard=shard)
    train(fsdp, world, mesh_of(one=1, a=2, b=2), dp_mesh_dims=dims)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
def test_data_parallel_dimensions_of_tensor_parallel_parameters(fsdp, world, reshard):
    mesh = mesh_of(copies=1, fsdp=2, tp=2) if reshard else mesh_of(fsdp=2, tp=2)
    dims = fsdp.DataParallelMeshDims(shard="fsdp", replicate="copies" if reshard else None)
    params = train(fsdp, world, mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    cuts = {name: param.placements[-2:] for name, param in params.items()}
    assert all(param.device_mesh == mesh for param in params.values())
    assert cuts == {
        "in_proj.weight": (Shard(1), Shard(0)),
        "in_proj.bias": (Shard(0), Replicate()),
        "out_proj.weight": (Shard(0), Shard(1)),
        "out_proj.bias": (Shard(0), Replicate()),
    }


def test_data_parallel_dimensions_that_are_refused(fsdp, world):
    mesh, other = mesh_of(fsdp=world.size), mesh_of(other=world.size)
    dims = fsdp.DataParallelMeshDims(shard="fsdp")
    cut = MLP(4)
    cut.in_proj.weight = nn.Parameter(distribute_tensor(cut.in_proj.weight, mesh, [Shard(0)]))
    for model, over, named in (
        (distribute(cut, mesh, "fsdp"), mesh, dims),
        (distribute(MLP(4), mesh), mesh, fsdp.DataParallelMeshDims(shard="absent")),
        (distribute(MLP(4), other), mesh, dims),
        (MLP(4), mesh, dims),
    ):
        with pytest.raises(ValueError):
            fsdp.fully_shard(model, mesh=over, dp_mesh_dims=named)
    with pytest.raises(ValueError):
        fsdp.DataParallelMeshDims()


@pytest.mark.ranks(4)
def test_zeros_for_unused_tensor_parallel_parameters(fsdp, world):
    class Experts(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.used, self.unused = (
                nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])) for _ in "ab"
            )

        def forward(self, x):
            return self.used.to_local().sum() * x

    mesh = mesh_of(dp=2, ep=2)
    model = fsdp.fully_shard(Experts(mesh["ep"]), mesh=mesh["dp"])
    model.set_reduce_scatter_unused_params(True)
    model(torch.tensor(2.0)).backward()
    assert isinstance(model.unused.grad, DTensor)
    close(model.unused.grad.to_local(), torch.zeros(2, 4))
    close(model.used.grad.to_local(), torch.full((2, 4), 2.0))
