"""The package's architecture, read from its source: who may import whom."""

import ast
from pathlib import Path

import pytest

import hpcfsdp

ROOT = Path(hpcfsdp.__file__).parent
FILES = {
    "hpcfsdp" + "".join(f".{part}" for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(), str(path)) for module, path in FILES.items()}

LAYERS = [
    {"errors", "config", "env", "terminal", "_compat", "_version"},
    {"launch", "observe"},
    {"comm", "mpi", "world"},
    {"flat"},
    {"engine", "tensor"},
    {"api", "state", "fsdp", "state_dict", "wrap"},
    {"checkpoint"},
    {"bench", "cli", "doctor", "train", "__main__", ""},
]


def layer(module):
    """The layer of a module, by its first part below the package."""
    part = module.removeprefix("hpcfsdp").lstrip(".").split(".")[0]
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def imported(node):
    """The modules of the package that one import statement loads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert node.level == 0, "relative import"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in FILES else node.module for name in names]
    return {name for name in names if name.split(".")[0] == "hpcfsdp"}


def imports(tree):
    """All imports in a module, those inside of functions too."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return set().union(*map(imported, nodes))


def imports_on_load(tree):
    """Imports that run when the module is loaded."""
    found, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= imported(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            waiting += list(ast.iter_child_nodes(node))
    return found


def test_the_source_is_found():
    assert len(FILES) > 40
    assert {"hpcfsdp", "hpcfsdp.flat.layout", "hpcfsdp.cli.main"} <= set(FILES)


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_its_own_layer_and_lower_ones(module):
    above = {name for name in imports(TREES[module]) if layer(name) > layer(module)}
    assert not above


def test_no_modules_import_each_other_in_a_circle():
    edges = {module: imports_on_load(tree) - {module} for module, tree in TREES.items()}
    done = set()

    def visit(module, path):
        assert module not in path, f"import circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in sorted(edges[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])


def attributes(tree):
    """Dotted names that a module uses, and names it takes from another with ``from``."""
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", sorted(set(FILES) - {"hpcfsdp.env"}))
def test_only_env_touches_the_environment(module):
    assert not {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"} & attributes(TREES[module])
    assert "os.environ" not in FILES[module].read_text()


@pytest.mark.parametrize("module", sorted(set(FILES) - {"hpcfsdp._compat"}))
def test_only_compat_touches_private_parts_of_torch(module):
    private = {
        name
        for name in attributes(TREES[module])
        if name.startswith(("torch.", "dist.")) and any(part.startswith("_") for part in name.split(".")[1:])
    }
    assert not private


def test_no_module_is_a_box_of_odds_and_ends():
    parts = {part for module in FILES for part in module.split(".")}
    assert not parts & {"util", "utils", "helper", "helpers", "misc", "common"}


@pytest.mark.parametrize("module", sorted(set(FILES) - {"hpcfsdp.__main__", "hpcfsdp._version"}))
def test_every_module_says_what_it_is_for(module):
    assert ast.get_docstring(TREES[module])
