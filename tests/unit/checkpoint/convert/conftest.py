"""A checkpoint that holds every dtype, and what is needed to compare two of them."""

import numpy as np
import pytest

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone

DTYPES = list(schema._NUMPY_DTYPES)


def make_bytes(spec, seed):
    raw = np.random.default_rng(seed).integers(0, 256, spec.nbytes, np.uint8)
    return raw & 1 if spec.dtype == "bool" else raw


def write(path, specs, **options):
    """A checkpoint of these tensors, with random bytes; those bytes by path."""
    data = {spec.path: make_bytes(spec, seed) for seed, spec in enumerate(specs)}

    def read(spec, start, numel):
        return data[spec.path][start * spec.itemsize : (start + numel) * spec.itemsize]

    write_alone(path, specs, read, **options)
    return data


def contents(path):
    """Shape, dtype and bytes of every tensor, by path."""
    index = open_index(path)
    with BlockReader(index) as reader:
        return {
            name: (spec.shape, spec.dtype, reader.read(name, 0, spec.numel).tobytes())
            for name, spec in index.tensors.items()
        }


GROUPS = [{"params": ["a.float32", "a.float64"], "lr": 0.1, "betas": [0.5, 0.75], "foreach": None}]
SCALARS = {"a.float64/step": 3}


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    """A checkpoint with tensors of all dtypes, a scalar, something empty, tied names and an optimizer."""
    specs = [TensorSpec(f"model/a.{dtype}", (3, 5), dtype) for dtype in DTYPES]
    specs += [TensorSpec("model/scalar", (), "float32"), TensorSpec("model/empty", (0, 2), "int8")]
    specs += [TensorSpec(f"optim/state/a.{dtype}/exp_avg", (3, 5), dtype) for dtype in ("float32", "float64")]
    specs += [TensorSpec("optim/state/a.float32/step", (), "float32")]
    path = tmp_path_factory.mktemp("everything") / "everything.h5"
    links = [("model/tied", "model/a.bfloat16"), ("model/tied.twice", "model/a.bfloat16")]
    write(path, specs, links=links, step=12, extra={"note": "x"}, groups=GROUPS, scalars=SCALARS)
    return path
