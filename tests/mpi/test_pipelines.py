"""``torch.distributed.pipelining`` over stages that ``fully_shard`` has sharded, next to torch's and to one process."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hpcfsdp.fsdp2 as ours
from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import HDF5Reader, HDF5Writer
from hpcfsdp.errors import EngineError
from tests.mpi.row_cases import TIGHT, Block, same, whole

WIDTH, MICRO, ROWS = 8, 4, 8
SCHEDULES = [
    ScheduleGPipe,
    Schedule1F1B,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    ScheduleDualPipeV,
]
pytestmark = [
    pytest.mark.ranks(4),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.pipelining"),
]


def blocks():
    torch.manual_seed(0)
    return [nn.Sequential(Block(WIDTH), Block(WIDTH)).double() for _ in range(4)]


def loss_of(out, target):
    return (out - target).square().mean()


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


def places(schedule, rank):
    """The stages of a rank of two."""
    if issubclass(schedule, PipelineScheduleSingle):
        return [rank]
    if schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        return [rank, 3 - rank]
    return [rank, rank + 2]


def stages_of(fsdp, mesh, schedule, *, reshard, tensor=False):
    pipe, layers = mesh["pipe"], blocks()
    single = issubclass(schedule, PipelineScheduleSingle)
    found = []
    for place in places(schedule, pipe.get_local_rank()):
        held = layers[2 * place : 2 * place + 2] if single else [layers[place]]
        stage = nn.Sequential(*held)
        for block in (inner for each in stage for inner in each):
            if tensor:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fsdp.fully_shard(block, mesh=mesh["shard"], reshard_after_forward=reshard)
        fsdp.fully_shard(stage, mesh=mesh["shard"], reshard_after_forward=reshard)
        count = 2 if single else 4
        found.append(PipelineStage(stage, place, count, torch.device("cpu"), group=pipe.get_group()))
    return found


def run(fsdp, mesh, schedule, *, reshard=False, tensor=False, steps=2):
    """Losses, gradients and parameters of this rank's stages after some steps."""
    stages = stages_of(fsdp, mesh, schedule, reshard=reshard, tensor=tensor)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    given = stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages
    runner = schedule(given, n_microbatches=MICRO, loss_fn=loss_of)
    found = []
    for step in range(steps):
        x, target = data(step, mesh["shard"].get_local_rank())
        losses = []
        kwargs = {"target": target, "losses": losses} if any(stage.is_last for stage in stages) else {}
        runner.step(*([x] if any(stage.is_first for stage in stages) else []), **kwargs)
        found += [*(loss.detach() for loss in losses), *(whole(param.grad) for param in params)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(param) for param in params]


def alone(ranks, schedule, pipe_rank, steps=2):
    """The parameters of a rank's stages as one process trains the whole model on the data of all."""
    layers = nn.Sequential(*blocks())
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    for step in range(steps):
        for rank in range(ranks):
            x, target = data(step, rank)
            (loss_of(layers(x), target) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    single = issubclass(schedule, PipelineScheduleSingle)
    held = [
        layer
        for place in places(schedule, pipe_rank)
        for layer in (layers[2 * place : 2 * place + 2] if single else [layers[place]])
    ]
    return [param.detach() for layer in held for param in layer.parameters()]


SPLIT = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""Schedules that compute the gradients of parameters apart from those of inputs."""


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: each.__name__)
def test_schedules(world, schedule, reshard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard"))
    if reshard and schedule in SPLIT:  # with torch's function no parameter gets a gradient then
        found = run(ours, mesh, schedule, reshard=True)
    else:
        found = same(lambda fsdp, mesh: run(fsdp, mesh, schedule, reshard=reshard), mesh)
    expected = alone(2, schedule, mesh["pipe"].get_local_rank())
    torch.testing.assert_close(found[-len(expected) :], expected, **TIGHT)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleavedZeroBubble], ids=lambda each: each.__name__)
def test_with_tensor_parallelism(world, schedule):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "shard", "tensor"))
    found = run(ours, mesh, schedule, tensor=True)
    expected = alone(2, schedule, mesh["pipe"].get_local_rank())
    torch.testing.assert_close(found[-len(expected) :], expected, **TIGHT)


def test_other_questions_are_refused(world):
    model = ours.fully_shard(nn.Linear(4, 4))
    for state in (stock.fully_shard.state(model), model._get_fsdp_state()):
        assert len(state._state_ctx.all_states) == 1
        with pytest.raises(EngineError, match="reads '_comm_ctx' of the inner state of its own fully_shard"):
            _ = state._comm_ctx


def state_of(stages, schedule):
    """The state of this rank's stages, by the names that the whole model has."""
    found = {}
    for stage in stages:
        first = stage.stage_index * (2 if issubclass(schedule, PipelineScheduleSingle) else 1)
        for name, value in stage.submod.state_dict().items():
            layer, _, rest = name.partition(".")
            found[f"{first + int(layer)}.{rest}"] = value
    return found


def test_stages_in_one_file(world, shared_path):
    """Four stages write one file, which two others and a whole model read."""
    mesh, path = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "shard")), shared_path / "stages.h5"
    stages = stages_of(ours, mesh, ScheduleInterleaved1F1B, reshard=False)
    with torch.no_grad():
        for param in (param for stage in stages for param in stage.submod.parameters()):
            param.add_(0.5)
    written = state_of(stages, ScheduleInterleaved1F1B)
    dcp.save({"model": written}, storage_writer=HDF5Writer(path))

    model, others = nn.Sequential(*blocks()), stages_of(ours, mesh, ScheduleGPipe, reshard=False)
    checkpoint.load(path, model=model)
    expected = model.state_dict()
    for name, value in written.items():
        assert torch.equal(whole(value), expected[name])
    read = state_of(others, ScheduleGPipe)
    changed = next(name for name in read if name.endswith("up.weight"))
    assert not torch.equal(whole(read[changed]), expected[changed])
    dcp.load({"model": read}, storage_reader=HDF5Reader(path))
    for name, value in state_of(others, ScheduleGPipe).items():
        assert torch.equal(whole(value), expected[name])
