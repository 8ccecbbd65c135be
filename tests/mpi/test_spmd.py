"""Models whose parameters and data are DTensors on a mesh of all dimensions, next to torch's ``fully_shard``."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hpcfsdp.fsdp2 as ours
from tests.mpi.row_cases import same, whole

MESHES = {
    "data": ((4,), ("data",), DataParallelMeshDims(shard="data")),
    "data and tensor": ((2, 2), ("data", "tensor"), DataParallelMeshDims(shard="data")),
    "tensor first": ((2, 2), ("tensor", "data"), DataParallelMeshDims(shard="data")),
    "data and context": ((2, 2), ("data", "context"), DataParallelMeshDims(shard=("data", "context"))),
    "replicas": ((2, 2), ("replicas", "data"), DataParallelMeshDims(shard="data", replicate="replicas")),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)])
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def on_mesh(model, mesh):
    """Parameters of the blocks are cut along "tensor", as by a colwise and a rowwise linear; all are replicated."""
    cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "2.weight": Shard(1)}
    for path, module in list(model.named_modules()):
        for name, param in list(module._parameters.items()):
            end = f"{path}.{name}".split(".", 2)[-1]
            cut = cuts.get(end, Replicate()) if path.startswith("blocks") else Replicate()
            placements = [cut if dim == "tensor" else Replicate() for dim in mesh.mesh_dim_names]
            module._parameters[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    return model


def batch(mesh, names, step, rank):
    """This rank's part of a batch: of each place along the data-parallel dimensions."""
    place = 0
    for name in names:
        place = place * mesh[name].size() + mesh[name].get_local_rank()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + place), dtype=torch.float64)
    return DTensor.from_local(x, mesh, [Shard(0) if name in names else Replicate() for name in mesh.mesh_dim_names])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", MESHES)
def test_training(world, kind):
    shape, dim_names, dims = MESHES[kind]
    whole_mesh = init_device_mesh("cpu", shape, mesh_dim_names=dim_names)
    names = (*dims.replicate_names, *dims.shard_names)

    def program(fsdp, mesh):
        torch.manual_seed(0)
        model = on_mesh(Net().double(), mesh)
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found, seen = [], []
        model.blocks[0][0].register_forward_pre_hook(
            lambda module, args: seen.append((str(module.weight.placements), str(args[0].placements)))
        )
        for step in range(3):
            loss = model(batch(mesh, names, step, world.rank)).square().mean()
            loss.backward()
            found += [whole(loss), *(whole(param.grad) for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        shapes = [tuple(param.to_local().shape) for param in model.parameters()]
        state = {name: whole(value) for name, value in model.state_dict().items()}
        return {"found": found, "seen": str(seen), "shapes": str(shapes), "state": state}

    same(program, whole_mesh)


@pytest.mark.ranks(4)
def test_what_does_not_fit_is_named(world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="data")
    with pytest.raises(ValueError, match="'weight' is no DTensor: with dp_mesh_dims all parameters must be DTensors"):
        ours.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims)
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"'weight' is S\(0\) along 'data', a data-parallel dimension"):
        ours.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match=r"names \['other'\]: give each once, of the dimensions \['data', 'tensor'\]"):
        ours.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="other"))
    with pytest.raises(ValueError, match="needs mesh="):
        ours.fully_shard(model, dp_mesh_dims=dims)
    with pytest.raises(NotImplementedError, match="without shard="):
        ours.fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="data"))
