"""Ranks on accelerators next to one process: training, lower precision, hybrid sharding, memory, late queues."""

import copy

import pytest
import torch
import torch.distributed as dist

from hpcfsdp.engine.streams import Stream
from hpcfsdp.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.gpu.conftest import simulated
from tests.gpu.training import ROWS, batches, late, make_model, train, wrap

pytestmark = pytest.mark.ranks(2, 1, 4)


def part(world, given):
    return [x.chunk(world.size)[world.rank] for x in given]


def mean_over_ranks(world, losses):
    total = losses.clone()
    world.communicator.all_reduce(total, "average")
    return total.cpu()


@pytest.mark.parametrize("prefetch", [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST], ids=str)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offload"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_is_that_of_the_plain_module(world, device, strategy, offload, original, prefetch):
    plain = make_model(device)
    model = wrap(
        copy.deepcopy(plain),
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload),
        use_orig_params=original,
        backward_prefetch=prefetch,
        forward_prefetch=prefetch is not None,
    )
    given = batches(device)
    expected, losses = train(plain, given), train(model, part(world, given))
    torch.testing.assert_close(mean_over_ranks(world, losses), expected.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_groups_that_shard_and_groups_that_replicate(world, device, strategy):
    plain = make_model(device)
    mesh = world.mesh(replicate=2, shard=2)
    model = wrap(copy.deepcopy(plain), device_mesh=mesh, sharding_strategy=ShardingStrategy[strategy])
    given = batches(device)
    expected, losses = train(plain, given), train(model, part(world, given))
    torch.testing.assert_close(mean_over_ranks(world, losses), expected.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_lower_precision_stays_near_the_plain_module(world, device, dtype, original):
    plain = make_model(device)
    mixed = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    model = wrap(copy.deepcopy(plain), mixed_precision=mixed, use_orig_params=original)
    given = batches(device)
    expected = train(plain, given, torch.optim.SGD)
    losses = train(model, part(world, given), torch.optim.SGD).float()
    torch.testing.assert_close(mean_over_ranks(world, losses), expected.cpu(), rtol=3e-2, atol=1e-3)


def test_queues_that_run_late_change_no_bit(world, device):
    given = part(world, batches(device))

    def results():
        model = wrap(make_model(device), forward_prefetch=True)
        losses = train(model, given)
        return torch.cat([losses.cpu(), *(param.detach().cpu().flatten() for param in model.parameters())])

    expected = results()
    for queue in (Stream.COMPUTE, Stream.GATHER, Stream.REDUCE):
        with late(queue, simulated):
            assert torch.equal(results(), expected), queue


def test_memory_returns_to_that_at_rest(world, device):
    # Libraries of a real device take some memory for themselves.
    width, slack = (1024, 40 << 20) if simulated is None else (256, 1 << 20)
    model = wrap(make_model(device, 6, width))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    (x,) = part(world, batches(device, width, 1))

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()

    step()
    at_rest = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        step()
    assert torch.accelerator.memory_allocated() <= at_rest + (1 << 20)
    assert torch.accelerator.memory_stats().get("num_alloc_retries", 0) == 0
    if world.size > 1 and dist.get_backend() != "hpcmpi":  # one gathers nothing, the other has copies for sending
        largest = max(
            flat.layout.padded_numel * 4 for each in model.fsdp_modules(model) for flat in each._unit.sharded_params
        )
        shards = sum(param.numel() * 4 for param in model.parameters())
        # Two units of values, two of gradients, the root, the shards' gradients, and what the module computes.
        assert torch.accelerator.max_memory_allocated() - at_rest < 5 * largest + shards + slack


def test_the_program_waits_for_nothing_in_a_step(world, device):
    """torch's check of synchronisations where the device has one; it does not see waits for events."""
    check = getattr(torch.get_device_module(device), "set_sync_debug_mode", None)
    if simulated is None and check is None:
        pytest.skip(f"torch cannot tell on {device.type!r}")
    if dist.get_backend() == "hpcmpi":
        pytest.skip("copies through host memory wait")
    model = wrap(make_model(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    for step, x in enumerate(part(world, batches(device))):
        if step == 2:  # the first steps allocate, and agree on the order of units
            check("error") if simulated is None else simulated.reset_counts()
        try:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if step == 3 and simulated is None:
                check("default")
    if simulated is not None:
        assert simulated.waits() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=str)
def test_collectives(world, device, dtype):
    comm, size = world.communicator, world.size
    everyone = torch.stack([(torch.arange(ROWS * size) % 7 + rank).to(dtype) for rank in range(size)])
    mine = everyone[world.rank].to(device)
    gathered = mine.new_empty(everyone.numel())
    comm.all_gather_into_tensor(gathered, mine)
    reduced = {op: mine.new_empty(ROWS) for op in ("sum", "average", "max")}
    for op, output in reduced.items():
        comm.reduce_scatter_tensor(output, mine, op)
    totals = {op: mine.clone() for op in ("sum", "average", "max")}
    for op, total in totals.items():
        comm.all_reduce(total, op)
    sent = mine.clone()
    comm.broadcast(sent, size - 1)
    assert torch.equal(gathered.cpu(), everyone.flatten())
    assert torch.equal(sent.cpu(), everyone[-1])
    wide = everyone.double() if dtype.is_floating_point else everyone
    average = wide.mean(0) if dtype.is_floating_point else wide.sum(0) // size
    for op, expected in (("sum", wide.sum(0)), ("average", average), ("max", wide.amax(0))):
        torch.testing.assert_close(totals[op].cpu(), expected.to(dtype))
        torch.testing.assert_close(reduced[op].cpu(), expected.to(dtype)[ROWS * world.rank :][:ROWS])
