"""Typed configuration from dataclasses: flag > environment (``HPCFSDP_*``) > file > default, nothing unknown accepted.

jsonargparse checks and converts types. This module adds an error for unknown keys from any source, which names the key,
its source and the nearest known key.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpcfsdp import env
from hpcfsdp.errors import UsageError, nearest, needs_extra
from hpcfsdp.text import safe_files

with needs_extra("cli", "hpcfsdp.config"):
    import yaml
    from jsonargparse import ArgumentParser, set_parsing_settings

Config = TypeVar("Config")

_OWN_FLAGS = ("config", "help", "print_config")


def parse(kind: type[Config], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None) -> Config:
    """Return a configuration of the dataclass `kind` from command-line arguments, environment and the file they name.

    Args:
        argv: flags ``--section.key value``, ``--config FILE``; a first argument without dashes is the file, too. A
            flag of a bool may stand without a value: it is true then.
        prog: name of the command, for messages.
        environ: ``HPCFSDP_SECTION__KEY`` variables; by default those of the process.

    Raises:
        UsageError: an unknown key, a value of the wrong type, or a file that cannot be read.
        SystemExit: after ``--help`` or ``--print_config``.
    """
    arguments = list(argv)
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--config", arguments[0]]
    values = env.config_values() if environ is None else dict(environ)
    keys = known_keys(kind)
    _check_flags(arguments, keys)
    known = [_variable(key) for key in (*keys, "config")]
    if (unknown := next((variable for variable in values if variable not in known), None)) is not None:
        raise UsageError(f"unknown environment variable {unknown}{nearest(unknown, known)}")
    switches = {f"--{key}" for key, hint in _fields(kind) if hint is bool}  # which may stand without a value
    pairs = itertools.pairwise([*arguments, "--"])
    files, flags = _split_files(f"{a}=true" if a in switches and after.startswith("--") else a for a, after in pairs)
    files = files or ([values[_variable("config")]] if _variable("config") in values else [])
    files = [path for path in files if _has_keys(Path(path), keys)]
    # In jsonargparse a file overrides the environment: give it everything as flags, the last of which counts.
    ordered = [f"--config={path}" for path in files]
    ordered += [f"--{key}={values[_variable(key)]}" for key in keys if _variable(key) in values]
    parser = parser_of(kind, prog)
    try:
        parsed = parser.parse_args([*ordered, *flags], env=False)
        return typing.cast(Config, _build(kind, parsed.as_dict()))
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        raise UsageError(f"{prog.removeprefix('hpcfsdp ')}: {_one_line(error)}") from error


def known_keys(kind: type) -> list[str]:
    """Return all keys of a configuration, ``section.key`` for those of a section."""
    return [key for key, _ in _fields(kind)]


def _fields(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration with their types, those of a section after the section."""
    for name, hint in typing.get_type_hints(kind).items():
        yield prefix + name, hint
        if dataclasses.is_dataclass(hint):
            yield from _fields(typing.cast(type, hint), f"{prefix}{name}.")


class _Dumper(yaml.SafeDumper):
    """Quotes text that some readers of YAML take for a number, as "0E0"."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?|\d*\.)[\d_]*[eE][-+]?\d+$"), list("-+.0123456789")
)


def write_yaml(config: Any, path: Path) -> None:
    """Write a configuration so that ``--config`` reads it back."""
    safe_files.replace(path, yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False).encode())


def parser_of(kind: type, prog: str) -> ArgumentParser:
    """Return the parser of the keys of a configuration, as ``--section.key``."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the docstring below a field is its help
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [run.yaml] [--section.key value ...]",
        env_prefix=env.CONFIG_PREFIX.rstrip("_"),
        default_env=True,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with sections and keys as below")
    parser.add_class_arguments(kind)
    return parser


def _build(kind: type, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    given = {entry.name: values[entry.name] for entry in dataclasses.fields(kind)}
    return kind(**{n: _build(hints[n], value) if isinstance(value, Mapping) else value for n, value in given.items()})


def _check_flags(arguments: Sequence[str], keys: Sequence[str]) -> None:
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            name = argument[2:].split("=", 1)[0].removesuffix("+")
            if name not in keys and name not in _OWN_FLAGS:
                raise UsageError(f"unknown option --{name}{nearest(name, keys)}")


def _variable(key: str) -> str:
    return env.CONFIG_PREFIX + key.upper().replace(".", "__")


def _split_files(arguments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files that ``--config`` names, and all other arguments."""
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, path = argument.partition("=")
        if flag != "--config":
            others.append(argument)
        elif equals:
            files.append(path)
        elif (following := next(rest, None)) is not None:
            files.append(following)
        else:
            raise UsageError("--config needs the path of a file")
    return files, others


def _has_keys(path: Path, keys: Sequence[str]) -> bool:
    """Return whether a configuration file has any keys. Raises if it cannot be read or has an unknown key."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"configuration file {path}: not YAML: {_one_line(error)}") from None
    if content is not None and not isinstance(content, Mapping):
        raise UsageError(f"configuration file {path}: must hold keys and values, not a {type(content).__name__}")
    for name, value in _flatten(content or {}):
        if value is None and any(key.startswith(f"{name}.") for key in keys):
            raise UsageError(f"configuration file {path}: section {name!r} is empty: leave it out, or give it keys")
        if name not in keys:
            raise UsageError(f"configuration file {path}: unknown key {name!r}{nearest(name, keys)}")
    return bool(content)


def _flatten(content: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in content.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")


def _one_line(error: BaseException) -> str:
    """Return jsonargparse's message on one line, with the key in front and types without "class"."""
    text = re.sub(r'^Parser key "(.+?)": ?', r"\1: ", " ".join(str(error).split()))
    return re.sub(r"Expected an? <class '(\w+)'>\. Got value: ", r"expected \1, got ", text)
