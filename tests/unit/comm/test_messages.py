import pytest
import torch
from mpi4py import MPI

from hpcfsdp.comm.mpi.messages import MpiCall, Requests
from hpcfsdp.errors import CommunicationError


class BrokenMatcher:
    """The messages of rank 2 of 4, of which MPI receives none."""

    rank, size = 2, 4

    def post(self, receive):
        pass

    def cancel(self, receive):
        pass

    def test(self, receive):
        raise MPI.Exception(MPI.ERR_TRUNCATE)


def test_an_error_of_mpi_in_a_part_of_a_call_names_the_rank_of_the_communicator():
    requests = Requests(MpiCall(BrokenMatcher(), "the call", 0).among([1, 2]))
    requests.recv(torch.empty(1), 0)
    with pytest.raises(CommunicationError, match="the call on rank 2: "):
        requests.holds()
