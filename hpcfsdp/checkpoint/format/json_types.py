"""Checks the types of JSON values in a file before they are used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcfsdp.checkpoint.format import entry_names as names, schema
from hpcfsdp.checkpoint.format.plain_values import fits
from hpcfsdp.text import json_input

_PLAIN = (bool, int, float)


def check_optimizer(groups: Any, scalars: Any, *, named: bool) -> None:
    """Raises ValueError unless these are an optimizer's hyper-parameters and numbers, or None.

    `named`: each group must list its parameters by name; with torch.distributed.checkpoint they may be numbers.
    """
    if groups is not None:
        check_type(groups, list, schema.PARAM_GROUPS)
    for number, group in enumerate(groups or ()):
        place = f"{schema.PARAM_GROUPS}[{number}]"
        check_type(group, dict, place)
        params = group.get("params")
        if named and not (isinstance(params, list) and all(isinstance(name, str) for name in params)):
            raise ValueError(f"{place}['params'] is {_short(params)}, no list of names of parameters")
    if scalars is not None:
        check_type(scalars, dict, schema.OPTIM_SCALARS)
    for name, value in (scalars or {}).items():
        if type(value) not in _PLAIN or not name.rpartition("/")[0]:
            raise ValueError(f"{schema.OPTIM_SCALARS}[{name!r}] is {_short(value)}, no number of a parameter")


def odd_hyper_parameters(groups: list[dict[str, Any]] | None) -> list[str]:
    """Descriptions of hyper-parameters that torch's optimizers could not use. Other optimizers might."""
    return [
        f"group {number}: {key} is {_short(group[key])}, {what}"
        for number, group in enumerate(groups or ())
        for key, (fits, what) in _HYPER_PARAMETERS.items()
        if key in group and not fits(group[key])
    ]


def check_module_states(states: Mapping[str, Any]) -> None:
    """Raises ValueError unless these are states of modules with their types; see ``plain_values.to_plain``."""
    for name, state in states.items():
        place = f"{schema.MODULE_STATES}[{name!r}]"
        if not isinstance(state, list) or len(state) != 2:
            raise ValueError(f"{place} is {_short(state)}, no value with its types")
        check_types(*state, place)


def check_types(value: Any, types: Any, place: str) -> None:
    """Raises ValueError unless ``from_plain(value, types)`` succeeds. `place` names the value in messages."""
    check_type(types, (list, tuple), f"types of {place}")
    done, entries = set[tuple[int, ...]](), dict[int, list[Any]]()
    for entry in types:
        is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[0], (list, tuple))
        if not is_pair or not all(type(position) is int and position >= 0 for position in entry[0]):
            raise ValueError(f"types of {place} have {_short(entry)}, no place with a type")
        path, kind = tuple(entry[0]), entry[1]
        # What is in a tuple cannot be changed any more.
        if any(path[:length] in done for length in range(len(path) + 1)):
            raise ValueError(f"types of {place} have {list(path)} twice, or after its container")
        done.add(path)
        if not isinstance(kind, str) or not fits(kind, _at(value, path, place, entries)):
            raise ValueError(f"types of {place} have {kind!r} at {list(path)}, where no such thing is")


def check_entries(entries: Any, tensors: Mapping[str, Any], index: Mapping[str, Any]) -> None:
    """Raises ValueError unless each entry of a torch.distributed.checkpoint state dict is where its metadata claim.

    Args:
        tensors: paths of tensors and their aliases.
        index: values by kind of entry: ``names.GROUP``, ``names.SCALAR``, ``names.EXTRA``.
    """
    check_type(entries, list, schema.STATE_DICT)
    for number, found in enumerate(entries):
        where = f"{schema.STATE_DICT}[{number}]"
        check_type(found, dict, where)
        kinds = set(found) - {"path", "types"}
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        keys = [found.get(key) for key in ("path", kind)]
        if kind not in names.KINDS or not all(keys) or not json_input.fits(keys, [[(str, int)]]):
            raise ValueError(f"{where} is {_short(found)}, no path of an entry with its place")
        entry = names.Entry(tuple(found["path"]), kind, tuple(found[kind]))
        if kind == names.TENSOR:
            value: Any = tensors.get(entry.dataset)
        else:
            try:
                value = names.get_at(index[kind], entry.place)
            except (LookupError, TypeError):
                raise ValueError(f"{where} claims that {names.dotted(entry.path)!r} is at an empty place") from None
        if kind == names.TENSOR and value is None:
            raise ValueError(
                f"{where} claims that {names.dotted(entry.path)!r} is {entry.dataset!r}, which is no tensor"
            )
        check_types(value, found.get("types", ()), where)


def check_type(value: Any, kind: Any, place: str) -> None:
    """Raises ValueError unless the value is an object or list, as `kind` is."""
    if not isinstance(value, kind):
        raise ValueError(f"{place} is {_short(value)}, no {'object' if kind is dict else 'list'}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _at(value: Any, path: tuple[int, ...], place: str, entries: dict[int, list[Any]]) -> Any:
    """`entries` of dicts are kept: there may be many places in one."""
    for position in path:
        if isinstance(value, dict) and id(value) not in entries:
            entries[id(value)] = list(value.values())
        inside = entries[id(value)] if isinstance(value, dict) else value
        if not isinstance(inside, list) or position >= len(inside):
            raise ValueError(f"types of {place} have {list(path)}, where nothing is")
        value = inside[position]
    return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


_HYPER_PARAMETERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "betas": (_are_numbers, "no numbers"),
    # Adafactor of transformers has none, and a tensor is kept as a list.
    "lr": (lambda value: value is None or _is_number(value) or _are_numbers(value), "no number"),
}
