"""Memory that the ranks of a node share: what collectives on it give, and what it takes.

Nodes are imagined: the ranks of one machine have a topology of several.
"""

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.mpi import communicator as communicators, node_memory
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology
from tests.mpi.imagined_nodes import held, machines, memory_held

pytestmark = [pytest.mark.ranks(3, 1, 2, more=(4,)), pytest.mark.transport]

MIB = 1 << 20


# What collectives give


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64], ids=str)
@pytest.mark.parametrize("numel", [1, 5, 3000])
def test_every_machine_gathers_and_reduces_as_plain_memory_does(world, make, dtype, numel):
    plain = make(Topology.regular(world.size, 1))
    for topology in machines(world.size):
        comm = make(topology)
        full, inputs = comm.alloc(numel * comm.size, dtype, gathered=True), comm.alloc(numel * comm.size, dtype)
        assert not full.to(torch.float32).any()
        for turn in range(3):
            shard = (held(comm.rank, numel, turn) % 5).to(dtype)
            expected = torch.empty(numel * comm.size, dtype=dtype)
            plain.all_gather_into_tensor(expected, shard)
            if turn % 2:
                comm.labelled_barrier("read")
                segment(full, comm).copy_(shard)
                comm.all_gather_into_tensor(full, segment(full, comm))
            else:
                comm.all_gather_into_tensor(full, shard)
            assert torch.equal(full.double(), expected.double()), topology

            given = (held(comm.rank, numel * comm.size, turn) % 3).to(dtype)
            for op in ("sum", "max"):
                outputs = []
                for communicator, memory in ((plain, given.clone()), (comm, inputs)):
                    memory.copy_(given)
                    output = torch.empty(numel, dtype=dtype)
                    communicator.reduce_scatter_tensor(output, memory, op)
                    assert torch.equal(memory.double(), given.double())
                    communicator.all_reduce(memory, op)
                    outputs.append((output, memory.clone()))
                assert torch.equal(outputs[0][0].double(), outputs[1][0].double()), (topology, op)
                assert torch.equal(outputs[0][1].double(), outputs[1][1].double()), (topology, op)


def test_values_are_rounded_once_whatever_the_nodes_are(world, make):
    for topology in machines(world.size):
        comm = make(topology)
        inputs = comm.alloc(comm.size, torch.bfloat16)
        inputs.fill_(256.0 if comm.rank == 0 else 1.0)  # 256 + 1 is 256 in bfloat16
        output = torch.empty(1)
        comm.reduce_scatter_tensor(output, inputs, "sum")
        assert output.item() == 255.0 + comm.size, topology


def test_an_all_reduce_is_bitwise_the_same_on_all_ranks_and_each_time(world, make):
    for topology in machines(world.size):
        comm = make(topology)
        memory = comm.alloc(1001, torch.float32)
        results = []
        for _ in range(2):
            memory.copy_(torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank)))
            comm.all_reduce(memory, "average")
            results.append(memory.numpy().tobytes())
        assert len({*world.comm.allgather(results[0]), *world.comm.allgather(results[1])}) == 1, topology


# Memory


def mapped(name):
    return Path("/proc/self/maps").read_text().count(name)


def test_a_node_holds_gathered_memory_once_and_gives_it_back(world, make):
    comm = make()
    gc.collect()  # models of other tests hold windows, too
    before, windows_before = memory_held(world), mapped("memfd:hpcfsdp")
    full = comm.alloc(6 * MIB, torch.float32, gathered=True)
    numel = full.numel() // comm.size
    segment(full, comm).fill_(comm.rank + 1.0)
    comm.all_gather_into_tensor(full, segment(full, comm))
    assert full[::numel].tolist()[: comm.size] == [rank + 1.0 for rank in range(comm.size)]
    assert full.sum() == numel * comm.size * (comm.size + 1) / 2  # reads every page
    assert abs(memory_held(world) - before - 24) < 2
    comm.free(full)
    assert abs(memory_held(world) - before - 24) < 2  # the tensor is still there
    del full
    assert abs(memory_held(world) - before) < 2
    assert mapped("memfd:hpcfsdp") == windows_before


def test_a_node_frees_what_its_ranks_have_released(several, world, make, monkeypatch):
    if world.size < 3:
        pytest.skip("two ranks of one node and one of another are three")
    monkeypatch.setattr(communicators, "KEPT_PART", 4.5 * MIB * world.size / node_memory.memory_limit())
    comm, numel = make(Topology.uneven([world.size - 1, 1])), MIB
    before = memory_held(world)
    memories = [comm.alloc(numel * comm.size, torch.float32, gathered=True) for _ in range(4)]
    for full in memories:
        comm.all_gather_parts(full, [[part] for part in full.view(comm.size, -1)], [torch.ones(numel)])
        assert full.sum() == full.numel()
    copy_mib = 4 * comm.size  # on the first node: a rank that is alone on its node shares nothing
    assert abs(memory_held(world) - before - 4 * copy_mib) < 2
    for full in memories:
        comm.release(full)
    world.comm.Barrier()
    full = memories[0]
    comm.all_gather_parts(full, [[part] for part in full.view(comm.size, -1)], [torch.ones(numel)])
    assert abs(memory_held(world) - before - 2 * copy_mib) < 2  # in use, and kept


def test_memory_to_reduce_is_held_once_for_each_rank(several, world, make):
    comm, output = make(), torch.zeros(2 * MIB).fill_(1.0)
    gc.collect()
    before = memory_held(world)
    inputs = comm.alloc(2 * MIB * comm.size, torch.float32)
    inputs.fill_(1.0)
    comm.reduce_scatter_tensor(output, inputs, "sum")
    assert abs(memory_held(world) - before - 8 * comm.size**2) < 2
    comm.close()
    del inputs
    assert abs(memory_held(world) - before) < 2


def test_windows_keep_no_file_descriptors(make):
    comm = make()
    before = len(os.listdir("/proc/self/fd"))
    held = [comm.alloc(8, torch.float32) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({tensor.data_ptr() for tensor in held}) == 20


def test_a_write_of_one_rank_is_seen_by_its_neighbours_alone(world, make):
    for topology in machines(world.size):
        comm = make(topology)
        full = comm.alloc(comm.size, torch.int64, gathered=True)
        segment(full, comm).fill_(comm.rank + 1)
        world.comm.Barrier()
        neighbours = topology.node_of(comm.rank)
        assert full.tolist() == [rank + 1 if rank in neighbours else 0 for rank in range(comm.size)], topology
        world.comm.Barrier()


def test_gathering_in_place_returns_the_very_memory_of_the_shard(make):
    comm = make()
    full = comm.alloc(4 * comm.size, torch.float32, gathered=True)
    own = segment(full, comm)
    assert own.data_ptr() == full.data_ptr() + comm.rank * 16
    own.fill_(comm.rank)
    comm.all_gather_into_tensor(full, own)
    assert full.tolist() == [float(rank) for rank in range(comm.size) for _ in range(4)]


def test_many_windows_live_side_by_side(make):
    comm = make()
    held_at_a_time = [comm.alloc(comm.size * n, torch.float32, gathered=True) for n in range(1, 9)]
    for n, full in enumerate(held_at_a_time, 1):
        comm.all_gather_into_tensor(full, torch.full((n,), float(10 * n + comm.rank)))
    for n, full in enumerate(held_at_a_time, 1):
        assert full.tolist() == [float(10 * n + rank) for rank in range(comm.size) for _ in range(n)]
    for full in held_at_a_time[::2]:
        comm.free(full)
    comm.all_gather_into_tensor(held_at_a_time[1], torch.full((2,), -1.0))
    assert set(held_at_a_time[1].tolist()) == {-1.0}


@pytest.mark.parametrize("gathered", [True, False])
def test_empty_memory_is_no_special_case(make, gathered):
    comm = make()
    empty = comm.alloc(0, torch.float32, gathered=gathered)
    assert empty.numel() == 0
    comm.all_gather_into_tensor(empty, torch.empty(0))
    comm.reduce_scatter_tensor(torch.empty(0), empty, "sum")
    comm.all_reduce(empty, "sum")
    comm.free(empty)


def test_only_what_alloc_gave_can_be_freed_and_only_once(make):
    comm, other = make(), make()
    mine, foreign = comm.alloc(8, torch.float32), other.alloc(8, torch.float32)
    comm.free(mine)
    for tensor in (mine, foreign, torch.empty(8), comm.alloc(9, torch.float32)[1:]):
        with pytest.raises(CommunicationError) as caught:
            comm.free(tensor)
        assert str(caught.value) == (
            f"free on rank {comm.rank}: this tensor of 8 x torch.float32 is not a whole tensor from this "
            "communicator's alloc, or was freed before"
        )
    mine.fill_(1.0)  # freed memory is plain memory as long as a tensor uses it
    comm.all_reduce(mine, "sum")
    assert mine.tolist() == [float(comm.size)] * 8


def test_sizes_that_cannot_be_are_refused(make):
    comm = make()
    with pytest.raises(CommunicationError, match=f"alloc on rank {comm.rank}: size must be >= 0, got -1"):
        comm.alloc(-1, torch.float32)
    if comm.size > 1:
        with pytest.raises(CommunicationError, match=f"elements do not divide into {comm.size} equal segments"):
            comm.alloc(comm.size + 1, torch.float32, gathered=True)


@pytest.mark.parametrize("what", ["numel", "dtype", "gathered"])
def test_allocations_that_differ_raise_on_every_node(several, world, make, what):
    for topology in machines(world.size):
        comm = make(topology)
        odd = world.rank == world.size - 1
        with pytest.raises(CommunicationError) as caught:
            comm.alloc(
                2 * comm.size * (1 + (odd and what == "numel")),
                torch.float16 if odd and what == "dtype" else torch.bfloat16,
                gathered=odd and what == "gathered",
            )
        asked = f"alloc of {2 * comm.size} x torch.bfloat16"
        other = {
            "numel": f"alloc of {4 * comm.size} x torch.bfloat16",
            "dtype": f"alloc of {2 * comm.size} x torch.float16",
            "gathered": f"{asked}, gathered",
        }[what]
        mine, theirs = (other, asked) if odd else (asked, other)
        peer = r"\d" if odd else str(world.size - 1)
        message = rf"rank {world.rank} calls {re.escape(mine)}, but rank {peer} calls {re.escape(theirs)}"
        assert re.fullmatch(message, str(caught.value))
        comm.alloc(4, torch.float32)  # and memory can be had as before


def failing(path, nbytes):
    raise OSError("not here")


def elsewhere(path, nbytes):
    """What another process with the same id, in a namespace of its own, would find there."""
    if path is None:
        return UNNAMED(path, nbytes)
    return os.memfd_create("another"), path, None


UNNAMED = node_memory.open_unnamed


@pytest.mark.parametrize("culprit", ["first", "last"])
@pytest.mark.parametrize("opener", [failing, elsewhere])
def test_a_named_file_serves_where_processes_do_not_see_each_other(several, world, make, monkeypatch, culprit, opener):
    if world.rank == (0 if culprit == "first" else world.size - 1):
        monkeypatch.setattr(node_memory, "open_unnamed", opener)
    comm = make()
    full = comm.alloc(4 * comm.size, torch.float32, gathered=True)
    falls_back = culprit == "last" or opener is failing
    assert mapped("/dev/shm/hpcfsdp-") == (1 if falls_back else 0)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("hpcfsdp-")]
    comm.all_gather_into_tensor(full, torch.full((4,), float(comm.rank)))
    assert full.tolist() == [float(rank) for rank in range(comm.size) for _ in range(4)]
    comm.close()
    del full
    assert mapped("/dev/shm/hpcfsdp-") == 0


@pytest.mark.parametrize("culprit", ["first", "last"])
def test_memory_that_cannot_be_shared_is_an_error_on_every_rank(several, world, make, monkeypatch, culprit):
    odd = 0 if culprit == "first" else world.size - 1
    for topology in (Topology.regular(1, world.size), Topology.uneven([world.size - 1, 1])):
        if len(topology.node_of(odd)) == 1:  # it shares no memory
            continue
        comm = make(topology)
        with monkeypatch.context() as patch:
            if world.rank == odd:
                patch.setattr(node_memory, "open_unnamed", failing)
                patch.setattr(node_memory, "_open_named", failing)
            with pytest.raises(CommunicationError) as caught:
                comm.alloc(8, torch.float32)
        local = topology.local_rank(odd)
        assert str(caught.value).startswith("alloc of 8 x torch.float32: ")
        assert str(caught.value).endswith(
            f"bytes of memory could not be shared on this node: local rank {local}: not here; with a file in /dev/shm: "
            f"local rank {local}: not here"
        )
        assert not [name for name in os.listdir("/dev/shm") if name.startswith("hpcfsdp-")]
        assert comm.alloc(8, torch.float32).tolist() == [0.0] * 8


def test_a_full_shared_folder_is_an_error_and_leaves_nothing(several, world, make, monkeypatch):
    def full(fd, offset, nbytes):
        raise OSError("no space left")

    if world.rank == 0:
        monkeypatch.setattr(node_memory, "open_unnamed", failing)
        monkeypatch.setattr(os, "posix_fallocate", full)
    comm = make()
    with pytest.raises(CommunicationError, match="with a file in /dev/shm: local rank 0: no space left"):
        comm.alloc(8, torch.float32)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("hpcfsdp-")]


# Ranks that call something else, or not at all


DIFFERENT = {
    "operation": (
        lambda comm, memory: comm.all_reduce(memory, "sum"),
        lambda comm, memory: comm.reduce_scatter_tensor(torch.empty(memory.numel() // comm.size), memory, "sum"),
    ),
    "reduction": (
        lambda comm, memory: comm.all_reduce(memory, "sum"),
        lambda comm, memory: comm.all_reduce(memory, "max"),
    ),
    "numel": (
        lambda comm, memory: comm.all_reduce(memory, "sum"),
        lambda comm, memory: comm.all_reduce(memory[:3], "sum"),
    ),
    "accumulate": (
        lambda comm, memory: comm.reduce_scatter_tensor(torch.empty(2), memory, "sum", accumulate=torch.float64),
        lambda comm, memory: comm.reduce_scatter_tensor(torch.empty(2), memory, "sum"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_on_the_same_memory_raise_on_every_rank(several, world, make, what):
    comm = make(timeout_s=60)
    memory = comm.alloc(2 * comm.size, torch.float32)
    for odd in (0, world.size - 1):
        with pytest.raises(CommunicationError) as caught:
            DIFFERENT[what][world.rank == odd](comm, memory)
        texts = world.comm.allgather(str(caught.value))
        # "rank 0 calls THIS, but rank 1 calls THAT on the same memory: ..."
        for rank, text in enumerate(texts):
            mine, _, rest = text.partition(", but rank ")
            peer, _, theirs = rest.removesuffix(" on the same memory: all ranks must call the same").partition(
                " calls "
            )
            assert mine.startswith(f"rank {rank} calls ")
            assert (rank == odd) != (int(peer) == odd)
            assert mine.removeprefix(f"rank {rank} calls ") != theirs
            assert texts[int(peer)].startswith(f"rank {peer} calls {theirs}")
        memory.fill_(1.0)
        comm.all_reduce(memory, "sum")  # the memory is as good as before
        assert memory.tolist() == [float(comm.size)] * memory.numel()


def test_two_collectives_on_one_window_at_a_time_are_refused(several, world, make):
    comm = make()
    memory = comm.alloc(2 * comm.size, torch.float32)
    memory.fill_(1.0)
    if world.rank == 0:
        first = comm.all_reduce(memory, "sum", async_op=True)
        with pytest.raises(CommunicationError, match="another collective on the same memory is still under way"):
            comm.all_reduce(memory, "sum")
        world.comm.Barrier()
        first.wait()
    else:
        world.comm.Barrier()
        comm.all_reduce(memory, "sum")
    assert memory.tolist() == [float(comm.size)] * memory.numel()


def test_gathered_memory_is_gathered_as_a_whole(make):
    comm = make()
    full = comm.alloc(4 * comm.size, torch.float32, gathered=True)
    with pytest.raises(CommunicationError) as caught:
        comm.all_gather_into_tensor(full[: 2 * comm.size], torch.empty(2))
    assert str(caught.value).endswith(
        f"gathered memory of {4 * comm.size} elements can only be gathered as a whole, not {2 * comm.size} of them"
    )


@pytest.mark.ranks(3, more=(2, 4))
def test_a_rank_that_does_not_come_to_a_window_is_named(several, world, make):
    comm, missing = make(timeout_s=1), world.size - 1
    others = world.comm.Split(world.rank == missing)
    numel = 2 * comm.size
    full = comm.alloc(numel, torch.float32, gathered=True)
    inputs = [comm.alloc(numel, torch.float32) for _ in range(2)]
    if world.rank != missing:
        for name, call in {
            "all_gather_into_tensor of 2 x torch.float32": lambda: comm.all_gather_into_tensor(full, torch.ones(2)),
            "reduce_scatter_tensor(sum) of": lambda: comm.reduce_scatter_tensor(torch.empty(2), inputs[0], "sum"),
            "all_reduce(max) of": lambda: comm.all_reduce(inputs[1], "max"),
        }.items():
            others.Barrier()  # those that come do so together
            with pytest.raises(CommunicationError) as caught:
                call()
            assert str(caught.value).startswith(name)
            assert f" on rank {world.rank}: waited 1 s for rank(s) {missing}, which did not" in str(caught.value)
    others.Free()
    world.comm.Barrier()


# What gathered memory is not for


def test_gathered_memory_is_written_by_gathering_alone(several, make):
    comm, other = make(), make()
    full = comm.alloc(2 * comm.size, torch.float32, gathered=True)
    outputs = list(full.split(2))
    for call in (
        lambda: comm.all_reduce(full, "sum"),
        lambda: comm.broadcast(full, 0),
        lambda: comm.reduce_scatter_tensor(full[:2], torch.ones(2 * comm.size), "sum"),
        lambda: comm.all_gather(outputs, torch.ones(2)),
        lambda: comm.all_to_all(outputs, [torch.ones(2)] * comm.size),
        lambda: comm.all_gather_into_tensor(full.view(torch.int32), torch.ones(2, dtype=torch.int32)),
        lambda: other.all_gather_into_tensor(full, torch.ones(2)),
    ):
        with pytest.raises(CommunicationError, match=r"on rank \d: the output is gathered memory"):
            call()


def test_neighbours_with_different_places_in_a_window_raise(several, make):
    comm = make(timeout_s=60)
    window = comm.alloc(4, torch.float32)
    place = window[2:] if comm.rank == 0 else window[:2]
    with pytest.raises(
        CommunicationError, match=r"at 2 of shared memory.* at 0 of shared|at 0 of shared.* at 2 of shared"
    ):
        comm.all_reduce(place, "sum")


@pytest.mark.parametrize("long", ["", "a module with a very long name " * 10], ids=["short", "long"])
@pytest.mark.parametrize("operation", ["reduce_scatter_tensor", "all_reduce"])
def test_ranks_that_reduce_different_values_raise_with_both_labels(several, world, make, operation, long):
    comm = make(timeout_s=60)
    inputs, output = comm.alloc(2 * comm.size, torch.float32), torch.empty(2)
    odd = world.size - 1
    label = f"{long}gradients of {'head' if comm.rank == odd else 'body'!r}"
    with pytest.raises(CommunicationError) as caught:
        if operation == "all_reduce":
            comm.all_reduce(inputs, "average", label=label)
        else:
            comm.reduce_scatter_tensor(output, inputs, "average", label=label)
    others = range(odd) if world.rank == odd else [odd]
    message = str(caught.value)
    assert message.startswith(f"rank {world.rank} calls {label[:80]}")
    assert any(f", but rank {other} calls {long[:80] or 'gradients of '}" in message for other in others)
    assert message.endswith(" on the same memory: all ranks must call the same")
    if not long:
        assert "gradients of 'head': " in message
        assert f"gradients of 'body': {operation}(average) of {inputs.numel()} x torch.float32" in message


def test_ranks_with_the_same_label_do_not_raise(make):
    comm = make()
    inputs = comm.alloc(2 * comm.size, torch.float32).fill_(1.0)
    for label in ("", "gradients of 'head'", "long " * 100):
        output = torch.empty(2)
        comm.reduce_scatter_tensor(output, inputs, "average", label=label)
        assert output.tolist() == [1, 1]
        comm.all_reduce(inputs, "average", label=label)


def test_a_shard_must_not_be_the_segment_of_another_rank(several, make):
    comm = make()
    full = torch.zeros(3 * comm.size)
    wrong = full.split(3)[(comm.rank + 1) % comm.size]
    for call in (
        lambda: comm.all_gather_into_tensor(full, wrong),
        lambda: comm.reduce_scatter_tensor(wrong, full, "sum"),
    ):
        with pytest.raises(CommunicationError, match=f"is not segment {comm.rank} of it"):
            call()


def test_memory_that_no_machine_has_is_an_error_on_every_rank(several, make):
    with pytest.raises(CommunicationError):
        make().alloc(2**60, torch.float64)
