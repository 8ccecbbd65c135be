"""Files that others write, read and remove at the same time."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.catalog import latest
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointError, CheckpointReplacedError
from tests.disks import value_of

SPECS = (TensorSpec("model/w", (70, 13), "float32"), TensorSpec("model/v", (3,), "int64"))


def write(path, value):
    def read(spec, start, numel):
        return np.full(numel, value, schema.numpy_dtype(spec.dtype))

    return write_alone(path, SPECS, read, step=value)


SAVER = """
import select, sys
import numpy as np
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone

path, first, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
specs = (TensorSpec("model/w", (70, 13), "float32"), TensorSpec("model/v", (3,), "int64"))
print("ready", flush=True)
sys.stdin.readline()
value = first - 2
while value < first + 2 * turns or not select.select([sys.stdin], [], [], 0)[0]:  # until it is closed
    value += 2
    write_alone(path, specs, lambda s, a, n: np.full(n, value, schema.numpy_dtype(s.dtype)), step=value)
print(value)
"""


@pytest.fixture
def savers(tmp_path):
    """Two processes that save to one path, from when the test says so, many times and until it closes their stdin.

    They then say what they have saved last. Ended with the test.
    """
    made = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", SAVER, str(tmp_path / "a.h5"), str(first), "60"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (2, 3)
    ]
    yield made
    for process in made:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_readers_see_whole_files_while_two_processes_save_to_one_path(tmp_path, savers):
    path = write(tmp_path / "a.h5", 1)
    for process in savers:
        assert process.stdout.readline() == "ready\n"
    for process in savers:
        process.stdin.write("go\n")
        process.stdin.flush()
    seen, newest = [], {0: 0, 1: 0}
    while any(process.poll() is None for process in savers):
        if len(set(seen)) > 5:
            for process in savers:
                process.stdin.close()
        try:
            value = value_of(path)
        except CheckpointReplacedError as error:
            assert str(error).startswith(f"{path}: ")
            continue
        seen.append(value)
        assert value == 1 or value >= newest[value % 2], "a file came back that had been replaced"
        newest[value % 2] = value
        assert latest(tmp_path) is None
    assert [process.returncode for process in savers] == [0, 0]
    assert len(set(seen)) > 5
    assert value_of(path) in [int(process.stdout.readline()) for process in savers]
    assert os.listdir(tmp_path) == ["a.h5"]


def test_verify_during_saves_finds_each_file_sound(tmp_path):
    path, stop, looks, last = write(tmp_path / "a.h5", 1), threading.Event(), 0, 1

    def save_on():
        nonlocal last
        while last < 79 or not looks:
            last += 1
            write(path, last)
        stop.set()

    saver = threading.Thread(target=save_on)
    saver.start()
    while not stop.is_set():
        try:
            report = verify_file(path)
        except CheckpointReplacedError:  # whenever it has tried to
            continue
        assert report.sound, report.faults
        looks += 1
    saver.join()
    assert looks
    assert value_of(path) == last


def test_a_file_that_is_removed_while_it_is_read_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.h5", 5)
    index = open_index(path)
    with BlockReader(index) as reader:
        path.unlink()
        assert set(reader.read("model/w", 0, 910).tolist()) == {5.0}


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.h5", 5)
    index = open_index(path)
    with BlockReader(index) as reader:
        write(path, 6)
        assert set(reader.read("model/w", 0, 910).tolist()) == {5.0}
    with pytest.raises(CheckpointReplacedError, match=r"a\.h5: "), BlockReader(index):
        pass


def test_a_file_that_is_written_over_in_place_is_found_out(tmp_path):
    # Not by us: we never do. A copy onto a file that is being read.
    path, other = write(tmp_path / "a.h5", 5), write(tmp_path / "b.h5", 6)
    index = open_index(path)
    with BlockReader(index) as reader:
        path.write_bytes(other.read_bytes())
        with pytest.raises(CheckpointError, match="checksum"):
            reader.read("model/w", 0, 910)
