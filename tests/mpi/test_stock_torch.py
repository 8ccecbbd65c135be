"""Parallelism that torch itself brings, on hpcmpi groups: the numbers are those of the same ranks over gloo."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hpcfsdp.comm.backend.process_group import is_mpi_group
from hpcfsdp.errors import LaunchError

WIDTH = 7  # rows that no number of ranks divides

pytestmark = [
    # FSDP1 is deprecated as a whole, and its state dicts use what torch has deprecated elsewhere.
    pytest.mark.filterwarnings("ignore:.*FSDP.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:When using ..NO_SHARD"),  # which FSDP1 is on one rank
    pytest.mark.filterwarnings("ignore:._get_pg_default_device. will be deprecated"),
]


@pytest.fixture(scope="module")
def gloo(world):
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def over(world, gloo):
    """Run a function over hpcmpi and over gloo; both results."""

    def both(function, *arguments, **options):
        return [function(group, *arguments, **options) for group in (dist.group.WORLD, gloo)]

    return both


@pytest.fixture
def square(world):
    """Two meshes of 2 x 2 ranks, one over hpcmpi, one over gloo."""
    if world.size != 4:
        pytest.skip("needs four ranks")
    return square_meshes()


@functools.cache
def square_meshes():
    names = ("replicate", "shard")
    over_mpi = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    rows = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    groups = [columns[rank % 2], rows[rank // 2]]
    over_gloo = DeviceMesh.from_group(groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=names)
    assert all(is_mpi_group(over_mpi.get_group(name)) and not is_mpi_group(over_gloo.get_group(name)) for name in names)
    return over_mpi, over_gloo


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unused, self.last = nn.Linear(3, 3), nn.Linear(WIDTH, 1)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


def make_net():
    torch.manual_seed(0)
    return Net()


def make_plain():
    """Without what not every kind of parallelism takes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def train(model, steps=3, optimizer=None, **options):
    """Losses and at last the gradients of a few steps on data that differs between ranks."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5, generator=generator)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def close(got, expected):
    """The same up to the order of summation, which is each backend's own."""
    torch.testing.assert_close(got, expected)


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def values_of(model):
    return {name: local(value).detach().clone() for name, value in model.state_dict().items()}


# DistributedDataParallel


def accumulated(group, **options):
    model = DistributedDataParallel(make_net(), process_group=group, find_unused_parameters=True, **options)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    with model.no_sync():
        model(x).square().mean().backward()
    model(2 * x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}, {"broadcast_buffers": False}],
    ids=["plain", "bucket views", "many buckets", "own buffers"],
)
def test_ddp_trains_as_over_gloo(over, options):
    def run(group):
        model = DistributedDataParallel(make_net(), process_group=group, find_unused_parameters=True, **options)
        return train(model), values_of(model)

    close(*over(run))


def test_ddp_accumulates_gradients(over):
    close(*over(accumulated))


def test_ddp_starts_all_ranks_with_the_parameters_of_the_first(world):
    torch.manual_seed(world.rank)
    model = DistributedDataParallel(nn.Linear(3, 2))
    torch.manual_seed(0)
    assert torch.equal(model.module.weight, nn.Linear(3, 2).weight)


def bf16_hook(group, bucket):
    return default_hooks.bf16_compress_hook(group, bucket)  # torch refuses it by its name where there is no NCCL


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, bf16_hook])
def test_ddp_takes_communication_hooks(over, hook):
    def run(group):
        model = DistributedDataParallel(make_plain(), process_group=group)
        model.register_comm_hook(group, hook)
        model(torch.ones(2, 5)).square().mean().backward()  # the same on all ranks: the average is exact
        return [parameter.grad for parameter in model.parameters()]

    close(*over(run))


def test_ddp_finds_that_models_differ(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    group, layers = dist.new_group(), [nn.Linear(3, 2), nn.Linear(2, 2)]
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks"):
        DistributedDataParallel(nn.Sequential(*layers[: 1 if world.rank == 0 else 2]), process_group=group)
    group.abort()


def test_the_join_context_of_ddp_evens_out_inputs(over, world):
    def run(group):
        model = DistributedDataParallel(make_plain(), process_group=group)
        with model.join():
            for step in range(1 + dist.get_rank()):
                model(torch.full((2, 5), float(step))).square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    close(*over(run))


# Fully sharded, the first


def fsdp1(group, strategy=ShardingStrategy.FULL_SHARD, mixed=None):
    return FullyShardedDataParallel(
        make_plain(),
        group,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        mixed_precision=mixed,
        device_id=torch.device("cpu"),
    )


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_trains_as_over_gloo(over, strategy):
    close(*over(lambda group: train(fsdp1(group, ShardingStrategy[strategy]))))


def test_fsdp1_in_mixed_precision(over):
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    close(*over(lambda group: train(fsdp1(group, mixed=mixed))))


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_fsdp1_shards_in_one_group_and_replicates_in_another(square, strategy):
    results = []
    for mesh in square:
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        results.append(train(fsdp1(groups, ShardingStrategy[strategy])))
        results.append(train(fsdp1_on_mesh(mesh, ShardingStrategy[strategy])))
    for result in results[1:]:
        close(result, results[0])


def fsdp1_on_mesh(mesh, strategy):
    return FullyShardedDataParallel(
        make_plain(), device_mesh=mesh, sharding_strategy=strategy, device_id=torch.device("cpu")
    )


def test_fsdp1_gives_and_takes_whole_states(over):
    def run(group):
        model = fsdp1(group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer=optimizer)
        configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            state = copy.deepcopy(model.state_dict())
            optimizer_state = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(model, optimizer))
            other = fsdp1(group)
            other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        with FullyShardedDataParallel.state_dict_type(other, StateDictType.FULL_STATE_DICT, *configs):
            other.load_state_dict(state)
            flat = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, optimizer_state)
            other_optimizer.load_state_dict(flat)
        close(train(other, optimizer=other_optimizer), train(model, optimizer=optimizer))
        return state, optimizer_state["state"]

    close(*over(run))


def test_fsdp1_gives_and_takes_sharded_states(world):
    model = fsdp1(dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer=optimizer)
    other = fsdp1(dist.group.WORLD)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        optimizer_state = copy.deepcopy(FullyShardedDataParallel.optim_state_dict(model, optimizer))
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        other.load_state_dict(state)
        flat = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, optimizer_state)
        other_optimizer.load_state_dict(flat)
    close(train(other, optimizer=other_optimizer), train(model, optimizer=optimizer))


def test_fsdp1_clips_gradients(over):
    def run(group):
        model = fsdp1(group)
        model(torch.ones(2, 5) * (1 + dist.get_rank())).square().mean().backward()
        return model.clip_grad_norm_(0.1).item()

    close(*over(run))


# Fully sharded, the second


def fsdp2(mesh, **options):
    model = make_plain()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}, {"reshard_after_forward": False}], ids=str)
def test_fsdp2_trains_as_over_gloo(over, options):
    def run(group):
        model = fsdp2(mesh_of(group), **options)
        return train(model), values_of(model)

    close(*over(run))


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=str)
def test_fsdp2_on_two_dimensions_replicates_and_shards(square, options):
    def run(mesh):
        model = fsdp2(mesh, **options)
        return train(model), values_of(model)

    close(*map(run, square))


def test_fsdp2_sums_gradients_in_bfloat16(over, world):
    """Over gloo they would be added in bfloat16; hpcmpi adds in float32 and rounds once."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = fully_shard(nn.Linear(1, 1, bias=False), mesh=mesh_of(dist.group.WORLD), mp_policy=policy)
    value = 256.0 if world.rank == 0 else 1.0
    (model(torch.full((1, 1), value, dtype=torch.bfloat16)) * world.size).sum().backward()
    if world.rank == 0:
        expected = torch.tensor(256.0 + world.size - 1).bfloat16().float()
        close(local(model.weight.grad).flatten(), expected.view(1))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_fsdp2_divides_gradients_by_a_factor(world, factor):
    model = fsdp2(mesh_of(dist.group.WORLD))
    plain = make_plain()
    for module in model.modules():
        module.set_gradient_divide_factor(factor) if hasattr(module, "set_gradient_divide_factor") else None
    model(torch.ones(2, 5)).square().mean().backward()
    plain(torch.ones(2, 5)).square().mean().backward()
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        close(sharded.grad.full_tensor(), whole.grad * world.size / factor)


def test_fsdp2_gives_and_takes_states(over):
    def run(group):
        models = [fsdp2(mesh_of(group)) for _ in range(2)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
        train(models[0], optimizer=optimizers[0])
        whole = StateDictOptions(full_state_dict=True)
        states = copy.deepcopy(get_state_dict(models[0], optimizers[0]))  # loading keeps the tensors themselves
        set_state_dict(models[1], optimizers[1], model_state_dict=states[0], optim_state_dict=states[1])
        close(train(models[1], optimizer=optimizers[1]), train(models[0], optimizer=optimizers[0]))
        return get_model_state_dict(models[1], options=whole)

    close(*over(run))


def test_fsdp2_takes_a_whole_state_from_the_first_rank(world):
    plain, model = make_plain(), fsdp2(mesh_of(dist.group.WORLD))
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    given = plain.state_dict() if world.rank == 0 else {}
    set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        close(sharded.full_tensor(), whole)


def test_fsdp2_clips_gradients(over):
    def run(group):
        model = fsdp2(mesh_of(group))
        model(torch.ones(2, 5) * (1 + dist.get_rank())).square().mean().backward()
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()

    close(*over(run))


# DTensor and meshes


@pytest.mark.parametrize("rows", [12, 5, 1])
def test_tensors_go_from_every_placement_to_every_other(world, rows):
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(rows * 5.0).view(rows, 5)
    placements = [Replicate(), Shard(0), Shard(1)]
    for given in placements:
        for wanted in placements:
            tensor = distribute_tensor(whole, mesh, [given]).redistribute(mesh, [wanted])
            close(tensor.to_local(), distribute_tensor(whole, mesh, [wanted]).to_local())
            close(tensor.full_tensor(), whole)
    for op, expected in (("sum", whole * world.size), ("avg", whole), ("max", whole)):
        for wanted in placements:
            partial = DTensor.from_local(whole, mesh, [Partial(op)])
            close(partial.redistribute(mesh, [wanted]).full_tensor(), expected)


def test_tensors_on_two_dimensions(square):
    whole = torch.arange(35.0).view(7, 5)
    kinds = [Replicate(), Shard(0), Shard(1)]
    for first in kinds:
        for second in kinds:
            locals_ = [distribute_tensor(whole, mesh, [first, second]) for mesh in square]
            close(locals_[0].to_local(), locals_[1].to_local())
            close(locals_[0].full_tensor(), whole)
            moved = locals_[0].redistribute(square[0], [Shard(1), Replicate()])
            close(moved.full_tensor(), whole)
    products = [distribute_tensor(whole, mesh, [Shard(0), Shard(1)]) for mesh in square]
    products = [(tensor @ tensor.t()).full_tensor() for tensor in products]
    close(*products)
    close(products[0], whole @ whole.t())


def test_layers_are_split_by_columns_and_rows(world):
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
    split = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(4, 5)
    expected, got = plain(x), split(x)
    close(got, expected)
    expected.square().mean().backward()
    got.square().mean().backward()
    for parallel, whole in zip(split.parameters(), plain.parameters(), strict=True):
        close(parallel.grad.full_tensor(), whole.grad)


def test_tensor_parallel_layers_are_sharded_too(square):
    def run(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
        parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicate"])
        generator = torch.Generator().manual_seed(mesh.get_local_rank("replicate"))
        losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 5, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    close(*map(run, square))


def test_a_mesh_is_sliced_and_flattened(square):
    mesh, _ = square
    rank = dist.get_rank()
    assert mesh["shard"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert mesh["replicate"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(mesh.get_group("replicate")) == [rank % 2, rank % 2 + 2]
    flat = mesh._flatten("all")
    assert is_mpi_group(flat.get_group())
    value = torch.tensor(float(rank))
    dist.all_reduce(value, group=flat.get_group())
    assert value == 6
    assert flat.size() == 4


def test_a_mesh_over_all_ranks_uses_the_default_group(world):
    mesh = init_device_mesh("cpu", (world.size,))
    assert is_mpi_group(mesh.get_group())
    assert mesh.get_local_rank() == world.rank
    assert [mesh.size(), mesh.ndim, *mesh.get_coordinate()] == [world.size, 1, world.rank]


# Checkpoints, optimizers, data


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_distributed_checkpoints_are_saved_and_loaded(world, shared_path, kind):
    def make():
        return DistributedDataParallel(make_plain()) if kind == "ddp" else fsdp2(mesh_of(dist.group.WORLD))

    model = make()
    train(model)
    saved = {"model": get_model_state_dict(model), "steps": 3}
    dcp.save(saved, checkpoint_id=shared_path / "sync", process_group=dist.group.WORLD)
    future = dcp.async_save(saved, checkpoint_id=shared_path / "async", process_group=dist.group.WORLD)
    future.result()
    for name in ("sync", "async"):
        other = make()
        state = {"model": get_model_state_dict(other), "steps": 0}
        dcp.load(state, checkpoint_id=shared_path / name)
        set_model_state_dict(other, state["model"])
        assert state["steps"] == 3
        close(values_of(other), values_of(model))


def test_a_checkpoint_is_read_into_another_layout(world, shared_path):
    model = fsdp2(mesh_of(dist.group.WORLD))
    train(model)
    dcp.save(get_model_state_dict(model), checkpoint_id=shared_path / "sharded")
    plain = make_plain()
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=shared_path / "sharded")
    for sharded, whole in zip(model.parameters(), state.values(), strict=True):
        close(sharded.full_tensor(), whole)


def test_a_failure_of_a_checkpoint_on_one_rank_reaches_all(world, shared_path):
    with pytest.raises(dcp.api.CheckpointException, match="no such tensor"):
        dcp.load({"no such tensor": torch.ones(1)}, checkpoint_id=saved_empty(shared_path))


def saved_empty(path):
    dcp.save({"x": torch.ones(1)}, checkpoint_id=path / "x")
    return path / "x"


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
def test_the_optimizer_state_is_split_between_ranks(over):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    def run(group):
        model = DistributedDataParallel(make_plain(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-2)
        losses = train(model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=0)
        return losses, len(optimizer.state_dict()["state"]) if dist.get_rank() == 0 else 6

    over_mpi, over_gloo = over(run)
    close(over_mpi, over_gloo)
    assert over_mpi[1] == 6


def test_samplers_deal_out_the_data_set_by_rank(world):
    sampler = DistributedSampler(list(range(12)), shuffle=False)
    assert list(sampler) == list(range(world.rank, 12, world.size))


# Meshes of the world


def test_the_mesh_of_the_world_is_one_dimension_over_all_ranks(world):
    mesh = world.mesh()
    assert (mesh.mesh_dim_names, mesh.device_type, mesh.size()) == (("shard",), "cpu", world.size)
    assert is_mpi_group(mesh.get_group())
    losses = train(fsdp2(mesh))
    close(losses, train(fsdp2(mesh_of(dist.group.WORLD))))


def test_a_mesh_of_the_world_by_nodes(world):
    mesh = world.mesh(replicate="nodes", shard="node")
    assert mesh.mesh.tolist() == [list(node) for node in world.topology.nodes]
    close(train(fsdp2(mesh)), train(fsdp2(world.mesh())))


@pytest.mark.ranks(4)
def test_a_mesh_of_the_world_has_three_dimensions(world):
    if world.size != 4:
        pytest.skip("needs four ranks")
    mesh = world.mesh(replicate=1, shard=None, tensor=2)
    assert mesh.shape == (1, 2, 2)
    sums = {}
    for name in mesh.mesh_dim_names:
        value = torch.tensor(float(world.rank))
        dist.all_reduce(value, group=mesh.get_group(name))
        sums[name] = value.item()
    pair = world.rank // 2 * 2
    assert sums == {"replicate": world.rank, "shard": 2 * (world.rank % 2) + 2, "tensor": 2 * pair + 1}
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
    model = parallelize_module(copy.deepcopy(plain), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    x = torch.randn(4, 5)
    close(model(x), plain(x))


@pytest.mark.parametrize(
    ("dimensions", "text"),
    [
        ({"shard": 5}, "5 does not equal"),
        ({"a": None, "b": None}, "only one dimension may be None"),
        ({"shard": "all"}, "'nodes', 'node' or None"),
    ],
    ids=str,
)
def test_a_mesh_that_does_not_fit_the_world_is_refused(world, dimensions, text):
    with pytest.raises(LaunchError, match=text):
        world.mesh(**dimensions)
