"""Tests that need a GPU: ``make test-gpu``, or ``mpirun -n N python -m pytest tests/gpu --with-mpi``.

One rank works over NCCL. Several ranks share the first GPU, over MPI with copies through host memory.
"""

import pytest
import torch

import hpcfsdp
from hpcfsdp.launch.job import load_mpi

COMM = load_mpi().COMM_WORLD


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU is visible"))
        return
    for item in items:
        if "one_rank" in item.name and COMM.size > 1:
            item.add_marker(pytest.mark.skip(reason="for one rank: NCCL takes one GPU for each"))


@pytest.fixture(scope="session")
def world():
    made = hpcfsdp.init("cuda:0", backend="nccl" if COMM.size == 1 else "hpcmpi")
    yield made
    hpcfsdp.finalize()
