"""Files that somebody has made to harm whoever looks into them: all their checksums are right.

They are refused with an error that names file and place, in little time and memory.
"""

import json
import os
import re
import socket

import h5py
import numpy as np
import pytest

from hpcfsdp.checkpoint.format import footer, schema
from hpcfsdp.checkpoint.format.access import LEAST_ROOM_BYTES
from hpcfsdp.checkpoint.format.footer import Footer
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from tests.unit.checkpoint.hostile import make_file

pytestmark = pytest.mark.hdf5

TERABYTE = 1 << 40


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        open_index(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert verify_file(path).faults[0].what == str(caught.value).removeprefix(f"{path}: ")
    return str(caught.value)


CHILD = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from pathlib import Path
from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.errors import CheckpointError

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mib()
path, found = Path(sys.argv[1]), []
try:
    open_index(path)
except CheckpointError as error:
    found.append(str(error))
found.append(verify_file(path).faults[0].what)
print(json.dumps([found, peak_mib() - before]))
"""


def looked_at(run_python, path):
    """What ``open_index`` and ``verify_file`` say of a file, in a process that may take no more than they should."""
    found, mib = json.loads(run_python(CHILD, path))
    assert mib < 150
    return found


def test_a_file_as_it_is_made_here_is_sound(tmp_path):
    path = make_file(tmp_path / "a.h5")
    assert verify_file(path).faults == ()
    assert open_index(path).info.step == 1


@pytest.mark.parametrize("bit", range(64))
def test_a_flipped_bit_in_the_number_of_regions_costs_no_memory(bit):
    data = Footer(1 << 33, ((0, 10), (20, 10)), 5).pack()
    trailer = bytearray(data[-40:])
    trailer[8 + bit // 8] ^= 1 << bit % 8
    asked = []

    def read(begin, nbytes):
        asked.append(nbytes)
        whole = bytes(data[:-40] + trailer)
        return (
            (bytes(max(0, nbytes - len(whole))) + whole)[-nbytes:]
            if begin + nbytes == 1 << 33
            else whole[-40 - nbytes : -40]
        )

    with pytest.raises(ValueError, match="its last bytes"):
        footer.read_footer(1 << 33, read)
    assert max(asked) <= footer.packed_bytes(footer.MOST_REGIONS)


def one_tensor(numel, **row):
    """A tensor of bytes with one row, wherever that is said to be."""
    values = {"count": 1, "start": 0, "numel": numel, "stride": numel, "byte_offset": 1 << 20, **row}
    rows = [tuple(values.get(name, 0) for name in schema.EXTENT_DTYPE.names)]
    return {"tensors": [(b"model/w", b"uint8", 0, 1)], "sizes": [numel], "rows": rows}


def test_an_extent_of_a_terabyte_of_holes_is_refused(tmp_path, run_python):
    path = make_file(tmp_path / "a.h5", claimed=TERABYTE + (2 << 20), **one_tensor(TERABYTE))
    opened, verified = looked_at(run_python, path)
    assert opened.endswith("damaged: model/w has an extent of 1099511627776 bytes; there are 4194304 at most")
    assert verified in opened


@pytest.mark.parametrize("nbytes", [schema.BLOCK_BYTES, schema.BLOCK_BYTES + 1])
def test_an_extent_has_4_mib_at_most(tmp_path, nbytes):
    checksum = schema.checksum(bytes(nbytes))
    path = make_file(tmp_path / "a.h5", claimed=8 << 20, **one_tensor(nbytes, checksum=checksum))
    if nbytes > schema.BLOCK_BYTES:
        assert "has an extent of 4194305 bytes; there are 4194304 at most" in refusal(path)
        return
    with BlockReader(open_index(path)) as reader:
        assert not reader.read("model/w", 0, nbytes).any()


def in_a_hole(path, name, shape, dtype, **values):
    """A file with a dataset that takes nothing on the disk."""

    def more(file):
        del file[name]
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        kind = h5py.h5t.py_create(np.dtype(dtype))
        h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), layout)

    return make_file(path, more=more, claimed=TERABYTE + (1 << 20), **values)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        (schema.EXTENTS, (1 << 34,), schema.EXTENT_DTYPE),
        (schema.SHAPES, (1 << 37,), "<u8"),
        (schema.CONFIG, (1 << 36,), "S8"),
    ],
)
def test_a_table_of_a_terabyte_of_holes_is_refused(tmp_path, run_python, name, shape, dtype):
    opened, _ = looked_at(run_python, in_a_hole(tmp_path / "a.h5", name, shape, dtype))
    assert re.search(f"damaged: {name} (has [0-9]+ bytes: it takes [0-9]+ bytes on the disk|has bytes without)", opened)


def test_a_region_of_a_terabyte_of_holes_is_refused(tmp_path, run_python):
    path = tmp_path / "a.h5"
    with path.open("wb") as file:
        file.seek(TERABYTE)
        file.write(Footer(TERABYTE + 56, ((0, TERABYTE),), 0).pack())
    opened, _ = looked_at(run_python, path)
    assert f"more than {LEAST_ROOM_BYTES} and 8 times as many of memory" in opened


def test_one_dataset_with_a_thousand_names_is_refused(tmp_path, run_python):
    def more(file):
        file[f"{schema.EXTRA_ARRAYS}/0"] = np.ones(4 << 20, "u1")
        for number in range(1, 2000):
            file[f"{schema.EXTRA_ARRAYS}/{number}"] = file[f"{schema.EXTRA_ARRAYS}/0"]

    opened, _ = looked_at(run_python, make_file(tmp_path / "a.h5", more=more))
    assert "bytes on the disk, and to look into it would take more than" in opened


def test_a_hole_between_tensors_is_passed_over(tmp_path, run_python):
    path = make_file(tmp_path / "a.h5", claimed=TERABYTE)
    with path.open("r+b") as file:
        file.seek(TERABYTE - 7)
        file.write(b"x")
    [found], _ = json.loads(run_python(CHILD, path))
    assert found == f"byte {TERABYTE - 7} belongs to nothing, and is 120 instead of 0"


@pytest.mark.parametrize("top", ["model", "optim/state"])
def test_groups_with_any_number_of_paths_are_found_at_once(tmp_path, run_python, top):
    def more(file):
        group = file.require_group(f"{top}/g")
        for _ in range(40):
            inner = group.create_group("a")
            group["b"] = inner
            group = inner

    [found], _ = json.loads(run_python(CHILD, make_file(tmp_path / "a.h5", more=more)))
    assert "are one group" in found


def test_a_group_in_itself_is_found(tmp_path):
    def more(file):
        file["model/g/in"] = file.require_group("model/g")

    [fault] = verify_file(make_file(tmp_path / "a.h5", more=more)).faults
    assert fault.what == "HDF5 cannot read it: model/g and model/g/in are one group"


WRONG = [
    ({"meta__config": "[1]"}, "meta/config is [1], no object"),
    ({"meta__config": "{"}, "meta/config: Expecting"),
    ({"extra__values": "3"}, "extra/values is no object"),
    ({"extra__values": '{"a": {"__array__": "7"}}'}, "extra/values is not as it is written"),
    ({"extra__values": '{"a": {"__items__": [1]}}'}, "extra/values is not as it is written"),
    ({"extra__values": '{"a": {"__items__": [[[], 1]]}}'}, "extra/values is not as it is written"),
    ({"optim__param_groups": "7"}, "optim/param_groups is 7, no list"),
    ({"optim__param_groups": "[7]"}, "optim/param_groups[0] is 7, no object"),
    ({"optim__param_groups": '[{"params": 7}]'}, "optim/param_groups[0]['params'] is 7, no list of names"),
    (
        {"optim__param_groups": '[{"params": ["a"]}, {"params": [1]}]'},
        "optim/param_groups[1]['params'] is [1], no list",
    ),
    ({"optim__param_groups": "[{}]"}, "optim/param_groups[0]['params'] is None, no list of names"),
    ({"optim__scalars": "[]"}, "optim/scalars is [], no object"),
    ({"optim__scalars": '{"w/step": null}'}, "optim/scalars['w/step'] is None, no number"),
    ({"optim__scalars": '{"step": 1}'}, "optim/scalars['step'] is 1, no number of a parameter"),
    ({"extra__modules": '{"m": 1}'}, "extra/modules['m'] is 1, no value with its types"),
    ({"extra__modules": '{"m": [1, 2]}'}, "types of extra/modules['m'] is 2, no list"),
    ({"extra__modules": '{"m": [[1], [[[3], "tuple"]]]}'}, "types of extra/modules['m'] have [3], where nothing is"),
    ({"extra__modules": '{"m": [[1], [[[0], "tuple"]]]}'}, "have 'tuple' at [0], where no such thing is"),
    ({"extra__modules": '{"m": [[[1]], [[[], "tuple"], [[0], "tuple"]]]}'}, "have [0] twice, or after its container"),
    ({"extra__modules": '{"m": [1, [[[], "evil"]]]}'}, "have 'evil' at []"),
    ({"meta__state_dict": "{}"}, "meta/state_dict is {}, no list"),
    ({"meta__state_dict": '[{"path": ["a"]}]'}, "meta/state_dict[0] is {'path': ['a']}, no path"),
    ({"meta__state_dict": '[{"path": [], "extra": ["a"]}]'}, "no path of an entry with its place"),
    ({"meta__state_dict": '[{"path": ["a"], "tensor": ["model", "w"]}]'}, "'a' is 'model/w', which is no tensor"),
    ({"meta__state_dict": '[{"path": ["a"], "extra": ["b"]}]'}, "claims that 'a' is at an empty place"),
    ({"meta__state_dict": '[{"path": ["a"], "group": [0, "lr"]}]'}, "claims that 'a' is at an empty place"),
]


@pytest.mark.parametrize(("texts", "message"), WRONG, ids=[message for _, message in WRONG])
def test_json_of_wrong_types_is_refused_and_named(tmp_path, texts, message):
    found = refusal(make_file(tmp_path / "a.h5", **texts))
    assert message in found
    assert "damaged" in found


@pytest.mark.parametrize("levels", [schema.MOST_LEVELS + 1, 900, 100_000])
@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_json_of_many_levels_is_refused(tmp_path, run_python, levels, ends):
    begin, end = ends
    text = begin * levels + ("" if begin == "[" else "1") + end * levels
    path = make_file(tmp_path / "a.h5", meta__config=f'{{"x": {text}}}')
    opened, _ = looked_at(run_python, path)
    assert f"meta/config: lists and objects are in each other over more than {schema.MOST_LEVELS} levels" in opened


def test_what_can_be_read_can_be_written_and_nothing_deeper(tmp_path):
    value = 1
    for _ in range(schema.MOST_LEVELS - 1):
        value = [value]
    path = write_alone(tmp_path / "a.h5", [], None, extra={"x": value})
    assert open_index(path).info.extra == {"x": value}
    with pytest.raises(CheckpointError, match="over more than 200 levels: flatten them"):
        write_alone(tmp_path / "b.h5", [], None, extra={"x": [value]})
    with pytest.raises(CheckpointError, match="over more than 200 levels: flatten them"):
        write_alone(tmp_path / "b.h5", [], None, config=json.loads("[" * 300 + "]" * 300) and {"x": [value]})
    assert os.listdir(tmp_path) == ["a.h5"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("betas", None), ("betas", []), ("betas", [0.9, "x"]), ("lr", "0.1"), ("lr", {})],
)
def test_verify_finds_hyper_parameters_of_no_optimizer(tmp_path, key, value):
    text = json.dumps([{"params": []}, {"params": [], key: value}])
    path = make_file(tmp_path / "a.h5", optim__param_groups=text, optim__scalars="{}")
    [fault] = verify_file(path).faults
    assert fault.where == "optim/param_groups"
    assert fault.what.startswith(f"group 1: {key} is {value!r}, no number")
    assert open_index(path).param_groups[1][key] == value  # whoever loads the model alone needs none of it


def test_verify_finds_names_that_cannot_be_printed(tmp_path):
    path = make_file(tmp_path / "a.h5", tensors=[(b"model/\x1b[31m\n", b"uint8", 0, 1)], sizes=[0])
    where, what = next((fault.where, fault.what) for fault in verify_file(path).faults if "printed" in fault.what)
    assert (where, what) == ("model/\x1b[31m\n", "has characters in its name that cannot be printed")


def table(name, value):
    """A file whose table is another one."""

    def more(file):
        del file[name]
        file[name] = value

    return more


def tensor_rows(*rows):
    return np.array(list(rows), schema.table_dtype(schema.TENSORS, 7))


TABLES = [
    (
        schema.TENSORS,
        tensor_rows((b"model/w", b"uint8", 0, 33)),
        "'model/w' has 33 dimensions; a tensor has 32 at most",
    ),
    (schema.TENSORS, tensor_rows((b"model/w", b"uint8", 0, 1 << 40)), "dimensions; a tensor has 32 at most"),
    (schema.TENSORS, tensor_rows((b"model/w", b"uint8", 0, 0), (b"model/w", b"uint8", 0, 0)), "has 'model/w' twice"),
    (schema.TENSORS, np.zeros((1, 1), schema.table_dtype(schema.TENSORS, 7)), "meta/tensors is no table of path"),
    (schema.TENSORS, np.zeros(3), "meta/tensors is no table of path"),
    (schema.SHAPES, np.array([-1]), "meta/shapes is no list of sizes"),
    (schema.SHAPES, np.array([1.5]), "meta/shapes is no list of sizes"),
    (
        schema.LINKS,
        np.array([(b"x", 5)], schema.table_dtype(schema.LINKS, 1)),
        "meta/links has 'x' for tensor 5, which cannot be",
    ),
    (schema.EXTENTS, np.zeros(2), "meta/extents is no table of extents"),
    (schema.CONFIG, np.zeros(3), "meta/config is no text"),
]


@pytest.mark.parametrize(("name", "value", "message"), TABLES, ids=[f"{n}: {m}" for n, _, m in TABLES])
def test_tables_of_another_kind_are_refused(tmp_path, name, value, message):
    assert message in refusal(make_file(tmp_path / "a.h5", sizes=[1] * 40, more=table(name, value)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", np.arange(3)),
        ("step", "x" * 10),
        ("date", np.bytes_(b"\xff")),
        ("software_version", np.bytes_(b"x" * 5000)),
        ("world_size", np.bytes_("many")),
    ],
)
def test_attributes_of_another_kind_are_refused(tmp_path, name, value):
    def more(file):
        file.attrs[name] = value

    assert f"the attribute {name} is missing or invalid" in refusal(make_file(tmp_path / "a.h5", more=more))


def test_metrics_that_are_no_numbers_are_refused(tmp_path):
    def more(file):
        file["metrics/loss/step"] = np.array([1])
        file["metrics/loss/value"] = np.array([b"x"])

    assert "'metrics/loss' has (1,) steps of int64 and (1,) values of |S1" in refusal(
        make_file(tmp_path / "a.h5", more=more)
    )


def test_more_dimensions_than_hdf5_has_cannot_be_saved(tmp_path):
    spec = TensorSpec("model/w", (1,) * 33, "float32")
    with pytest.raises(CheckpointError, match="model/w has 33 dimensions; HDF5 has 32 at most: reshape it"):
        write_alone(tmp_path / "a.h5", [spec], lambda spec, start, numel: np.zeros(numel, "f4"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_part_that_is_no_file_is_refused_without_waiting_for_it(tmp_path, kind, monkeypatch):
    def more(file):
        file[schema.FILES] = np.array([(b"part.h5", 100, 1)], schema.table_dtype(schema.FILES, 7))

    path = make_file(tmp_path / "a.h5", more=more, **one_tensor(10, file=1, byte_offset=0))
    if kind == "pipe":
        os.mkfifo(tmp_path / "part.h5")
    else:
        monkeypatch.chdir(tmp_path)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(tmp_path)
            server.bind("part.h5")
    with BlockReader(open_index(path)) as reader, pytest.raises(CheckpointError, match="is not a regular file"):
        reader.read("model/w", 0, 1)
    assert any("is not a regular file" in fault.what for fault in verify_file(path).faults)


def test_a_damaged_file_is_no_reason_for_another_error(tmp_path):
    with pytest.raises(CheckpointCorruptError):
        open_index(make_file(tmp_path / "a.h5", extra__values='{"a": {"__array__": []}}'))
