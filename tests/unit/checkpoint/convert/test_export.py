import json
import os
import shutil
import warnings

import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from hpcfsdp.checkpoint.convert import output
from hpcfsdp.checkpoint.convert.export import export_checkpoint
from hpcfsdp.checkpoint.format.disk import System
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, UsageError
from tests.disks import using
from tests.unit.checkpoint.convert.conftest import DTYPES, GROUPS, contents, write

HELD = sorted({*DTYPES} - {"complex128"})


@pytest.fixture
def no_complex128(tmp_path):
    """A checkpoint of what safetensors can hold."""
    specs = [TensorSpec(f"model/{dtype}", (3, 5), dtype) for dtype in HELD]
    specs += [TensorSpec("model/scalar", (), "bfloat16"), TensorSpec("model/empty", (2, 0), "float32")]
    specs += [TensorSpec("optim/state/float32/exp_avg", (3, 5), "float32")]
    path = tmp_path / "in.h5"
    write(path, specs, links=[("model/tied", "model/float32")], step=4, groups=GROUPS, scalars={"float32/step": 1})
    return path


def raw(tensor):
    """Shape, dtype and bytes of a torch tensor."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), data


def of_model(path):
    return {name.removeprefix("model/"): value for name, value in contents(path).items() if name.startswith("model/")}


def names_in(folder):
    return sorted(os.listdir(folder))


def test_safetensors_hold_the_same_bits_in_every_dtype(no_complex128, tmp_path):
    done = export_checkpoint(no_complex128, tmp_path / "out.safetensors")
    assert {name: raw(tensor) for name, tensor in safetensors.torch.load_file(done.files[0]).items()} == of_model(
        no_complex128
    )
    assert (done.format, done.tensors, done.ties) == ("safetensors", len(HELD) + 2, {"tied": "float32"})
    assert names_in(tmp_path) == ["in.h5", "out.safetensors"]


def test_safetensors_hold_their_tied_names_and_the_step(no_complex128, tmp_path):
    export_checkpoint(no_complex128, tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "float32", "hpcfsdp.step": "4"}


def test_safetensors_are_split_as_transformers_splits_them(no_complex128, tmp_path):
    done = export_checkpoint(no_complex128, tmp_path / "out", shard_bytes=150)
    *shards, index = done.files
    count = len(shards)
    assert count > 2
    assert [path.name for path in shards] == [
        f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)
    ]
    assert index.name == "model.safetensors.index.json"
    listing = json.loads(index.read_text())
    expected = of_model(no_complex128)
    assert listing["metadata"] == {"total_size": sum(len(data) for _, _, data in expected.values())}
    assert set(listing["weight_map"]) == set(expected)
    for path in shards:
        tensors = safetensors.torch.load_file(path)
        assert {name for name, file in listing["weight_map"].items() if file == path.name} == set(tensors)
        assert all(raw(tensor) == expected[name] for name, tensor in tensors.items())
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 150
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"


def test_a_folder_gets_one_file_where_one_is_enough(no_complex128, tmp_path):
    done = export_checkpoint(no_complex128, tmp_path / "out", shard_bytes=1 << 20)
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    assert len(done.files) == 1
    export_checkpoint(no_complex128, tmp_path / "other", format="safetensors")
    assert names_in(tmp_path / "other") == ["model.safetensors"]


def test_other_files_of_a_folder_stay_and_old_weights_do_not(no_complex128, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    export_checkpoint(no_complex128, folder, format="safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: exists already \(--force replaces it\)"):
        export_checkpoint(no_complex128, folder, shard_bytes=150)
    assert names_in(folder) == ["config.json", "model.safetensors"]
    export_checkpoint(no_complex128, folder, shard_bytes=150, force=True)
    assert "model.safetensors" not in names_in(folder)
    with pytest.raises(CheckpointError, match="exists already"):
        export_checkpoint(no_complex128, folder, shard_bytes=400)
    export_checkpoint(no_complex128, folder, shard_bytes=400, force=True)
    listing = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {*listing["weight_map"].values(), "config.json", "model.safetensors.index.json"} == {*names_in(folder)}


def test_pt_holds_the_same_bits_and_ties(everything, tmp_path):
    done = export_checkpoint(everything, tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    expected = of_model(everything)
    names = {"tied": "a.bfloat16", "tied.twice": "a.bfloat16"}
    assert {name: raw(tensor) for name, tensor in loaded.items()} == {
        **expected,
        **{further: expected[name] for further, name in names.items()},
    }
    assert done.ties == names
    for further, name in names.items():
        assert loaded[further].data_ptr() == loaded[name].data_ptr()


def test_pt_with_the_optimizer_has_its_state_by_names(everything, tmp_path):
    export_checkpoint(everything, tmp_path / "out.pt", optimizer=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(loaded) == {"model", "optimizer", "step"}
    assert loaded["step"] == 12
    assert loaded["optimizer"]["param_groups"] == GROUPS
    state = loaded["optimizer"]["state"]
    assert {fqn: set(values) for fqn, values in state.items()} == {
        "a.float32": {"exp_avg", "step"},
        "a.float64": {"exp_avg", "step"},
    }
    assert state["a.float64"]["step"] == 3
    expected = contents(everything)
    assert raw(state["a.float32"]["exp_avg"]) == expected["optim/state/a.float32/exp_avg"]
    assert raw(state["a.float32"]["step"]) == expected["optim/state/a.float32/step"]


def test_pt_trains_on_as_torch_itself_would(tmp_path, make_model, train_steps):
    from hpcfsdp import checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "a.h5", model=model, optimizer=optimizer)
    export_checkpoint(tmp_path / "a.h5", tmp_path / "a.pt", optimizer=True)
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    other.load_state_dict(loaded["model"])
    second = torch.optim.AdamW(other.named_parameters(), lr=0.5)
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(other, second, loaded["optimizer"])
    for it, of in ((model, optimizer), (other, second)):
        of.zero_grad()
        it(torch.ones(1, 3)).sum().backward()
        of.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_dcp_loads_the_folder(everything, tmp_path):
    done = export_checkpoint(everything, tmp_path / "out", format="dcp", optimizer=True)
    assert {path.name for path in done.files} == {".metadata", "__0_0.distcp"}
    expected = contents(everything)
    model = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (shape, dtype, _) in of_model(everything).items()
    }
    model["tied"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    state = {
        "model": model,
        "optimizer": {"state": {"a.float32": {"exp_avg": torch.zeros(3, 5)}, "a.float64": {"step": None}}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(raw(tensor) == expected[f"model/{name}"] for name, tensor in model.items() if name != "tied")
    assert raw(model["tied"]) == expected["model/a.bfloat16"]
    assert raw(state["optimizer"]["state"]["a.float32"]["exp_avg"]) == expected["optim/state/a.float32/exp_avg"]
    assert state["optimizer"]["state"]["a.float64"]["step"] == 3


def test_dcp_replaces_a_folder_of_its_kind_alone(everything, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for force, message in ((False, "exists already"), (True, "is not a checkpoint of that format")):
        with pytest.raises(CheckpointError, match=message):
            export_checkpoint(everything, tmp_path / "out", format="dcp", force=force)
    assert names_in(tmp_path / "out") == ["thesis.txt"]
    export_checkpoint(everything, tmp_path / "dcp", format="dcp", names=["scalar"])
    export_checkpoint(everything, tmp_path / "dcp", format="dcp", force=True)
    assert names_in(tmp_path) == ["dcp", "out"]


@pytest.mark.parametrize(
    ("names", "optimizer", "expected"),
    [
        (["a.float*"], False, {name for name in DTYPES if name.startswith("float")}),
        (["model/a.int8", "a.bool"], False, {"int8", "bool"}),
        (["tied.*"], False, {"tied.twice"}),
    ],
)
def test_names_choose_tensors(everything, tmp_path, names, optimizer, expected):
    export_checkpoint(everything, tmp_path / "out.pt", names=names, optimizer=optimizer)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name.removeprefix("a.") for name in loaded} == expected


def test_names_choose_of_the_optimizer_too(everything, tmp_path):
    export_checkpoint(everything, tmp_path / "out.pt", names=["*a.float64*"], optimizer=True)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(loaded["model"]) == {"a.float64"}
    assert loaded["optimizer"]["state"].keys() == {"a.float64"}
    assert loaded["optimizer"]["state"]["a.float64"].keys() == {"exp_avg", "step"}


@pytest.mark.parametrize(
    ("out", "options", "kind", "message"),
    [
        ("out.xyz", {}, UsageError, r"does not determine the format: give --format safetensors\|pt\|dcp"),
        ("out.pt", {"format": "onnx"}, UsageError, "unknown format 'onnx'; there are safetensors, pt, dcp"),
        ("out.pt", {"format": "pt", "shard_bytes": 5}, UsageError, "--shard-bytes is for safetensors, not for pt"),
        ("out.safetensors", {"shard_bytes": 5}, UsageError, "--shard-bytes writes a folder"),
        ("out", {"shard_bytes": 0}, UsageError, "must be at least 1, not 0"),
        ("out.pt", {"names": ["nothing*"]}, CheckpointError, r"no tensor matches 'nothing\*'"),
        ("out.pt", {"names": ["optim/*"]}, CheckpointError, "add --optimizer"),
        ("out.safetensors", {}, CheckpointError, "'a.complex128' has dtype complex128"),
        ("there.pt", {}, CheckpointError, "there.pt: exists already"),
        ("folder.pt", {"force": True}, CheckpointError, "folder.pt: is a folder"),
        ("there.pt", {"format": "safetensors"}, CheckpointError, "there.pt: is a file; give the name of a folder"),
        ("there.pt/sub/x.pt", {}, CheckpointError, "cannot be written: Not a directory"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(everything, tmp_path, out, options, kind, message):
    (tmp_path / "there.pt").write_text("precious")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(kind, match=message):
        export_checkpoint(everything, tmp_path / out, **options)
    assert names_in(tmp_path) == ["folder.pt", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "precious"


def test_a_file_without_an_optimizer_says_so(tmp_path):
    write(tmp_path / "in.h5", [TensorSpec("model/w", (2,), "float32")])
    with pytest.raises(CheckpointError, match="holds no optimizer: leave --optimizer out"):
        export_checkpoint(tmp_path / "in.h5", tmp_path / "out.pt", optimizer=True)


@pytest.mark.parametrize("out", ["new/folder/out.safetensors", "new/out", "new/out.pt", "new/dcp"])
def test_damage_is_found_and_leaves_nothing(tmp_path, out):
    write(tmp_path / "in.h5", [TensorSpec("model/w", (1000,), "float32")])
    offset = int(open_index(tmp_path / "in.h5").extents["byte_offset"][0])
    with (tmp_path / "in.h5").open("r+b") as file:
        file.seek(offset + 2000)
        byte = file.read(1)[0]
        file.seek(offset + 2000)
        file.write(bytes([byte ^ 4]))
    options = {"new/out": {"shard_bytes": 100}, "new/dcp": {"format": "dcp"}}.get(out, {})
    with pytest.raises(CheckpointCorruptError, match="do not have their checksum"):
        export_checkpoint(tmp_path / "in.h5", tmp_path / out, **options)
    assert names_in(tmp_path) == ["in.h5"]


@pytest.mark.parametrize("out", ["new/out.safetensors", "new/out", "new/out.pt", "new/dcp"])
def test_too_little_room_is_reported_before_anything_is_written(no_complex128, tmp_path, monkeypatch, out):
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 100))
    options = {"new/out": {"shard_bytes": 100}, "new/dcp": {"format": "dcp"}}.get(out, {})
    with pytest.raises(CheckpointError, match=r"\d+ bytes are needed, 100 are free"):
        export_checkpoint(no_complex128, tmp_path / out, **options)
    assert names_in(tmp_path) == ["in.h5"]


class Failing(System):
    """Calls of one kind fail from the n-th on."""

    def __init__(self, kind, after):
        self._left = after
        call = getattr(System, kind)

        def failing(*arguments):
            self._left -= 1
            if self._left < 0:
                raise OSError(28, "No space left on device")
            return call(*arguments)

        setattr(self, kind, failing)


@pytest.mark.parametrize("out", ["out.safetensors", "out", "out.pt"])
@pytest.mark.parametrize("kind", ["pwritev", "fsync", "ftruncate", "replace"])
def test_an_error_of_the_system_at_any_call_leaves_nothing(no_complex128, tmp_path, out, kind):
    options = {"shard_bytes": 300} if out == "out" else {}
    export_checkpoint(no_complex128, tmp_path / "new" / out, **options)
    whole = names_in(tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    for after in range(1000):
        try:
            with using(Failing(kind, after)):
                export_checkpoint(no_complex128, tmp_path / "new" / out, **options)
        except CheckpointError as error:
            assert "No space left on device" in str(error)
            # Of the folder's fsync it cannot be known whether the names have come to the disk: they stay.
            assert names_in(tmp_path) == ["in.h5"] or (kind == "fsync" and names_in(tmp_path / "new") == whole)
        else:
            break
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert 0 < after < 999


def test_golden_files_are_exported_too(tmp_path):
    from tests.cli.conftest import ROOT

    golden = ROOT / "tests/golden/format-1.0.h5"
    export_checkpoint(golden, tmp_path / "out.pt")
    export_checkpoint(golden, tmp_path / "out.safetensors")
    expected = of_model(golden)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: raw(loaded[name]) for name in expected} == expected
    assert {
        name: raw(tensor) for name, tensor in safetensors.torch.load_file(tmp_path / "out.safetensors").items()
    } == expected


def test_tensors_that_lie_elsewhere_are_gathered_first(everything, tmp_path, monkeypatch):
    from hpcfsdp.checkpoint.convert import torch_output as mapped

    export_checkpoint(everything, tmp_path / "one.pt", optimizer=True)
    monkeypatch.setattr(mapped.MappedTensors, "_begin_of", lambda self, spec: None)
    export_checkpoint(everything, tmp_path / "two.pt", optimizer=True)
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "two.pt"))
    assert {name: raw(tensor) for name, tensor in one["model"].items()} == {
        name: raw(tensor) for name, tensor in two["model"].items()
    }
    assert names_in(tmp_path) == ["one.pt", "two.pt"]


@pytest.mark.parametrize("out", ["out.safetensors", "out.pt", "dcp"])
def test_progress_ends_at_what_was_announced(no_complex128, tmp_path, out):
    told = []

    class Bar:
        def __init__(self, what, nbytes):
            told.append(nbytes)

        def __enter__(self):
            return lambda nbytes: told.append(-nbytes)

        def __exit__(self, *_):
            pass

    export_checkpoint(no_complex128, tmp_path / out, progress=Bar, format="dcp" if out == "dcp" else None)
    assert told[0] > 0
    if out == "out.safetensors":
        assert sum(told) == 0
    else:
        assert -sum(told[1:]) >= told[0] // 2
