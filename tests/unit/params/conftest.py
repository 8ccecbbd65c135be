"""Flat parameters of any few tensors."""

import pytest
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout


@pytest.fixture(scope="session")
def make_flat():
    """``make_flat(*tensors, comm=None, requires_grad=True, **options)``: of leaves that are called p0, p1, ..."""

    def make(*tensors, comm=None, requires_grad=True, **options):
        comm = comm or FakeCommunicator()
        leaves = [nn.Parameter(tensor, requires_grad=requires_grad) for tensor in tensors]
        named = [(f"p{index}", leaf.shape, ()) for index, leaf in enumerate(leaves)]
        return FlatParam(leaves, FlatLayout.plan(named, leaves[0].dtype, comm.size), comm, **options)

    return make
