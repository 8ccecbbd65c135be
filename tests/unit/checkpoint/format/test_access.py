"""What a file is, by its first bytes."""

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.access import is_checkpoint, is_hdf5, sized
from hpcfsdp.checkpoint.format.metadata import build_metadata_image

GOLDEN = sorted((Path(__file__).parents[3] / "golden").glob("format-*.h5"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_files_of_all_versions_are_checkpoints_also_when_cut_off(path, tmp_path):
    assert is_checkpoint(path) and is_hdf5(path)
    (tmp_path / "a").write_bytes(path.read_bytes()[:5000])
    assert is_checkpoint(tmp_path / "a")


def test_a_checkpoint_of_a_large_model_is_one(tmp_path):
    model = torch.nn.ModuleDict({f"a_module_with_quite_a_long_name_{n}": torch.nn.Linear(1, 1) for n in range(500)})
    assert is_checkpoint(checkpoint.save(tmp_path / "a.h5", model=model))


def test_a_part_of_a_checkpoint_is_none(tmp_path):
    attributes = {"format": schema.PART_FORMAT, "about": schema.ABOUT_PART, "checkpoint": "a.h5"}
    with (tmp_path / "part").open("wb") as file:
        for place, data in build_metadata_image((), (), 0, attributes, {}).regions:
            file.seek(place)
            file.write(data)
    with h5py.File(tmp_path / "part") as file:
        assert "a checkpoint of hpcfsdp" in file.attrs["about"].decode()
    assert is_hdf5(tmp_path / "part") and not is_checkpoint(tmp_path / "part")


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("attributes", [{}, {"format": "hpcf"}, {"program": "hpcfsdp"}, {"format": np.arange(3)}])
def test_files_of_other_programs_are_none(tmp_path, libver, attributes):
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        file["x"] = [1.0]
        for name, value in attributes.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
    assert is_hdf5(tmp_path / "a.h5") and not is_checkpoint(tmp_path / "a.h5")


@pytest.mark.parametrize("content", [b"", b"\x89HDF", b"format\0hpcfsdp", bytes(9000)])
def test_what_is_no_hdf5_is_none(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    assert not is_hdf5(tmp_path / "a.h5") and not is_checkpoint(tmp_path / "a.h5")


@pytest.mark.parametrize(
    ("present", "whole", "text"),
    [
        (20_000_000, 39_300_000, "20.0 of 39.3 MB"),
        (39_299_999, 39_300_000, "39299999 of 39300000 bytes"),
        (5, 800, "5 of 800 bytes"),
        (1, 3 * 10**12, "0.0 of 3.0 TB"),
        (800, None, "800 bytes"),
        (1500, None, "1.5 kB"),
    ],
)
def test_sizes(present, whole, text):
    assert sized(present, whole) == text
