import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.state.tensors import (
    NO_RUNS,
    FullTensorBuffer,
    GatherBuffer,
    LocalPiece,
    StateTensor,
    replicated,
)


def test_a_piece_is_flat_without_a_copy_where_its_elements_lie_in_order():
    tensor = torch.arange(6.0).view(2, 3)
    piece = LocalPiece(10, tensor)
    assert piece.numel == 6
    assert piece.flat().tolist() == [0, 1, 2, 3, 4, 5]
    assert piece.flat().data_ptr() == tensor.data_ptr()


def test_a_flat_piece_is_in_row_major_order_whatever_the_strides():
    assert LocalPiece(0, torch.arange(6).view(2, 3).t()).flat().tolist() == [0, 3, 1, 4, 2, 5]


def test_a_flat_piece_of_a_tensor_without_dimensions_has_one():
    assert LocalPiece(0, torch.tensor(5.0, requires_grad=True)).flat().tolist() == [5]


def test_a_flat_piece_of_a_lazily_conjugated_tensor_holds_its_values():
    flat = LocalPiece(0, torch.tensor([1 + 2j, 3 - 4j]).conj()).flat()
    assert flat.tolist() == [1 - 2j, 3 + 4j]
    assert not flat.is_conj()


def test_the_piece_of_an_element_is_the_one_that_has_it():
    pieces = LocalPiece(2, torch.zeros(3)), LocalPiece(5, torch.zeros(1))
    tensor = StateTensor("w", (9,), torch.float32, NO_RUNS, pieces)
    assert [tensor.piece_of(start) for start in (2, 4, 5)] == [pieces[0], pieces[0], pieces[1]]


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
    assert (state.runs.edges.tolist(), state.runs.ranks.tolist()) == ([0, 6], [[0]])
    (piece,) = state.pieces
    assert piece.start == 0 and piece.tensor is tensor


def test_no_rank_writes_a_tensor_without_elements():
    runs = replicated("w", torch.zeros(0, 3)).runs
    assert (runs.edges.tolist(), runs.ranks.tolist()) == ([0], [])


@pytest.mark.parametrize("shape", [(5,), (7, 1), (1, 1), (2, 3), (0,), (0, 4), ()])
def test_the_tensor_of_a_buffer_loses_its_memory_and_gets_new_one(shape):
    tensor = torch.ones(shape)
    seen, kept = tensor.numpy(), tensor
    parts = {"memory": {0: tensor}, "gather": None, "scatter": None}
    buffer = type("Buffer", (GatherBuffer,), parts)()
    buffer.free()
    assert tensor is kept
    assert tensor.shape == shape
    assert tensor.untyped_storage().nbytes() <= tensor.itemsize
    assert (seen == 1).all()  # what others look at is still there
    buffer.alloc()
    tensor.fill_(2)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    before = tensor.untyped_storage().data_ptr()
    buffer.alloc()
    assert tensor.untyped_storage().data_ptr() == before
    assert (tensor == 2).all()


def test_a_buffer_has_memory_when_it_is_asked_for():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    mesh = DeviceMesh("cpu", torch.arange(3))
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False, shape=torch.Size((5,)), stride=(1,))
    buffer = FullTensorBuffer(tensor)
    whole = buffer.memory[0]
    assert whole.shape == (5,)
    assert whole.untyped_storage().nbytes() == 4
    buffer.alloc()
    whole.copy_(torch.arange(5.0))
    buffer.scatter()
    assert tensor.to_local().tolist() == [2, 3]
    buffer.free()
    assert whole.untyped_storage().nbytes() == 4
    dist.destroy_process_group()
