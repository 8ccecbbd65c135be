"""Programs of other libraries, trained under mpirun: ``make test-programs``.

Or, where these libraries are installed, ``mpirun -n 2 python -m pytest tests/programs --with-mpi``. Models have random
weights; nothing is downloaded.
"""

import os

import pytest
import torch

import hpcfsdp
from tests.programs.program import complete_torchvision
from tests.under_mpi import *  # noqa: F403

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of transformers


complete_torchvision()


@pytest.fixture(scope="module")
def world():
    """One for each file: some programs make the process group themselves."""
    torch.set_num_threads(1)
    made = hpcfsdp.init("cpu")
    yield made
    hpcfsdp.finalize()


def pytest_sessionstart(session):
    # Libraries warn of each other's old names. hpcfsdp's own warnings are of other kinds, and remain errors.
    for kind in ("FutureWarning", "DeprecationWarning"):
        session.config.addinivalue_line("filterwarnings", f"ignore::{kind}")
    # Lightning advises srun wherever that is installed.
    session.config.addinivalue_line("filterwarnings", "ignore:The .srun. command is available")
