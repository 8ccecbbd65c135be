"""User values next to the tensors, as JSON and arrays with the types that they had, and back. Pure.

A value comes back as it was, or it is refused; but sizes are tuples, and parameters tensors. Torch is loaded for its
own types alone.
"""

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.errors import CheckpointError

Place = tuple[int, ...]
"""Positions in lists and dicts, from outside inwards."""

Types = tuple[tuple[Place, str], ...]
"""Places in a value, and the types there: "tuple", "numpy float32". Inner places come before outer ones."""

_JSON, _BASES = (type(None), bool, int, float, str), (int, float, str, bytes, tuple, list, dict)
_ALLOWED = "numbers, strings, lists, tuples, dicts, bytes, arrays or tensors"


def to_plain(name: str, value: Any) -> tuple[Any, Types]:
    """Return a value of JSON's types and arrays, and the places of those that stand for other types.

    Raise CheckpointError for a value that would not come back as it was, with `name` and the place in the value.
    """
    types: list[tuple[Place, str]] = []

    def visit(item: Any, place: str, path: Place) -> Any:
        if type(item) in _JSON:
            return item
        kind, item = _form_of(item, name + place)
        if isinstance(item, dict):
            odd = next((key for key in item if type(key) not in _JSON), None)
            if odd is not None:
                raise CheckpointError(f"{name}{place}: key {odd!r} cannot be saved; use strings or numbers as keys")
            item = {key: visit(entry, f"{place}[{key!r}]", (*path, at)) for at, (key, entry) in enumerate(item.items())}
        elif isinstance(item, list):
            item = [visit(entry, f"{place}[{at}]", (*path, at)) for at, entry in enumerate(item)]
        if kind:
            types.append((path, kind))
        return item

    try:
        return visit(value, "", ()), tuple(types)
    except RecursionError:
        raise CheckpointError(f"{name}: {schema.TOO_DEEP}") from None


def from_plain(value: Any, types: Sequence[Any]) -> Any:
    """Undo ``to_plain``; raise IndexError for a place where nothing is. `types` may be of JSON. Copy no arrays."""
    kinds = {tuple(path): kind for path, kind in types}

    def visit(item: Any, path: Place) -> Any:
        if isinstance(item, dict):
            item = {key: visit(entry, (*path, at)) for at, (key, entry) in enumerate(item.items())}
        elif isinstance(item, list):
            item = [visit(entry, (*path, at)) for at, entry in enumerate(item)]
        kind, _, detail = kinds.pop(path, "").partition(" ")
        return _TYPES[kind][2](item, detail) if kind else item

    found = visit(value, ()) if kinds else value
    if kinds:
        raise IndexError(f"nothing is at {next(iter(kinds))}")
    return found


def fits(kind: str, form: Any) -> bool:
    """Return whether there is such a type, and `form` can stand for a value of it."""
    name, _, detail = kind.partition(" ")
    of, details, _ = _TYPES.get(name, (type(None), (), None))
    return isinstance(form, of) and detail in details and (of is not np.ndarray or form.dtype.isnative)


def _form_of(item: Any, where: str) -> tuple[str, Any]:
    """Return the type of an item, empty for one that needs none, and what stands for the item."""
    kind, torch = type(item), sys.modules.get("torch")
    name, form = kind.__name__, item
    if kind in (list, dict) or (kind is np.ndarray and item.dtype.kind in "biufc"):
        name = ""
    elif kind is tuple or (torch and kind is torch.Size):
        name, form = "tuple", list(item)
    elif kind in (Counter, OrderedDict):
        form = dict(item)
    elif kind is defaultdict and item.default_factory in _FACTORIES.values():
        name, form = f"{name} {getattr(item.default_factory, '__name__', None)}", dict(item)
    elif kind in (bytes, bytearray):
        form = np.frombuffer(bytes(item), np.uint8)
    elif isinstance(item, np.generic) and item.dtype.name in _NUMBERS:
        name, form = f"numpy {item.dtype.name}", item.item()
    elif torch and kind in (torch.Tensor, torch.nn.Parameter):
        dtype = str(item.dtype).removeprefix("torch.")
        name, form = f"tensor {dtype}" if dtype in schema.WITHOUT_NUMPY else "tensor", _array_of(item, where)
    else:
        plain = next((f"{base.__name__}(...) of it" for base in _BASES if isinstance(item, base)), _ALLOWED)
        what = f"{where} is a {name}, and nothing is pickled into a checkpoint"
        raise CheckpointError(f"{what}: keep {plain} in its place, or leave it out")
    return name, form


def _array_of(tensor: Any, where: str) -> np.ndarray:
    """Return a copy of a tensor: of bfloat16 as float32, of 8-bit floats their bits."""
    torch = sys.modules["torch"]
    try:
        values = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)  # numpy() would mark its storage
        if values.dtype is torch.bfloat16:
            bits = values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
            return np.asarray(bits << 16, np.uint32).view(np.float32)
        if str(values.dtype).removeprefix("torch.") in schema.WITHOUT_NUMPY:
            values = values.view(torch.uint8)
        return np.asarray(values.numpy())
    except (TypeError, NotImplementedError, RuntimeError) as error:
        what = f"{where} is a tensor of {tensor.dtype} on {tensor.device} that no array can hold ({error})"
        remedy = "save a dense one of another dtype, such as tensor.float(), or leave it out"
        raise CheckpointError(f"{what}: {remedy}") from None


def _tensor_of(array: np.ndarray, dtype: str) -> Any:
    import torch

    if dtype == "bfloat16":
        array = np.asarray(array.view(np.uint32) >> 16, np.uint16)
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(getattr(torch, dtype)) if dtype else tensor


_FACTORIES = {"None": None, **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}}

_NUMBERS = {"bool", "float16", "float32", "float64", *(f"{sign}int{8 << n}" for sign in ("", "u") for n in range(4))}
"""Scalars of NumPy that are numbers in JSON."""

_TYPES: dict[str, tuple[Any, Collection[str], Callable[[Any, str], Any]]] = {
    "tuple": (list, ("",), lambda form, _: tuple(form)),
    "Counter": (dict, ("",), lambda form, _: Counter(form)),
    "OrderedDict": (dict, ("",), lambda form, _: OrderedDict(form)),
    "defaultdict": (dict, _FACTORIES, lambda form, name: defaultdict(_FACTORIES[name], form)),
    "numpy": ((bool, int, float), _NUMBERS, lambda form, name: np.dtype(name).type(form)),
    "bytes": (np.ndarray, ("",), lambda form, _: form.tobytes()),
    "bytearray": (np.ndarray, ("",), lambda form, _: bytearray(form.tobytes())),
    "tensor": (np.ndarray, {"", *schema.WITHOUT_NUMPY}, _tensor_of),
}
"""The form of a type, the details that it may have, and how a value is made of form and detail."""


_ARRAY_KEY = "__array__"
_ITEMS_KEY = "__items__"


def split_arrays(value: Any, first: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a value of ``to_plain`` with references in place of arrays, and the arrays, by number from `first` on."""
    arrays: dict[str, np.ndarray] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, dict):
            entries = {key: visit(entry) for key, entry in item.items()}
            if all(isinstance(key, str) and key not in (_ARRAY_KEY, _ITEMS_KEY) for key in entries):
                return entries
            return {_ITEMS_KEY: [list(pair) for pair in entries.items()]}  # JSON would make strings of the keys
        if isinstance(item, (list, tuple)):
            return [visit(entry) for entry in item]
        if not isinstance(item, np.ndarray):
            return item
        name = str(first + len(arrays))
        arrays[name] = item
        return {_ARRAY_KEY: name}

    return visit(value), arrays


def join_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Undo ``split_arrays``."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY_KEY}:
            return arrays[value[_ARRAY_KEY]]
        if set(value) == {_ITEMS_KEY}:
            return {key: join_arrays(entry, arrays) for key, entry in value[_ITEMS_KEY]}
        return {key: join_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [join_arrays(entry, arrays) for entry in value]
    return value


def leaves_of(name: str, value: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return short descriptions of all leaves of a value from ``split_arrays``, by place ("extra['data'][0]"). Pure."""
    found: dict[str, str] = {}

    def visit(item: Any, place: str) -> None:
        if isinstance(item, dict) and set(item) == {_ARRAY_KEY}:
            array = arrays[item[_ARRAY_KEY]]
            digest = schema.checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            found[place] = f"an array {list(array.shape)} of {array.dtype}, checksum {digest:016x}"
        elif isinstance(item, (dict, list, tuple)) and item:
            for key, entry in item.items() if isinstance(item, dict) else enumerate(item):
                visit(entry, f"{place}[{key!r}]")
        else:
            found[place] = repr(item)

    visit(value, name)
    return found
