"""export and import, as the page about them shows them."""

import json
import re
import shlex

import pytest
import torch
from safetensors.torch import load_file

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import open_index
from hpcfsdp.cli.main import main
from tests.cli.conftest import ROOT

PAGE = (ROOT / "docs/how-to/converting.md").read_text()
COMMANDS = re.findall(r"^\$ hpcfsdp (.*)$", PAGE, re.MULTILINE)


AS_PEFT = "--format peft --config adapter_config.json"


def save_adapter(folder):
    """A checkpoint of layers named as those of PEFT, and its configuration; the layers."""
    made = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1, bias=False) for name in ("default", "other")})
    checkpoint.save(folder / "adapters.h5", model=torch.nn.ModuleDict({"lora_A": made}))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return made


@pytest.mark.fresh
def test_an_adapter_is_exported_without_torch_and_mpi(start, tmp_path):
    adapter = save_adapter(tmp_path)
    (tmp_path / "cli.py").write_text(WITHOUT_TORCH)
    options = ("--format", "peft", "--config", "adapter_config.json", "--adapter", "other")
    job = start("cli.py", "adapters.h5", "out", *options, "--json").wait()
    assert job.code == 0, job.stderr
    facts = json.loads(job.stdout)
    assert (facts["format"], facts["tensors"], facts["bytes"]) == ("peft", 1, 12)
    (tensor,) = load_file(facts["files"][0]).values()
    assert torch.equal(tensor, adapter["other"].weight)


def test_the_commands_of_the_page_run(command, saved, tmp_path):
    assert len(COMMANDS) == 11
    (tmp_path / "step-00000007.h5").write_bytes(saved.read_bytes())
    adapter = save_adapter(tmp_path)
    for line in COMMANDS:
        done = command(*shlex.split(line))
        assert done.code == 0, (line, done.stderr)
        assert done.stderr == ""
    for name in ("imported.h5", "with_optimizer.h5", "from_dcp.h5"):
        facts = json.loads(command("show", tmp_path / name, "--json").stdout)
        assert (facts["step"], facts["model_tensors"]) == (7, 5)
        assert facts["tied_names"] == {"model/twin.bias": "model/0.bias", "model/twin.weight": "model/0.weight"}
    for name, has_optimizer in (("with_optimizer.h5", True), ("model_alone.h5", False)):
        facts = json.loads(command("show", name, "--json").stdout)
        assert (facts["step"], facts["optimizer_tensors"] > 0) == (7, has_optimizer)
    assert set(load_file(tmp_path / "first.safetensors")) == {"0.weight", "0.bias"}
    found = load_file(tmp_path / "my_adapter/adapter_model.safetensors")
    assert torch.equal(found.pop("base_model.model.lora_A.weight"), adapter["default"].weight)
    assert not found


def test_the_example_in_python_runs(start, saved, tmp_path):
    (tmp_path / "step-00000007.h5").write_bytes(saved.read_bytes())
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    job = start("example.py").wait()
    assert job.code == 0, job.stderr
    assert job.stdout.splitlines()[-1] == "7"


WITHOUT_TORCH = """
import sys
from hpcfsdp.cli.main import main
assert main(["export", *sys.argv[1:]]) == 0
assert not {"torch", "mpi4py"} & set(sys.modules)
"""


@pytest.mark.fresh
def test_safetensors_are_exported_without_torch_and_mpi(start, saved, tmp_path):
    job = start("-c", WITHOUT_TORCH, saved, tmp_path / "a.safetensors").wait()
    assert job.code == 0, job.stderr


def test_results_as_json(command, saved, tmp_path):
    done = json.loads(command("export", saved, tmp_path / "a.pt", "--json").stdout)
    assert done == {
        "format": "pt",
        "files": [str(tmp_path / "a.pt")],
        "tensors": 5,
        "bytes": (12 + 4 + 8 + 2) * 4 + 5 * 8,
        "tied_names": {"twin.bias": "0.bias", "twin.weight": "0.weight"},
    }
    done = json.loads(command("import", tmp_path / "a.pt", tmp_path / "b.h5", "--json", "--step", "3").stdout)
    assert (done["file"], done["format"], done["step"], done["tensors"]) == (str(tmp_path / "b.h5"), "pt", 3, 5)
    assert (done["optimizer"], done["extra"]) == (False, [])


def test_each_names_takes_one_pattern_and_leaves_the_output_alone(command, saved, tmp_path):
    out = tmp_path / "a.safetensors"
    done = command("export", saved, "--names", "0.*", "--names", "1.b*", out)
    assert done.code == 0, done.stderr
    assert set(load_file(out)) == {"0.weight", "0.bias", "1.bias"}


def test_tables_name_files_and_ties(command, saved, tmp_path):
    lines = command("export", saved, tmp_path / "a", "--shard-bytes", "60").stdout.splitlines()
    assert "file\t" + str(tmp_path / "a" / "model.safetensors.index.json") in lines
    assert "tied name\ttwin.bias = 0.bias" in lines
    lines = command("import", tmp_path / "a", tmp_path / "b.h5").stdout.splitlines()
    assert "tied name\tmodel/twin.bias = model/0.bias" in lines
    assert "step\t7" in lines


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("export saved.h5 there.pt", 1, "there.pt: exists already (--force replaces it)"),
        ("export saved.h5 out.xyz", 2, "does not determine the format"),
        ("export saved.h5 out.pt --format onnx", 2, "invalid choice: 'onnx'"),
        ("export saved.h5 out.safetensors --shard-bytes 10", 2, "--shard-bytes writes a folder"),
        ("export saved.h5 out.pt --names nothing", 1, "no tensor matches 'nothing'"),
        ("export damaged.h5 out.pt", 4, "damaged"),
        ("export flipped.h5 out.pt", 4, "do not have their checksum"),
        ("export flipped.h5 out.safetensors", 4, "do not have their checksum"),
        ("export flipped.h5 out --format dcp", 4, "do not have their checksum"),
        ("export missing.h5 out.pt", 1, "o such file"),
        ("export adapters.h5 out --format peft", 2, "needs --config adapter_config.json, which peft_model.peft_config"),
        (f"export adapters.h5 out {AS_PEFT} --adapter third", 1, "adapters.h5: has no LoRA adapter 'third'"),
        (f"export saved.h5 out {AS_PEFT}", 1, "saved.h5: has no LoRA adapter 'default'"),
        (f"export adapters.h5 there.pt {AS_PEFT}", 1, "there.pt: is a file; give the name of a folder"),
        (f"export adapters.h5 there {AS_PEFT}", 1, "adapter_config.json: exists already (--force replaces it)"),
        (
            "export adapters.h5 out --format peft --config deep.json",
            1,
            "deep.json: cannot be read as the configuration",
        ),
        (f"export adapters.h5 out {AS_PEFT} --names 0.*", 2, "--names is not for --format peft"),
        ("export adapters.h5 out.pt --adapter default", 2, "--adapter is for --format peft"),
        ("import there.pt out.h5", 4, "there.pt: damaged, or not a file of torch.save"),
        ("import missing.pt out.h5", 1, "missing.pt: No such file or directory"),
        ("import there.xyz out.h5", 1, "o such file"),
        ("import saved.h5 out.h5", 2, "does not determine the format"),
        ("import module.pt out.h5", 1, "executes no code from a file"),
        ("import good.pt saved.h5", 1, "saved.h5: exists already (--force replaces it)"),
        ("import good.pt out.h5 --step 99999999999999999999", 2, "must fit into 64 bits"),
        ("import usual.pt out.h5", 1, "--no-optimizer imports only the model"),
        ("import good.pt out.h5 --tie w", 2, "'w' is not NAME=KEPT"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(saved, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    data = saved.read_bytes()
    (tmp_path / "saved.h5").write_bytes(data)
    save_adapter(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/adapter_config.json").write_text("precious")
    (tmp_path / "damaged.h5").write_bytes(data[:3000])
    index = open_index(saved)
    place = int(index.rows_of("model/0.weight")["byte_offset"][0]) + 5
    (tmp_path / "flipped.h5").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    (tmp_path / "there.pt").write_text("precious")
    torch.save({"w": torch.ones(1)}, tmp_path / "good.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "module.pt")
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "usual.pt")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert main(arguments.split()) == code
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_the_model_alone_of_a_file_with_an_optimizer(saved, tmp_path, capsys):
    for name, options in (("a.pt", []), ("a", ["--format", "dcp"]), ("a.safetensors", [])):
        assert main(["export", str(saved), str(tmp_path / name), "--optimizer", *options]) == 0
        capsys.readouterr()
        assert (
            main(["import", str(tmp_path / name), str(tmp_path / "b.h5"), "--no-optimizer", "--force", "--json"]) == 0
        )
        done = json.loads(capsys.readouterr().out)
        assert (done["optimizer"], done["tensors"] >= 5, done["step"]) == (False, True, 7)
