"""What ``fully_shard`` makes of a module: units, rows and placements; modules on the meta device; meshes of groups."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.conformance.models import MLP, attribute, check_training, close, data_of, mesh_of, reference

REPLICATED = ("replicate", "shard")
BY_COLUMNS_AND_ROWS = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}


class Scaled(MLP):
    """With a buffer."""

    def __init__(self, dim, **options):
        super().__init__(dim, **options)
        self.register_buffer("scale", torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)

    def forward(self, x):
        return super().forward(x) * self.scale


def loss_of(model, rank, step):
    return model(data_of(rank + 10 * step, 2, 4)).sum()


# Units


def test_containers_with_a_forward(fsdp, mesh):
    class ByName(nn.ModuleDict):
        def forward(self, x):
            return self["only"](x)

    class InTurn(nn.ModuleList):
        def forward(self, x):
            return self[1](self[0](x))

    for model in (ByName({"only": nn.Linear(4, 2)}), InTurn([nn.Linear(4, 3), nn.Linear(3, 2)])):
        assert fsdp.fully_shard(model, mesh=mesh)(torch.ones(2, 4)).shape == (2, 2)


def test_meshes_that_are_refused(fsdp, world):
    with pytest.raises(ValueError):
        fsdp.fully_shard(MLP(4), mesh=init_device_mesh("cpu", (world.size, 1, 1)))
    with pytest.raises((ValueError, AssertionError)):
        fsdp.fully_shard(MLP(4), mesh=init_device_mesh("cpu", (1, world.size)))


def test_each_parameter_is_of_one_unit(fsdp, mesh):
    twice = Scaled(4)
    model = nn.Sequential(Scaled(4), Scaled(4), twice, twice, Scaled(4))
    model[4].in_proj.weight, model[4].scale = twice.in_proj.weight, twice.scale
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    fsdp.fully_shard([model[0], model[1]], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    assert model[4].scale is model[2].scale
    whole = []
    for unit in (model, model[0]):
        unit.unshard()
        assert model[4].in_proj.weight is model[2].in_proj.weight
        whole.append({name for name in names if not isinstance(attribute(model, name), DTensor)})
    assert whole == [{name for name in names if name[0] in "234"}, set(names)]


def test_replicated_modules_stay_as_they_are(fsdp, mesh):
    model = nn.Sequential(MLP(4), MLP(4), MLP(4))
    given = [*model[0].parameters()]
    replicate(model[0])
    fsdp.fully_shard(model[2], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    assert all(param is before for param, before in zip(model[0].parameters(), given, strict=True))
    assert all(isinstance(param, DTensor) for param in model[1:].parameters())


def test_a_unit_of_several_modules_called_first(fsdp, mesh):
    model = nn.Sequential(MLP(4), MLP(4))
    fsdp.fully_shard([model[0], model[1]], mesh=mesh)
    with pytest.raises(RuntimeError):
        model[0](torch.ones(2, 4))


def test_a_list_with_a_number_of_ranks_to_keep_it(fsdp, mesh, world):
    model = nn.Sequential(MLP(4), MLP(4)).double()
    expected = reference(model, world, loss_of)
    fsdp.fully_shard([model[0], model[1]], mesh=mesh, reshard_after_forward=world.size)
    fsdp.fully_shard(model, mesh=mesh)
    check_training(model, world, loss_of, expected)


# Rows


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_each_rank(fsdp, mesh, world, shared):
    model = nn.Sequential(*(MLP(3, hidden=3) for _ in range(3)))
    if shared:
        model[0].in_proj = model[1].in_proj
    given = [param.detach().clone() for param in model.parameters()]
    fsdp.fully_shard(model, mesh=mesh)
    for param, before in zip(model.parameters(), given, strict=True):
        assert isinstance(param, nn.Parameter) and isinstance(param, DTensor)
        assert (param.device_mesh, param.placements) == (mesh, (Shard(0),))
        assert (param.shape, param.stride()) == (before.shape, before.stride())
        close(param.to_local(), before.chunk(world.size)[world.rank], rtol=0, atol=0)


def test_parameters_without_dimensions(fsdp, mesh):
    model = MLP(4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale"):
        fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.ranks(4)
def test_rows_of_tensor_parallel_parameters(fsdp, world):
    mesh = mesh_of(dp=2, tp=2)
    model = MLP(9, hidden=3)
    given = dict(copy.deepcopy(model).named_parameters())
    parallelize_module(model, mesh["tp"], BY_COLUMNS_AND_ROWS)
    fsdp.fully_shard(model, mesh=mesh["dp"])
    cuts = {"in_proj.weight": 0, "in_proj.bias": 0, "out_proj.weight": 1, "out_proj.bias": None}
    for name, param in model.named_parameters():
        cut, block = cuts[name], given[name]
        assert (param.device_mesh, param.shape, param.stride()) == (mesh, block.shape, block.stride())
        assert param.placements[0].dim == 0
        assert param.placements[1] == (Replicate() if cut is None else Shard(cut))
        if cut is not None:
            block = block.chunk(2, dim=cut)[mesh.get_local_rank("tp")]
        close(param.to_local(), block.chunk(2)[mesh.get_local_rank("dp")], rtol=0, atol=0)


@pytest.mark.parametrize("dim", ["longest", "last"])
def test_placements_along_other_dimensions(fsdp, mesh, world, dim):
    model = MLP(4).double()
    before, expected = copy.deepcopy(model), reference(model, world, loss_of)

    def place(param):
        return Shard(max(range(param.dim()), key=lambda dim: param.shape[dim]) if dim == "longest" else -1)

    fsdp.fully_shard(model, mesh=mesh, shard_placement_fn=place)
    assert model.out_proj.weight.placements == (Shard(1),)
    assert model.in_proj.weight.placements == (Shard(0 if dim == "longest" else 1),)
    for param, whole in zip(model.parameters(), before.parameters(), strict=True):
        close(param, whole)
    check_training(model, world, loss_of, expected)


@pytest.mark.ranks(4)
def test_placements_along_the_dimension_that_tensor_parallelism_leaves(fsdp, world):
    mesh = mesh_of(dp=2, tp=2)
    model = nn.Sequential(MLP(4), MLP(4))
    before = copy.deepcopy(model)
    for each in model:
        parallelize_module(each, mesh["tp"], BY_COLUMNS_AND_ROWS)

    def place(param):
        cut = next((placement.dim for placement in param.placements if placement.is_shard()), param.dim() - 1)
        return Shard(param.dim() - 1 - cut)

    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh["dp"], shard_placement_fn=place)
    for (name, param), whole in zip(model.named_parameters(), before.parameters(), strict=True):
        if name.endswith("weight"):
            assert sorted(placement.dim for placement in param.placements) == [0, 1]
        close(param, whole)


def test_a_placement_along_a_dimension_that_there_is_not(fsdp, mesh):
    with pytest.raises((ValueError, AssertionError)):
        fsdp.fully_shard(MLP(4), mesh=mesh, shard_placement_fn=lambda param: Shard(1))


# Dtypes


def test_units_of_a_policy_are_trained(fsdp):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mp_policy=policy)
        assert isinstance(unit, fsdp.FSDPModule)
    out = model(torch.randn(2, 4))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(param.grad.dtype == param.dtype == torch.float32 for param in model.parameters())


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("dtypes", [[torch.uint8], [torch.int64, torch.int16, torch.float8_e4m3fn]], ids=str)
def test_frozen_parameters_of_other_dtypes(fsdp, mesh, dtypes, policy):
    class Model(nn.Linear):
        def forward(self, x):
            self.seen = [getattr(self, f"codes{index}") for index in range(len(dtypes))]
            self.seen = [codes.detach().clone() for codes in self.seen]
            return super().forward(x)

    model = Model(4, 4)
    given = [torch.arange(6).to(dtype) for dtype in dtypes]
    for index, codes in enumerate(given):
        model.register_parameter(f"codes{index}", nn.Parameter(codes, requires_grad=False))
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None and model.codes0.grad is None
    for codes, before in zip(model.seen, given, strict=True):
        # Policies cast what counts as floating point, of which float8 is.
        cast = policy.get("param_dtype", before.dtype) if before.is_floating_point() else before.dtype
        assert codes.dtype == cast
        close(codes.float(), before.float())


# The meta device


def check_filling(model, x):
    """Initialise a model without memory, and train it."""
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(1337)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    local = [param.to_local() for param in model.parameters()]
    assert not any((tensor == 1337).any() for tensor in (*local, *model.buffers()))
    model(x).sum().backward()
    assert all(param.grad.to_local().isfinite().all() for param in model.parameters())
    optim.step()


@pytest.mark.parametrize("dim", [4, 3, 1])
@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_modules_on_the_meta_device(fsdp, mesh, dim, policy):
    with torch.device("meta"):  # the mesh of all ranks, too
        model = nn.Sequential(Scaled(dim, hidden=2, bias=False), MLP(dim, hidden=2, bias=False))
        for unit in (*model, model):
            options = {} if dim == 4 else {"mesh": mesh}
            fsdp.fully_shard(unit, **options, mp_policy=fsdp.MixedPrecisionPolicy(**policy))
    check_filling(model, torch.ones(2, dim))


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of the output of a tensor-parallel module
@pytest.mark.parametrize("dim", [4, 3])
def test_tensor_parallel_modules_on_the_meta_device(fsdp, world, dim):
    mesh = mesh_of(dp=2, tp=2)
    with torch.device("meta"):
        model = Scaled(dim)
        parallelize_module(model, mesh["tp"], BY_COLUMNS_AND_ROWS)
        for unit in (model.in_proj, model.out_proj, model):
            fsdp.fully_shard(unit, mesh=mesh["dp"])
    check_filling(model, torch.ones(2, dim))


def test_modules_left_on_the_meta_device(fsdp, mesh):
    with torch.device("meta"):
        model = nn.Sequential(MLP(4), MLP(4))
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    with pytest.raises(RuntimeError, match="in_proj"):
        model(torch.ones(2, 4))


def test_a_parameter_replaced_before_the_first_forward(fsdp, mesh):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norms = nn.Linear(3, 3, bias=False), nn.Parameter(torch.empty(3))

        def forward(self, x):
            return self.layer(x).sum() + self.norms.sum()

    with torch.device("meta"):
        model = Model()
    fsdp.fully_shard(model.layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    model.layer.to_empty(device="cpu")
    nn.init.constant_(model.layer.weight, 2)
    with torch.no_grad():
        model.norms = nn.Parameter(torch.linalg.vector_norm(model.layer.weight, dim=1))
    loss = model(torch.ones(1, 3))
    loss.backward()
    close(loss, torch.tensor(18 + 3 * 12**0.5), rtol=1e-6)
    close(model.norms.grad, torch.ones(3))


def test_values_that_one_rank_has(fsdp, mesh, world):
    torch.manual_seed(world.rank)
    values = Scaled(4).double()
    with torch.device("meta"):
        model = Scaled(4).double()
    for unit in (model.in_proj, model):
        fsdp.fully_shard(unit, mesh=mesh)
    sharded = {}
    for name, tensor in model.state_dict().items():
        value = values.state_dict()[name].clone()
        dist.broadcast(value, src=0)
        if isinstance(tensor, DTensor):
            value = nn.Parameter(distribute_tensor(value, tensor.device_mesh, tensor.placements))
        sharded[name] = value
    model.load_state_dict(sharded, assign=True)
    assert all(isinstance(param, DTensor) and not param.is_meta for param in model.parameters())
    torch.manual_seed(0)
    expected = Scaled(4).double()
    for name, param in expected.named_parameters():
        close(attribute(model, name), param)
    check_training(model, world, loss_of, reference(expected, world, loss_of))


# Meshes


@pytest.mark.ranks(4)
@pytest.mark.parametrize("replicated", [False, True])
def test_meshes_of_process_groups(fsdp, world, replicated):
    by_shape = mesh_of(replicate=2, shard=2)
    groups = [by_shape.get_group(name) for name in REPLICATED]
    if replicated:
        mesh = DeviceMesh.from_group(groups, "cpu", mesh_dim_names=REPLICATED, mesh=by_shape.mesh)
    else:
        mesh, by_shape = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("shard",)), by_shape["shard"]
    model = MLP(4).double()
    like = copy.deepcopy(model)
    for sharded, over in ((model, mesh), (like, by_shape)):
        for unit in (sharded.in_proj, sharded.out_proj, sharded):
            fsdp.fully_shard(unit, mesh=over)
        loss_of(sharded, world.rank, 0).backward()
    for param, expected in zip(model.parameters(), like.parameters(), strict=True):
        assert torch.equal(param.device_mesh.mesh, expected.device_mesh.mesh)
        assert param.placements == expected.placements
        close(param.to_local(), expected.to_local())
        close(param.grad.to_local(), expected.grad.to_local())


@pytest.mark.ranks(4)
def test_values_that_one_replica_has(fsdp, world):
    mesh = mesh_of(replicate=2, shard=2)
    model = Scaled(4).double()
    expected = copy.deepcopy(model)
    for unit in (model.in_proj, model):
        fsdp.fully_shard(unit, mesh=mesh)
    group = mesh.get_group("replicate")
    tensors = [*(param.to_local().detach() for param in model.parameters()), *model.buffers()]
    if mesh.get_local_rank("replicate"):
        for tensor in tensors:
            tensor.fill_(1337)
    for tensor in tensors:
        dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
    for param, before in zip(model.parameters(), expected.parameters(), strict=True):
        close(param, before)
    close(model.scale, expected.scale)
    check_training(model, world, loss_of, reference(expected, world, loss_of))


@pytest.mark.ranks(4)
def test_replicas_by_a_hook(fsdp, world):
    mesh = mesh_of(replicate=2, shard=2)
    model = MLP(4, bias=False).double()
    expected = reference(model, world, loss_of)
    fsdp.fully_shard(model, mesh=mesh["shard"])
    sizes = []

    def average(grads):
        sizes.append(grads.numel())
        dist.all_reduce(grads, group=mesh.get_group("replicate"))
        grads.div_(2)

    model.set_all_reduce_hook(average)
    check_training(model, world, loss_of, expected)
    assert sizes == [2 * 4 * 16 // 2] * 3
