"""Checkpoints of any tensors, and copies of them with damage."""

import functools

import numpy as np
import pytest
import torch

from hpcfsdp.checkpoint.format.schema import TensorSpec, numpy_dtype
from hpcfsdp.checkpoint.saving import plan as planning
from hpcfsdp.checkpoint.saving.writer import write_alone


def raw(tensor):
    """The elements of a tensor as a checkpoint holds them, 1-D."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return np.frombuffer(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes(), numpy_dtype(dtype))


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write torch's tensors by their paths, at most so many bytes of them under one checksum.

    What else ``write_alone`` takes goes on to it.
    """

    def write_file(tensors, name="a.h5", block_bytes=4 << 20, **more):
        planned = functools.partial(planning.plan_alone, block_bytes=block_bytes)
        monkeypatch.setattr("hpcfsdp.checkpoint.saving.writer.plan_alone", planned)
        elements = {path: raw(tensor) for path, tensor in tensors.items()}
        specs = [
            TensorSpec(path, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for path, tensor in tensors.items()
        ]
        return write_alone(
            tmp_path / name, specs, lambda spec, start, numel: elements[spec.path][start : start + numel], **more
        )

    return write_file


@pytest.fixture
def flip():
    """Change one bit of a file."""

    def flip_bit(path, byte, bit=0):
        with open(path, "r+b") as file:
            file.seek(byte)
            (value,) = file.read(1)
            file.seek(byte)
            file.write(bytes([value ^ 1 << bit]))

    return flip_bit
