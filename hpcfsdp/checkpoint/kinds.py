"""Whether JSON values of a file are of the types that they are written with, before anybody relies on it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.dcp import entry_names as names
from hpcfsdp.checkpoint.format import schema

_PLAIN = (bool, int, float)


def check_optimizer(groups: Any, scalars: Any, *, named: bool) -> None:
    """Raise unless these are the hyper-parameters and plain numbers of an optimizer; None where there is none.

    Args:
        named: whether each group lists its parameters by names. torch.distributed.checkpoint may be given numbers.

    Raises:
        ValueError: they are not; says where.
    """
    if groups is not None:
        _check(groups, list, schema.PARAM_GROUPS)
    for number, group in enumerate(groups or ()):
        place = f"{schema.PARAM_GROUPS}[{number}]"
        _check(group, dict, place)
        if named and not _are_names(group.get("params")):
            raise ValueError(f"{place}['params'] is {_short(group.get('params'))}, no list of names of parameters")
    if scalars is not None:
        _check(scalars, dict, schema.OPTIM_SCALARS)
    for name, value in (scalars or {}).items():
        if type(value) not in _PLAIN or not name.rpartition("/")[0]:
            raise ValueError(f"{schema.OPTIM_SCALARS}[{name!r}] is {_short(value)}, no number of a parameter")


def odd_hyper_parameters(groups: list[dict[str, Any]] | None) -> list[str]:
    """What no optimizer of torch could compute with, in words. Another one might."""
    return [
        f"group {number}: {key} is {_short(group[key])}, {what}"
        for number, group in enumerate(groups or ())
        for key, (fits, what) in _HYPER_PARAMETERS.items()
        if key in group and not fits(group[key])
    ]


def check_module_states(states: Mapping[str, Any]) -> None:
    """Raise unless these are states of modules, each with what became of its types; see ``values.plain``.

    Raises:
        ValueError: they are not; says where.
    """
    for name, state in states.items():
        place = f"{schema.MODULE_STATES}[{name!r}]"
        if not isinstance(state, list) or len(state) != 2:
            raise ValueError(f"{place} is {_short(state)}, no value with its types")
        check_types(*state, place)


def check_types(value: Any, types: Any, place: str) -> None:
    """Raise unless ``values.rebuilt(value, types)`` gives a value back.

    Args:
        place: of the value in the file, for the message.

    Raises:
        ValueError: it does not.
    """
    _check(types, (list, tuple), f"types of {place}")
    done: set[tuple[int, ...]] = set()
    for entry in types:
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and _are_places(entry[0])):
            raise ValueError(f"types of {place} have {_short(entry)}, no place with a type")
        path, kind = tuple(entry[0]), entry[1]
        # What is in a tuple cannot be changed any more.
        if any(path[:length] in done for length in range(len(path) + 1)):
            raise ValueError(f"types of {place} have {list(path)} twice, or after what it is in")
        done.add(path)
        if not isinstance(kind, str) or kind not in _MADE_OF or not _MADE_OF[kind](_at(value, path, place)):
            raise ValueError(f"types of {place} have {kind!r} at {list(path)}, where no such thing is")


def check_entries(entries: Any, tensors: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Raise unless each entry of a state dict of torch.distributed.checkpoint is where its metadata claims.

    Args:
        tensors: paths of tensors, further ones too.
        index: values by what entries call them: ``names.GROUP``, ``names.SCALAR``, ``names.EXTRA``.

    Raises:
        ValueError: one is not; says which.
    """
    _check(entries, list, schema.STATE_DICT)
    for number, found in enumerate(entries):
        where = f"{schema.STATE_DICT}[{number}]"
        _check(found, dict, where)
        kinds = set(found) - {"path", "types"}
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        if kind not in names.KINDS or not all(_are_keys(found.get(key)) for key in ("path", kind)):
            raise ValueError(f"{where} is {_short(found)}, no path of an entry with its place")
        entry = names.Entry(tuple(found["path"]), kind, tuple(found[kind]))
        if kind == names.TENSOR:
            value: Any = tensors.get(entry.dataset)
        else:
            try:
                value = names.get(index[kind], entry.place)
            except (LookupError, TypeError):
                raise ValueError(f"{where} says that {names.dotted(entry.path)!r} stands where nothing is") from None
        if kind == names.TENSOR and value is None:
            raise ValueError(f"{where} says that {names.dotted(entry.path)!r} is {entry.dataset!r}, which is no tensor")
        check_types(value, found.get("types", ()), where)


def _check(value: Any, kind: Any, place: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{place} is {_short(value)}, no {'object' if kind is dict else 'list'}")


def check_object(value: Any, place: str) -> None:
    """Raise unless it is an object, or null.

    Raises:
        ValueError: it is not.
    """
    if value is not None:
        _check(value, dict, place)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _are_names(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def _are_places(found: Any) -> bool:
    return isinstance(found, (list, tuple)) and all(type(place) is int and place >= 0 for place in found)


def _are_keys(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(type(key) in (str, int) for key in found)


def _at(value: Any, path: tuple[int, ...], place: str) -> Any:
    for position in path:
        inside = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(inside, list) or position >= len(inside):
            raise ValueError(f"types of {place} have {list(path)}, where nothing is")
        value = inside[position]
    return value


def _is_array(value: Any, kinds: str) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in kinds and value.dtype.isnative


_MADE_OF: dict[str, Callable[[Any], bool]] = {
    "tuple": lambda value: isinstance(value, list),
    "tensor": lambda value: _is_array(value, "biufc"),
    "bytes": lambda value: _is_array(value, "u") and value.dtype.itemsize == 1,
}
"""What the values of types in ``values.rebuilt`` are made of."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


_HYPER_PARAMETERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "betas": (_are_numbers, "no numbers"),
    # Adafactor of transformers has none, and a tensor is kept as a list.
    "lr": (lambda value: value is None or _is_number(value) or _are_numbers(value), "no number"),
}
