import ast
import importlib
import json
import pkgutil
from pathlib import Path

import pytest
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint

LOADED = """
import json, sys
heavy = [name for name in ("torch", "mpi4py", "h5py", "numpy") if name in sys.modules]
print(json.dumps(heavy))
"""


def loaded_by(run_python, code, *arguments):
    """Heavy modules that are loaded after `code` ran in a process of its own, and what it printed before."""
    *printed, last = run_python(f"{code}\n{LOADED}", *arguments).splitlines()
    return json.loads(last), printed


def test_importing_the_package_loads_nothing_heavy(run_python):
    assert loaded_by(run_python, "import hpcfsdp; dir(hpcfsdp); hpcfsdp.__version__; hpcfsdp.errors") == ([], [])


def test_importing_checkpoints_loads_nothing_heavy_until_a_name_is_used(run_python):
    assert loaded_by(run_python, "import hpcfsdp.checkpoint") == ([], [])
    assert loaded_by(run_python, "from hpcfsdp.checkpoint import latest") == ([], [])


def test_importing_launch_starts_neither_mpi_nor_torch(run_python):
    assert loaded_by(run_python, "import hpcfsdp; hpcfsdp.init; hpcfsdp.finalize; hpcfsdp.World") == ([], [])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_load_nothing_heavy(run_python, arguments):
    code = f"from hpcfsdp.cli.main import main; assert main({arguments}) == 0"
    heavy, printed = loaded_by(run_python, code)
    assert heavy == []
    assert printed[0].startswith(("usage: hpcfsdp", f"hpcfsdp {hpcfsdp.__version__}"))


@pytest.mark.parametrize(
    "words", [["ls", "FILE"], ["ls", "--json", "FOLDER"], ["show", "FILE"], ["show", "FILE", "bias"]]
)
def test_looking_into_a_file_loads_neither_torch_nor_mpi(run_python, tmp_path, words):
    path = checkpoint.save(tmp_path / "step-1.h5", model=nn.Linear(2, 3))
    places = {"FILE": str(path), "FOLDER": str(tmp_path)}
    arguments = [places.get(word, word) for word in words]
    code = "import sys; from hpcfsdp.cli.main import main; assert main(sys.argv[1:]) == 0"
    heavy, printed = loaded_by(run_python, code, *arguments)
    assert heavy == ["h5py", "numpy"]
    assert len(printed) > 2


def test_help_of_a_verb_loads_neither_torch_nor_mpi(run_python):
    code = "from hpcfsdp.cli.main import main\ntry:\n    main(['train', '--help'])\nexcept SystemExit: pass"
    heavy, printed = loaded_by(run_python, code)
    assert not {"torch", "mpi4py"} & set(heavy)
    assert any("--train.steps" in line for line in printed)


def test_dir_lists_the_public_names():
    names = {"FullyShardedDataParallel", "World", "init", "finalize", "checkpoint", "errors", "fsdp", "mpi", "wrap"}
    names |= {"fsdp2", "fully_shard", "param_groups", "param_info", "Preemption", "preemption", "exit_requeue"}
    names |= {"data", "observe", "optim", "resilient", "WeightedMean"}
    assert names | {"__version__"} == set(hpcfsdp.__all__)
    assert set(hpcfsdp.__all__) <= set(dir(hpcfsdp))
    assert dir(hpcfsdp) == sorted(dir(hpcfsdp))


def test_every_public_name_can_be_had():
    for name in hpcfsdp.__all__:
        assert getattr(hpcfsdp, name) is not None
    assert hpcfsdp.checkpoint.__name__ == "hpcfsdp.checkpoint"
    assert hpcfsdp.init.__module__ == "hpcfsdp.world"


@pytest.mark.parametrize(
    "path",
    [
        "hpcfsdp.checkpoint.convert.export.export_checkpoint",
        "hpcfsdp.checkpoint.convert.importing.import_checkpoint",
        "hpcfsdp.checkpoint.inspect.diff.compare",
        "hpcfsdp.checkpoint.inspect.names.tensors_matching",
        "hpcfsdp.checkpoint.inspect.stats.file_statistics",
        "hpcfsdp.checkpoint.inspect.verify.verify_file",
        "hpcfsdp.checkpoint.manager.Saved",
        "hpcfsdp.checkpoint.reader.BlockReader",
    ],
)
def test_names_that_the_documentation_imports_from_inner_modules_stay_there(path):
    module, _, name = path.rpartition(".")
    found = pkgutil.resolve_name(f"{module}:{name}")
    assert found.__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'hpcfsdp' has no attribute 'nothing'$"):
        _ = hpcfsdp.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from hpcfsdp import nothing")


def test_the_version_is_three_numbers():
    parts = hpcfsdp.__version__.split(".")
    assert len(parts) == 3
    assert all(part.isdigit() for part in parts[:2])


def test_an_installed_package_has_all_folders():
    """Folders without an ``__init__.py`` can be imported from the source, but are not installed."""
    package = Path(hpcfsdp.__file__).parent
    assert not {path.parent for path in package.rglob("*.py") if not path.with_name("__init__.py").exists()}


@pytest.mark.parametrize("module", ["hpcfsdp", "hpcfsdp.checkpoint", "hpcfsdp.observe"])
def test_type_checkers_see_the_names_that_are_loaded_on_first_use(module):
    """The stub beside a package of lazy names has the same names, from the same modules."""
    package = importlib.import_module(module)
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    seen = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "only `import x as x` is public in a stub"
                whole = f"{node.module}.{alias.name}"
                seen[alias.name] = whole if whole == package._PUBLIC.get(alias.name) else node.module
    seen.pop("__version__", None)
    assert seen == package._PUBLIC
