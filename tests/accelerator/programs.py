"""What the tests on the simulated device share: models, training there and on the CPU, and comparisons; no tests.

The models are those of ``tests/mpi/parity.py``. In float64 a sharded model on the device computes what the plain one
computes on the CPU, to the last digits. Where numbers are rounded to fewer bits on the way, the sharded model on the
CPU is the reference, for it rounds at the same places.
"""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp.engine.streams import OWN_STREAMS, Stream
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.world import current_world
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated
from tests.mpi import parity
from tests.mpi.parity import Trained, build, inputs, loss_of, plain_name

SIM, CPU = torch.device("sim", 0), torch.device("cpu")

POLICIES = ["eager", "random", "all"]
SOME_POLICIES = ["eager", "all"]

EXACT = {"rtol": 1e-9, "atol": 1e-11}
"""float64 has 16 digits; ranks add in another order, and optimizers divide by what may be small."""
SINGLE = {"rtol": 1e-5, "atol": 1e-6}
MIXED = {
    "full": None,
    "bf16": MixedPrecision(torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16, cast_forward_inputs=True),
    "fp16": MixedPrecision(torch.float16, torch.float16),
    "kept low": MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True),
}


def leave_for_later(streams, policy, patience_s=None):
    """Have the device starve queues: all that run concurrently, or in a random order.

    Args:
        patience_s: short where a rank may wait for another one by other means than the device.
    """
    queues = {"eager": [], "random": [], "all": [Stream.COMPUTE, *OWN_STREAMS]}
    starved = queues.get(policy, [queue for queue in Stream if queue.value == policy])
    seed = 1 if policy in ("random", "all") else None
    simulated.starve(*(streams._stream(queue) for queue in starved), seed=seed, patience_s=patience_s)


def shard(model, group=None, *, strategy="FULL_SHARD", original=False, offload=False, mixed="full", **options):
    """Collective over all ranks. Wrap a model; its class names the units."""
    options.setdefault("sharding_strategy", ShardingStrategy[strategy])
    if "device_mesh" not in options:
        options["process_group"] = group
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(type(model).units),
        use_orig_params=original,
        cpu_offload=CPUOffload(offload_params=True) if offload else None,
        mixed_precision=MIXED[mixed],
        **options,
    )


def whole(model):
    """Collective over all ranks. Every parameter in host memory, by its name in the plain model."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {plain_name(name): tensor.cpu() for name, tensor in parity.named(model).items()}


def train(model, recipe, device, optimizer=None, first=0):
    """Collective over all ranks, each of which takes its own data. The host reads no value before the end."""
    world, optimizer = current_world(), optimizer or recipe.make_optimizer(model.parameters())
    steps, parts = range(first, first + recipe.steps), range(recipe.parts)
    batches = [[inputs(step, world.rank, recipe.dtype, part).to(device) for part in parts] for step in steps]
    losses, norms = [], []
    for batch in batches:
        total = torch.zeros((), dtype=recipe.dtype, device=device)
        for part, x in enumerate(batch):
            alone = recipe.no_sync and part < recipe.parts - 1
            with model.no_sync() if alone else contextlib.nullcontext():
                loss = loss_of(model, x)
                (loss / recipe.parts).backward()
            total += loss.detach() / recipe.parts
        losses.append(total)
        if recipe.clip is not None:
            norms.append(model.clip_grad_norm_(*recipe.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
    losses = [world.comm.allreduce(loss.item()) / world.size for loss in losses]
    return Trained(losses, [norm.item() for norm in norms], {}, {}, whole(model))


@functools.cache
def on_the_cpu(model_type, recipe, **options):
    """Collective over all ranks. What the same training of the same sharded model gives on the CPU."""
    return train(shard(build(model_type, recipe.dtype), **options), recipe, CPU)


@functools.cache
def mesh_of(shape, names):
    """Collective over all ranks, the first time. A mesh of all ranks on the device."""
    grid, rank, groups = torch.arange(math.prod(shape)).view(shape), dist.get_rank(), []
    for dimension, size in enumerate(shape):
        for line in grid.movedim(dimension, -1).reshape(-1, size).tolist():
            made = dist.new_group(line, backend=simulated.BACKEND)
            if rank in line:
                groups.append(made)
    return DeviceMesh.from_group(groups if len(shape) > 1 else groups[0], "sim", mesh=grid, mesh_dim_names=names)
