import gc

import pytest
import torch

from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.progress import Finished
from hpcfsdp.flat.storage import Resident, Transient, Whole

CPU = torch.device("cpu")


def test_one_rank_alone_computes_with_its_shard_itself():
    shard = torch.arange(4.0)
    buffer = Whole(shard)
    assert buffer.resident
    assert buffer.gather(shard, async_op=True) is None
    assert buffer.full is shard
    buffer.free()
    assert buffer.full.tolist() == [0, 1, 2, 3]
    assert buffer.held_bytes == 0


def test_memory_is_taken_by_the_gather_and_given_back_while_views_stay(run_ranks):
    def body(comm):
        buffer = Transient(comm, 4, torch.float32, CPU)
        full, view = buffer.full, buffer.full[2:]
        buffer.free()
        seen = [buffer.held_bytes]
        for turn in range(2):
            assert buffer.gather(torch.full((2,), comm.rank + 10.0 * turn), async_op=False) is None
            seen.append((buffer.held_bytes, full.tolist(), view.tolist()))
            buffer.free()
            seen.append(buffer.held_bytes)
        assert buffer.full is full
        assert not buffer.resident
        return seen

    expected = [0, (16, [0, 0, 1, 1], [1, 1]), 0, (16, [10, 10, 11, 11], [11, 11]), 0]
    assert run_ranks(2, body) == [expected] * 2


def test_shards_are_cast_before_they_are_sent(run_ranks):
    def body(comm):
        sent = []
        original = comm.all_gather_into_tensor
        comm.all_gather_into_tensor = lambda output, shard, **options: (
            sent.append(shard.dtype),
            original(output, shard, **options),
        )[1]
        buffer = Transient(comm, 4, torch.bfloat16, CPU)
        work = buffer.gather(torch.full((2,), 257.0 + comm.rank), async_op=True)
        assert isinstance(work, Finished)
        return sent, buffer.full.dtype, buffer.full.tolist()

    assert run_ranks(2, body) == [([torch.bfloat16], torch.bfloat16, [256, 256, 258, 258])] * 2


def test_one_rank_that_computes_in_another_dtype_copies():
    buffer = Transient(FakeCommunicator(), 3, torch.float16, CPU)
    buffer.free()
    assert buffer.gather(torch.tensor([1.0, 2.0, 2049.0]), async_op=True) is None
    assert buffer.full.tolist() == [1, 2, 2048]
    assert buffer.held_bytes == 6


def test_shared_memory_holds_all_shards_as_soon_as_they_are_written(run_ranks):
    def body(comm):
        buffer = Resident(comm, 4, torch.float32, is_cast=False)
        buffer.write(torch.full((2,), comm.rank + 1.0))
        comm.barrier()
        assert buffer.gather(torch.zeros(2), async_op=True) is None
        buffer.free()
        assert (buffer.resident, buffer.held_bytes) == (True, 0)
        assert buffer.segment.data_ptr() == segment(buffer.full, comm).data_ptr()
        return buffer.full.data_ptr(), buffer.full.tolist()

    first, second = run_ranks(2, body, shares_memory=True)
    assert first == second
    assert first[1] == [1, 1, 2, 2]


def test_a_shard_that_is_the_segment_is_not_written_again(run_ranks):
    def body(comm):
        buffer = Resident(comm, 4, torch.float32, is_cast=False)
        before = buffer.full._version
        buffer.write(buffer.segment)
        buffer.write(buffer.segment.view(-1))
        return buffer.full._version - before

    assert run_ranks(1, body, shares_memory=True) == [0]


def test_shared_memory_of_another_dtype_is_held_besides_the_shard(run_ranks):
    def body(comm):
        buffer = Resident(comm, 6, torch.bfloat16, is_cast=True)
        buffer.write(torch.full((3,), 257.0))
        return buffer.held_bytes, buffer.segment.tolist()

    assert run_ranks(2, body, shares_memory=True) == [(6, [256, 256, 256])] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_memory_is_given_back_with_the_buffer(run_ranks, dtype):
    def body(comm):
        freed = []
        comm.free = freed.append
        buffer = Resident(comm, 4, dtype, is_cast=dtype != torch.float32)
        full = buffer.full
        del buffer
        gc.collect()
        return [memory is full for memory in freed]

    assert run_ranks(1, body, shares_memory=True) == [[True]]
