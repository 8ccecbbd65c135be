"""``fully_shard`` together with tensor parallelism, pipelines, recomputation and ``replicate``."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.conformance.models import MLP, check_training, close, data_of, mesh_of, reference, tensor_parallel, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # one of CommDebugMode
]


def stack(dim):
    return nn.Sequential(MLP(dim, hidden=3), MLP(dim), MLP(dim, hidden=3)).double()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(dim), MLP(dim)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tokens(nn.Module):
    """Embeddings of 8 tokens and of their 6 places, two layers, and a head."""

    def __init__(self, dim):
        super().__init__()
        self.embed, self.places = nn.Embedding(8, dim), nn.Embedding(6, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 8)

    def forward(self, ids):
        x = self.embed(ids) + self.places(torch.arange(6))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sequence_parallel(model, mesh):
    """Between the layers each rank of `mesh` has a part of the tokens."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.norm": SequenceParallel(),
        "layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "layers.*.mlp.in_proj": ColwiseParallel(),
        "layers.*.mlp.out_proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dim", [3, 16, 17])
@pytest.mark.parametrize("dims", [("shard",), ("replicate", "shard")])
def test_training_with_tensor_parallelism(fsdp, world, dims, dim, recompute, reshard):
    mesh = mesh_of(shard=2, tensor=2) if len(dims) == 1 else mesh_of(replicate=2, shard=1, tensor=2)
    model = stack(dim)

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 4, dim)).sum()

    plain = copy.deepcopy(model)
    other = torch.optim.Adam(plain.parameters(), lr=1e-2, foreach=False)
    tensor_parallel(model, mesh["tensor"])
    for mlp in model:
        if recompute:
            checkpoint(mlp)
        fsdp.fully_shard(mlp, mesh=mesh[dims], reshard_after_forward=reshard)
    fsdp.fully_shard(model, mesh=mesh[dims], reshard_after_forward=reshard)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        losses = [loss_of(plain, rank, step) for rank in range(2)]
        (sum(losses) / 2).backward()
        loss = loss_of(model, mesh.get_local_rank(dims[0]), step)
        loss.backward()
        close(loss, losses[mesh.get_local_rank(dims[0])])
        for each in (optim, other):
            each.step()
            each.zero_grad(set_to_none=step % 2 == 0)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(param, expected)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("across", [False, True])
def test_training_with_sequence_parallelism(fsdp, world, across):
    mesh = mesh_of(shard=2, tensor=2)
    plain = Tokens(4).double()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    model = sequence_parallel(copy.deepcopy(plain), mesh["tensor"])

    def other_dim(param):
        cut = [place.dim for place in param.placements if place.is_shard()] if isinstance(param, DTensor) else []
        return Shard(param.dim() - 1 - cut[0] if cut else 0)

    for unit in (*model.layers, model):
        fsdp.fully_shard(unit, mesh=mesh["shard"], shard_placement_fn=other_dim if across else None)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = mesh.get_local_rank("shard")
    for step in range(2):
        ids = [torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(7 * step + each)) for each in range(2)]
        losses = [plain(each).sin().sum() for each in ids]
        (sum(losses) / 2).backward()
        loss = model(ids[rank]).sin().sum()
        close(loss, losses[rank])
        loss.backward()
        for embedding in (model.embed.weight, model.places.weight):
            assert embedding.placements[1] == embedding.grad.placements[1] and embedding.placements[1].is_shard()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            close(param.grad, expected.grad)
        for each in (optim, other):
            each.step()
            each.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(param, expected)


def test_nothing_is_sent_to_the_only_rank_that_shards(fsdp, world):
    """Tensor parallelism alone sends: sums of outputs, and of gradients of all inputs but the first."""
    mesh = mesh_of(shard=1, tensor=2)
    model = stack(8)
    plain = copy.deepcopy(model)
    tensor_parallel(model, mesh["tensor"])
    policy = fsdp.CPUOffloadPolicy(pin_memory=False)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh["shard"], offload_policy=policy)
    optim, other = (torch.optim.Adam(each.parameters(), lr=1e-2, foreach=False) for each in (model, plain))
    for step in range(3):
        x = data_of(step, 4, 8)
        with CommDebugMode() as forward:
            loss = model(x).sum()
        with CommDebugMode() as backward:
            loss.backward()
        assert forward.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 3}
        assert backward.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 2}
        expected = plain(x).sum()
        close(loss, expected)
        expected.backward()
        for each in (optim, other):
            each.step()
            each.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("new", [False, True])
def test_resuming_with_tensor_parallelism(fsdp, world, shared_path, new):
    mesh = mesh_of(shard=2, tensor=2)

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(MLP(6), MLP(6), nn.LayerNorm(6)).double()
        tensor_parallel(model, mesh["tensor"])
        for unit in (*model[:2], model):
            fsdp.fully_shard(unit, mesh=mesh["shard"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(model, optim):
        loss = whole(model(data_of(mesh.get_local_rank("shard"), 2, 6)).sin().sum())
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    def state():
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim)}

    model, optim = made(1)
    first = step(model, optim)
    dcp.save(state(), checkpoint_id=shared_path)
    second = step(model, optim)
    assert first != second
    if new:
        model, optim = made(2)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
                optim.state[param]["exp_avg"].zero_()
    assert step(model, optim) != second
    dcp.load(state(), checkpoint_id=shared_path)
    close(step(model, optim), second)


def loss_of_outputs(out, target):
    return (out - target).square().sum()


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.pipelining")
@pytest.mark.parametrize(
    ("schedule", "inside"),
    [
        (ScheduleGPipe, "tensor"),
        (Schedule1F1B, "half"),
        (ScheduleInterleaved1F1B, "shard"),
        (ScheduleInterleaved1F1B, "replicate"),
        (ScheduleLoopedBFS, "half"),
        (ScheduleInterleavedZeroBubble, "tensor"),
        (ScheduleInterleavedZeroBubble, "replicate"),
    ],
)
def test_pipelines(fsdp, world, schedule, inside):
    """Of two ranks, each of which is one of two that shard, replicate, or are tensor-parallel."""
    sizes = {"replicate": {"replicate": 2, "shard": 1}, "tensor": {"shard": 1, "tensor": 2}}.get(inside, {"shard": 2})
    mesh = mesh_of(pipe=2, **sizes)
    dims = tuple(name for name in sizes if name != "tensor")
    dtype = torch.bfloat16 if inside == "half" else torch.float64
    policy = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64)
    layers = [MLP(4).double() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(layers))

    is_single = issubclass(schedule, PipelineScheduleSingle)
    rank, each = mesh.get_local_rank("pipe"), 2 if is_single else 1
    params, expected, stages = [], [], []
    for place in [rank] if is_single else [rank, rank + 2]:
        held = slice(each * place, each * (place + 1))
        module = nn.Sequential(*layers[held])
        if inside == "tensor":
            tensor_parallel(module, mesh["tensor"])
        for mlp in module:
            fsdp.fully_shard(mlp, mesh=mesh[dims], mp_policy=policy, reshard_after_forward=False)
        fsdp.fully_shard(module, mesh=mesh[dims], mp_policy=policy)
        stages.append(PipelineStage(module, place, 4 // each, torch.device("cpu"), group=mesh.get_group("pipe")))
        params += module.parameters()
        expected += plain[held].parameters()
    runner = schedule(stages[0] if is_single else stages, 4, loss_fn=loss_of_outputs, scale_grads=False)
    optim, other = (torch.optim.AdamW(each, lr=1e-2) for each in (params, plain.parameters()))

    ranks = 1 if inside == "tensor" else 2
    for step in range(2):
        data = [(data_of(4 * step + rank, 4, 4), data_of(4 * step + rank + 2, 4, 4)) for rank in range(ranks)]
        for x, target in data:
            (loss_of_outputs(plain(x), target) / ranks).backward()
        x, target = (value.to(dtype) for value in data[mesh.get_local_rank(dims[0])])
        losses = []
        kwargs = {"target": target, "losses": losses} if stages[-1].is_last else {}
        runner.step(*([x] if stages[0].is_first else []), **kwargs)
        assert all(loss.dtype == dtype for loss in losses)
        for param, value in zip(params, expected, strict=True):
            if inside == "half":
                assert param.grad.dtype == torch.float64 and whole(param.grad).isfinite().all()
            else:
                close(param.grad, value.grad)
        for every in (optim, other):
            every.step()
            every.zero_grad()


def test_stages_in_one_checkpoint(fsdp, world, shared_path):
    """The names are those of the whole model."""
    mesh = mesh_of(shard=1, pipe=2)
    layers = nn.ModuleDict({str(number): MLP(4) for number in range(4)})

    class Stage(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.layers = nn.ModuleDict({str(number): layers[str(number)] for number in held})

        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x

    model = fsdp.fully_shard(Stage(range(2 * world.rank, 2 * world.rank + 2)), mesh=mesh["shard"])
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=shared_path)
    names = dcp.FileSystemReader(shared_path).read_metadata().state_dict_metadata
    for name, _ in layers.named_parameters(prefix="layers"):
        assert f"model.{name}" in names
        assert f"optim.state.{name}.exp_avg" in names
    assert set(state) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("root", ["replicate", "fully_shard"])
def test_replicated_layers_between_sharded_ones(fsdp, mesh, world, root):
    model = nn.Sequential(*(MLP(4) for _ in range(4)), nn.Linear(4, 4)).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 2, 4)).sum()

    expected = reference(model, world, loss_of)
    ways = {"replicate": replicate, "fully_shard": fsdp.fully_shard}
    for number, layer in enumerate(model[:4]):
        ways["replicate" if number % 2 == 0 else "fully_shard"](layer, mesh=mesh)
    ways[root](model, mesh=mesh)
    for number, layer in enumerate(model[:4]):
        for param in layer.parameters():
            assert param.placements == ((Replicate(),) if number % 2 == 0 else (Shard(0),))
    check_training(model, world, loss_of, expected)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


class Forked(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x.sin(), x.cos()


class Joined(nn.Linear):
    def forward(self, xs):
        return super().forward(xs[0] + xs[1]).relu()


class Failing(nn.Linear):
    """Fails in its call of the number `at`."""

    calls, at = 0, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("failing")
        return super().forward(x)


@pytest.mark.parametrize(
    "kinds", [(nn.Linear,), (Noisy,), (Forked, Joined)], ids=["plain", "random", "several outputs"]
)
def test_recomputation(fsdp, mesh, world, kinds):
    model = nn.Sequential(*(kind(4, 4) for _ in range(2) for kind in kinds)).double()
    plain, entered = copy.deepcopy(model), []

    class Entered:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            entered.append(self.name)

        def __exit__(self, *_):
            pass

    for module in model:
        checkpoint(module, context_fn=lambda: (Entered("forward"), Entered("again")))
        fsdp.fully_shard(module, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    total = 0
    for rank in range(world.size):
        torch.manual_seed(rank)
        total = total + plain(data_of(rank, 2, 4)).sum() / world.size
    total.backward()
    torch.manual_seed(world.rank)
    model(data_of(world.rank, 2, 4)).sum().backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        close(param.grad, expected.grad)
    assert sorted(entered) == sorted(["forward", "again"] * len(model))


@pytest.mark.parametrize("at", [1, 2])
def test_recomputation_that_fails(fsdp, mesh, world, at):
    model = nn.Sequential(Failing(4, 4), nn.Linear(4, 4))
    model[0].at = at
    checkpoint(model[0])
    for unit in (model[0], model):
        fsdp.fully_shard(unit, mesh=mesh)
    with pytest.raises(RuntimeError, match="failing"):
        model(torch.ones(2, 4)).sum().backward()
    assert model[0].calls == at


def test_a_module_belongs_to_one_call(fsdp, mesh):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    fsdp.fully_shard([model[0], model[1]], mesh=mesh)
    fsdp.fully_shard([model[2]], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    for given in (model[0], model, [model[1], model[3]]):
        with pytest.raises((AssertionError, ValueError)):
            fsdp.fully_shard(given, mesh=mesh)
    with pytest.raises(RuntimeError):
        replicate(model[0], mesh=mesh)
