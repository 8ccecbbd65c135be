"""Members of a new process group that find each other through torch's store."""

import pytest
import torch.distributed as dist

from hpcfsdp.comm.backend import _Meeting
from hpcfsdp.errors import CommunicationError

DIFFER = r"rank 0 makes a group of ranks \[0\], but rank 1 makes a group of ranks \[0, 1\]: all members must give"


def test_a_rank_with_another_list_that_comes_while_the_others_have_just_met_is_told():
    store = dist.HashStore()
    alone = _Meeting(store, 0, [0])
    late = _Meeting(store, 1, [0, 1])
    alone.close()
    with pytest.raises(CommunicationError, match=DIFFER):
        late.close()


def test_a_rank_with_another_list_that_comes_when_the_others_have_gone_is_told():
    store = dist.HashStore()
    _Meeting(store, 0, [0]).close()
    with pytest.raises(CommunicationError, match=DIFFER):
        _Meeting(store, 1, [0, 1]).close()


def test_ranks_that_have_not_met_yet_are_all_told_of_another_list():
    store = dist.HashStore()
    first = _Meeting(store, 0, [0, 2])
    second = _Meeting(store, 1, [0, 1])
    for meeting in (first, second):
        assert meeting.holds()
        with pytest.raises(CommunicationError, match=r"rank 0 makes .*\[0, 2\], but rank 1 makes .*\[0, 1\]"):
            meeting.close()
