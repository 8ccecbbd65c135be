"""The engine on a GPU: the numbers of the plain module, memory that comes back, streams that overlap."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp.engine.streams import CudaStreams
from hpcfsdp.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from hpcfsdp.wrap import ModuleWrapPolicy

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model_of(layers=4, width=WIDTH):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), *[Block(width) for _ in range(layers)], nn.Linear(width, 8)).cuda()


def wrap(model, **arguments):
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def inputs(step, world, width=WIDTH):
    whole = torch.randn(12, width, generator=torch.Generator().manual_seed(step)).cuda()
    return whole, whole.chunk(world.size)[world.rank]


def losses(model, optimizer, batches, world, clip=1.0):
    found = []
    for x in batches:
        loss = model(x).square().mean()
        loss.backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(clip)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if isinstance(model, FullyShardedDataParallel):
            world.communicator.all_reduce(mean, "average")
        found.append(mean.item())
    return found


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("prefetch", [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST])
def test_losses_are_those_of_the_plain_module(world, strategy, offload, original, prefetch):
    plain = model_of()
    sharded = wrap(
        copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload),
        use_orig_params=original,
        backward_prefetch=prefetch,
        forward_prefetch=prefetch is not None,
    )
    whole, mine = zip(*(inputs(step, world) for step in range(5)), strict=True)
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), 1e-2), whole, world)
    got = losses(sharded, torch.optim.AdamW(sharded.parameters(), 1e-2), mine, world)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_stays_near_the_plain_module(world, dtype):
    plain = model_of()
    sharded = wrap(copy.deepcopy(plain), mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype))
    whole, mine = zip(*(inputs(step, world) for step in range(5)), strict=True)
    expected = losses(plain, torch.optim.SGD(plain.parameters(), 1e-2), whole, world)
    got = losses(sharded, torch.optim.SGD(sharded.parameters(), 1e-2), mine, world)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=1e-3)


def test_memory_on_the_device_returns_to_that_at_rest(world):
    sharded = wrap(model_of(6, 512))
    optimizer = torch.optim.SGD(sharded.parameters(), 1e-3)
    _, mine = inputs(0, world, 512)
    losses(sharded, optimizer, [mine], world)
    at_rest = torch.cuda.memory_allocated()
    largest = max(flat.layout.padded_numel * 4 for w in sharded.fsdp_modules(sharded) for flat in w._unit.flats)
    torch.cuda.reset_peak_memory_stats()
    losses(sharded, optimizer, [mine] * 3, world)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= at_rest + (1 << 20)
    if world.size > 1:  # a single rank gathers nothing
        shards = sum(param.numel() * 4 for param in sharded.parameters())
        # Two units of values, two of gradients, the root, the shards' gradients, and what the module computes.
        assert torch.cuda.max_memory_allocated() - at_rest < 5 * largest + shards + (16 << 20)


def test_streams_that_run_late_change_nothing(world, monkeypatch):
    """Each queue is slowed down in turn: with a missing wait, values would be read too early."""
    launch = CudaStreams.launch

    def late(queue):
        def slowed(self, on, *arguments, **keywords):
            if on is queue:
                with torch.cuda.stream(self._stream(on)):
                    torch.cuda._sleep(2_000_000)
            return launch(self, on, *arguments, **keywords)

        return slowed

    from hpcfsdp.engine.streams import Queue

    _, mine = zip(*(inputs(step, world) for step in range(3)), strict=True)

    def run():
        sharded = wrap(model_of(), forward_prefetch=True)
        return losses(sharded, torch.optim.AdamW(sharded.parameters(), 1e-2), mine, world)

    expected = run()
    for queue in (Queue.GATHER, Queue.REDUCE):
        monkeypatch.setattr(CudaStreams, "launch", late(queue))
        assert run() == expected


def test_one_rank_takes_no_allocator_retries(world):
    sharded = wrap(model_of(6, 512))
    _, mine = inputs(0, world, 512)
    losses(sharded, torch.optim.SGD(sharded.parameters(), 1e-3), [mine] * 5, world)
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
