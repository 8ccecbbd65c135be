"""Where the package reads what others have written: on docs/explanation/trust.md, or with a reason here."""

import ast
from pathlib import Path

import pytest

from tests.unit.test_layers import ROOT, trees

NEVER = {"eval", "exec", "pickle.load", "yaml.load", "yaml.unsafe_load", "torch.jit.load", "marshal.loads"}
PICKLES = {
    "hpcfsdp.checkpoint.memory.windows": "memory and messages of ranks",
    "hpcfsdp.comm.mpi.communicator": "messages of ranks",
    "hpcfsdp.comm.mpi.part_comm": "messages of ranks",
    "hpcfsdp.state.optim.compare": "messages of ranks",
    "hpcfsdp.state.optim.values": "of this process",
    "hpcfsdp.state.rank0": "messages of ranks",
}
"""Modules that unpickle, and whose bytes they are."""
FILES = {
    **dict.fromkeys(
        ("accelerator", "doctor.all_ranks", "doctor.installed", "doctor.speed", "launch.device"),
        "/proc, /sys",
    ),
    **dict.fromkeys(
        ("checkpoint.format.disk", "hang.stacks", "launch.lock", "hang.departure", "observe.held_memory"), "/proc"
    ),
    "observe.perfetto": "/proc",
    **dict.fromkeys(("bench.checkpoint", "bench.gpu"), "its own files, in a folder of its own"),
    **dict.fromkeys(("config", "plan.links", "integrations.recipe", "examples.gpt.data"), "files that the user names"),
    **dict.fromkeys(("checkpoint.convert.peft", "checkpoint.convert.torch_source"), "sources of the page"),
    "checkpoint.retention": "regular files of a folder of checkpoints",
    "cli.main": "/dev/null",
    "launch.job": "/proc, and mpi4py's own module",
    "comm.mpi.node_memory": "shared memory of the page",
    "report.page": "of the package",
    "text.safe_files": "what this page is about",
}
"""Modules that open files by themselves."""


def calls(tree):
    """Names of what a module calls, as written, and their last part."""
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [ast.unparse(function) for function in functions if isinstance(function, (ast.Name, ast.Attribute))]
    return [(name, name.rpartition(".")[2]) for name in names]


def modules_that(wanted):
    return {module for module, tree in trees().items() if any(wanted(*call) for call in calls(tree))}


def test_nothing_is_evaluated():
    assert modules_that(lambda name, _: name in NEVER) == set()


def test_pickles_come_from_ranks_alone():
    assert modules_that(lambda name, _: name in ("pickle.loads", "pickle.Unpickler")) == set(PICKLES)


@pytest.mark.parametrize("module", modules_that(lambda name, _: name == "torch.load"))
def test_torch_loads_no_code(module):
    loads = [node for node in ast.walk(trees()[module]) if isinstance(node, ast.Call)]
    loads = [node for node in loads if ast.unparse(node.func) == "torch.load"]
    assert all("weights_only=True" in ast.unparse(node) for node in loads)


def test_files_are_opened_safely_or_for_a_reason():
    own = ("open", "os.open", "path.open")
    found = modules_that(
        lambda name, last: name in own or last in ("read_text", "read_bytes", "from_file") or name.endswith(").open")
    )
    # Of checkpoints, ``disk`` opens regular files alone; access.read_bytes goes through it.
    through = ("format.access", "convert.pickles", "convert.safetensors", "inspect.verify")
    through = {f"hpcfsdp.checkpoint.{name}" for name in through}
    assert found - through == {f"hpcfsdp.{name}" for name in FILES}


def test_the_page_names_modules_that_are_there():
    page = Path(ROOT.parent, "docs/explanation/trust.md").read_text()
    named = {part.strip("`") for part in page.replace("(", " ").replace(")", " ").replace(",", " ").split()}
    paths = {name.removeprefix("hpcfsdp/") for name in named if name.endswith(".py")}
    assert len(paths) > 15
    assert not [name for name in paths if not (ROOT / name).is_file()]
