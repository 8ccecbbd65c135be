"""``hpcfsdp.init`` on the simulated accelerator."""

import pytest
import torch
from mpi4py import MPI

from hpcfsdp import world as worlds
from hpcfsdp.errors import LaunchError
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1)


@pytest.mark.parametrize(("level", "name"), [(MPI.THREAD_SINGLE, "single"), (MPI.THREAD_FUNNELED, "funneled")])
def test_mpi_must_allow_calls_from_other_threads(world, monkeypatch, level, name):
    if world.rank == world.size - 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    with pytest.raises(LaunchError, match=f"MPI was started with the thread level '{name}', but on 'sim'") as caught:
        worlds._agree(worlds._Settings(simulated.NAME))
    assert caught.value.raised_on_all_ranks
    assert worlds._agree(worlds._Settings("cpu"))[1] == torch.device("cpu")


def test_serialized_calls_are_enough(world, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    assert worlds._agree(worlds._Settings(simulated.NAME))[1] == torch.device(simulated.NAME, 0)
