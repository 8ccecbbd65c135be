import pytest
import torch

from hpcfsdp.errors import EngineError
from hpcfsdp.flat.storage import alloc_storage, free_storage


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
