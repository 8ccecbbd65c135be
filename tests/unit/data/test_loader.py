"""Batches in order, read in threads; errors with their batch; nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hpcfsdp.data import HDF5Dataset, ResumableSampler, ThreadedLoader
from hpcfsdp.errors import DataError, UsageError


class Slow(Dataset):
    """Samples take times at random, and one of them is an error."""

    def __init__(self, length=60, bad=None):
        self.length, self.bad, self.read = length, bad, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(0.001 * (index % 4))
        self.read.append(index)
        if index == self.bad:
            raise ValueError("out of range")
        return {"x": torch.tensor([index, index]), "name": str(index)}


def sampler(dataset, **options):
    return ResumableSampler(dataset, rank=0, ranks=1, **{"global_batch": 4, **options})


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("hpcfsdp-data")]


def assert_threads_end():
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


@pytest.mark.parametrize("number", [1, 3])
def test_batches_are_those_of_a_dataloader(number):
    dataset = Slow()
    loader = ThreadedLoader(dataset, batch_sampler=sampler(dataset), threads=number)
    plain = DataLoader(dataset, batch_sampler=sampler(dataset))
    assert len(loader) == len(plain) == 15
    for _ in range(2):
        for found, expected in zip(loader, plain, strict=True):
            assert torch.equal(found["x"], expected["x"])
            assert found["name"] == expected["name"]
    assert_threads_end()


def test_what_is_read_ahead_is_bounded_and_does_not_count():
    dataset = Slow()
    loader = ThreadedLoader(dataset, batch_sampler=sampler(dataset, shuffle=False), threads=2, ahead=3)
    for number, _ in enumerate(loader):
        assert loader.state_dict()["samples"] == 4 * number + 4
        time.sleep(0.02)
        assert len(dataset.read) <= 4 * (number + 1 + 3)
        if number == 5:
            break
    state = loader.state_dict()
    other = ThreadedLoader(dataset, batch_sampler=sampler(dataset, shuffle=False))
    other.load_state_dict(state)
    assert next(iter(other))["x"][0, 0] == 24
    assert next(iter(loader))["x"][0, 0] == 24, "a loop that is entered again goes on"
    gc.collect()
    assert_threads_end()


def test_an_error_comes_with_its_batch_and_names_the_sample():
    dataset = Slow(bad=9)
    loader = ThreadedLoader(dataset, batch_sampler=sampler(dataset, shuffle=False), threads=2, ahead=8)
    seen = []
    with pytest.raises(DataError, match="sample 9 cannot be read: ValueError: out of range") as caught:
        for batch in loader:
            seen.append(batch)
    assert len(seen) == 2
    assert isinstance(caught.value.__cause__, ValueError)
    assert loader.state_dict()["samples"] == 8
    assert_threads_end()


def test_an_error_in_a_file_names_it(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.random.rand(40, 8), chunks=(4, 8), compression="gzip")
        place = file["x"].id.get_chunk_info(3).byte_offset
    dataset = HDF5Dataset(tmp_path / "a.h5", "x")
    with (tmp_path / "a.h5").open("r+b") as file:
        file.seek(place)
        file.write(b"\0" * 60)
    with pytest.raises(DataError, match=r"a.h5: sample 12 \(row 12\)"):
        list(ThreadedLoader(dataset, batch_sampler=sampler(dataset, shuffle=False)))


def test_whole_batches_of_files_are_what_a_dataloader_collates(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.random.rand(40, 3), np.arange(40)
    dataset = HDF5Dataset(tmp_path, ["x", "y"])
    options = {"tail": "uneven", "global_batch": 6}
    for found, expected in zip(
        ThreadedLoader(dataset, batch_sampler=sampler(dataset, **options)),
        DataLoader(dataset, batch_sampler=sampler(dataset, **options)),
        strict=True,
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_rank_without_samples_has_an_empty_batch():
    dataset = Slow(5)
    uneven = ResumableSampler(dataset, global_batch=4, tail="uneven", rank=0, ranks=4)
    batches = list(ThreadedLoader(dataset, batch_sampler=uneven))
    assert [batch["x"].shape for batch in batches] == [(1, 2), (0, 2)]


def test_collate_fn_and_other_samplers():
    dataset = Slow(7)
    loader = ThreadedLoader(dataset, batch_sampler=[[0, 1], [6]], collate_fn=len)
    assert list(loader) == [2, 1]
    with pytest.raises(UsageError, match="has no state: use a ResumableSampler"):
        loader.state_dict()
    with pytest.raises(UsageError, match="threads must be at least 1"):
        ThreadedLoader(dataset, batch_sampler=[], threads=0)
    with pytest.raises(UsageError, match="ahead must be at least 1, not 0"):
        ThreadedLoader(dataset, batch_sampler=[], ahead=0)


STUCK = """
import signal, sys, time
from hpcfsdp.data import ResumableSampler, ThreadedLoader
class Stuck:
    def __len__(self): return 10
    def __getitem__(self, index):
        time.sleep(1000)
loader = ThreadedLoader(Stuck(), batch_sampler=ResumableSampler(10, global_batch=2, rank=0, ranks=1))
print("ready", flush=True)
try:
    next(iter(loader))
except KeyboardInterrupt:
    print("interrupted", loader.state_dict()["samples"], flush=True)
    sys.exit(3)
"""


def test_a_signal_ends_a_loop_whose_disk_does_not_answer():
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted 0\n"
        assert process.wait(timeout=20) == 3
        assert time.monotonic() - began < 10
