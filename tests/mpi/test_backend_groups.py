"""Process groups of torch.distributed over hpcmpi: created, used at the same time, and destroyed."""

import datetime
import itertools

import pytest
import torch
import torch.distributed as dist

from hpcfsdp.comm.backend.process_group import is_mpi_group
from hpcfsdp.errors import CommunicationError
from hpcfsdp.mpi import NAME, MpiProcessGroup, register

pytestmark = [pytest.mark.ranks(4, 1, 2, 3), pytest.mark.transport]

SHORT = datetime.timedelta(seconds=1)


def total_over(group):
    """The sum of the global ranks of a group, by a collective of it."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=group)
    return value.item()


def subsets(world):
    return [subset for size in range(1, world.size + 1) for subset in itertools.combinations(range(world.size), size)]


def test_the_attributes_of_the_default_group(world):
    group = dist.group.WORLD
    assert isinstance(group, MpiProcessGroup) and is_mpi_group(group)
    assert dist.get_backend() == dist.get_backend(group) == NAME == "hpcmpi"
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size) == (group.rank(), group.size())
    assert dist.get_process_group_ranks(group) == list(range(world.size))
    assert dist.get_group_rank(group, world.rank) == dist.get_global_rank(group, world.rank) == world.rank
    assert (group.name(), group.group_desc) == (NAME, "default_pg")
    assert dist.is_backend_available("hpcmpi")
    assert dist.get_node_local_rank() == world.local_rank


def test_registering_again_changes_nothing(world):
    before = list(dist.Backend.backend_list)
    register()
    assert dist.Backend.backend_list == before
    assert dist.get_default_backend_for_device("cpu") == "gloo"


def test_every_subset_of_the_ranks_can_be_a_group(world):
    for ranks in subsets(world):
        group = dist.new_group(ranks)
        if world.rank not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_backend(group) == NAME
        assert dist.get_process_group_ranks(group) == list(ranks)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (ranks.index(world.rank), len(ranks))
        assert total_over(group) == sum(ranks)
        value = torch.tensor(float(world.rank))
        dist.broadcast(value, ranks[-1], group=group)
        assert value == ranks[-1]
        value.fill_(world.rank)
        dist.broadcast(value, group_src=0, group=group)
        assert value == ranks[0]
        dist.barrier(group)
        dist.destroy_process_group(group)


def test_groups_of_the_same_ranks_do_not_mix_their_messages(world):
    first, second = dist.new_group(), dist.new_group()
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    works = [dist.all_reduce(one, group=first, async_op=True), dist.all_reduce(two, group=second, async_op=True)]
    for work in reversed(works) if world.rank % 2 else works:
        work.wait()
    assert (one.item(), two.item()) == (world.size, 2 * world.size)
    for group in (first, second):
        dist.destroy_process_group(group)


def test_overlapping_groups_are_used_in_an_order_that_is_each_ranks_own(world):
    pairs = [(rank, (rank + 1) % world.size) for rank in range(world.size)] if world.size > 2 else [(0, world.size - 1)]
    pairs = [sorted(set(pair)) for pair in pairs]
    mine = [(pair, dist.new_group(pair)) for pair in pairs]
    mine = [(pair, group) for pair, group in mine if world.rank in pair]
    values = [torch.tensor(float(world.rank)) for _ in mine]
    calls = [(value, group) for value, (_, group) in zip(values, mine, strict=True)]
    works = [
        dist.all_reduce(value, group=group, async_op=True)
        for value, group in (calls if world.rank % 2 else reversed(calls))
    ]
    for work in works:
        work.wait()
    assert [value.item() for value in values] == [sum(pair) for pair, _ in mine]
    for _, group in mine:
        dist.destroy_process_group(group)


def test_members_alone_may_make_a_group(world):
    evens = list(range(0, world.size, 2))
    for _ in range(2):  # torch gives the second one the name of the first
        if world.rank in evens:
            group = dist.new_group(evens, use_local_synchronization=True)
            assert total_over(group) == sum(evens)
            dist.destroy_process_group(group)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    assert total_over(alone) == world.rank
    dist.destroy_process_group(alone)
    if world.size > 1:
        assert dist.new_group([(world.rank + 1) % world.size], use_local_synchronization=True) is None


def test_ranks_keep_the_order_in_which_they_are_given(world):
    backwards = list(range(world.size))[::-1]
    group = dist.new_group(backwards, sort_ranks=False)
    assert dist.get_rank(group) == group.rank() == group.communicator.rank == world.size - 1 - world.rank
    gathered = [torch.empty(1) for _ in backwards]
    dist.all_gather(gathered, torch.tensor([float(world.rank)]), group=group)
    assert [value.item() for value in gathered] == backwards
    dist.destroy_process_group(group)


def test_a_group_is_made_while_others_have_collectives_under_way(world):
    value = torch.full((50_000,), float(world.rank))
    work = dist.all_reduce(value, async_op=True)  # moves on in steps, which every rank must take
    if world.rank % 2:
        work.wait()
    group = dist.new_group()
    everyone = dist.new_group(list(range(world.size)))
    work.wait()
    assert value[0] == total_over(group) == total_over(everyone)
    for made in (group, everyone):
        dist.destroy_process_group(made)


def test_groups_of_other_backends_exist_at_the_same_time(world):
    gloo = dist.new_group(backend="gloo")
    assert dist.get_backend(gloo) == "gloo" and not is_mpi_group(gloo)
    assert total_over(gloo) == total_over(None)
    named = dist.new_group(backend="hpcmpi")
    assert is_mpi_group(named)
    for group in (gloo, named):
        dist.destroy_process_group(group)


def test_subgroups_of_equal_size(world):
    if world.size % 2:
        pytest.skip("needs an even number of ranks")
    mine, all_groups = dist.new_subgroups(group_size=2)
    pair = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(mine) == pair
    assert total_over(mine) == sum(pair)
    halves, _ = dist.new_subgroups_by_enumeration(
        [list(range(world.size // 2)), list(range(world.size // 2, world.size))]
    )
    assert dist.get_world_size(halves) == world.size // 2
    for group in (mine, halves):
        dist.destroy_process_group(group)
    assert len(all_groups) == world.size // 2


def test_a_group_cannot_be_split_by_torch_on_the_cpu(world):
    with pytest.raises(RuntimeError, match="not safe to split"):
        dist.split_group(split_ranks=[[rank] for rank in range(world.size)])


def test_a_topology_may_be_given_with_a_group(world):
    from hpcfsdp.launch.topology import Topology

    group = dist.new_group(pg_options=Topology.regular(world.size, 1))
    assert group.communicator.topology.num_nodes == world.size
    assert total_over(group) == total_over(None)
    dist.destroy_process_group(group)


def test_a_destroyed_group_refuses_calls_and_the_others_go_on(world):
    group, other = dist.new_group(), dist.new_group()
    pending = torch.ones(50_000)
    dist.all_reduce(pending, group=group, async_op=True)  # completed by the end of the group
    dist.destroy_process_group(group)
    assert pending[0] == world.size
    with pytest.raises(CommunicationError, match=r"all_reduce\(sum\) of 1 x torch\.float32 on rank \d: .*destroyed"):
        group.allreduce([torch.ones(1)])
    with pytest.raises(ValueError, match="not initialized in the world group map"):
        dist.broadcast(torch.ones(1), 0, group=group)
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    assert total_over(other) == total_over(None)
    dist.destroy_process_group(other)


def test_a_group_that_a_rank_does_not_join_names_it(world):
    if world.size == 1:
        pytest.skip("there is no other rank to wait for")
    last = world.size - 1
    world.comm.Barrier()
    if world.rank != last:
        with pytest.raises(
            CommunicationError, match=rf"new_group of ranks .* on rank \d: waited 1 s for rank\(s\) {last}, "
        ):
            dist.new_group(timeout=SHORT)
    world.comm.Barrier()
    if world.rank == last:  # it comes too late: it raises, and does not wait for the others
        with pytest.raises(CommunicationError, match=rf"waited 1 s for rank\(s\) {last}, "):
            dist.new_group()
    assert total_over(None) == sum(range(world.size))


def test_ranks_that_differ_in_the_members_of_a_group_raise_with_both_lists(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    everyone, fewer = list(range(world.size)), list(range(world.size - 1))
    if world.size == 2:
        everyone, fewer = [0, 1], [0]
    message = None
    try:
        group = dist.new_group(fewer if world.rank == 0 else everyone)  # no rank waits: they know at once
        dist.destroy_process_group(group)  # where the members of the smaller one have found each other first
    except CommunicationError as error:
        message = str(error)
    assert message or (world.rank == 0 and world.size == 2)
    assert message is None or (
        f"makes a group of ranks {everyone}" in message and f"makes a group of ranks {fewer}" in message
    )
    assert total_over(None) == sum(range(world.size))


def test_a_group_gives_up_after_its_own_timeout(world):
    if world.size == 1:
        pytest.skip("there is no other rank to wait for")
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    if world.rank == 0:
        with pytest.raises(CommunicationError, match=r"waited 0\.3 s for rank\(s\) 1"):
            dist.barrier(group)
        group.set_timeout(datetime.timedelta(seconds=0.2))
        with pytest.raises(CommunicationError, match=r"waited 0\.2 s for rank\(s\) 1"):
            dist.barrier(group)
    world.comm.Barrier()
    if world.rank != 0:
        group.set_timeout(datetime.timedelta(seconds=60))
        dist.barrier(group)
        dist.barrier(group)
    dist.destroy_process_group(group)


def test_collectives_of_different_numbers_of_elements_raise(world):
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    group = dist.new_group()
    with pytest.raises(CommunicationError, match=r"calls all_reduce\(sum\) of \d x .*, but rank \d calls all_reduce"):
        dist.all_reduce(torch.ones(3 + world.rank), group=group)
    group.abort()
    with pytest.raises(CommunicationError, match="closed"):
        dist.barrier(group)
