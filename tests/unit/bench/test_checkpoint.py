import math
import os

import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.bench import checkpoint
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import HpcfsdpError


@given(st.integers(1, 1 << 50), st.integers(1, 10_000))
def test_tensors_are_about_square_and_of_the_given_size(nbytes, tensors):
    rows, columns = checkpoint.shape_of(nbytes, tensors)
    wanted = max(1, nbytes // (4 * tensors))
    assert wanted - columns < rows * columns <= wanted
    assert columns <= rows <= columns + 2


def test_all_values_of_the_model_differ():
    cpu, tensors = torch.device("cpu"), 2 * checkpoint.UNIT_TENSORS + 1
    model = checkpoint.make_model("hpcfsdp", FakeCommunicator(), tensors, (3, 5), cpu)
    values = torch.cat([param.detach().view(-1)[: math.prod(param.shape)] for param in model.parameters()])
    found = values[values != 0]  # shards are padded
    assert len(found) == len(found.unique()) == (2 * checkpoint.UNIT_TENSORS + 1) * 15


def test_the_folder_is_removed_with_its_files_even_after_an_error(tmp_path):
    def fail_inside():
        with checkpoint.scratch(FakeCommunicator(), tmp_path, 1) as folder:
            (folder / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert os.listdir(tmp_path) == []


def test_no_folder_is_made_without_room(tmp_path):
    with pytest.raises(HpcfsdpError, match=rf"^{tmp_path}: {1 << 60} bytes are needed, \d+ are free: choose another"):
        checkpoint.scratch(FakeCommunicator(), tmp_path, 1 << 60).__enter__()
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(HpcfsdpError, match="none: no folder can be made there: No such file or directory"):
        checkpoint.scratch(FakeCommunicator(), tmp_path / "none", 1).__enter__()
