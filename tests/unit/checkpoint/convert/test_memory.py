"""A file larger than memory is fine: what is held at a time does not grow with it."""

import subprocess
import sys

import pytest

from hpcfsdp.checkpoint.format.schema import TensorSpec
from tests.cli.conftest import ROOT
from tests.unit.checkpoint.convert.conftest import write

MIB = 1 << 20
TENSORS = 24
TENSOR_BYTES = 10 * MIB

CHILD = r"""
import pathlib, re, sys
import torch.distributed.checkpoint
from hpcfsdp.checkpoint.convert import torch_output, torch_source
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint

def peak():
    # Not getrusage: after an exec it still counts the memory of the process that forked.
    return int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

source, output, kind, verb = sys.argv[1:]
before = peak()
if verb == "export":
    export_checkpoint(source, output, format=kind)
else:
    import_checkpoint(source, output, format=kind)
print(peak() - before)
"""


def grown(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, arguments)], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "in.h5"
    write(path, [TensorSpec(f"model/w{place}", (TENSOR_BYTES // 4,), "float32") for place in range(TENSORS)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "exporting", "importing"),
    # A few blocks, or the tensor that torch is at; in the other direction what is written at once, 64 MiB, and for DCP
    # a tensor that torch has read. What is read of a .pt are pages of the file, which the kernel
    # takes back when it needs them: nothing is said of them.
    [("safetensors", 30 * MIB, 90 * MIB), ("pt", 4 * TENSOR_BYTES, None), ("dcp", 4 * TENSOR_BYTES, 110 * MIB)],
)
def test_memory_does_not_grow_with_the_file(large, tmp_path, kind, exporting, importing):
    assert max(exporting, importing or 0) < TENSORS * TENSOR_BYTES / 2
    assert grown(large, tmp_path / "out", kind, "export") < exporting
    if importing is not None:
        assert grown(tmp_path / "out", tmp_path / "back.h5", kind, "import") < importing


def test_of_a_dcp_folder_a_large_tensor_is_in_memory_once(tmp_path):
    nbytes = 200 * MIB
    write(tmp_path / "in.h5", [TensorSpec("model/w", (nbytes // 4,), "float32")])
    grown(tmp_path / "in.h5", tmp_path / "dcp", "dcp", "export")
    assert grown(tmp_path / "dcp", tmp_path / "back.h5", "dcp", "import") < 1.6 * nbytes
