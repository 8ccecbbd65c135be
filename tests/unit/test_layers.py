"""The package's architecture, read from its source: who may import whom."""

import ast
import functools
import importlib
from pathlib import Path

import pytest

import hpcfsdp

ROOT = Path(hpcfsdp.__file__).parent
FILES = {
    "hpcfsdp" + "".join(f".{part}" for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
LAYERS = [
    {"_version", "accelerator", "text"},
    {"_compat"},
    {"", "errors"},
    {"env"},
    {"hang", "timeline"},
    {"config", "launch", "output"},
    {"comm"},
    {"mpi", "world"},
    {"preempt", "resilience"},
    {"params"},
    {"reshard"},
    {"engine"},
    {"units"},
    {"state"},
    {"api"},
    {"fsdp", "fsdp2", "optim", "state_dict", "wrap"},
    {"checkpoint"},
    {"data", "observe"},
    {"doctor", "examples", "integrations", "report", "run"},
    {"plan"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
"""What stands on what. Parts of one layer know nothing of each other."""


@functools.cache
def trees():
    """The modules of the package, parsed: in the tests that look, not wherever tests are collected."""
    return {module: ast.parse(path.read_text(), str(path)) for module, path in FILES.items()}


def part(module):
    """The part of the package that a module belongs to: its first folder, or the module itself."""
    return module.removeprefix("hpcfsdp").lstrip(".").split(".")[0]


def layer(module):
    """The layer of a module's part."""
    return next(number for number, parts in enumerate(LAYERS) if part(module) in parts)


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
    """All imports in a module: at its top, inside of functions, and for type checkers alone."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return set().union(*map(imported, nodes))


def imports_in_functions(tree):
    """The statements that import something of the package where a function runs, and not where it is loaded."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = (node for function in functions for node in ast.walk(function))
    return [node for node in inside if isinstance(node, (ast.Import, ast.ImportFrom)) and imported(node)]


def test_the_source_is_found():
    assert len(FILES) > 40
    assert {"hpcfsdp", "hpcfsdp.params.layout", "hpcfsdp.cli.main"} <= set(FILES)


def test_modules_import_only_their_own_part_and_lower_layers():
    edges = ((module, name) for module, tree in trees().items() for name in imports(tree) if part(name) != part(module))
    assert not [f"{module} -> {name}" for module, name in edges if layer(name) >= layer(module)]


def test_no_modules_import_each_other_in_a_circle():
    edges = {module: imports(tree) - {module} for module, tree in trees().items()}
    done = set()

    def visit(module, path):
        assert module not in path, f"import circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in sorted(edges[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])


def test_imports_inside_of_functions_have_a_reason():
    silent = []
    for module, tree in trees().items():
        lines = FILES[module].read_text().splitlines()
        for node in imports_in_functions(tree):
            # Several in a row have one comment, behind the first or above it.
            first = node.lineno - 1
            while lines[first - 1].strip().startswith(("from ", "import ")):
                first -= 1
            beside = (*lines[node.lineno - 1 : node.end_lineno], lines[first], lines[first - 1])
            if not any("#" in line for line in beside):
                silent.append(f"{module}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not silent


def public_names():
    """Names that users import, by the module that they are imported from."""
    parts = ("checkpoint", "data", "fsdp", "fsdp2", "mpi", "observe", "optim", "state_dict", "wrap")
    modules = ("hpcfsdp", *(f"hpcfsdp.{part}" for part in parts))
    names = {module: set(importlib.import_module(module).__all__) for module in modules}
    return names | {"hpcfsdp.errors": {name for name in vars(hpcfsdp.errors) if name.endswith("Error")}}


def not_public(tree):
    """What a program imports of the package beside public names, and what it uses of private attributes."""
    found, names = set(), public_names()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.module.startswith("hpcfsdp.examples."):
            if node.module.split(".")[0] == "hpcfsdp":
                taken = {alias.name for alias in node.names} - names.get(node.module, set())
                found |= {f"{node.module}.{name}" for name in taken}
        elif isinstance(node, ast.Import):
            found |= imported(node) - {"hpcfsdp", *names}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            found |= {ast.unparse(node)} if ast.unparse(node.value) not in ("self", "super()") else set()
    return found


def test_examples_use_public_names_alone():
    used = {module: not_public(tree) for module, tree in trees().items() if part(module) == "examples"}
    assert len(used) > 5
    assert not any(used.values()), used


@pytest.mark.parametrize(
    "source",
    [
        "from hpcfsdp.comm import raise_together",
        "from hpcfsdp.checkpoint import writer",
        "from hpcfsdp import world",
        "import hpcfsdp.units.flat_unit",
        "model._unit.mesh",
    ],
)
def test_names_that_are_not_public_are_found(source):
    assert not_public(ast.parse(source))


def attributes(tree):
    """Dotted names that a module uses, and names it takes from another with ``from``."""
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_only_env_touches_the_environment():
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    touching = {module for module, tree in trees().items() if names & attributes(tree)}
    touching |= {module for module, path in FILES.items() if "os.environ" in path.read_text()}
    assert touching == {"hpcfsdp.env"}


def names_of_torch(tree):
    """Dotted names of torch that a module imports, or reads by whatever name it has given to a part of torch."""
    given, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                given[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
                given[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.add(f"{given.get(first, first)}.{rest}")
    return {name for name in names if name.split(".")[0] == "torch"}


def test_no_module_uses_the_accelerators_of_one_vendor():
    """All go through ``hpcfsdp.accelerator``; the doctor alone reports how torch was built."""
    vendors = {"torch.cuda", "torch.xpu", "torch.mps", "torch.mtia"}
    names = {(module, name) for module, tree in trees().items() for name in names_of_torch(tree)}
    using = {module for module, name in names if ".".join(name.split(".")[:2]) in vendors}
    assert part(next(iter(using))) == "doctor" and len(using) == 1, using


def test_only_compat_touches_private_parts_of_torch():
    def is_private(part):
        return part.startswith("_") and not part.startswith("__")

    names = {(module, name) for module, tree in trees().items() for name in names_of_torch(tree)}
    using = {(module, name) for module, name in names if any(map(is_private, name.split(".")))}
    assert {module for module, _ in using} == {"hpcfsdp._compat"}, using


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch.distributed._tensor as tensors",
        "from torch import _C",
        "from torch import nn as layers\nlayers.modules.module._global_forward_hooks",
        "import torch.distributed as dist\ndist.distributed_c10d._world.default_pg",
    ],
)
def test_private_parts_of_torch_are_found_under_any_name(source):
    assert any("._" in name for name in names_of_torch(ast.parse(source)))


def test_no_module_is_a_box_of_odds_and_ends():
    parts = {part for module in FILES for part in module.split(".")}
    assert not parts & {"util", "utils", "helper", "helpers", "misc", "common"}


def test_every_module_has_a_docstring():
    silent = {module for module, tree in trees().items() if not ast.get_docstring(tree)}
    assert silent <= {"hpcfsdp.__main__", "hpcfsdp._version"}
