import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp._compat import at_its_storage, inner_tensors
from hpcfsdp.errors import ShardingError
from hpcfsdp.reshard.whole import WholeStaging, fill_block, forget_memory, is_cut, take_memory, whole_of


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield DeviceMesh("cpu", torch.arange(3))
    dist.destroy_process_group()


def dtensor(mesh, local, placement, shape):
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)


@pytest.mark.parametrize("shape", [(5,), (7, 1), (1, 1), (2, 3), (0,), (0, 4), ()])
def test_a_tensor_forgets_its_memory_and_gets_new_one(shape):
    tensor = torch.ones(shape)
    seen, kept = tensor.numpy(), tensor
    forget_memory(tensor)
    assert tensor is kept
    assert tensor.shape == shape
    assert tensor.untyped_storage().nbytes() <= tensor.itemsize
    assert (seen == 1).all()  # what others look at is still there
    take_memory(tensor)
    tensor.fill_(2)
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    before = tensor.untyped_storage().data_ptr()
    take_memory(tensor)
    assert tensor.untyped_storage().data_ptr() == before
    assert (tensor == 2).all()


def test_what_is_cut_and_what_is_not(mesh):
    local = torch.arange(2.0)
    assert is_cut(dtensor(mesh, local, Shard(0), (5,)))
    assert is_cut(dtensor(mesh, local, Partial(), (2,)))
    same = dtensor(mesh, local, Replicate(), (2,))
    assert not is_cut(same)
    assert not is_cut(local)
    assert whole_of(same).data_ptr() == whole_of(local).data_ptr() == local.data_ptr()


@pytest.mark.parametrize(("dim", "expected"), [(0, [[2.0, 3.0], [4.0, 5.0]]), (1, [[1.0], [3.0], [5.0]])])
def test_a_block_is_filled_from_the_whole(mesh, dim, expected):
    whole = torch.arange(6.0).view(3, 2)
    if dim == 0:
        whole = torch.arange(10.0).view(5, 2)  # rows 2, 2, 1
        expected = [[4.0, 5.0], [6.0, 7.0]]
    target = dtensor(mesh, torch.zeros(len(expected), len(expected[0])), Shard(dim), whole.shape)
    fill_block(target, whole)
    assert target.to_local().tolist() == expected


def test_a_rank_that_has_nothing_is_not_filled(mesh):
    target = dtensor(mesh, torch.zeros(0, 2), Shard(0), (1, 2))
    fill_block(target, torch.ones(1, 2))
    assert target.to_local().shape == (0, 2)


def test_sums_to_come_are_not_filled(mesh):
    with pytest.raises(ShardingError, match="has no values of its own"):
        fill_block(dtensor(mesh, torch.zeros(2), Partial(), (2,)), torch.ones(2))


def test_plain_tensors_and_replicas_are_filled_whole(mesh):
    for target in (torch.zeros(2), dtensor(mesh, torch.zeros(2), Replicate(), (2,))):
        fill_block(target, torch.ones(2))
        local = target.to_local() if isinstance(target, DTensor) else target
        assert local.tolist() == [1, 1]


def test_the_form_for_a_file_has_memory_when_it_is_asked_for(mesh):
    tensor = dtensor(mesh, torch.zeros(2), Shard(0), (5,))
    form = WholeStaging(tensor)
    assert form.memory.shape == (5,)
    assert form.memory.untyped_storage().nbytes() == 4
    form.alloc()
    form.memory.copy_(torch.arange(5.0))
    form.scatter()
    assert tensor.to_local().tolist() == [2, 3]
    form.free()
    assert form.memory.untyped_storage().nbytes() == 4


def test_tensors_within_others(mesh):
    local = torch.zeros(2)
    assert [part.data_ptr() for part in inner_tensors(dtensor(mesh, local, Shard(0), (5,)))] == [local.data_ptr()]
    assert list(inner_tensors(local)) == [local]


def test_an_alias_begins_at_its_storage():
    memory = torch.arange(6.0)
    part = memory[2:4]
    alias = at_its_storage(part)
    assert alias.storage_offset() == 0
    alias += 1
    assert memory.tolist() == [0, 1, 3, 4, 4, 5]
    assert at_its_storage(memory) is memory
