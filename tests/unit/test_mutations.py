"""The faults of tests/mutations.py are still faults of this source."""

import pytest

from tests.mutations import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_piece_that_a_fault_replaces_is_there_once(fault):
    assert (ROOT / "hpcfsdp" / fault.path).read_text().count(fault.old) == 1
    assert all((ROOT / path).exists() for path in fault.tests.split())
