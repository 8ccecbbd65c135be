import pytest
import torch

from hpcfsdp.flat.layout import ShardExtent
from hpcfsdp.state.tensors import LocalPiece, replicated


def test_a_slice_counts_from_the_start_of_the_whole_tensor():
    piece = LocalPiece(10, torch.arange(6.0).view(2, 3))
    assert piece.numel == 6
    assert piece.slice(12, 3).tolist() == [2, 3, 4]


def test_a_slice_is_in_row_major_order_whatever_the_strides():
    assert LocalPiece(0, torch.arange(6).view(2, 3).t()).slice(1, 3).tolist() == [3, 1, 4]


def test_a_slice_of_a_tensor_without_dimensions_has_one():
    assert LocalPiece(0, torch.tensor(5.0, requires_grad=True)).slice(0, 1).tolist() == [5]


def test_a_slice_of_a_lazily_conjugated_tensor_holds_its_values():
    part = LocalPiece(0, torch.tensor([1 + 2j, 3 - 4j]).conj()).slice(1, 1)
    assert part.tolist() == [3 + 4j]
    assert not part.is_conj()


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(4, 6)[::2, ::2]])
def test_fill_overwrites_in_row_major_order(tensor):
    LocalPiece(0, tensor).fill(torch.arange(6.0))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_fill_writes_into_parameters_without_a_graph():
    param = torch.nn.Parameter(torch.zeros(2))
    LocalPiece(0, param).fill(torch.ones(2))
    assert param.tolist() == [1, 1]
    assert param.is_leaf


def test_a_replicated_tensor_is_kept_by_all_and_written_by_rank_0():
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    state = replicated("w", tensor, ("v",))
    assert (state.name, state.shape, state.dtype, state.aliases) == ("w", (2, 3), torch.int16, ("v",))
    assert state.extents == (ShardExtent("w", 0, 0, 6, 0),)
    assert state.pieces == (LocalPiece(0, tensor),)


def test_nobody_writes_a_tensor_without_elements():
    assert replicated("w", torch.zeros(0, 3)).extents == ()
