"""The documentation site: ``make docs``. Warnings are errors."""

import argparse
import dataclasses
import importlib
import re
import typing

import docstring_parser
from sphinx.util.docutils import SphinxDirective

from hpcfsdp import __version__
from hpcfsdp.cli.main import VERBS

project = "hpcfsdp"
author = "The hpcfsdp developers"
copyright = "The hpcfsdp developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "examples", "packaging"]
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name types of torch, whose pages no build machine reaches

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]

default_role = "code"  # a name in single backquotes is an argument
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"hpcfsdp {version}"
html_theme_options = {"navigation_with_keys": True}


class ConfigurationKeys(SphinxDirective):
    """A table of all keys of a configuration class: type, default, and the text below the field."""

    required_arguments = 1

    def run(self):
        module, _, name = self.arguments[0].rpartition(".")
        rows = "".join(_rows(getattr(importlib.import_module(module), name)))
        return self.parse_text_to_nodes(f"| key | type | default | |\n| --- | --- | --- | --- |\n{rows}")


def _rows(kind, prefix=""):
    texts = {one.arg_name: one.description for one in docstring_parser.parse_from_object(kind).params}
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _rows(hints[field.name], f"{field.name}.")
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        shown = str(field.type).replace("|", "\\|")
        text = " ".join((texts.get(field.name) or "").split())
        yield f"| `{prefix}{field.name}` | {shown} | `{default}` | {text} |\n"


class CommandHelp(SphinxDirective):
    """What a verb of the command line does, its arguments and its examples, from its parser."""

    required_arguments = 1

    def run(self):
        module = importlib.import_module(VERBS[self.arguments[0]][0])
        parser = module.parser
        is_listed = hasattr(parser, "examples")  # the parser of ``train`` lists the keys of its configuration
        examples = "\n".join(f"$ {line}" for line in (parser.examples if is_listed else module.EXAMPLES))
        text = f"{_escaped(parser.description)}\n\n{''.join(_arguments(parser))}\n" if is_listed else ""
        return self.parse_text_to_nodes(f"{text}```console\n{examples}\n```\n")


def _arguments(parser):
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        if isinstance(action, argparse._HelpAction) or not action.help:
            continue
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        value = value if action.nargs != 0 else ""
        name = " ".join(filter(None, [", ".join(action.option_strings), str(value)]))
        name += "..." if action.nargs in ("*", "+") else ""
        text = _escaped(action.help)
        cases = "".join(f"  - {case}\n" for case in text.split("; ")) if len(text) > 500 else ""
        yield f"- `{name}`:\n{cases}" if cases else f"- `{name}`: {text}\n"


def _escaped(text):
    """Text as Markdown, with options as code: their dashes would become one."""
    return re.sub(r"(--[\w-]+)", r"`\1`", " ".join(text.split()).replace("*", "\\*").replace("<", "\\<"))


def _keep_colons(app, what, name, obj, options, lines):
    """Undo napoleon, which takes the text before a colon in an attribute's docstring for its type."""
    kinds = [place for place, line in enumerate(lines) if line.startswith(":type: ")]
    if what in ("attribute", "data", "property") and kinds:
        before = lines.pop(kinds[0]).removeprefix(":type: ")
        lines[0] = f"{before}: {lines[0]}"


def setup(app):
    app.add_directive("configuration-keys", ConfigurationKeys)
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", _keep_colons, priority=900)
