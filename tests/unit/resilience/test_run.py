"""Bad use of ``resilient``, and a job of one process."""

import pytest
import torch.distributed as dist

import hpcfsdp
from hpcfsdp.errors import LaunchError, UsageError


@pytest.fixture(autouse=True)
def no_world():
    yield
    hpcfsdp.finalize()
    if dist.is_initialized():  # after an error finalize leaves it
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spares": -1}, "spares is a whole number of at least 0, not -1"),
        ({"spares": 1.0}, "spares is a whole number of at least 0, not 1.0"),
        ({"min_ranks": 0}, "min_ranks is a whole number of at least 1, not 0"),
        ({"max_losses": True}, "max_losses is a whole number of at least 0, not True"),
    ],
)
def test_wrong_numbers_are_named(given, message):
    with pytest.raises(UsageError, match=message):
        hpcfsdp.resilient(lambda world: None, **given)


def test_one_process_trains_in_a_world_that_ends_with_it():
    def train(world):
        assert hpcfsdp.world.current_world() is world
        return world.size

    assert hpcfsdp.resilient(train, device="cpu") == 1
    assert hpcfsdp.world.current_world() is None


def test_an_error_of_the_program_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        hpcfsdp.resilient(lambda world: 1 / 0, device="cpu")
    assert hpcfsdp.world.current_world() is None


def test_within_itself_and_after_init_it_is_refused():
    def train(world):
        with pytest.raises(LaunchError, match=r"within hpcfsdp\.resilient"):
            hpcfsdp.resilient(train)

    hpcfsdp.resilient(train, device="cpu")
    hpcfsdp.init("cpu")
    with pytest.raises(LaunchError, match=r"after hpcfsdp\.init"):
        hpcfsdp.resilient(train)
