"""Map entries of a state dict to places in a file, and back. Pure; needs neither MPI nor torch.

``torch.distributed.checkpoint`` flattens state dicts: an entry has a path, the keys from the outermost dict inwards,
and a name, its path with dots. In the file the model's tensors are in ``model`` and the optimizer's in
``optim/state``, as ``hpcfsdp.checkpoint.save`` writes them, whatever the outer keys are. The file lists the place of
each entry.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.plain_values import Types
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError

Path = tuple[str | int, ...]
"""Keys from the outermost dict inwards; numbers are places in lists."""

TENSOR, GROUP, SCALAR, EXTRA = KINDS = "tensor", "group", "scalar", "extra"

GROUP_TENSORS = "optim/group_tensors"
"""The group of hyper-parameters that are tensors (a capturable optimizer's ``lr``): ``<group>/<name>`` in it."""

_OPTIMIZER = ("optim", "optimizer")
_RESERVED = ("meta", "extra", "metrics", schema.PARAM_GROUPS, schema.OPTIM_SCALARS)
_GROUPS = (schema.MODEL, "optim", schema.OPTIM_STATE)


def dotted(path: Iterable[str | int]) -> str:
    """Return the name of an entry."""
    return ".".join(map(str, path))


@dataclass(frozen=True)
class StateEntry:
    """An entry of a state dict and its place in the file."""

    path: Path  # in the state dict
    kind: str  # TENSOR: a dataset; GROUP: a value in optim/param_groups; SCALAR: in optim/scalars; EXTRA: in `extra`
    place: Path  # the dataset's path; or the keys that lead to the value, one for a SCALAR
    types: Types = ()  # types that JSON does not keep, see ``plain_values.to_plain``

    @property
    def dataset(self) -> str:
        """The path of a TENSOR in the file."""
        return "/".join(map(str, self.place))

    def to_json(self) -> dict[str, Any]:
        """Return its JSON in meta/state_dict."""
        types = {"types": [[list(path), kind] for path, kind in self.types]} if self.types else {}
        return {"path": list(self.path), self.kind: list(self.place), **types}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "StateEntry":
        """Undo ``to_json``."""
        [kind] = set(found) - {"path", "types"}
        types = tuple((tuple(path), kind) for path, kind in found.get("types", ()))
        return cls(tuple(found["path"]), kind, tuple(found[kind]), types)


def place_entries(tensors: Mapping[str, Path], values: Mapping[str, Path]) -> dict[str, StateEntry]:
    """Choose a place for each tensor and each other value, by name; raise CheckpointError for a key that cannot be."""
    everyone = [*tensors.values(), *values.values()]
    outer = _outer(everyone)
    renamed = not any(path[outer] == "optim" for path in everyone)
    plain = all(len(path) == outer + 1 for path in tensors.values())
    entries: dict[str, StateEntry] = {}
    places: dict[Path, str] = {}

    def standard(path: Path) -> Path:
        inner = path[outer:]
        return ("optim", *inner[1:]) if renamed and inner[0] == "optimizer" and len(inner) > 1 else inner

    for name, path in tensors.items():
        place = _tensor_place(name, standard(path), plain)
        if places.setdefault(place, name) != name:
            what = f"the state dict's {places[place]!r} and {name!r} would both be stored at {dotted(place)!r}"
            raise CheckpointError(f"{what}: rename one")
        entries[name] = StateEntry(path, TENSOR, place)
    for name, path in values.items():
        match standard(path):
            case ("optim", "param_groups", int(), str()) as inner:
                entries[name] = StateEntry(path, GROUP, inner[2:])
            case ("optim", "state", str(fqn), str(key)):
                entries[name] = StateEntry(path, SCALAR, (f"{fqn}/{key}",))
            case ("extra", _, *_) as inner:
                entries[name] = StateEntry(path, EXTRA, inner[1:])
            case inner:
                entries[name] = StateEntry(path, EXTRA, inner)
    return entries


def _outer(paths: list[Path]) -> int:
    """Return the number of keys around model and optimizer: 1 for ``{"app": {"model": ..., "optim": ...}}``."""
    if not paths or min(map(len, paths)) < 2 or len({path[0] for path in paths}) > 1:
        return 0
    return int(paths[0][0] not in ("model", *_OPTIMIZER) and any(path[1] == "model" for path in paths))


def _tensor_place(name: str, path: Path, plain: bool) -> Path:
    for key in path:
        if "/" in str(key):
            raise CheckpointError(f"the state dict's {name!r} has a key with / in it, {key!r}: rename it")
    if plain:
        return (schema.MODEL, *path)
    if path[:2] == ("optim", "param_groups") and len(path) > 3:
        return (*GROUP_TENSORS.split("/"), *path[2:])
    joined = "/".join(map(str, path))
    if joined in _GROUPS or any(joined == place or joined.startswith(f"{place}/") for place in _RESERVED):
        what = f"the state dict's {name!r} would be stored at {joined!r}, a path that checkpoints reserve"
        raise CheckpointError(f"{what}: rename the key")
    return path


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what flattening makes of a value without tensors: it enters lists only where they contain dicts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif _has_dict(value):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    else:
        yield path, value


def _has_dict(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) or _has_dict(item) for item in value)


def set_at(root: dict[str | int, Any], path: Path, value: Any) -> None:
    """Set a value in nested dicts and lists, which it makes; raise CheckpointError where another value is."""
    inside: Any = root
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(inside, list) and isinstance(key, int):
            inside += [None] * (key + 1 - len(inside))
        elif not isinstance(inside, dict):
            raise CheckpointError(f"the state dict's {dotted(path)!r} is inside of another entry: rename it")
        if following is None:
            inside[key] = value
            return
        found = inside[key] if isinstance(inside, list) else inside.get(key)
        if found is None:
            found = inside[key] = [] if isinstance(following, int) else {}
        inside = found


def get_at(root: Any, path: Path) -> Any:
    """Return the value at a path; raise LookupError or TypeError without one."""
    for key in path:
        root = root[key]
    return root


def native_entries(
    tensors: Iterable[str],
    groups: list[dict[str, Any]] | None,
    scalars: Mapping[str, Any] | None,
    extra: Mapping[str, Any],
) -> list[StateEntry]:
    """Return the entries of a file of ``hpcfsdp.checkpoint.save``: dicts ``model``, ``optim`` and ``extra``."""
    found = [StateEntry(tuple(path.split("/")), TENSOR, tuple(path.split("/"))) for path in tensors]
    for number, group in enumerate(groups or ()):
        found += [StateEntry(("optim", "param_groups", number, key), GROUP, (number, key)) for key in group]
    for name in scalars or {}:
        found.append(StateEntry(("optim", "state", *name.rsplit("/", 1)), SCALAR, (name,)))
    found += [StateEntry(("extra", *path), EXTRA, path) for path, _ in leaves(extra) if path]
    return found


class EntryRequest:
    """The entries of a file that a load asks for, under any names that state dicts may use for them.

    Outer keys may differ from the saved ones: ``weight`` and ``model.weight`` can be the same parameter, ``optim`` and
    ``optimizer`` the same dict, and a dict around model and optimizer may be missing. But without outer keys
    ``model.weight`` can also be the parameter of a module "model": only all names together decide.

    Attributes:
        entries: by the saved name.
    """

    def __init__(self, entries: Iterable[StateEntry], alike: Callable[[StateEntry, StateEntry], bool]) -> None:
        """`alike`: whether two entries look the same to a planner, by shape and dtype of tensors."""
        self.entries, self._alike = {dotted(entry.path): entry for entry in entries}, alike
        everyone = list(self.entries.values())
        outer = _outer([entry.path for entry in everyone])
        inner = _once((_with_optim(dotted(entry.path[outer:])), entry) for entry in everyone)
        standard = _once((_standard_name(entry), entry) for entry in everyone)
        # From a name to an entry or None: first by the saved names, then by other outer keys. One must fit all names.
        self._mappings: tuple[Callable[[str], StateEntry | None], ...] = (
            self.entries.get,
            lambda name: inner.get(_with_optim(name)),
            lambda name: standard.get(_with_optim(name)),
            lambda name: standard.get(f"{schema.MODEL}.{name}"),
        )
        self._possible = list(self._mappings)  # those that have found every name so far
        self._answers: dict[str, StateEntry | None] = {}

    def find(self, name: str) -> StateEntry | None:
        """Return an entry that looks like the one of this name, None without one; only ``settled`` decides which."""
        if name not in self._answers:
            self._possible = [mapping for mapping in self._possible if mapping(name) is not None]
            self._answers[name] = (self._possible or self._mappings)[0](name)
        return self._answers[name]

    def settled(self, names: Iterable[str]) -> dict[str, StateEntry]:
        """Return the entries of these names and of those of ``find``; raise CheckpointMismatchError if it was wrong."""
        wanted = list(dict.fromkeys([*self._answers, *names]))
        for mapping in self._mappings:
            found = {name: entry for name in wanted if (entry := mapping(name)) is not None}
            if found and len(found) == len(wanted) == len({id(entry) for entry in found.values()}):
                break
        else:  # names that are not there are passed over: then by the names that were saved alone
            found = {name: self.entries[name] for name in wanted if name in self.entries}
            elsewhere = (name for name in wanted if any(mapping(name) for mapping in self._mappings))
            if not found and (name := next(elsewhere, None)) is not None:
                self._refuse(name)
        for name, answer in self._answers.items():
            if answer is not None and name not in found:
                self._refuse(name)
            if answer is not None and not self._alike(answer, found[name]):
                what = f"{name!r} may be {dotted(answer.path)!r} or {dotted(found[name].path)!r} in the file, and these"
                remedy = "give the state dict the outer keys that it was saved with"
                raise CheckpointMismatchError(f"{what} differ in shape or dtype: {remedy}")
        return found

    def _refuse(self, name: str) -> None:
        what = f"holds {name!r} only under other outer keys, and these do not fit all names of the state dict"
        remedy = (
            "use the outer keys that it was saved with, or leave out unsaved entries (the first name in the file is"
        )
        raise CheckpointMismatchError(f"{what}: {remedy} {next(iter(self.entries))!r})")


def _once(pairs: Iterable[tuple[str, StateEntry]]) -> dict[str, StateEntry]:
    """Return a dict of the pairs, without names that occur twice."""
    pairs = list(pairs)
    times = Counter(name for name, _ in pairs)
    return {name: entry for name, entry in pairs if times[name] == 1}


_BEFORE = {TENSOR: (), EXTRA: ("extra",), GROUP: ("optim", "param_groups"), SCALAR: ("optim", "state")}


def _standard_name(entry: StateEntry) -> str:
    """Return the name of an entry with outer keys "model" and "optim"."""
    before: Path = _BEFORE[entry.kind]
    if entry.dataset.startswith(f"{GROUP_TENSORS}/"):
        return dotted(("optim", "param_groups", *entry.place[2:]))
    return dotted((*before, *(part for key in entry.place for part in str(key).split("/"))))


def _with_optim(name: str) -> str:
    return f"optim.{name.removeprefix('optimizer.')}" if name.startswith("optimizer.") else name
