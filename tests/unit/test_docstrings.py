"""Docstrings of what users call: each argument is named. Ruff checks the style of all docstrings (``make lint``)."""

import dataclasses
import importlib
import inspect
import re

import pytest

MODULES = ("", ".checkpoint", ".errors", ".fsdp", ".fsdp2", ".observe", ".optim", ".preempt", ".state_dict", ".wrap")
PASSED_ON = {"args", "kwargs"}


def is_ours(value):
    return getattr(value, "__module__", "").startswith("hpcfsdp")


def methods_of(kind):
    """The public methods that a class defines, with the docstrings in which their arguments may be named."""
    about = inspect.getdoc(kind) or ""
    for name, value in vars(kind).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        # What a class of another library defines, its page describes; the arguments of a record are its attributes.
        others = any(name in vars(base) for base in kind.__mro__[1:] if not is_ours(base))
        is_record = name == "__init__" and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))
        is_called = name == "__init__" or not (name.startswith("_") or others)
        if inspect.isfunction(function) and is_ours(function) and is_called and not is_record:
            yield name, function, f"{about}\n{inspect.getdoc(function) or ''}"


def documented():
    """(name, function, docstrings) of every function and method that users call."""
    for end in MODULES:
        module = importlib.import_module(f"hpcfsdp{end}")
        for name in getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")]):
            value = getattr(module, name)
            if inspect.isclass(value) and is_ours(value):
                yield from ((f"{name}.{method}", function, text) for method, function, text in methods_of(value))
            elif inspect.isfunction(value) and is_ours(value):
                yield name, inspect.unwrap(value), inspect.getdoc(value) or ""


def unnamed(function, text):
    names = [name for name in inspect.signature(function).parameters if name not in {"self", "cls", *PASSED_ON}]
    return [name for name in names if not name.startswith("_") and not re.search(rf"\b{name}\b", text)]


def test_each_argument_of_a_public_function_is_named():
    found = list(documented())
    assert len(found) > 80
    missing = {name: unnamed(function, text) for name, function, text in found}
    assert not {name: names for name, names in missing.items() if names}


@pytest.mark.parametrize(("text", "names"), [("Do it `fast`.", ["path"]), ("Do it to `path`, `fast`.", [])])
def test_an_argument_that_is_not_named_is_found(text, names):
    def function(path, fast, *args, _private=0): ...

    assert unnamed(function, text) == names
