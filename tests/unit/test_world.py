import pytest

from hpcfsdp import world
from hpcfsdp.errors import LaunchError


def test_there_is_no_world_before_init_and_finalize_then_does_nothing():
    assert world.current_world() is None
    world.finalize()
    assert world.current_world() is None


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_timeout_is_positive(timeout_s):
    with pytest.raises(LaunchError, match="timeout_s must be a positive number of seconds"):
        world.init(timeout_s=timeout_s)
    assert world.current_world() is None
