"""The engine does on this device what it did on the simulated one."""

import pytest

from tests.gpu import golden

pytestmark = pytest.mark.ranks(1)


@pytest.mark.parametrize("case", golden.CASES)
def test_a_step_is_the_golden_one(alone, case):
    assert not golden.difference(case, golden.trace(case, alone))
