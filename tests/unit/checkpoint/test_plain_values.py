import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint.plain_values import from_plain, to_plain
from hpcfsdp.errors import CheckpointError
from tests.unit.checkpoint.examples import equal

SIMPLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SIMPLE | st.sampled_from([np.arange(3), torch.arange(4.0), torch.tensor(True)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    found, types = to_plain("x", value)
    assert equal(from_plain(found, types), value)


class Word(str):
    """Not a plain string."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [(object(), "object"), (Word("a"), "Word"), ({1, 2}, "set"), (torch.float32, "dtype"), (1j, "complex")],
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: (1, {"a": v})], ids=["bare", "list", "tuple"])
def test_what_json_does_not_know_is_refused_by_name(value, kind, wrap):
    with pytest.raises(CheckpointError, match=rf"'sched\.x' (is|holds) a {kind}, and nothing is pickled"):
        to_plain("sched.x", wrap(value))


def test_a_tensor_that_numpy_has_not_is_refused_by_name():
    with pytest.raises(CheckpointError, match=r"'x' holds, in a tuple, a tensor of torch.bfloat16"):
        to_plain("x", (torch.zeros(2, dtype=torch.bfloat16),))
