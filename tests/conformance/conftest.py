"""What torch's own tests of ``fully_shard`` expect, in our words: ``make test-conformance``.

Each test runs with torch's ``fully_shard``, then with ours: what torch's does not do is not expected. The table
``README.md`` says for every test of torch's which test here stands for it, or why none does.
"""

import types

import pytest
import torch
import torch.distributed.fsdp as stock
from torch.distributed.device_mesh import init_device_mesh

import hpcfsdp.fsdp2 as ours
from tests import under_mpi
from tests.under_mpi import *  # noqa: F403

FRONTS = {"torch": stock, "hpcfsdp": ours}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """On 2 ranks unless a test says 4; each value of each parameter with both fronts."""
    for item in items:
        if item.get_closest_marker("ranks") is None:
            item.add_marker(pytest.mark.ranks(2))
        item.add_marker(pytest.mark.pairs)
    under_mpi.pytest_collection_modifyitems(config, items)


@pytest.fixture(autouse=True)
def seed():
    """All ranks begin with one seed: what they build has the same values."""
    torch.manual_seed(0)


@pytest.fixture(params=FRONTS)
def fsdp(request) -> types.ModuleType:
    """The module with the names of ``torch.distributed.fsdp``: torch's own, then ours."""
    return FRONTS[request.param]


@pytest.fixture
def mesh(world):
    """All ranks in one dimension."""
    return init_device_mesh("cpu", (world.size,))
