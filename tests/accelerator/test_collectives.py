"""Process groups of the simulated accelerator: NCCL's semantics, and what becomes of programs that violate them."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hpcfsdp import _compat
from tests.accelerator import simulated
from tests.deadlock import Group

pytestmark = pytest.mark.ranks(2, 1, 4)

SIM = torch.device("sim", 0)


def mine(rank, *shape, dtype=torch.float32):
    return (torch.arange(max(1, torch.Size(shape).numel())).view(shape) % 5 + 10 * rank).to(dtype)


def everyone(world, *shape, **options):
    return [mine(rank, *shape, **options) for rank in range(world.size)]


@pytest.mark.parametrize("async_op", [False, True], ids=["on the current stream", "on its own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_collectives_give_what_they_should_without_a_wait_of_the_host(world, group, dtype, async_op):
    def done(work):
        if async_op:
            work.wait()

    size, rank = world.size, world.rank
    given = mine(rank, 4 * size, dtype=dtype).to(SIM)
    simulated.reset_counts()
    gathered = given.new_empty(4 * size * size)
    done(_compat.all_gather_single(gathered, given, group, async_op))
    reduced = given.new_empty(4)
    done(_compat.reduce_scatter_single(reduced, given, dist.ReduceOp.SUM, group, async_op))
    total = given.clone()
    done(dist.all_reduce(total, dist.ReduceOp.MAX, group, async_op))
    average = given.double()
    done(dist.all_reduce(average, dist.ReduceOp.AVG, group, async_op))
    sent = given.clone()
    done(dist.broadcast(sent, group_src=size - 1, group=group, async_op=async_op))
    received = torch.empty_like(given)
    done(dist.all_to_all_single(received, given, group=group, async_op=async_op))
    lists = [torch.empty_like(given) for _ in range(size)]
    done(dist.all_gather(lists, given, group, async_op))
    assert simulated.waits() == {}
    all_given = torch.stack(everyone(world, 4 * size, dtype=dtype))
    assert torch.equal(gathered.cpu(), all_given.flatten())
    assert torch.equal(reduced.cpu(), all_given.sum(0, dtype=torch.float64).to(dtype)[4 * rank : 4 * rank + 4])
    assert torch.equal(total.cpu(), all_given.amax(0))
    assert torch.equal(average.cpu(), all_given.double().mean(0))
    assert torch.equal(sent.cpu(), all_given[-1])
    assert torch.equal(received.cpu(), all_given.view(size, size, 4)[:, rank].flatten())
    assert torch.equal(torch.stack(lists).cpu(), all_given)


def test_parts_of_different_sizes(world, group):
    sizes = [(world.rank + other) % 3 for other in range(world.size)]
    given = torch.full((sum(sizes),), float(world.rank), device=SIM)
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, sizes, sizes, group=group)
    assert received.cpu().tolist() == [float(rank) for rank, size in enumerate(sizes) for _ in range(size)]


def test_messages_between_ranks(world, group):
    if world.size == 1:
        pytest.skip("needs a rank to send to")
    value, received = torch.full((3,), float(world.rank), device=SIM), torch.empty(3, device=SIM)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    works = [dist.isend(value, group_dst=after, group=group), dist.irecv(received, group_src=before, group=group)]
    for work in works:
        work.wait()
    assert received.cpu().tolist() == [float(before)] * 3


def test_objects_and_barriers(world, group):
    found = [None] * world.size
    dist.all_gather_object(found, {"rank": world.rank}, group=group)
    assert found == [{"rank": rank} for rank in range(world.size)]
    simulated.reset_counts()
    dist.barrier(group, device_ids=[0])
    assert simulated.waits() == {"event": 1}


def test_a_result_that_nobody_waits_for_is_not_there_yet(world, group):
    values = [mine(world.rank, 4).to(SIM) for _ in range(2)]
    backend = group if isinstance(group, simulated.SimulatedGroup) else group._get_backend(SIM)
    simulated.starve(backend.stream)
    works = [dist.all_reduce(value, group=group, async_op=True) for value in values]
    works[0].wait()
    right, wrong = values[0] * 1, values[1] * 1
    expected = sum(everyone(world, 4))
    assert torch.equal(right.cpu(), expected)
    assert torch.equal(wrong.cpu(), expected) is (world.size == 1)
    works[1].wait()
    assert torch.equal(values[1].cpu(), expected)


@pytest.mark.ranks(2, 4)
@pytest.mark.other_orders("what one raises is the test")
def test_ranks_that_differ_in_the_order_of_calls_raise_with_both(world, own_group):
    value, gathered = torch.ones(4, device=SIM), torch.empty(4 * world.size, device=SIM)

    def reduce():
        dist.all_reduce(value, group=own_group)

    def gather():
        _compat.all_gather_single(gathered, value, own_group)

    for call in (reduce, gather) if world.rank else (gather, reduce):
        call()
    one, other = r"all_reduce\(sum\) of 4 x torch.float32", "all_gather of 4 x torch.float32"
    with pytest.raises(RuntimeError, match=rf"call 0 of the group: rank \d calls ({one}, .*{other}|{other}, .*{one})"):
        torch.accelerator.synchronize()


def test_tensors_of_the_host_are_refused(world, group):
    with pytest.raises(RuntimeError, match=r"all_reduce\(sum\) of 3 x torch.float32: the group is for tensors on sim"):
        group.allreduce([torch.ones(3)])


@pytest.mark.parametrize("starved", ["nothing", "compute", "collectives", "random"])
def test_torchs_fully_shard_trains_as_one_process_does_on_the_cpu(world, group, starved):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model, mesh = copy.deepcopy(reference).to(SIM), DeviceMesh.from_group(group, "sim")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    streams = {"nothing": [], "random": [], "compute": [torch.accelerator.current_stream()]}
    simulated.starve(*streams.get(starved, [group.stream]), seed=0 if starved == "random" else None)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(3):
        x = torch.randn(4, 8)
        losses = []
        for each, optimizer, given in zip((model, reference), optimizers, (x.to(SIM), x), strict=True):
            losses.append(each(given).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0].cpu(), losses[1])
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor().cpu(), expected)


@pytest.mark.ranks(1)
def test_others_may_read_what_a_rank_wrote_when_it_has_left_its_group(tmp_path):
    folder, known = tmp_path / "group", Group("a group of two", (0, 1))
    first, second = (simulated.SimulatedGroup(str(folder), rank, known) for rank in range(2))
    first._new_communicator("0").send(torch.ones(2, device=SIM), 1, 0)
    first.shutdown()
    (message,) = (folder / "0").iterdir()
    assert message.stat().st_size == 8
    second.shutdown()
    assert not folder.exists()
