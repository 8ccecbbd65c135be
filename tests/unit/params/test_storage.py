import gc

import numpy
import pytest
import torch
import torch.distributed._functional_collectives  # torch's functions for storage use it, but import it not
from torch.distributed import utils as stock

from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.progress import Finished
from hpcfsdp.errors import EngineError
from hpcfsdp.params.storage import SharedBuffer, Transient, Whole, alloc_storage, data_ptr_allocated, free_storage
from tests.unit.params.gathering import buffer_bytes

CPU = torch.device("cpu")


def storage_bytes(tensor):
    return tensor.untyped_storage().size()


def test_freed_storage_has_no_bytes_and_the_tensor_keeps_shape_and_stride():
    tensor = torch.ones(2, 3, dtype=torch.float64)
    assert free_storage(tensor)
    assert storage_bytes(tensor) == 0
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (3, 1), torch.float64)


def test_freeing_twice_frees_once():
    tensor = torch.ones(4)
    assert [free_storage(tensor), free_storage(tensor)] == [True, False]


def test_allocating_twice_allocates_once():
    tensor = torch.ones(4)
    free_storage(tensor)
    assert [alloc_storage(tensor, 4), alloc_storage(tensor, 4)] == [True, False]
    assert storage_bytes(tensor) == 16


def test_allocating_what_is_there_keeps_the_values():
    tensor = torch.arange(4.0)
    assert not alloc_storage(tensor, 4)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_views_see_the_memory_that_comes_back():
    tensor = torch.zeros(6)
    view = tensor[2:6].view(2, 2)
    free_storage(tensor)
    assert storage_bytes(view) == 0
    alloc_storage(tensor, 6)
    tensor.copy_(torch.arange(6.0))
    assert view.tolist() == [[2, 3], [4, 5]]
    view.fill_(9)
    assert tensor.tolist() == [0, 1, 9, 9, 9, 9]


def test_a_tensor_without_elements_has_nothing_to_take_or_give():
    tensor = torch.zeros(0)
    assert not alloc_storage(tensor, 0)
    assert not free_storage(tensor)


def test_allocating_over_another_size_is_refused_with_both_sizes():
    tensor = torch.zeros(4)
    with pytest.raises(EngineError, match=r"^the storage holds 16 bytes where 32 are to be allocated: free it first$"):
        alloc_storage(tensor, 8)
    assert storage_bytes(tensor) == 16


@pytest.mark.parametrize(
    ("part", "place"),
    [
        (lambda tensor: tensor[1:], "element 1 and has shape (3,)"),
        (lambda tensor: tensor[:2], "element 0 and has shape (2,)"),
        (lambda tensor: tensor.as_strided((2, 2), (0, 1), 1), "element 1 and has shape (2, 2)"),
    ],
    ids=["end", "beginning", "overlapping"],
)
def test_freeing_under_other_tensors_is_refused_with_offset_shape_and_size(part, place):
    tensor = torch.arange(4.0)
    with pytest.raises(EngineError) as caught:
        free_storage(part(tensor))
    assert str(caught.value) == (
        f"the tensor is not the sole occupant of its storage: it starts at {place} of torch.float32, the storage "
        "holds 16 bytes"
    )
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_shape_gives_the_number_of_elements():
    tensor = torch.ones(2, 3)
    free_storage(tensor)
    assert alloc_storage(tensor, tensor.shape)
    assert storage_bytes(tensor) == 24
    assert not alloc_storage(tensor, torch.Size([3, 2]))
    scalar = torch.ones(())
    free_storage(scalar)
    assert alloc_storage(scalar, torch.Size([]))
    assert storage_bytes(scalar) == 4


def test_torch_frees_what_other_tensors_view_and_gives_no_sizes_of_allocations():
    tensor = torch.arange(4.0)
    stock._free_storage(tensor[:2])
    assert storage_bytes(tensor) == 0
    with pytest.raises(AssertionError) as caught:
        stock._alloc_storage(torch.zeros(4), torch.Size([8]))
    assert not any(digit in str(caught.value).replace("be 0", "") for digit in "123456789")


def test_all_elements_may_be_freed_in_any_order_of_dimensions():
    tensor = torch.arange(6.0).view(2, 3)
    assert free_storage(tensor.t())
    assert storage_bytes(tensor) == 0


def test_as_many_elements_that_overlap_are_not_all_there_are():
    """torch frees them: they begin where the storage begins."""
    tensor = torch.arange(4.0)
    overlapping = tensor.as_strided((2, 2), (0, 1))
    with pytest.raises(
        EngineError, match=r"^the tensor is not the sole occupant of its storage: .* the storage holds 16"
    ):
        free_storage(overlapping)
    assert tensor.tolist() == [0, 1, 2, 3]
    stock._free_storage(overlapping)
    assert storage_bytes(tensor) == 0


def test_memory_of_others_is_refused():
    array = numpy.zeros(4, dtype=numpy.float32)
    with pytest.raises(
        EngineError, match=r"^the storage of 16 bytes cannot be resized to 0: its memory is not torch's"
    ):
        free_storage(torch.from_numpy(array))
    nothing = torch.from_numpy(array[:0])
    with pytest.raises(EngineError, match=r"^the storage of 0 bytes cannot be resized to 16: "):
        alloc_storage(nothing, 4)


def test_memory_that_there_is_not_is_torchs_own_error():
    with pytest.raises(RuntimeError, match="memory"):
        alloc_storage(torch.empty(0), 1 << 58)


def test_parameters_in_use_by_autograd_are_freed_and_allocated():
    parameter = torch.nn.Parameter(torch.ones(3))
    assert free_storage(parameter)
    assert alloc_storage(parameter, 3)
    assert parameter.requires_grad


def test_allocated_memory_is_distinguished_from_freed():
    tensor = torch.ones(3)
    view = tensor[1:]
    seen = [data_ptr_allocated(tensor), data_ptr_allocated(view)]
    free_storage(tensor)
    seen += [data_ptr_allocated(tensor), data_ptr_allocated(view), stock._data_ptr_allocated(tensor)]
    alloc_storage(tensor, 3)
    seen += [data_ptr_allocated(tensor), data_ptr_allocated(view), stock._data_ptr_allocated(tensor)]
    assert seen == [True, True, False, False, False, True, True, True]


def test_no_memory_is_behind_meta_tensors_and_those_without_elements():
    assert not data_ptr_allocated(torch.empty(3, device="meta"))
    assert not data_ptr_allocated(torch.empty(0))


# Where gathered values stand


def test_one_rank_alone_computes_with_its_shard_itself():
    shard = torch.arange(4.0)
    buffer = Whole(shard)
    assert buffer.stays
    assert buffer.gather(shard, async_op=True) is None
    assert buffer.full is shard
    buffer.free()
    assert buffer.full.tolist() == [0, 1, 2, 3]
    assert buffer_bytes(buffer) == 0


def test_memory_is_taken_by_the_gather_and_given_back_while_views_stay(run_ranks):
    def body(comm):
        buffer = Transient(comm, 4, torch.float32, CPU)
        full, view = buffer.full, buffer.full[2:]
        buffer.free()
        seen = [buffer_bytes(buffer)]
        for turn in range(2):
            assert buffer.gather(torch.full((2,), comm.rank + 10.0 * turn), async_op=False) is None
            seen.append((buffer_bytes(buffer), full.tolist(), view.tolist()))
            buffer.free()
            seen.append(buffer_bytes(buffer))
        assert buffer.full is full
        assert not buffer.stays
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
    assert buffer_bytes(buffer) == 6


def test_shared_memory_holds_all_shards_as_soon_as_they_are_written(run_ranks):
    def body(comm):
        buffer = SharedBuffer(comm, 4, torch.float32, is_cast=False)
        buffer.write(torch.full((2,), comm.rank + 1.0))
        comm.barrier()
        assert buffer.gather(torch.zeros(2), async_op=True) is None
        buffer.free()
        assert (buffer.stays, buffer_bytes(buffer)) == (True, 0)
        assert buffer.segment.data_ptr() == segment(buffer.full, comm).data_ptr()
        return buffer.full.data_ptr(), buffer.full.tolist()

    first, second = run_ranks(2, body, shares_memory=True)
    assert first == second
    assert first[1] == [1, 1, 2, 2]


def test_a_shard_that_is_the_segment_is_not_written_again(run_ranks):
    def body(comm):
        buffer = SharedBuffer(comm, 4, torch.float32, is_cast=False)
        before = buffer.full._version
        buffer.write(buffer.segment)
        buffer.write(buffer.segment.view(-1))
        return buffer.full._version - before

    assert run_ranks(1, body, shares_memory=True) == [0]


def test_shared_memory_of_another_dtype_is_held_besides_the_shard(run_ranks):
    def body(comm):
        buffer = SharedBuffer(comm, 6, torch.bfloat16, is_cast=True)
        buffer.write(torch.full((3,), 257.0))
        return buffer_bytes(buffer), buffer.segment.tolist()

    assert run_ranks(2, body, shares_memory=True) == [(6, [256, 256, 256])] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_memory_is_given_back_with_the_buffer(run_ranks, dtype):
    def body(comm):
        freed = []
        comm.free = freed.append
        buffer = SharedBuffer(comm, 4, dtype, is_cast=dtype != torch.float32)
        full = buffer.full
        del buffer
        gc.collect()
        return [memory is full for memory in freed]

    assert run_ranks(1, body, shares_memory=True) == [[True]]
