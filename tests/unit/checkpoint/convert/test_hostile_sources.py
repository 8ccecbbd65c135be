"""Sources of imports that somebody has made to harm who imports them: refused in little time and memory."""

import contextlib
import io
import json
import os
import pickle
import re
import struct
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from hpcfsdp.checkpoint.convert import importing, pickles, safetensors
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from tests.unit.checkpoint.convert.test_importing import save_dcp


def laughs(levels):
    """A pickle of tuples, of which each holds the one before it twice."""
    steps = [b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(levels)]
    return b"\x80\x02)q\x00" + b"".join(steps) + b"."


def late_laughs(levels):
    """The same of lists that get what is in them after they have been put into others."""
    made = b"".join(b"]q%c" % level for level in range(levels))
    filled = b"".join(b"h%c(h%ch%ce0" % (level, level + 1, level + 1) for level in range(levels - 1))
    return b"\x80\x02" + made + filled + b"h\x00."


SOUND = [1, {"a": [1.5, None, (2, "x")], "b": {3, 4}}, [[1, 2]] * 100, b"bytes", torch.Size([1, 2])]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_any_protocol_is_gone_through(protocol):
    stream = io.BytesIO(pickle.dumps(SOUND, protocol) + b"more")
    pickles.check_pickle(stream)
    assert stream.read() == b"more"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (laughs(100), "contain each other too often to be traversed"),
        (late_laughs(100), "contain each other too often to be traversed"),
        (b"\x80\x02]q\x00h\x00a.", "a list that contains itself"),
        (b"\x80\x02]r\xff\xff\xff\x7f.", "numbers objects that it does not have"),
        (b"\x80\x02h\x00.", "takes objects that it has not made"),
        (b"\x80\x02a.", "takes objects that it has not made"),
        (b"\x80\x02]", "before seeing STOP"),
    ],
)
def test_a_pickle_that_expands_beyond_its_declared_size_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        pickles.check_pickle(io.BytesIO(data))


def refused(path, kind=CheckpointCorruptError, **options):
    before = sorted(os.listdir(path.parent))
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(path, path.parent / "out.h5", **options)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(str(path))
    assert sorted(os.listdir(path.parent)) == before
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """A sound folder of DCP."""
    save_dcp({"model": {"w": torch.arange(6.0).view(2, 3), "v": torch.ones(2)}, "more": 1}, tmp_path / "in")
    return tmp_path / "in"


def change(folder, changed):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed(metadata)
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("data", [laughs(100), late_laughs(100), b"\x80\x02]r\xff\xff\xff\x7f."])
def test_metadata_that_unfold_are_refused(folder, data):
    (folder / ".metadata").write_bytes(data)
    assert ".metadata: damaged: it " in refused(folder)


@pytest.mark.parametrize("name", ["/etc/passwd", "../in/__0_0.distcp", "a/../../x", "", "x\0y", 7])
def test_files_outside_of_the_folder_are_refused(folder, name):
    def elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change(folder, elsewhere)
    assert ("which is not in its folder" if isinstance(name, str) else "the file and bytes of") in refused(folder)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, kind):
    [path] = folder.glob("*.distcp")
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert "is not a regular file" in refused(folder, CheckpointError)


def nested(levels):
    value = ()
    for _ in range(levels):
        value = [value, value]
    return value


def set_sizes(sizes):
    def changed(metadata):
        found = metadata.state_dict_metadata["model.w"]
        found.size = torch.Size(sizes)

    return changed


def set_field(name, value):
    return lambda metadata: setattr(metadata, name, value)


def set_lengths(metadata):
    for info in metadata.storage_data.values():
        info.length = 1 << 40


def set_chunks(metadata):
    metadata.state_dict_metadata["model.w"].chunks = [1]


def set_value_inside(metadata):
    metadata.planner_data["more"] = ("model", "w", "more")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (set_field("planner_data", {"model.w": nested(10)}), "'model.w' has no path into a state dict"),
        (set_field("planner_data", {"model.w": ("x",) * 5000}), "'model.w' has no path into a state dict"),
        (set_field("planner_data", {"model.w": ((1,),)}), "'model.w' has no path into a state dict"),
        (set_field("state_dict_metadata", [1]), "describes no state dict"),
        (set_field("state_dict_metadata", {1: 2}), "the name of an entry is no text"),
        (set_field("state_dict_metadata", {"a": 2}), "'a' is described by a int"),
        (set_field("storage_data", None), "it does not list its files"),
        (set_field("storage_data", {"a": 1}), "its list of files is not by names of entries"),
        (set_field("storage_data", {MetadataIndex("a"): 1}), "the file and bytes of 'a'"),
        (set_sizes([1 << 20, 1 << 20]), "would have 4398046511104 bytes"),
        (set_sizes([1] * 40), "has 40 dimensions"),
        (set_sizes([-1, 3]), r"has the sizes \[-1, 3\]"),
        (set_lengths, "bytes on the disk, and to look into it would take more"),
        (set_chunks, "'model.w' has a piece that is described by no offsets"),
        (set_value_inside, "'model.w.more' has the same place as another entry"),
    ],
)
def test_metadata_of_other_types_are_refused(folder, changed, message):
    change(folder, changed)
    assert re.search(message, refused(folder))


def test_metadata_in_a_hole_are_refused(folder):
    with (folder / ".metadata").open("wb") as file:
        file.truncate(1 << 40)
    assert "it takes 0 bytes on the disk" in refused(folder)


def archive(path, changed=lambda name, data: data, compression=zipfile.ZIP_STORED):
    """A file of torch.save, with other contents."""
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(name, changed(name, data))
    return path


def test_a_compressed_pt_file_is_refused(tmp_path):
    path = archive(tmp_path / "a.pt", compression=zipfile.ZIP_DEFLATED)
    assert "it is compressed, which no file of torch.save is" in refused(path)


@pytest.mark.parametrize("data", [laughs(100), late_laughs(100)])
def test_a_pt_file_that_unfolds_is_refused(tmp_path, data):
    path = archive(tmp_path / "a.pt", lambda name, old: data if name.endswith("data.pkl") else old)
    assert "contain each other too often to be traversed" in refused(path)
    (tmp_path / "old.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + data)
    assert "contain each other too often to be traversed" in refused(tmp_path / "old.pt")


def test_lists_of_many_levels_in_a_pt_file_are_refused(tmp_path):
    value = []
    for _ in range(250):
        value = [value]
    torch.save({"model": {"w": torch.ones(1)}, "x": value}, tmp_path / "a.pt")
    assert "nested more than 200 levels" in refused(tmp_path / "a.pt", CheckpointError)


def test_a_tensor_that_is_expanded_to_a_terabyte_is_refused(tmp_path):
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    assert "['w'] is expanded to 4398046511104 bytes" in refused(tmp_path / "a.pt", CheckpointError)
    torch.save({"w": torch.ones(1).expand(100)}, tmp_path / "b.pt")
    assert import_checkpoint(tmp_path / "b.pt", tmp_path / "out.h5").nbytes == 400


def test_a_header_in_a_hole_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", safetensors.MAX_HEADER_BYTES))
        file.truncate(1 << 40)
    assert "bytes on the disk, and to look into it would take more" in refused(path)
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "is not an index of safetensors files: it has 1099511627776 bytes" in refused(tmp_path / "in")


@pytest.mark.parametrize(
    ("groups", "message"), [("7", "is 7, no list"), ('[{"params": 7}]', "no list of names"), ("[" * 100_000, "levels")]
)
def test_groups_of_other_types_in_a_safetensors_file_are_refused(tmp_path, groups, message):
    metadata = {"hpcfsdp.optim.param_groups": groups, "hpcfsdp.optim.scalars": "{}"}
    text = json.dumps({"__metadata__": metadata}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert message in refused(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\ud800", "\u202ea"])
def test_names_that_cannot_be_printed_are_no_names_of_tensors(tmp_path, name):
    torch.save({name: torch.ones(1)}, tmp_path / "a.pt")
    assert "cannot be the name of a dataset" in refused(tmp_path / "a.pt", CheckpointError)
    text = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "cannot be the name of a dataset" in refused(tmp_path / "a.safetensors", CheckpointError)


def test_a_tensor_of_40_dimensions_is_refused(tmp_path):
    torch.save({"w": torch.ones((1,) * 40)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="model/w has 40 dimensions; HDF5 has 32 at most"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "out.h5")


def test_metadata_of_a_tensor_know_each_piece_once(folder):
    def claim(metadata):
        found = metadata.state_dict_metadata["model.w"]
        assert isinstance(found, TensorStorageMetadata)
        found.chunks, found.size = found.chunks * 100_000, torch.Size([1 << 20, 100])

    change(folder, claim)
    assert "would have 419430400 bytes" in refused(folder)


MANY = """
import json, resource, struct, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (80, 80))
from pathlib import Path
from hpcfsdp.checkpoint.convert.importing import import_checkpoint

count, folder = 30_000, Path(sys.argv[1])
header = {
    f"layers.{n // 10}.weight_{n}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
    for n in range(count)
}
text = json.dumps(header).encode()
(folder / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * count))
del header, text
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert import_checkpoint(folder / "a.safetensors", folder / "a.h5").tensors == count
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_a_header_of_many_tensors_takes_little_memory(tmp_path, run_python):
    assert float(run_python(MANY, tmp_path)) < 200  # 420 MiB, when HDF5 had all datasets open


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ([[0, 0]], [[1, 3]], r"no piece with element \[1, 0\]"),
        ([[0, 0], [1, 0]], [[2, 3], [1, 3]], r"overlap: both have element \[1, 0\]"),
        ([[0, 0], [1, 0]], [[1, 3], [2, 3]], "is not within"),
    ],
    ids=["gap", "overlap", "outside"],
)
def test_pieces_that_do_not_make_up_a_tensor_are_refused(folder, offsets, sizes, message):
    def cut(metadata):
        found = metadata.state_dict_metadata["model.w"]
        assert list(found.size) == [2, 3]
        pairs = zip(offsets, sizes, strict=True)
        found.chunks = [ChunkStorageMetadata(torch.Size(begin), torch.Size(size)) for begin, size in pairs]

    change(folder, cut)
    assert re.search(rf"'model.w'.*{message}", refused(folder))


@pytest.mark.parametrize("step", [b"}", b"K\x01", b"N0"], ids=["dicts", "numbers", "nothing kept"])
def test_a_pickle_of_more_objects_than_the_size_of_the_file_explains_is_refused(tmp_path, step):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02](" + step * 1_300_000 + b"e.")
    message = r"^/.*x.pt: its pickle has more than \d+ steps, .*: save long lists of numbers as tensors$"
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "x.h5")


def test_a_large_file_may_have_as_many_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(pickles, "STEPS_LEAST", 1000)
    for numel, steps in ((1, 2000), (100_000, 2000)):
        torch.save({"model": {"w": torch.ones(numel)}, "extra": list(range(steps))}, tmp_path / "x.pt")
        if numel == 1:
            with pytest.raises(CheckpointError, match="too many for the size of the file"):
                import_checkpoint(tmp_path / "x.pt", tmp_path / "x.h5")
        else:
            assert import_checkpoint(tmp_path / "x.pt", tmp_path / "x.h5").extra == ("extra",)


def test_more_tensors_than_their_bytes_explain_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "TENSORS_LEAST", 10)
    for numel, refused in ((1, True), (256, False)):
        torch.save({f"w{number}": torch.ones(numel) for number in range(20)}, tmp_path / "x.pt")
        with contextlib.ExitStack() as stack:
            if refused:
                message = r"x.pt: has 20 tensors, too many for their 80 bytes"
                stack.enter_context(pytest.raises(CheckpointError, match=message))
            assert import_checkpoint(tmp_path / "x.pt", tmp_path / "x.h5").tensors == 20


def test_an_archive_of_two_pickles_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        for name in ("a", "b"):
            archive.writestr(f"{name}/data.pkl", pickle.dumps({}))
    with pytest.raises(CheckpointCorruptError, match=r"it has 2 entries data.pkl"):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "x.h5")


def test_the_names_of_storages_in_a_file_of_old_torch_do_not_unfold(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
    parts, stream = [], io.BytesIO(path.read_bytes())
    for _ in range(4):
        begin = stream.tell()
        pickles.check_pickle(stream)
        parts.append(stream.getvalue()[begin : stream.tell()])
    path.write_bytes(b"".join(parts) + laughs(100))
    with pytest.raises(CheckpointCorruptError, match="contain each other too often"):
        import_checkpoint(path, tmp_path / "x.h5")


FLIPS = """
import collections, random, resource, shutil, signal, sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import HpcfsdpError

folder, count = Path(sys.argv[1]), int(sys.argv[2])
dice = random.Random(count)
model = torch.nn.Linear(3, 4)
optimizer = torch.optim.AdamW(model.named_parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
warnings.simplefilter("ignore")  # of torch, about saving in one process
values = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "more": [1, 2.5, "x", None]}
torch.save(values, folder / "a.pt")
torch.save(values, folder / "old.pt", _use_new_zipfile_serialization=False)
dcp.save(values, checkpoint_id=folder / "dcp", no_dist=True)
import_checkpoint(folder / "a.pt", folder / "a.h5")
export_checkpoint(folder / "a.h5", folder / "a.safetensors", optimizer=True)

def changed(data):
    data, kind = bytearray(data), dice.randrange(5)
    place = dice.randrange(len(data))
    if kind == 0:
        data[place] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        data[place:place] = dice.randbytes(dice.randrange(1, 9))
    elif kind == 3:
        del data[place : place + dice.randrange(1, 9)]
    else:  # a length, often
        places = [at for at, byte in enumerate(data) if byte == ord("X")] or [place]
        place = dice.choice(places) + 1
        data[place : place + 4] = dice.choice((b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\0\\x80", b"\\xff" * 4))
    return bytes(data)

def look(path):
    if path.suffix != ".h5":
        import_checkpoint(path, folder / "new.h5", force=True)
        return
    index = open_index(path)
    with BlockReader(index) as reader:
        for name in index.tensors:
            collections.deque(reader.blocks(name), 0)

size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + (256 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
signal.alarm(120)  # as a whole, and ends the process
ends = collections.Counter()
sources = ["a.pt", "old.pt", "a.safetensors", "a.h5", "dcp/.metadata", "dcp/__0_0.distcp"]
for number in range(count):
    name = sources[number % len(sources)]
    victim = folder / f"x{Path(name).suffix}"
    if name.startswith("dcp"):
        shutil.copytree(folder / "dcp", victim := folder / "x", dirs_exist_ok=True)
    (victim / Path(name).name if victim.is_dir() else victim).write_bytes(changed((folder / name).read_bytes()))
    try:
        look(victim)
        ends["fine"] += 1
    except HpcfsdpError as error:
        assert len(str(error)) < 700 and "\\n" not in str(error), error
        ends["refused"] += 1
    assert not list(folder.glob(".*.partial"))
print(ends["fine"], ends["refused"])
"""


def test_damage_of_any_kind_ends_in_one_line_and_little_memory(tmp_path, run_python):
    fine, refused = map(int, run_python(FLIPS, tmp_path, 300).split())
    assert refused > fine > 0
