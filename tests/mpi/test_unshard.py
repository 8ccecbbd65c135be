"""Whole parameters of sharded models on ranks of MPI: what is seen, what is written back, and what memory it takes."""

import ctypes
import gc

import pytest
import torch
from torch import nn

from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.launch.topology import Topology
from hpcfsdp.units.summon import walk_full_params
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.mpi.models import ORIGINAL, batch, loss_of, make_net, plain_copy, shard, units, unsharded_bytes

pytestmark = pytest.mark.ranks(2, 1, 3)

summon = FullyShardedDataParallel.summon_full_params
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
STRATEGIES = pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
)
CARRIERS = pytest.mark.parametrize("carrier", ["shared memory", "messages", "gloo"])


@pytest.fixture(scope="module")
def groups(world):
    """Groups by what carries their messages; for hybrid strategies pairs (shard, replicate), two replicas if it can."""
    dtensor_ranks = {
        "shared memory": MpiCommunicator(world.comm.Dup(), Topology.regular(1, world.size)),
        "messages": MpiCommunicator(world.comm.Dup(), Topology.regular(world.size, 1)),
        "gloo": world.process_group,
    }
    from hpcfsdp.comm import communicator_for

    shards = world.size // (2 if world.size % 2 == 0 else 1)
    found = {}
    for name, group in dtensor_ranks.items():
        comm = communicator_for(group, required=True)
        replica, place = divmod(world.rank, shards)
        pair = (
            comm.subgroup(range(replica * shards, (replica + 1) * shards)),
            comm.subgroup(range(place, world.size, shards)),
        )
        found[name] = {False: group, True: pair}
    return found


@pytest.fixture
def wrap(groups):
    """``wrap(plain, carrier, strategy, **options)``: a sharded copy."""

    def sharded(plain, carrier="shared memory", strategy="FULL_SHARD", **options):
        group = groups[carrier]["HYBRID" in strategy]
        return shard(plain_copy(plain), group, sharding_strategy=ShardingStrategy[strategy], **options)

    return sharded


def named(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def whole(model, **arguments):
    with summon(model, writeback=False, **arguments):
        return named(model)


def backward(model, comm, step=0, parts=None):
    """Gradients of the whole batch on a plain module, of this rank's part of it on a sharded one."""
    size, rank = (1, 0) if parts == 1 else (comm.size, comm.rank)
    loss = loss_of(model, *(part.chunk(size)[rank] for part in batch(step)))
    loss.backward()
    return loss


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def step_like_the_plain_one(sharded, plain, comm):
    """One more step of each, from the values that they have."""
    for model, parts in ((plain, 1), (sharded, None)):
        model.zero_grad()
        backward(model, comm, parts=parts)
        torch.optim.SGD(model.parameters(), 0.1).step()
    found = whole(sharded)
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(found[name], tensor.detach(), **CLOSE)


# What is seen


@ORIGINAL
@STRATEGIES
@CARRIERS
def test_they_are_those_of_the_plain_module(comm, wrap, carrier, strategy, original):
    plain = make_net()
    expected = named(plain)
    sharded = wrap(plain, carrier, strategy, use_orig_params=original)
    for _ in range(2):
        with summon(sharded):
            same(named(sharded), expected)
            assert sharded.head.weight is sharded.embed.weight
            assert dict(sharded.named_buffers()).keys() == dict(plain.named_buffers()).keys()
        assert unsharded_bytes(sharded) == 0
    step_like_the_plain_one(sharded, plain, comm)


@ORIGINAL
@STRATEGIES
def test_rank_0_alone_has_them_if_asked(comm, wrap, strategy, original):
    plain = make_net()
    sharded = wrap(plain, strategy=strategy, use_orig_params=original)
    shapes = [leaf.shape for unit in units(sharded) for flat in unit.sharded_params for leaf in flat.leaves]
    with summon(sharded, rank0_only=True, offload_to_cpu=True, writeback=False):
        if comm.rank == 0:
            same(named(sharded), named(plain))
        else:
            now = [leaf.shape for unit in units(sharded) for flat in unit.sharded_params for leaf in flat.leaves]
            assert now == shapes
    step_like_the_plain_one(sharded, plain, comm)


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@CARRIERS
def test_they_may_be_looked_at_between_forward_and_backward(comm, wrap, carrier, strategy, original):
    plain = make_net()
    sharded = wrap(plain, carrier, strategy, use_orig_params=original)
    backward(plain, comm, parts=1)
    loss = loss_of(sharded, *(part.chunk(comm.size)[comm.rank] for part in batch(0)))
    same(whole(sharded), named(plain))
    loss.backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with summon(sharded, with_grads=True):
        for name, param in sharded.named_parameters():
            torch.testing.assert_close(param.grad, expected[name], **CLOSE)


# What is written back


@ORIGINAL
@STRATEGIES
@CARRIERS
@pytest.mark.parametrize("rank0_only", [False, True])
def test_changes_are_written_back(comm, wrap, carrier, strategy, original, rank0_only):
    plain = make_net()
    sharded = wrap(plain, carrier, strategy, use_orig_params=original)
    with summon(sharded, rank0_only=rank0_only), torch.no_grad():
        if comm.rank == 0 or not rank0_only:
            for param in sharded.parameters():
                param.mul_(2)
            sharded.module.norm.bias = nn.Parameter(torch.full_like(sharded.norm.bias, 0.5))
        else:
            sharded.norm.bias.data = torch.full((3,), 99.0)  # of no matter to anyone
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
        plain.norm.bias.fill_(0.5)
    same(whole(sharded), named(plain))
    assert unsharded_bytes(sharded) == 0
    step_like_the_plain_one(sharded, plain, comm)


@STRATEGIES
@pytest.mark.parametrize("rank0_only", [False, True])
def test_padding_never_leaks(comm, wrap, strategy, rank0_only):
    plain = make_net()
    sharded = wrap(plain, strategy=strategy)
    with summon(sharded, rank0_only=rank0_only):
        if comm.rank == 0 or not rank0_only:
            for flat in (flat for unit in units(sharded) for flat in unit.sharded_params):
                everything = torch.empty(0).set_(flat.leaves[0].data.untyped_storage())
                outside = torch.ones_like(everything, dtype=torch.bool)
                for leaf in flat.leaves:
                    outside[leaf.storage_offset() : leaf.storage_offset() + leaf.numel()] = False
                assert outside.any()
                everything[outside] = torch.nan
    for unit in units(sharded):
        for flat in unit.sharded_params:
            assert not flat.parameter.isnan().any()
    same(whole(sharded), named(plain))


@ORIGINAL
def test_another_shape_on_rank_0_raises_on_all(comm, wrap, original):
    plain = make_net()
    sharded = wrap(plain, strategy="HYBRID_SHARD", use_orig_params=original)
    with pytest.raises(EngineError, match=r"'norm\.bias' has shape \(2,\).*cannot be changed"):  # noqa: SIM117
        with summon(sharded, rank0_only=True, recurse=False):
            if comm.rank == 0:
                sharded.norm.bias.data = torch.zeros(2)
    same(whole(sharded), named(plain))


@ORIGINAL
def test_an_error_of_all_ranks_leaves_shards(comm, wrap, original):
    plain = make_net()
    sharded = wrap(plain, use_orig_params=original)
    with pytest.raises(ZeroDivisionError), summon(sharded, rank0_only=True):
        raise ZeroDivisionError
    assert unsharded_bytes(sharded) == 0
    step_like_the_plain_one(sharded, plain, comm)


# Gradients


@ORIGINAL
@STRATEGIES
@CARRIERS
@pytest.mark.parametrize("rank0_only", [False, True])
def test_gradients_are_whole_and_are_written_back(comm, wrap, carrier, strategy, original, rank0_only):
    plain = make_net()
    sharded = wrap(plain, carrier, strategy, use_orig_params=original)
    for model, parts in ((plain, 1), (sharded, None)):
        backward(model, comm, parts=parts)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with summon(sharded, with_grads=True, rank0_only=rank0_only), torch.no_grad():
        if comm.rank == 0 or not rank0_only:
            for name, param in sharded.named_parameters():
                torch.testing.assert_close(param.grad, expected[name], **CLOSE)
                param.grad.mul_(3)
    with summon(sharded):
        assert all(param.grad is None for param in sharded.parameters())
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    torch.testing.assert_close(sharded.clip_grad_norm_(1e9), 3 * norm, **CLOSE)


# In host memory, and other dtypes


@ORIGINAL
def test_replicated_whole_parameters_may_be_in_host_memory(comm, wrap, original):
    plain = make_net()
    sharded = wrap(plain, strategy="NO_SHARD", use_orig_params=original)
    with summon(sharded, offload_to_cpu=True, rank0_only=True), torch.no_grad():
        for name, param in sharded.named_parameters():
            assert param.device == torch.device("cpu")
            if comm.rank == 0:
                param.fill_(len(name))
    for name, value in whole(sharded).items():
        assert value.unique().tolist() == [len(name)]


@ORIGINAL
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_values_are_those_that_are_kept_not_those_that_are_computed_with(comm, wrap, strategy, original):
    plain = make_net()
    lowered = MixedPrecision(param_dtype=torch.bfloat16)
    sharded = wrap(plain, strategy=strategy, use_orig_params=original, mixed_precision=lowered)
    backward(sharded, comm)
    same(whole(sharded), named(plain))


# Memory


def private_bytes(generation=1):
    """Private memory that was written to, as the kernel counts it, without what malloc keeps of freed pieces for later.

    Not clean memory: pages of libraries are no longer private when any other process loads them.
    """
    gc.collect(generation)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line and "kB" in line)
    return int(fields["Private_Dirty"].split()[0]) * 1024


@pytest.mark.parametrize("carrier", ["shared memory", "messages"])
@pytest.mark.ranks(2)
def test_a_walk_holds_one_unit_and_all_of_it_is_given_back(groups, carrier):
    width = 2400  # 22 MiB a layer
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
    policy = ModuleWrapPolicy({nn.Linear})
    sharded = FullyShardedDataParallel(model, groups[carrier][False], auto_wrap_policy=policy)
    layer = 4 * width * width
    with summon(sharded):  # what earlier tests have left behind goes now, and not while memory is measured
        pass
    at_rest = private_bytes(2)
    with summon(sharded):
        everything = private_bytes() - at_rest
    assert everything > 2.8 * layer, "the probe does not see whole parameters"
    assert private_bytes() - at_rest < 0.2 * layer
    held = [(name, private_bytes() - at_rest) for name, _ in walk_full_params(sharded)]
    assert [name for name, _ in held] == ["", "0", "1", "2"]
    assert max(nbytes for _, nbytes in held) < 1.2 * layer
    assert min(nbytes for _, nbytes in held[1:]) > 0.8 * layer
    assert private_bytes() - at_rest < 0.2 * layer
    with summon(sharded, rank0_only=True):
        here = private_bytes() - at_rest
    assert (here > 2.8 * layer) == (groups[carrier][True][0].rank == 0 and groups[carrier][True][1].rank == 0)
