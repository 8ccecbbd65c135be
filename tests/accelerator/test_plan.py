"""Predicted memory next to what the device counts, for every strategy and precision."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)

from hpcfsdp import _compat, fsdp2
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.launch.topology import Topology
from hpcfsdp.plan.footprint import all_reduce_scratch, footprint, scatter_scratch
from hpcfsdp.plan.layouts import STRATEGIES, Precision, Setup, groups_of
from hpcfsdp.plan.meta_trace import trace
from hpcfsdp.plan.traced_step import Param
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator.programs import SIM, mesh_of
from tests.accelerator.simulated import BACKEND

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPE = ModelConfig(layers=3, width=150, heads=5, context=21)
"""Rows that do not divide among ranks."""
BATCH = 2
PRECISIONS = {
    "fp32": (torch.float32, Precision()),
    "bf16": (torch.float32, Precision(torch.bfloat16)),
    "bf16, reduced in fp32": (torch.float32, Precision(torch.bfloat16, torch.float32)),
    "fp32, reduced in bf16": (torch.float32, Precision(None, torch.bfloat16)),
    "pure bf16": (torch.bfloat16, Precision()),
    "pure bf16, reduced in fp32": (torch.bfloat16, Precision(None, torch.float32)),
}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
}
CLOSE = 0.03


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


@functools.cache
def step_of(precision, checkpointed=False):
    """The step on the meta device, with attention as the device computes it."""
    kept, mixed = PRECISIONS[precision]
    with torch.device("meta"):
        model, ids = GPT(SHAPE).to(kept), torch.zeros(BATCH, SHAPE.context, dtype=torch.int64)
    return trace(
        model,
        [module for module in model.modules() if isinstance(module, Block)],
        lambda model: loss_of(model, ids),
        name="gpt",
        tokens=ids.numel(),
        compute=mixed.compute,
        checkpointed=checkpointed,
        fused=False,
    )


def counted():
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def measure(make, optimizer="adamw", accumulation=1):
    """Bytes of a model between steps and at the peak of a step, above those before it was made."""
    ids = torch.randint(0, 256, (BATCH, SHAPE.context)).to(SIM)
    before = counted()
    model = make()
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for number in range(2):  # the first one makes the optimizer's state, and the order of units
        if number == 1:
            at_rest = counted() - before
            torch.accelerator.reset_peak_memory_stats()
        for _ in range(accumulation):
            loss_of(model, ids).backward()
        stepping.step()
        stepping.zero_grad()
    torch.accelerator.synchronize()
    return at_rest, torch.accelerator.max_memory_allocated() - before


def wrapped(process_group=None, strategy="FULL_SHARD", precision="fp32", **options):
    """A model of the class on the device."""
    kept, mixed = PRECISIONS[precision]
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        GPT(SHAPE).to(kept),
        process_group,
        ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(mixed.compute, mixed.reduce),
        device_id=SIM,
        **options,
    )


def of_all(world, measured):
    """Collective over all ranks. Of the rank that takes most."""
    return [max(figures) for figures in zip(*world.comm.allgather(measured), strict=True)]


def check(measured, predicted):
    """Both figures are within 3% of what the device counted."""
    rest, peak = measured
    assert abs(predicted.at_rest.nbytes - rest) <= CLOSE * max(rest, 1 << 16), (predicted.at_rest, rest)
    assert abs(predicted.peak.nbytes - peak) <= CLOSE * peak, (predicted.peak, peak)


def setup_of(strategy, precision, shards, replicas, **options):
    if strategy == "NO_SHARD":
        shards, replicas = 1, shards * replicas
    return Setup(strategy, shards, replicas, precision=PRECISIONS[precision][1], **options)


def imagined(strategy, ranks):
    """A communicator of one process that stands for so many ranks, or a pair for hybrid strategies."""
    if "HYBRID" not in strategy:
        return FakeCommunicator(ranks - 1, ranks, device=SIM), ranks, 1
    replicas = 2 if ranks % 2 == 0 else 1
    shards = ranks // replicas
    pair = FakeCommunicator(shards - 1, shards, device=SIM), FakeCommunicator(0, replicas, device=SIM)
    return pair, shards, replicas


WITH_SCRATCH = ("bf16", "fp32, reduced in bf16", "pure bf16", "pure bf16, reduced in fp32")
"""Precisions whose reductions take memory that those of an imagined communicator do not take."""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name not in WITH_SCRATCH])
@pytest.mark.parametrize("place", range(len(STRATEGIES)), ids=STRATEGIES)  # names would ask for four processes
def test_the_class_on_imagined_ranks(place, precision, ranks):
    strategy = STRATEGIES[place]
    group, shards, replicas = imagined(strategy, ranks)
    predicted = footprint(step_of(precision), setup_of(strategy, precision, shards, replicas))
    check(measure(lambda: wrapped(group, strategy, precision)), predicted)


def real(world, group, strategy):
    """All ranks, as a group, or as a mesh of two replicas."""
    if "HYBRID" not in strategy:
        return {"process_group": group}, world.size, 1
    return {"device_mesh": mesh_of((2, world.size // 2), ("replicate", "shard"))}, world.size // 2, 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if "HYBRID" not in name])
def test_the_class(world, group, strategy, precision):
    predicted = footprint(step_of(precision), setup_of(strategy, precision, world.size, 1))
    check(of_all(world, measure(lambda: wrapped(group, strategy, precision))), predicted)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if "HYBRID" in name])
def test_replicas_of_the_class(world, group, strategy, precision):
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    predicted = footprint(step_of(precision), setup_of(strategy, precision, 2, 2))
    make = lambda: wrapped(strategy=strategy, precision=precision, device_mesh=mesh)  # noqa: E731
    check(of_all(world, measure(make)), predicted)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fully_shard(world, group, precision, reshard):
    mesh = mesh_of((world.size,), ("shard",))
    check_rows(world, mesh, precision, reshard, world.size, 1)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_replicas_of_fully_shard(world, group, precision):
    check_rows(world, mesh_of((2, 2), ("replicate", "shard")), precision, True, 2, 2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("front", ["class", "fully_shard"])
@pytest.mark.parametrize("precision", ["fp32", "bf16, reduced in fp32", "pure bf16"])
def test_values_that_stay_over_some_ranks(world, group, front, precision):
    if front == "fully_shard":
        check_rows(world, mesh_of((world.size,), ("shard",)), precision, 2, world.size, 1)
        return
    predicted = footprint(step_of(precision), setup_of("FULL_SHARD", precision, world.size, 1, kept_over=2))
    check(of_all(world, measure(lambda: wrapped(group, precision=precision, reshard_after_forward=2))), predicted)


def check_rows(world, mesh, precision, reshard, shards, replicas):
    kept, mixed = PRECISIONS[precision]

    def make():
        torch.manual_seed(0)
        model = GPT(SHAPE).to(SIM, kept)
        options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(mixed.compute, mixed.reduce)}
        for block in model.blocks:
            fsdp2.fully_shard(block, reshard_after_forward=reshard, **options)
        return fsdp2.fully_shard(model, **options)

    options = {"front": "fully_shard", "kept_over": 0 if isinstance(reshard, bool) else reshard}
    setup = setup_of("FULL_SHARD" if reshard else "SHARD_GRAD_OP", precision, shards, replicas, **options)
    check(of_all(world, measure(make)), footprint(step_of(precision), setup))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("optimizer", "accumulation", "checkpointed", "offload"),
    [
        ("sgd", 1, True, False),
        ("sgd-momentum", 2, False, False),
        ("adamw", 2, True, True),
        ("sgd-momentum", 1, False, True),
        ("adamw", 1, True, False),
    ],
)
def test_options(world, group, optimizer, accumulation, checkpointed, offload):
    options = {"cpu_offload": CPUOffload(True)} if offload else {}
    precision = "bf16, reduced in fp32"
    chosen = {"optimizer": optimizer, "accumulation": accumulation, "offload": offload}
    predicted = footprint(step_of(precision, checkpointed), setup_of("FULL_SHARD", precision, world.size, 1, **chosen))

    def make():
        model = wrapped(group, "FULL_SHARD", precision, **options)
        if checkpointed:  # inside of the units
            _compat.checkpoint_activations(model, lambda module: isinstance(module, Block))
        return model

    check(of_all(world, measure(make, optimizer, accumulation)), predicted)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("nodes", "by"), [(1, "hpcfsdp"), (2, "hpcfsdp"), (1, "backend")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scratch_of_reductions(world, group, precision, nodes, by):
    """Of a reduce-scatter, within one node and over two, and of an all-reduce."""
    comm = TorchGroupCommunicator(dist.new_group(backend=BACKEND))
    if nodes > 1:
        comm.divide(Topology(((0, 1), (2, 3))))
    options = CommOptions(sums_by=by)
    comm = comm.choosing(options)
    setup = setup_of("FULL_SHARD", precision, world.size, 1, nodes_of_shards=nodes, comm_options=options)
    (found,) = groups_of([Param("weight", (64, 1000), PRECISIONS[precision][0])], setup)
    dtypes = found.dtypes
    full = torch.ones(found.layout.padded_numel, dtype=dtypes.reduce).to(SIM)
    shard = torch.empty(found.layout.shard_numel, dtype=dtypes.grad, device=SIM)
    scratch = []
    for call in (
        lambda: comm.reduce_scatter_tensor(shard, full, "average", accumulate=dtypes.accumulate),
        lambda: comm.all_reduce(full, "average", accumulate=dtypes.accumulate),
    ):
        before = counted()
        torch.accelerator.reset_peak_memory_stats()
        call()
        torch.accelerator.synchronize()
        scratch.append(torch.accelerator.max_memory_allocated() - before)
    assert scratch[0] == scatter_scratch(found, setup, dtypes.grad)
    if nodes == 1:
        assert scratch[1] == all_reduce_scratch(found.layout.padded_numel, found, world.size)
