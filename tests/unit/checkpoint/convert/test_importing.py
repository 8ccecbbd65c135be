import io
import json
import os
import pickle
import warnings
from collections import Counter, OrderedDict

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint.convert.export import PT_SUFFIXES, export_checkpoint
from hpcfsdp.checkpoint.convert.importing import import_checkpoint
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, UsageError
from tests.unit.checkpoint.convert.conftest import DTYPES, contents

TIES = [("tied", "a.bfloat16"), ("tied.twice", "a.bfloat16")]


def save_dcp(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("out", ["out.safetensors", "split", "out.pt", "dcp"])
def test_there_and_back_is_bitwise_in_every_dtype(everything, tmp_path, out, optimizer):
    options = {"split": {"shard_bytes": 200}, "dcp": {"format": "dcp"}}.get(out, {})
    if out in ("out.safetensors", "split"):
        options["names"] = [*(f"*a.{dtype}*" for dtype in DTYPES if dtype != "complex128"), "scalar", "empty", "tied*"]
    export_checkpoint(everything, tmp_path / out, optimizer=optimizer, **options)
    ties = TIES if out == "dcp" else []
    import_checkpoint(tmp_path / out, tmp_path / "back.h5", ties=ties)
    expected = {name: value for name, value in contents(everything).items() if optimizer or name.startswith("model/")}
    if "names" in options:
        del expected["model/a.complex128"]
    assert contents(tmp_path / "back.h5") == expected
    index, before = open_index(tmp_path / "back.h5"), open_index(everything)
    assert index.links == before.links
    assert (index.param_groups, index.scalars) == ((before.param_groups, before.scalars) if optimizer else (None, None))
    assert index.info.step == (before.info.step if optimizer or out not in ("out.pt", "dcp") else 0)
    assert index.info.extra == {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def trained(steps, seed=0):
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
    return net, optimizer, train(net, optimizer, steps)


def train(net, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.arange(5)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_names(optimizer):
    names = optimizer.param_groups[0]["param_names"]
    state = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    group = {**optimizer.param_groups[0], "params": names}
    del group["param_names"]
    return {"state": state, "param_groups": [group]}


@pytest.mark.parametrize("named", [False, True], ids=["torch's own", "by names"])
@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_run_of_torch_goes_on_from_the_imported_file(tmp_path, kind, named):
    net, optimizer, _ = trained(3)
    state = {"model": net.state_dict(), "optim": by_names(optimizer) if named else optimizer.state_dict(), "step": 3}
    ties = ()
    if kind == "pt":
        torch.save(state, tmp_path / "in.pt")
    else:
        save_dcp(state, tmp_path / "in")
        ties = [("head.weight", "embed.weight")]
    done = import_checkpoint(tmp_path / ("in.pt" if kind == "pt" else "in"), tmp_path / "out.h5", ties=ties)
    assert (done.format, done.step, done.has_optimizer) == (kind, 3, True)
    other, second, _ = trained(1, seed=1)
    info = checkpoint.load(tmp_path / "out.h5", model=other, optimizer=second)
    assert info.step == 3
    assert train(other, second, 3) == train(net, optimizer, 3)


def test_other_values_become_extra(tmp_path):
    state = {"model": {"w": torch.ones(2)}, "epoch": 4, "best": {"loss": 0.5, "at": [1, 2]}, "rng": torch.arange(3)}
    torch.save(state, tmp_path / "in.pt")
    done = import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", step=8)
    assert done.extra == ("epoch", "best", "rng")
    info = open_index(tmp_path / "out.h5").info
    np.testing.assert_array_equal(info.extra.pop("rng"), [0, 1, 2])
    assert info.extra == {"epoch": 4, "best": {"loss": 0.5, "at": [1, 2]}}
    assert info.step == 8


def test_a_step_that_is_overruled_is_kept(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "step": 4}, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", step=8)
    info = open_index(tmp_path / "out.h5").info
    assert (info.step, info.extra) == (8, {"step": 4})


def test_types_of_other_values_are_kept(tmp_path):
    schedule = {"milestones": Counter({3: 1}), "rates": (0.1, [torch.ones(2)]), "named": OrderedDict(b=1, a=2)}
    torch.save({"model": {"w": torch.ones(2)}, "schedule": schedule}, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    found = open_index(tmp_path / "out.h5").info.extra["schedule"]
    assert found.pop("rates")[1][0].tolist() == [1, 1]
    assert found == {"milestones": Counter({3: 1}), "named": OrderedDict(b=1, a=2)}
    assert {type(value) for value in found.values()} == {Counter, OrderedDict}


def test_values_that_cannot_be_kept_are_named(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "odd": [1, torch.float32]}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"extra\['odd'\]\[1\] is a dtype, and nothing is pickled"):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12)[2:7:2],
        torch.ones(1).expand(5),
        torch.ones(2, dtype=torch.cfloat).mul(1j).conj(),
    ],
    ids=["transposed", "strided", "expanded", "conjugated"],
)
def test_a_tensor_that_is_a_view_comes_as_what_it_shows(tmp_path, tensor):
    torch.save({"w": tensor, "whole": torch.arange(3)}, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    shape, dtype, data = contents(tmp_path / "out.h5")["model/w"]
    assert (shape, dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    assert data == tensor.resolve_conj().contiguous().numpy().tobytes()


def test_views_of_one_storage_are_tied_only_where_they_are_the_same(tmp_path):
    whole = torch.arange(6.0)
    torch.save({"a": whole[:3], "b": whole[3:], "c": whole[:3], "d": whole[:2]}, tmp_path / "in.pt")
    import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    assert open_index(tmp_path / "out.h5").links == {"model/c": "model/a"}
    assert contents(tmp_path / "out.h5")["model/b"][2] == whole[3:].numpy().tobytes()


def test_a_file_of_old_torch_is_read(tmp_path):
    torch.save({"w": torch.arange(4.0)}, tmp_path / "in.pth", _use_new_zipfile_serialization=False)
    import_checkpoint(tmp_path / "in.pth", tmp_path / "out.h5")
    assert contents(tmp_path / "out.h5")["model/w"][2] == torch.arange(4.0).numpy().tobytes()


class Evil:
    """Makes a file when it is un-pickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_nothing_of_a_pt_file_is_executed(tmp_path):
    torch.save({"w": torch.ones(1), "evil": Evil(tmp_path / "executed")}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="executes no code from a file: if you trust it, load it with"):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    assert os.listdir(tmp_path) == ["in.pt"]


def test_a_whole_module_is_refused_with_the_mend(tmp_path):
    torch.save(nn.Linear(1, 1), tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"torch\.save only its state dicts"):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_nothing_of_a_dcp_folder_is_executed(tmp_path, place):
    evil = Evil(tmp_path / "executed")
    save_dcp({"model": {"w": torch.ones(1)}, "more": evil if place == "value" else 1}, tmp_path / "in")
    if place == "metadata":
        metadata = pickle.loads((tmp_path / "in" / ".metadata").read_bytes())
        metadata.planner_data = evil
        (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"executes no code from a file") as caught:
        import_checkpoint(tmp_path / "in", tmp_path / "out.h5")
    assert caught.value.exit_code == 1
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("name", ["load", "save", "compile", "Tensor", "hub", "dtype", "missing"])
def test_of_torch_itself_a_pickle_of_metadata_gets_dtypes_alone(name):
    from hpcfsdp.checkpoint.convert.pickles import _MetadataUnpickler

    with pytest.raises(CheckpointError, match=rf"asks for torch\.{name}"):
        _MetadataUnpickler(io.BytesIO()).find_class("torch", name)
    assert _MetadataUnpickler(io.BytesIO()).find_class("torch", "bfloat16") is torch.bfloat16


@pytest.mark.parametrize(
    "name", ["FileSystemReader", "FileSystemWriter", "os.system", "pickle", "io.open", "_StorageWriterTransforms"]
)
def test_metadata_find_no_more_than_records(tmp_path, name):
    from hpcfsdp.checkpoint.convert.pickles import _MetadataUnpickler

    with pytest.raises(CheckpointError, match=r"which torch.* does not write"):
        _MetadataUnpickler(io.BytesIO()).find_class("torch.distributed.checkpoint.filesystem", name)


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_views_are_imported_with_the_values_that_they_show(tmp_path, kind):
    one, other = (torch.tensor([1 + 2j, 3 - 4j]) for _ in range(2))
    state = {"conj": one.conj(), "neg": other.conj().imag, "turned": torch.arange(6).view(2, 3).t()}
    if kind == "dcp":
        save_dcp(state, tmp_path / "in")
    else:
        torch.save(state, tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "out.h5", format=kind)
    with checkpoint.open(tmp_path / "out.h5") as found:
        assert all(torch.equal(found[f"model/{name}"][...], value) for name, value in state.items())


def test_a_dcp_folder_of_one_level_and_of_nested_lists(tmp_path):
    save_dcp({"w": torch.arange(3), "v": torch.tensor(True)}, tmp_path / "in")
    import_checkpoint(tmp_path / "in", tmp_path / "out.h5")
    assert set(contents(tmp_path / "out.h5")) == {"model/w", "model/v"}
    save_dcp({"model": {"w": torch.arange(3)}, "more": [{"a": torch.arange(2)}, {"b": 2}]}, tmp_path / "in2")
    import_checkpoint(tmp_path / "in2", tmp_path / "out2.h5")
    more = open_index(tmp_path / "out2.h5").info.extra["more"]
    np.testing.assert_array_equal(more[0].pop("a"), [0, 1])
    assert more == [{}, {"b": 2}]


def test_ties_as_the_library_of_safetensors_notes_them(tmp_path):
    net = Net()
    safetensors.torch.save_model(net, tmp_path / "in.safetensors")
    import_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.h5")
    other = Net()
    checkpoint.load(tmp_path / "out.h5", model=other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())


def test_a_tie_may_name_what_the_source_leaves_out(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "in.safetensors", metadata={"author": "me"})
    import_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.h5", ties=[("head", "w")])
    index = open_index(tmp_path / "out.h5")
    assert index.links == {"model/head": "model/w"}
    assert index.info.extra == {"safetensors": {"author": "me"}}


@pytest.mark.parametrize(
    ("tie", "message"),
    [
        (("a", "b"), "'model/a' and 'model/b' differ, so they cannot be tied"),
        (("a", "short"), "'model/a' and 'model/short' differ"),
        (("x", "sort"), "no tensor 'sort' to tie 'x' to; did you mean 'short'"),
        (("a", "a"), "'a' is 'model/a' already"),
    ],
)
def test_a_wrong_tie_is_refused(tmp_path, tie, message):
    torch.save({"a": torch.ones(2), "b": torch.zeros(2), "short": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", ties=[tie])
    assert os.listdir(tmp_path) == ["in.pt"]


def good_split(tmp_path):
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    safetensors.torch.save_file({"v": torch.ones(2)}, tmp_path / "two.safetensors")
    return {"w": "one.safetensors", "v": "two.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: "[", "is not an index"),
        (lambda names: json.dumps({}), "is not an index"),
        (lambda names: json.dumps({"weight_map": {**names, "v": "../two.safetensors"}}), "is not a file next to it"),
        (
            lambda names: json.dumps({"weight_map": {**names, "v": "six.safetensors"}}),
            "'six.safetensors', which is missing",
        ),
        (lambda names: json.dumps({"weight_map": {**names, "u": "two.safetensors"}}), "lacks 'u', which the index"),
        (lambda names: json.dumps({"weight_map": {"w": "one.safetensors", "x": "two.safetensors"}}), "lacks 'x'"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, change, message):
    names = good_split(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(change(names))
    with pytest.raises(CheckpointCorruptError, match=message):
        import_checkpoint(tmp_path, tmp_path / "out.h5")


def test_a_shard_that_holds_more_than_the_index_says_is_refused(tmp_path):
    names = good_split(tmp_path)
    safetensors.torch.save_file({"v": torch.ones(2), "more": torch.ones(1)}, tmp_path / "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointCorruptError, match="holds 'more', which the index omits"):
        import_checkpoint(tmp_path, tmp_path / "out.h5")


def test_a_folder_of_several_files_needs_an_index(tmp_path):
    good_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"there are: one\.safetensors, two\.safetensors"):
        import_checkpoint(tmp_path, tmp_path / "out.h5")


def sources(tmp_path):
    torch.save({"w": torch.arange(200.0)}, tmp_path / "in.pt")
    safetensors.torch.save_file({"w": torch.arange(200.0)}, tmp_path / "in.safetensors")
    save_dcp({"w": torch.arange(200.0)}, tmp_path / "dcp")
    return {
        "pt": (tmp_path / "in.pt", tmp_path / "in.pt"),
        "safetensors": (tmp_path / "in.safetensors", tmp_path / "in.safetensors"),
        "dcp metadata": (tmp_path / "dcp", tmp_path / "dcp" / ".metadata"),
        "dcp data": (tmp_path / "dcp", tmp_path / "dcp" / "__0_0.distcp"),
    }


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp metadata", "dcp data"])
def test_a_source_that_ends_too_early_is_damaged(tmp_path, kind):
    source, file = sources(tmp_path)[kind]
    data = file.read_bytes()
    for nbytes in sorted({0, 1, 7, 8, 9, len(data) // 3, len(data) // 2, len(data) - 1}):
        file.write_bytes(data[:nbytes])
        if kind == "dcp data" and nbytes == len(data) - 1 and not _needs_last_byte(data):
            continue
        with pytest.raises(CheckpointCorruptError):
            import_checkpoint(source, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def _needs_last_byte(data):
    """Whether what a zip archive says in its last bytes is missed: a comment that it does not have is not."""
    return data[-2:] != b"\0\0"


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("missing.pt", {}, CheckpointError, "missing.pt: No such file"),
        ("in.xyz", {}, UsageError, r"does not determine the format: give --format safetensors\|pt\|dcp"),
        ("in.xyz", {"format": "onnx"}, UsageError, "unknown format 'onnx'"),
        ("in.xyz", {"format": "dcp"}, CheckpointError, "a DCP checkpoint is a folder"),
        ("in.xyz", {"format": "pt"}, CheckpointCorruptError, "not a file of torch.save"),
        ("in.xyz", {"format": "safetensors"}, CheckpointCorruptError, "not a safetensors file"),
        ("folder", {}, CheckpointError, "holds neither safetensors files nor the .metadata"),
        ("folder", {"format": "dcp"}, CheckpointError, ".metadata: No such file"),
        ("folder", {"format": "pt"}, CheckpointError, "folder: is a directory"),
        ("folder", {"format": "safetensors"}, CheckpointError, "there are: none"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(tmp_path, name, options, kind, message):
    (tmp_path / "in.xyz").write_text("x" * 1000)
    (tmp_path / "folder").mkdir()
    with pytest.raises(kind, match=message):
        import_checkpoint(tmp_path / name, tmp_path / "out.h5", **options)
    assert sorted(os.listdir(tmp_path)) == ["folder", "in.xyz"]


def test_a_checkpoint_that_is_there_stays(everything, tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "in.pt")
    (tmp_path / "out.h5").write_bytes(everything.read_bytes())
    with pytest.raises(CheckpointError, match=r"out\.h5: exists already"):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    assert contents(tmp_path / "out.h5") == contents(everything)
    import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", force=True)
    assert set(contents(tmp_path / "out.h5")) == {"model/w"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"\['w'\] is a tensor of float32 \(torch.sparse_coo"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            r"\['w'\] is a tensor of qint8 \(quantized",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_tensor_that_is_not_dense_is_named(tmp_path, make, message):
    torch.save({"w": make()}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_dtype_that_cannot_be_kept_is_named(tmp_path, kind):
    state = {"good": torch.ones(2), "w": torch.ones(2, dtype=torch.complex32)}
    if kind == "pt":
        torch.save(state, tmp_path / "in")
    else:
        save_dcp(state, tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"in: 'model/w' has dtype complex32, which checkpoints do not support"):
        import_checkpoint(tmp_path / "in", tmp_path / "out.h5", format=kind)
    assert os.listdir(tmp_path) == ["in"]


def test_a_step_that_is_too_large_is_reported(tmp_path):
    torch.save({"model": {"w": torch.ones(1)}, "step": 2**63}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match=r"in\.pt: its step does not fit.*give --step"):
        import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5")
    for step in (2**63, -(2**63) - 1):
        with pytest.raises(UsageError, match=f"--step {step} is no step: it must fit into 64 bits"):
            import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", step=step)
    assert os.listdir(tmp_path) == ["in.pt"]
    assert import_checkpoint(tmp_path / "in.pt", tmp_path / "out.h5", step=2**63 - 1).step == 2**63 - 1
    info = open_index(tmp_path / "out.h5").info
    assert (info.step, info.extra) == (2**63 - 1, {"step": 2**63})


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_without_its_optimizer_any_model_can_be_taken(tmp_path, kind):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    if kind == "pt":
        torch.save(state, tmp_path / "in")
    else:
        save_dcp(state, tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"which has no name.*--no-optimizer imports only the model"):
        import_checkpoint(tmp_path / "in", tmp_path / "out.h5", format=kind)
    done = import_checkpoint(tmp_path / "in", tmp_path / "out.h5", format=kind, optimizer=False)
    assert (done.has_optimizer, done.step, done.extra) == (False, 2, ())
    assert all(path.startswith("model/") for path in contents(tmp_path / "out.h5"))
    for name, value in net.state_dict().items():
        index = open_index(tmp_path / "out.h5")
        with BlockReader(index) as reader:
            spec = index.resolve(f"model/{name}")
            assert reader.read(spec.path, 0, spec.numel).tobytes() == value.numpy().tobytes()


def test_without_its_optimizer_of_safetensors_and_of_an_optimizer_alone(everything, tmp_path):
    names = ["a.float*", "*a.float32*"]
    export_checkpoint(everything, tmp_path / "in.safetensors", names=names, optimizer=True)
    done = import_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.h5", optimizer=False)
    assert not done.has_optimizer
    index = open_index(tmp_path / "out.h5")
    assert (index.param_groups, index.scalars) == (None, None)
    assert index.tensors
    assert all(path.startswith("model/") for path in index.tensors)
    torch.save(trained(1)[1].state_dict(), tmp_path / "alone.pt")
    with pytest.raises(CheckpointError, match="which --no-optimizer leaves out"):
        import_checkpoint(tmp_path / "alone.pt", tmp_path / "out2.h5", optimizer=False)


@pytest.mark.parametrize("suffix", PT_SUFFIXES)
def test_names_of_pt_files_are_the_same_both_ways(everything, tmp_path, suffix):
    assert export_checkpoint(everything, tmp_path / f"a{suffix}", names=["scalar"]).format == "pt"
    assert import_checkpoint(tmp_path / f"a{suffix}", tmp_path / "out.h5").format == "pt"


def test_a_piece_of_dcp_that_is_not_as_described_is_damage(tmp_path):
    for folder, shape in (("a", (4, 2)), ("b", (2, 4))):
        save_dcp({"w": torch.ones(shape)}, tmp_path / folder)
    (tmp_path / "a" / "__0_0.distcp").write_bytes((tmp_path / "b" / "__0_0.distcp").read_bytes())
    with pytest.raises(CheckpointCorruptError, match=r"'w'.*\[2, 4\], and another for \.metadata"):
        import_checkpoint(tmp_path / "a", tmp_path / "out.h5")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
