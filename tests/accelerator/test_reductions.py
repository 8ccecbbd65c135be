"""Gradients on the simulated accelerator: kernels and bytes of narrow dtypes, communicators, streams of replicas."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.engine.streams import Stream
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.launch.topology import Topology
from hpcfsdp.units.unit_mesh import GroupCache
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated
from tests.accelerator.programs import POLICIES, SIM, leave_for_later
from tests.accelerator.test_engine import Net, trained

pytestmark = pytest.mark.ranks(4, 2)
NARROW = [torch.bfloat16, torch.float16]


@pytest.fixture
def comm(own_group):
    return TorchGroupCommunicator(own_group)


def gradient(dtype, rank, numel):
    """Values whose sum in a narrow dtype would lose the small ones, and in float16 be too large."""
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    made[::2] += 30000 if dtype == torch.float16 else 256
    return made.to(dtype)


def average(dtype, size, numel):
    return torch.stack([gradient(dtype, rank, numel).double() for rank in range(size)]).mean(0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("numel", [3, 1 << 18])
def test_narrow_values_are_averaged_in_float32_by_few_kernels(world, comm, dtype, numel):
    given = gradient(dtype, world.rank, numel * world.size).to(SIM)
    kept = torch.empty(numel, device=SIM)
    comm.reduce_scatter_tensor(kept, given, "average")
    simulated.reset_counts()
    comm.reduce_scatter_tensor(kept, given, "average")
    launched = simulated.launches()
    assert launched <= 3, "a mean, and the exchange"
    expected = average(dtype, world.size, numel * world.size).chunk(world.size)[world.rank]
    torch.testing.assert_close(kept.cpu().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", NARROW)
def test_an_all_reduce_of_narrow_values_sends_them_as_they_are(world, own_group, comm, dtype):
    numel = 4 * world.size + 1
    values = gradient(dtype, world.rank, numel).to(SIM)
    own_group.called.clear()
    comm.all_reduce(values, "average")
    assert own_group.called == ["all_to_all of torch.uint8", f"all_gather of {2 * 5} x torch.uint8"]
    expected = average(dtype, world.size, numel)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(values.cpu().double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=["block", "cyclic"])
@pytest.mark.parametrize("dtype", NARROW)
def test_averages_go_between_nodes_once(world, comm, dtype, nodes):
    numel, sent = 8, Counter()
    given = gradient(dtype, world.rank, numel * world.size).to(SIM)
    kept = torch.empty(numel, device=SIM)
    comm.divide(Topology(nodes))
    for line in comm._lines:
        exchange = line.group._all_to_all

        def counted(outputs, inputs, used, opts, line=line, exchange=exchange):
            node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
            for peer, part in zip(line.world_ranks, inputs, strict=True):
                sent[node_of[peer] == node_of[world.rank]] += part.nbytes * (peer != world.rank)
            return exchange(outputs, inputs, used, opts)

        line.group._all_to_all = counted
    comm.reduce_scatter_tensor(kept, given, "average")
    # A ring sends 3/4 of all bytes along each of its four edges, of which one leaves each node.
    ring_bytes = given.nbytes * 3 // 4
    assert 2 * sent[False] == given.nbytes // 2 <= ring_bytes
    expected = average(dtype, world.size, numel * world.size).chunk(world.size)[world.rank]
    rounding = torch.finfo(dtype).eps / 2  # the average of a node is rounded
    torch.testing.assert_close(kept.cpu().double(), expected, rtol=rounding, atol=rounding)


def test_gathers_and_reductions_have_communicators_of_their_own(world, group):
    model = FullyShardedDataParallel(nn.Linear(8, 8), process_group=group)
    group.called.clear()
    model(torch.ones(2, 8).to(SIM)).sum().backward()
    assert not [call for call in group.called if call.startswith(("reduce", "all_reduce", "all_to_all"))]
    (flat,) = model._unit.sharded_params
    assert flat.reduce_comm != flat.comm
    again = FullyShardedDataParallel(nn.Linear(8, 8), process_group=group)
    assert again._unit.sharded_params[0].reduce_comm == flat.reduce_comm, "one for all units"


@pytest.mark.other_orders("two groups do not wait for each other")
def test_ranks_may_reduce_and_gather_in_different_orders(world, group):
    """Where gradients depend on data: one communicator would see a gather on one rank and a reduction on another."""
    comm = TorchGroupCommunicator(group)
    own = GroupCache.current().for_reductions(comm, narrow=False)
    full, shard, reduced = torch.ones(8 * world.size).to(SIM), torch.ones(8).to(SIM), torch.empty(8, device=SIM)
    calls = [lambda: comm.all_gather_into_tensor(full, shard), lambda: own.reduce_scatter_tensor(reduced, full, "sum")]
    queues = [torch.Stream(SIM), torch.Stream(SIM)]
    for turn in (0, 1) if world.rank % 2 else (1, 0):
        with queues[turn]:
            calls[turn]()
    torch.accelerator.synchronize()
    assert reduced.tolist() == [world.size] * 8


@pytest.fixture(scope="module")
def pair(world):
    """Groups of two nodes with two ranks: (shard, replicate)."""
    lines = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    return tuple(dist.new_subgroups_by_enumeration(each, backend=simulated.BACKEND)[0] for each in lines)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", [*POLICIES, "replicate"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_replicas_reduce_on_a_queue_of_their_own(world, pair, streams, policy, half):
    torch.manual_seed(0)
    reference = Net()
    model = FullyShardedDataParallel(
        copy.deepcopy(reference),
        process_group=pair,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16) if half else None,
    )
    leave_for_later(streams, policy)
    losses = trained(model, SIM, [world.rank], 1)
    expected = trained(reference, torch.device("cpu"), range(world.size), world.size)[world.rank :: world.size]
    simulated.starve()
    torch.testing.assert_close([loss.cpu() for loss in losses], expected, rtol=0, atol=0.02 if half else 1e-6)


@pytest.mark.ranks(4)
def test_between_replicas_gradients_travel_in_the_reduce_dtype(world, pair):
    model = FullyShardedDataParallel(
        nn.Linear(8, 8, bias=False),
        process_group=pair,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16),
    )
    pair[1].called.clear()
    model(torch.ones(2, 8).to(SIM)).sum().backward()
    assert f"all_gather of {2 * 16} x torch.uint8" in pair[1].called, "half of the 32 elements of a shard"
    assert model._unit.sharded_params[0].parameter.grad.dtype == torch.float32


def test_flat_parameters_of_one_unit_do_not_wait_for_each_other(world, group, streams):
    """A unit may have several: of other dtypes kept, for instance. A unit's reductions have a whole unit's time."""
    model = FullyShardedDataParallel(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double()) for _ in range(3))),
        process_group=group,
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
    )
    grads = [grad for unit in (module._unit for module in model.fsdp_modules(model)) for grad in unit.grads]
    assert model.check_is_root()
    rings = model._unit.root.context.reductions._ring_of
    assert len({id(rings[grad]) for grad in grads}) == 2
    assert streams._stream(Stream.REPLICATE) is not streams._stream(Stream.REDUCE)
