"""The rendezvous of the members of a new process group, in torch's store."""

import pytest
import torch.distributed as dist

from hpcfsdp.comm.backend.process_group import MemberRendezvous
from hpcfsdp.errors import CommunicationError

DIFFER = r"rank 0 makes a group of ranks \[0\], but rank 1 makes a group of ranks \[0, 1\]: all members must give"


def test_a_rank_with_another_list_raises_when_the_others_have_just_finished():
    store = dist.HashStore()
    alone = MemberRendezvous(store, 0, [0])
    late = MemberRendezvous(store, 1, [0, 1])
    alone.close()
    with pytest.raises(CommunicationError, match=DIFFER):
        late.close()


def test_a_rank_with_another_list_raises_when_the_others_have_left():
    store = dist.HashStore()
    MemberRendezvous(store, 0, [0]).close()
    with pytest.raises(CommunicationError, match=DIFFER):
        MemberRendezvous(store, 1, [0, 1]).close()


def test_all_ranks_raise_for_another_list_before_the_rendezvous_is_complete():
    store = dist.HashStore()
    first = MemberRendezvous(store, 0, [0, 2])
    second = MemberRendezvous(store, 1, [0, 1])
    for rendezvous in (first, second):
        assert rendezvous.holds()
        with pytest.raises(CommunicationError, match=r"rank 0 makes .*\[0, 2\], but rank 1 makes .*\[0, 1\]"):
            rendezvous.close()
