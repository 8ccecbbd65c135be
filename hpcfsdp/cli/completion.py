"""``hpcfsdp completion SHELL``: a script with which a shell completes verbs, options, choices and files."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.main import VERBS

_SHELLS = ("bash", "zsh", "fish")


class Words(NamedTuple):
    """What can follow a verb: options with their help, choices of an option's value, and of the first argument."""

    options: dict[str, str]
    choices: dict[str, tuple[str, ...]]
    first: tuple[str, ...]


parser = Parser(
    "completion",
    "Print a script with which a shell completes hpcfsdp's verbs, options and files.",
    'eval "$(hpcfsdp completion bash)"   # in ~/.bashrc',
    'eval "$(hpcfsdp completion zsh)"    # in ~/.zshrc, after compinit',
    "hpcfsdp completion fish > ~/.config/fish/completions/hpcfsdp.fish",
)
parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def main(arguments: Sequence[str]) -> int:
    """Print the script, and return the exit code."""
    options = parser.parse_args(arguments)
    words = {verb: words_of(importlib.import_module(module)) for verb, (module, _) in VERBS.items()}
    print(_fish(words) if options.shell == "fish" else _bash(words, for_zsh=options.shell == "zsh"), end="")
    return 0


def words_of(module: object) -> Words:
    """Return the words of a verb, from the parser of its module; ``train`` makes it when it is asked."""
    options, of_options, first = {}, {}, ()
    for action in (module.parser() if callable(module.parser) else module.parser)._actions:
        choices = tuple(map(str, action.choices or ()))
        for option in action.option_strings:
            if option.startswith("--") and not option.endswith("+"):
                options[option] = "" if action.help in (None, argparse.SUPPRESS) else " ".join(str(action.help).split())
                of_options |= {option: choices} if choices else {}
        if not action.option_strings and choices:
            first = choices
    return Words(options, of_options, first)


def _bash(words: Mapping[str, Words], for_zsh: bool) -> str:
    """For zsh the same script: its bashcompinit runs completions of bash."""
    options = "".join(f"    {verb}) words='{' '.join(of.options)}' ;;\n" for verb, of in words.items())
    choices = "".join(
        f"    '{verb} {option}') words='{' '.join(known)}' ;;\n"
        for verb, of in words.items()
        for option, known in of.choices.items()
    )
    first = "".join(f"    {verb}) words='{' '.join(of.first)}' ;;\n" for verb, of in words.items() if of.first)
    return f"""{"autoload -U +X bashcompinit && bashcompinit" if for_zsh else "# for bash"}
_hpcfsdp() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}" words=''
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(words)} --help --version' -- "$cur"))
    return
  fi
  case "$verb $prev" in
{choices}  esac
  if [ -z "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then
    case "$verb" in
{first}    esac
  fi
  if [ "${{cur:0:1}}" = - ]; then
    case "$verb" in
{options}    esac
  fi
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  else
    local IFS=$'\\n'
    COMPREPLY=($(compgen -f -- "$cur"))
  fi
}}
complete -o filenames -F _hpcfsdp hpcfsdp
"""


def _fish(words: Mapping[str, Words]) -> str:
    first = "complete -c hpcfsdp -n __fish_use_subcommand -f -a"
    lines = [f"{first} {verb} -d {shlex.quote(text)}" for verb, (_, text) in VERBS.items()]
    for verb, of in words.items():
        after = f"complete -c hpcfsdp -n '__fish_seen_subcommand_from {verb}'"
        lines += [f"{after} -f -a {shlex.quote(' '.join(of.first))}"] if of.first else []
        for option, text in of.options.items():
            known = f" -x -a {shlex.quote(' '.join(of.choices[option]))}" if option in of.choices else ""
            lines.append(f"{after} -l {option.removeprefix('--')}{known} -d {shlex.quote(text.split(';')[0])}")
    return "\n".join(lines) + "\n"
