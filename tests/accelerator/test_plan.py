"""Predicted memory next to what the device counts: at rest and at the peak of a step, for every strategy and precision."""

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from hpcfsdp import _compat, fsdp2
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.plan.footprint import footprint
from hpcfsdp.plan.layouts import STRATEGIES, Precision, Setup
from hpcfsdp.plan.meta_trace import trace
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator.programs import SIM, mesh_of

pytestmark = pytest.mark.ranks(1, 2, 4)

SHAPE = ModelConfig(layers=3, width=160, heads=5, context=24)
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


def workload_of(precision, checkpointed=False):
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
        fused_attention=False,
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
    for number in range(3):
        if number == 2:
            at_rest = counted() - before
            torch.accelerator.reset_peak_memory_stats()
        for _ in range(accumulation):
            loss_of(model, ids).backward()
        stepping.step()
        stepping.zero_grad()
    torch.accelerator.synchronize()
    return at_rest, torch.accelerator.max_memory_allocated() - before


def wrapped(group, strategy, precision, **options):
    """A model of the class on the device."""
    kept, mixed = PRECISIONS[precision]
    torch.manual_seed(0)
    return FullyShardedDataParallel(
        _prepared(GPT(SHAPE).to(kept), options.pop("checkpointed", False)),
        group,
        ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(mixed.compute, mixed.reduce),
        device_id=SIM,
        **options,
    )


def _prepared(model, checkpointed):
    if checkpointed:
        _compat.checkpoint_activations(model, lambda module: isinstance(module, Block))
    return model


def check(measured, predicted):
    """Both figures are within 3% of what the device counted."""
    rest, peak = measured
    print(f"rest {predicted.at_rest.nbytes}/{rest} peak {predicted.peak.nbytes}/{peak} {predicted.peak.nbytes/peak-1:+.2%} {predicted.peak}")
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


@pytest.mark.ranks(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_class_on_imagined_ranks(strategy, precision, ranks):
    group, shards, replicas = imagined(strategy, ranks)
    predicted = footprint(workload_of(precision), setup_of(strategy, precision, shards, replicas))
    check(measure(lambda: wrapped(group, strategy, precision)), predicted)
