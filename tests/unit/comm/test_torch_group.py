import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.fake import FakeCommunicator


def test_a_process_without_a_world_stands_alone():
    assert isinstance(communicator_for(None, required=False), FakeCommunicator)


def test_a_missing_world_is_named_where_one_is_required():
    with pytest.raises(RuntimeError) as caught:
        communicator_for(None, required=True)
    assert str(caught.value) == (
        "there is no process group yet: call hpcfsdp.init() first (or torch.distributed.init_process_group)"
    )


def test_a_communicator_is_used_as_it_is():
    comm = FakeCommunicator()
    assert communicator_for(comm, required=True) is comm


@pytest.mark.parametrize("group", [3, "world", (1, 2), 0])
def test_anything_else_is_refused_by_its_type(group):
    with pytest.raises(TypeError) as caught:
        communicator_for(group, required=True)
    assert str(caught.value) == (
        f"process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not {type(group).__name__}"
    )


def test_torchs_fake_backend_gets_a_communicator_of_one_process():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        comm = communicator_for(None, required=True)
        part = communicator_for(dist.new_group([1, 3]), required=True)
    finally:
        dist.destroy_process_group()
    assert isinstance(comm, FakeCommunicator)
    assert (comm.rank, comm.size, part.rank, part.size) == (3, 4, 1, 2)
    assert comm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert not comm.shares_gathered
