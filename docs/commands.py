"""Writes docs/reference/commands.md from the parsers of the commands: ``python docs/commands.py``."""

import argparse
import importlib
import textwrap
from pathlib import Path

from hpcfsdp.cli.main import VERBS

PAGE = Path(__file__).parent / "reference" / "commands.md"

_TOP = """\
# Commands

`hpcfsdp <verb> --help` shows the same on a terminal. Data goes to stdout, messages to stderr; exit codes are listed in
[exit-codes.md](exit-codes.md). With `--json` a verb prints JSON, and on failure an object with the key `error`.
This page is written by `python docs/commands.py` from the parsers of the commands.
"""


def render() -> str:
    """The page."""
    parts = [_TOP, "\n".join(f"- [`hpcfsdp {verb}`](#hpcfsdp-{verb}): {text}" for verb, (_, text) in VERBS.items())]
    for verb, (name, _) in VERBS.items():
        module = importlib.import_module(name)
        parts += _section(verb, module)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(verb: str, module: object) -> list[str]:
    parser = module.parser()
    examples = module.EXAMPLES if verb == "train" else parser.examples
    parts = [f"## hpcfsdp {verb}"]
    if verb == "train":
        parts.append(
            "Trains the byte-level GPT of the package. It takes a YAML file and `--section.key value` for every key\n"
            "of its configuration: [configuration.md](configuration.md) lists them."
        )
    else:
        parts += [textwrap.fill(parser.description, 120), _table(parser)]
    parts.append("```console\n" + "\n".join(f"$ {line}" for line in examples) + "\n```")
    return parts


def _table(parser: argparse.ArgumentParser) -> str:
    rows = ["| argument | meaning |", "| --- | --- |"]
    for action in sorted(parser._actions, key=lambda action: bool(action.option_strings)):
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        value = value if action.nargs != 0 else ""
        name = " ".join(filter(None, [", ".join(action.option_strings), str(value)]))
        name += "..." if action.nargs in ("*", "+") else ""
        text = " ".join((action.help or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {text} |".replace("  |", " |"))
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render())
