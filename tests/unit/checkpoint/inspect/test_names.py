import pytest
import torch

from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.inspect.names import matching, tensors_matching
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

PATHS = ["model/embed", "model/blocks.0.w", "model/blocks.1.w", "model/odd[0]", "optim/state/blocks.0.w/exp_avg"]


@pytest.fixture
def index(write):
    return open_index(write({path: torch.zeros(2) for path in PATHS}, links=[("model/head", "model/embed")]))


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ([], [*PATHS, "model/head"]),
        (["*"], [*PATHS, "model/head"]),
        (["model/*"], [*PATHS[:4], "model/head"]),
        (["blocks.*"], PATHS[1:3]),
        (["model/blocks.?.w"], PATHS[1:3]),
        (["blocks.[1-9].w"], PATHS[2:3]),
        (["blocks.1.w", "blocks.0.w"], PATHS[1:3]),
        (["head"], ["model/head"]),
        (["odd[0]"], ["model/odd[0]"]),
        (["*exp_avg"], PATHS[4:]),
        (["optim/state/blocks.0.w/exp_avg"], PATHS[4:]),
    ],
)
def test_patterns_stand_for_paths_in_the_order_of_the_file(index, patterns, found):
    assert matching(index, patterns) == found


def test_a_tensor_is_found_once_by_any_of_its_names(index):
    assert tensors_matching(index, ["head"]) == ["model/embed"]
    assert tensors_matching(index, ["head", "em*"]) == ["model/embed"]
    assert tensors_matching(index) == PATHS


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("blocks.00.w", "did you mean 'blocks.0.w'"),
        ("model/blocks.00.w", "did you mean 'model/blocks.0.w'"),
        ("Blocks.0.w", "did you mean 'blocks.0.w'"),
        ("nothing like it", "'nothing like it' (hpcfsdp ls"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(index, pattern, hint):
    with pytest.raises(CheckpointError) as caught:
        matching(index, ["embed", pattern])
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert repr(pattern) in str(caught.value)
    assert hint in str(caught.value)
