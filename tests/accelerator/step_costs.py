"""What a step costs on the simulated device, ours next to torch's FSDP2: one scenario, counted by the device itself."""

import collections
import gc
from dataclasses import dataclass

import torch
import torch.distributed.fsdp as stock
import torch.nn.functional as F

import hpcfsdp.fsdp2 as ours
from hpcfsdp import _compat
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated
from tests.accelerator.programs import SIM, mesh_of

SHAPE = ModelConfig(layers=4, width=60, heads=5, context=16)
BATCH = 2

SCENARIOS = {
    "float32": {},
    "bfloat16, reduced in float32": {"mixed": (torch.bfloat16, torch.float32)},
    "bfloat16": {"mixed": (torch.bfloat16, torch.bfloat16)},
    "CPU offload": {"offload": True},
    "recomputation": {"recomputed": True},
    "replicas": {"replicas": 2},
}
ENGINES = ("class", "fully_shard", "FSDP2")


@dataclass(frozen=True)
class Cost:
    """Of one step on one rank."""

    launches: int  # kernels and copies, as CUDA counts them, without the optimizer's
    waits: int  # of the host for the device
    collectives: int
    peak: int  # bytes of the allocator above those between steps


def sharded(engine, ranks, *, mixed=(None, None), offload=False, recomputed=False, replicas=1):
    """Collective over all ranks. A model of an engine."""
    torch.manual_seed(0)
    model = GPT(SHAPE).to(SIM)
    if recomputed:
        _compat.checkpoint_activations(model, lambda module: isinstance(module, Block))
    names = ("replicate", "shard")
    mesh = mesh_of((replicas, ranks // replicas), names) if replicas > 1 else mesh_of((ranks,), ("shard",))
    if engine == "class":
        strategy = ShardingStrategy.HYBRID_SHARD if replicas > 1 else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model,
            None,
            strategy,
            device_mesh=mesh,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(*mixed) if mixed[0] else None,
            cpu_offload=CPUOffload(offload),
        )
    front = ours if engine == "fully_shard" else stock
    options = {"mesh": mesh, "mp_policy": front.MixedPrecisionPolicy(*mixed)}
    if offload:
        options["offload_policy"] = front.CPUOffloadPolicy()
    for block in model.blocks:
        front.fully_shard(block, **options)
    return front.fully_shard(model, **options)


def step_of(model):
    ids = torch.zeros(BATCH, SHAPE.context, dtype=torch.int64).to(SIM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(engine, ranks, **options):
    """Collective over all ranks. The cost of a step, and what the device has noted in it."""
    step = step_of(sharded(engine, ranks, **options))
    for _ in range(3):
        step()
    gc.collect()  # of models before
    torch.accelerator.synchronize()
    at_rest = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    simulated.reset_counts()
    with simulated.log() as entries:
        step()
    launches, waits = simulated.launches(), sum(simulated.waits().values())
    torch.accelerator.synchronize()
    kinds = collections.Counter(entry[0] for entry in entries)
    peak = torch.accelerator.max_memory_allocated() - at_rest
    return Cost(launches, waits, kinds["collective"], peak), entries
