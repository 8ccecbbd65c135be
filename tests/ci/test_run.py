"""The files of the README's training, read with plain tools."""

import json
import shutil
import subprocess
import sys

import h5py
import pytest


def test_the_run_was_resumed_on_three_ranks(run_dir):
    listed = json.loads(
        subprocess.check_output([sys.executable, "-m", "hpcfsdp", "ls", str(run_dir), "--json"], text=True)
    )
    assert [(entry["step"], entry["ranks"]) for entry in listed] == [(5, 2), (8, 2), (10, 3), (12, 3)]


def test_every_step_is_in_the_metrics_once_and_the_loss_goes_down(run_dir):
    with open(run_dir / "metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    assert list(losses) == list(range(1, 13))
    assert losses[12] < 0.8 * losses[1]
    held_out = [record for record in records if record["kind"] == "held_out"]
    assert [record["step"] for record in held_out] == [8, 12]
    assert held_out[1]["bits_per_byte"] < held_out[0]["bits_per_byte"]


def test_h5py_alone_reads_the_parameters(run_dir):
    with h5py.File(run_dir / "checkpoints" / "step-00000012.h5") as file:
        assert file["model/blocks.0.attention.qkv.weight"].shape == (768, 256)
        assert file["model/head.weight"] == file["model/embed.weight"]
        assert abs(file["model/embed.weight"][...]).max() > 0
        assert file["optim/state/blocks.0.attention.qkv.weight/exp_avg"].shape == (768, 256)


def test_h5dump_lists_every_parameter_by_name_and_shape(run_dir):
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed (Debian: hdf5-tools)")
    path = run_dir / "checkpoints" / "step-00000012.h5"
    header = subprocess.check_output(["h5dump", "-H", path], text=True)
    with h5py.File(path) as file:
        for name, dataset in file["model"].items():
            assert f'DATASET "{name}"' in header
            shape = ", ".join(map(str, dataset.shape))
            assert f"DATASPACE  SIMPLE {{ ( {shape} ) / ( {shape} ) }}" in header
