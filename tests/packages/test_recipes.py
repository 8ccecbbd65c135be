"""Recipes of packages: other tools read them, and they ask for what setup.cfg asks for."""

import ast
import configparser
import re

import rattler_build
import yaml
from packaging.requirements import Requirement

from hpcfsdp import __version__
from tests.packages.conftest import ROOT

CONDA = ROOT / "docs/packaging/conda/recipe.yaml"
SPACK = ROOT / "docs/packaging/spack/spack_repo/hpcfsdp/packages/py_hpcfsdp/package.py"
ELSEWHERE = {"torch": "pytorch", "xxhash": "python-xxhash", "pyyaml": "pyyaml"}
"""Names on conda-forge that are not those on PyPI."""


def required():
    """Each requirement of the package: name -> least version."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]
    return {one.name.lower(): str(one.specifier).removeprefix(">=") for one in found}


def test_the_conda_recipe_renders_and_asks_for_what_the_package_needs():
    recipe = rattler_build.Stage0Recipe.from_file(CONDA)
    (rendered,) = recipe.render(rattler_build.VariantConfig(variants={"python_min": ["3.10"]}))
    found = rendered.recipe.to_dict()
    assert found["package"] == {"name": "hpcfsdp", "version": __version__}
    run = dict(line.partition(" >=")[::2] for line in found["requirements"]["run"])
    assert {name: run.get(ELSEWHERE.get(name, name)) for name in required()} == required()
    assert run["python"] == "3.10"


def test_the_spack_package_asks_for_what_the_package_needs():
    (package,) = [node for node in ast.parse(SPACK.read_text()).body if isinstance(node, ast.ClassDef)]
    calls = [node.value for node in package.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    asked = [(call.func.id, call.args[0].value) for call in calls]
    assert ("version", __version__) in asked
    specs = [re.fullmatch(r"(?:py-)?([\w-]+)@([\d.]+):.*", spec) for kind, spec in asked if kind == "depends_on"]
    found = {spec[1]: spec[2] for spec in specs if spec}
    assert {name: found.get(name) for name in required()} == required()
    assert found["python"] == "3.10"


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["version"], cited["license"]) == (__version__, "BSD-3-Clause")


def test_the_changelog_names_this_version():
    assert re.search(rf"^## {re.escape(__version__)}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
