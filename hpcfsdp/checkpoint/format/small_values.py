"""Read attributes, tables and small values of a checkpoint, and check each, and its types, before use.

HDF5 has parsed them by then. Some layouts make it expand few bytes to many, or read other files: whatever this
package does not write is refused.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import entry_names as names, schema
from hpcfsdp.checkpoint.format.access import MemoryBudget
from hpcfsdp.checkpoint.format.plain_values import fits, from_plain, join_arrays
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from hpcfsdp.text import json_input

_OPTIMIZER = schema.PARAM_GROUPS, schema.GROUP_TYPES, schema.OPTIM_SCALARS
_EXTRA = schema.EXTRA_VALUES, schema.EXTRA_TYPES, schema.MODULE_STATES, schema.DATA
_SINGLE = *_OPTIMIZER, *_EXTRA, schema.CONFIG, schema.STATE_DICT, schema.TENSORS, schema.SHAPES, schema.LINKS


def attribute_text(value: Any) -> str:
    """Return the text of an attribute."""
    return value.decode() if isinstance(value, bytes) else str(value)


def required_attribute(file: h5py.File, name: str, kind: Callable[[Any], Any]) -> Any:
    """Return an attribute of the root group, converted by `kind`; raise ValueError if it is missing or invalid."""
    value = schema.attribute(file, name)
    with contextlib.suppress(ValueError):
        if value is not None:
            return kind(value)
    raise ValueError(f"the attribute {name} is missing or invalid")


def check_kind(path: Path, file: h5py.File) -> str:
    """Return the version of the format; raise CheckpointError for an unsupported one or a part of a checkpoint."""
    kind = attribute_text(schema.attribute(file, "format"))
    if kind == schema.PART_FORMAT:
        whole = attribute_text(schema.attribute(file, "checkpoint"))
        what = f"{path}: holds a part of the checkpoint {whole}, which is to be opened instead"
        raise CheckpointError(what).of_kind("part")
    if kind != schema.FORMAT:
        what = f"{path}: an HDF5 file, but not an hpcfsdp checkpoint"
        raise CheckpointCorruptError(what).of_kind("not_a_checkpoint")
    version = required_attribute(file, "format_version", attribute_text)
    major, known = (int(each.split(".")[0]) for each in (version, schema.FORMAT_VERSION))
    if major < 0:
        raise ValueError(f"{version!r} is no version of a format")
    if major != known:
        what = f"{path}: has format version {version}, this hpcfsdp reads {schema.FORMAT_VERSION}: use "
        raise CheckpointError(f"{what}{'a newer' if major > known else 'an older'} hpcfsdp").of_kind("version")
    return version


class SmallDatasets:
    """Small datasets of a file. `places` lists (first byte, end) of those that were read."""

    def __init__(self, path: Path, file: h5py.File, end: int, budget: MemoryBudget) -> None:
        """`end` is where HDF5's part of the file ends."""
        self._path, self._file, self._end, self._budget = path, file, end, budget
        self.places: list[tuple[int, int]] = []

    def get(self, name: str) -> h5py.Group | h5py.Dataset | None:
        """Return a group or dataset, None if there is none; raise for links to other places."""
        found: Any = self._file
        for part in name.split("/"):
            link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise self._damaged(name, "is reached by a link that is no hard one")
            found = found[part]
        return found

    def read(self, name: str, regions: Iterable[tuple[int, int]] | None = None) -> Any:
        """Return the value of a dataset. Raise CheckpointCorruptError unless its bytes are unencoded in this file.

        One of `regions`, (first byte, end), must contain all of it. They lack zeros at ends: this suits tables alone.
        """
        dataset = self.get(name)
        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None or dataset.dtype.hasobject:
            raise self._damaged(name, "is not there, or no array of numbers or text")
        layout = dataset.id.get_create_plist()
        if layout.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT) or layout.get_nfilters():
            raise self._damaged(name, "is chunked, filtered or virtual")
        nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
        if nbytes and layout.get_layout() == h5py.h5d.CONTIGUOUS:
            begin = dataset.id.get_offset()
            if layout.get_external_count() or begin is None:
                raise self._damaged(name, f"has none of its {nbytes} bytes in the file")
            end = begin + nbytes
            if end > self._end:
                raise self._damaged(name, f"ends at byte {end}, behind the end of the data, {self._end}")
            if regions is not None and not any(first <= begin and end <= last for first, last in regions):
                raise self._damaged(name, "has bytes without a checksum")
            self.places.append((begin, end))
        try:
            self._budget.claim(nbytes)
        except ValueError as error:
            raise self._damaged(name, f"has {nbytes} bytes: {error}") from None
        value = dataset[...]
        return value.item() if value.dtype.kind == "S" and not value.shape else value

    def _damaged(self, name: str, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self._path}: damaged: {name} {what}")


def read_small(values: SmallDatasets) -> dict[str, Any]:
    """Return all datasets but tensors and the table of extents, as they were given to ``build_metadata_image``."""
    names = [name for name in _SINGLE if values.get(name) is not None]
    metric = [f"/{part}" for part in schema.METRIC_PARTS]
    for group, ends in ((schema.EXTRA_ARRAYS, [""]), (schema.RNG, [""]), (schema.METRICS, metric)):
        if isinstance(found := values.get(group), h5py.Group):
            names += [f"{group}/{name}{end}" for name in found for end in ends]
    return {name: values.read(name) for name in names}


def read_specs(tensors: np.ndarray, sizes: np.ndarray) -> dict[str, schema.TensorSpec]:
    """Return the tensors of the two tables; raise ValueError where these are invalid."""
    if sizes.ndim != 1 or sizes.dtype.kind != "u":
        raise ValueError(f"{schema.SHAPES} is no list of sizes")
    shape = sizes.tolist()
    found: dict[str, schema.TensorSpec] = {}
    for path, dtype, first, ndim in _rows(schema.TENSORS, tensors):
        name = path.decode()
        if ndim > schema.MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {ndim} dimensions; a tensor has {schema.MOST_DIMENSIONS} at most")
        spec = schema.TensorSpec(name, tuple(shape[first : first + ndim]), dtype.decode())
        if not schema.supported(spec.dtype) or len(spec.shape) != ndim:
            raise ValueError(f"{name!r} has the dtype {dtype!r} and {ndim} dimensions, which are not known here")
        if found.setdefault(name, spec) is not spec:
            raise ValueError(f"{schema.TENSORS} has {name!r} twice")
    return found


def read_links(links: np.ndarray, specs: dict[str, schema.TensorSpec]) -> dict[str, str]:
    """Return the path of each alias; raise ValueError for an unknown tensor, or a path that occurs twice."""
    paths, found = list(specs), {}
    for path, tensor in _rows(schema.LINKS, links):
        name = path.decode()
        if name in specs or name in found or tensor >= len(paths):
            raise ValueError(f"{schema.LINKS} has {name!r} for tensor {tensor}, which cannot be")
        found[name] = paths[tensor]
    return found


class PartFile(NamedTuple):
    """A file next to the checkpoint that stores elements of tensors: its name, bytes, and the digest of its footer."""

    name: str
    nbytes: int
    digest: int


def read_parts(values: SmallDatasets, regions: Iterable[tuple[int, int]]) -> tuple[PartFile, ...]:
    """Return the part files; raise ValueError for a name outside of this folder."""
    if values.get(schema.FILES) is None:
        return ()
    rows = _rows(schema.FILES, values.read(schema.FILES, regions))
    parts = tuple(PartFile(name.decode(), *rest) for name, *rest in rows)
    for name, *_ in parts:
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise ValueError(f"it names a part {name!r}, which is no name of a file")
    return parts


def _rows(name: str, table: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table, a few thousand at a time as Python objects."""
    wanted, found = ([(f, d[f].kind) for f in d.names or ()] for d in (schema.table_dtype(name, 1), table.dtype))
    if table.ndim != 1 or found != wanted:
        raise ValueError(f"{name} is no table of {', '.join(schema.TABLES[name])}")
    for first in range(0, len(table), 1 << 12):
        yield from table[first : first + (1 << 12)].tolist()


def read_json(small: dict[str, Any], name: str) -> Any:
    """Return the value of a dataset of JSON; raise ValueError, naming the dataset, for other content."""
    found = small.get(name)
    if not isinstance(found, bytes):
        raise ValueError(f"{name} is no text")
    try:
        return schema.from_json(found)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_extra(small: dict[str, Any], name: str) -> dict[str, Any]:
    """Return values with their arrays; raise ValueError where they are invalid."""
    prefix = f"{schema.EXTRA_ARRAYS}/"
    arrays = {path.removeprefix(prefix): value for path, value in small.items() if path.startswith(prefix)}
    try:
        found = join_arrays(read_json(small, name), arrays)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name} is not as it is written: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def read_place(small: dict[str, Any]) -> dict[str, Any] | None:
    """Return the place in the data, None without one; raise ValueError where it is invalid."""
    if schema.DATA not in small:
        return None
    found = read_extra(small, schema.DATA)
    if found.keys() != {"state", "types"}:
        raise ValueError(f"{schema.DATA} is not as it is written")
    check_type(found["state"], dict, schema.DATA)
    check_types(found["state"], found["types"], schema.DATA)
    return from_plain(found["state"], found["types"])


def read_metrics(small: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return curves by name: steps, values. Raise ValueError unless they are numbers of equal counts."""
    paths = {path.rpartition("/")[0] for path in small if path.startswith(f"{schema.METRICS}/")}
    found = {}
    for path in sorted(paths):
        steps, values = (np.asarray(small[f"{path}/{part}"]) for part in schema.METRIC_PARTS)
        if steps.ndim != 1 or steps.shape != values.shape or steps.dtype.kind not in "iu" or values.dtype.kind != "f":
            what = f"{steps.shape} steps of {steps.dtype} and {values.shape} values of {values.dtype}"
            raise ValueError(f"{path!r} has {what}")
        found[path.removeprefix(f"{schema.METRICS}/")] = steps, values
    return found


def check_optimizer(groups: Any, scalars: Any, *, named: bool) -> None:
    """Raise ValueError unless these are an optimizer's hyper-parameters and numbers, or None.

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
        if type(value) not in (bool, int, float) or not name.rpartition("/")[0]:
            raise ValueError(f"{schema.OPTIM_SCALARS}[{name!r}] is {_short(value)}, no number of a parameter")


def odd_hyper_parameters(groups: list[dict[str, Any]] | None) -> list[str]:
    """Return descriptions of hyper-parameters that torch's optimizers could not use. Other optimizers might."""
    odd = []
    for number, group in enumerate(groups or ()):
        betas, lr = group.get("betas", [0.0]), group.get("lr")
        if not (isinstance(betas, list) and _are_numbers(betas)):
            odd.append(f"group {number}: betas is {_short(betas)}, no numbers")
        # Adafactor of transformers has none, and a tensor is kept as a list.
        if not (lr is None or _are_numbers(lr if isinstance(lr, list) else [lr])):
            odd.append(f"group {number}: lr is {_short(lr)}, no number")
    return odd


def _are_numbers(values: list[Any]) -> bool:
    return bool(values) and all(type(value) in (int, float) for value in values)


def check_module_states(states: Mapping[str, Any]) -> None:
    """Raise ValueError unless these are states of modules with their types; see ``plain_values.to_plain``."""
    for name, state in states.items():
        place = f"{schema.MODULE_STATES}[{name!r}]"
        if not isinstance(state, list) or len(state) != 2:
            raise ValueError(f"{place} is {_short(state)}, no value with its types")
        check_types(*state, place)


def check_types(value: Any, types: Any, place: str) -> None:
    """Raise ValueError unless ``from_plain(value, types)`` succeeds. `place` names the value in messages."""
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
    """Raise ValueError unless each entry of a state dict is among `tensors` and aliases, or in `index`, by its kind."""
    check_type(entries, list, schema.STATE_DICT)
    for number, found in enumerate(entries):
        where = f"{schema.STATE_DICT}[{number}]"
        check_type(found, dict, where)
        kinds = set(found) - {"path", "types"}
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        keys = [found.get(key) for key in ("path", kind)]
        if kind not in names.KINDS or not all(keys) or not json_input.fits(keys, [[(str, int)]]):
            raise ValueError(f"{where} is {_short(found)}, no path of an entry with its place")
        entry = names.StateEntry(tuple(found["path"]), kind, tuple(found[kind]))
        claim = f"{where} claims that {names.dotted(entry.path)!r} is"
        if kind == names.TENSOR and entry.dataset not in tensors:
            raise ValueError(f"{claim} {entry.dataset!r}, which is no tensor")
        try:
            value = tensors[entry.dataset] if kind == names.TENSOR else names.get_at(index[kind], entry.place)
        except (LookupError, TypeError):
            raise ValueError(f"{claim} at an empty place") from None
        check_types(value, found.get("types", ()), where)


def check_type(value: Any, kind: Any, place: str) -> None:
    """Raise ValueError unless the value is an object or list, as `kind` is."""
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
