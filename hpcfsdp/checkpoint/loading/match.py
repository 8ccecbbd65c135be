"""Match tensors of a checkpoint with those of a model. Pure."""

import collections
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.plain_values import from_plain
from hpcfsdp.checkpoint.inspect.names import match_names, matching
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, nearest
from hpcfsdp.state.tensors import StateTensor
from hpcfsdp.state.wrappers import CHILD, NUM_AVERAGED

_MODEL = f"{schema.MODEL}/"

_WRAPPED = re.compile(rf"(?:{CHILD}\.)*")


@dataclass(frozen=True)
class FileNames:
    """Names of parameters and modules in a file.

    They equal the model's, unless every name in the file begins with the name of a wrapper's child (``module.``), as in
    other programs' files of a ``DistributedDataParallel``.
    """

    index: CheckpointIndex
    known: Collection[str]  # the model's names
    rename: Callable[[str], str] | None = None  # makes the model's name of that in the file, as the program says

    @cached_property
    def _renamed(self) -> dict[str, str]:
        """The names in the file, by those that the program gives them."""
        paths = (*self.index.tensors, *self.index.links)
        names = dict.fromkeys(path.removeprefix(_MODEL) for path in paths if path.startswith(_MODEL))
        names |= dict.fromkeys(self.index.module_states)
        found: dict[str, str] = {}
        for name in names if self.rename is not None else ():
            new = self.rename(name)
            if not isinstance(new, str):
                raise TypeError(f"rename= returned {new!r} for {name!r}: return the name that it has in the model")
            if found.setdefault(new, name) != name:
                raise CheckpointError(
                    f"{self.index.info.path}: rename= gives {found[new]!r} and {name!r} of the file one name, {new!r}"
                )
        return found

    @cached_property
    def prefix(self) -> str:
        """The text before the model's names in the file."""
        if self.rename is not None:
            return ""
        paths = (*self.index.tensors, *self.index.links)
        there = {path.removeprefix(_MODEL) for path in paths if path.startswith(_MODEL)} - {NUM_AVERAGED}
        if not there.isdisjoint(self.known):  # it may be a part of a model with a module that is called so
            return ""
        return f"{CHILD}." * max(0, _depth(there) - _depth(self.known))

    def in_file(self, name: str) -> str:
        """Return the name in the file, by that in the model."""
        if self.rename is not None:
            return self._renamed.get(name, name)
        return name if name == NUM_AVERAGED else self.prefix + name

    def in_model(self, name: str) -> str:
        """Return the name in the model, by that in the file."""
        return name.removeprefix(self.prefix) if self.rename is None else self.rename(name)

    def in_optimizer(self, name: str) -> str:
        """Return a parameter's name in the file, with a key of its state behind it or not, as the model has it."""
        parameter, slash, key = name.rpartition("/")
        return self.in_model(parameter) + slash + key if slash else self.in_model(name)

    def state(self, name: str) -> str:
        """Return the name in the file of a parameter's state, by "name/key" in the model."""
        parameter, slash, key = name.rpartition("/")
        return self.in_file(parameter) + slash + key

    def optimizer(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return scalars by ``name/key`` and ``param_groups`` of the file's optimizer, by names in the model."""
        scalars = dict(self.index.scalars or {})
        groups = from_plain(self.index.param_groups or [], self.index.group_types)
        if self.prefix or self.rename is not None:
            scalars = {self.in_optimizer(name): value for name, value in scalars.items()}
            groups = [{**group, "params": list(map(self.in_model, group["params"]))} for group in groups]
        return scalars, groups

    def patterns(self, patterns: Iterable[str]) -> list[str]:
        """Return patterns of names in the model as patterns of names in the file; patterns that match there stay."""
        known = [*self.index.tensors, *self.index.links]
        return [
            each if not self.prefix or match_names(each, known) else self.prefix + each.removeprefix(_MODEL)
            for each in patterns
        ]

    def chosen(self, patterns: Sequence[str]) -> set[str]:
        """Return the paths that patterns of names in the model, or in the file, match."""
        if self.rename is None:
            return set(matching(self.index, self.patterns(patterns)))
        found = {_MODEL + new: _MODEL + name for new, name in self._renamed.items()}
        by_name = {found[path] for each in patterns for path in match_names(each, found)}
        known = [*self.index.tensors, *self.index.links]
        return by_name.union(path for each in patterns for path in match_names(each, known))

    def has_chosen(self, patterns: Iterable[str], names: Iterable[str]) -> bool:
        """Return whether a pattern matches one of these names of the model, or its name in the file."""
        paths = [_MODEL + each for name in names for each in (name, self.in_file(name))]
        return any(match_names(pattern, paths) for pattern in patterns)

    def paths(self, tensor: StateTensor) -> list[str]:
        """Return possible paths of a tensor of the model in the file."""
        return [_MODEL + self.in_file(name) for name in (tensor.name, *tensor.aliases)]

    def path_in(self, tensor: StateTensor) -> str | None:
        """Return the path of a tensor of the model in the file, if it is there."""
        index = self.index
        return next((path for path in self.paths(tensor) if path in index.tensors or path in index.links), None)


def _depth(names: Iterable[str]) -> int:
    """Return the number of wrappers in all names."""
    return min((len(_WRAPPED.match(name)[0]) for name in names), default=0) // len(f"{CHILD}.")


def check_patterns(names: Sequence[str] | None) -> None:
    """Raise TypeError or ValueError unless `names` is a list of patterns, or None."""
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names= is {names!r}: give a list of names or patterns")
    if not names:
        raise ValueError("names= is empty: give names or patterns of tensors, or None for all")


def chosen_of(
    tensors: Sequence[StateTensor], modules: Mapping[str, nn.Module], patterns: Sequence[str]
) -> tuple[list[StateTensor], dict[str, nn.Module], set[str]]:
    """Return what patterns match: tensors, modules with extra state, all names of the tensors; each has to match."""
    of_name = {_MODEL + name: tensor.name for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    chosen: set[str] = set()
    for pattern in patterns:
        here = match_names(pattern, of_name)
        if not here and not match_names(pattern, [_MODEL + name for name in modules]):
            hint = nearest(pattern.removeprefix(_MODEL), [path.removeprefix(_MODEL) for path in of_name])
            raise CheckpointError(f"no tensor of the model matches {pattern!r}{hint}")
        chosen.update(of_name[path] for path in here)
    found = [tensor for tensor in tensors if tensor.name in chosen]
    states = {name: module for name, module in modules.items() if is_chosen(name, patterns)}
    return found, states, chosen.union(*(tensor.aliases for tensor in found))


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name of the model matches one of the patterns."""
    return any(match_names(each, [_MODEL + name]) for each in patterns)


@dataclass(frozen=True)
class Match:
    """Names of the model's tensors in the file, those missing in the file, and those only in the file."""

    found: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    states: frozenset[str]  # modules with extra state in the file


def match_model(
    files: FileNames,
    tensors: Sequence[StateTensor],
    states: Collection[str],
    names: Sequence[str] | None,
    strict: bool,
    cast: bool = False,
) -> Match:
    """Match a model with the file.

    Raise CheckpointError if a pattern matches nothing in the file, CheckpointMismatchError with a list of missing,
    unexpected and different tensors. `states` are the names of modules with extra state.
    """
    index = files.index
    there = {path for path in (*index.tensors, *index.links) if path.startswith(_MODEL)}
    # Files of torch.distributed.checkpoint, and imported ones, know nothing of such states.
    has_states = index.state_dict is None and bool(index.rng)
    known_states = set(map(files.in_model, index.module_states)) if has_states else set(states)
    states, targets = set(states), list(tensors)
    if names is not None:
        there = there.intersection(files.chosen(names))
        if not there:
            raise CheckpointError(f"{index.info.path}: {names} match no tensor of the model, only the optimizer's")
        targets = [tensor for tensor in tensors if files.has_chosen(names, (tensor.name, *tensor.aliases))]
        known_states, states = ({n for n in found if files.has_chosen(names, [n])} for found in (known_states, states))
    missing = {t.name: f"{t.name} {list(t.shape)}" for t in targets if files.path_in(t) is None}
    strange = sorted(there.difference(path for tensor in targets for path in files.paths(tensor)))
    unexpected = {files.in_model(path.removeprefix(_MODEL)): list(index.resolve(path).shape) for path in strange}
    unexpected = {name: f"{name} {shape}" for name, shape in unexpected.items()}
    missing |= {name: f"{name}, the state of a module" for name in sorted(states - known_states)}
    unexpected |= {name: f"{name}, the state of a module" for name in sorted(known_states - states)}
    lines = [line for tensor in targets for line in _differences(files, tensor, cast=cast)]
    if strict:
        lines = [f"  missing in the file: {text}" for text in missing.values()] + lines
        # Its average is loaded into a model as well as into an AveragedModel.
        lines += [f"  unexpected in the file: {text}" for name, text in unexpected.items() if name != NUM_AVERAGED]
    if lines:
        shown = lines[:40] + ([f"  ... and {len(lines) - 40} more"] if len(lines) > 40 else [])
        is_part = strict and len(lines) == len(missing) < len(targets)
        problem = "the checkpoint belongs to another model"
        if is_part:
            problem = "holds only a part of the model: load it with names= of that part, or strict=False"
        hint = _renaming(unexpected, missing) if strict else ""
        raise CheckpointMismatchError(f"{index.info.path}: {problem}{hint}\n" + "\n".join(shown))
    return Match(
        frozenset(tensor.name for tensor in targets if tensor.name not in missing),
        tuple(sorted(missing)),
        tuple(unexpected),
        frozenset(name for name in states if files.in_file(name) in index.module_states),
    )


def _renaming(there: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return a question whether names differ by their beginnings alone; "" if no one beginning explains most.

    Both map names to descriptions, with the name before the shape.
    """
    shapes = {name: text.removeprefix(name) for name, text in there.items()}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    by_end = collections.defaultdict(list)
    for name, shape in shapes.items():
        by_end[name.rpartition(".")[2], shape].append(name)
    for name, text in wanted.items():
        for other in by_end[name.rpartition(".")[2], text.removeprefix(name)]:
            parts, others = name.split("."), other.split(".")
            while parts and others and parts[-1] == others[-1]:
                del parts[-1], others[-1]
            counts[".".join((*others, "*")), ".".join((*parts, "*"))] += 1
    for (before, after), count in counts.most_common(1):
        if 2 * count > len(wanted):
            return f"; did you mean rename={{{before!r}: {after!r}}} (names in the file: names in the model)?"
    return ""


Rename = Mapping[str, str] | Callable[[str], str]
"""Patterns of names in a file and of names in the model, with "*" for any text; or a function from one to the other."""


def renaming(rename: Rename | None) -> Callable[[str], str] | None:
    """Return a function from a name in a file to that in the model. Raise TypeError or ValueError for wrong patterns.

    The first pattern that matches counts; other names stay.
    """
    if rename is None or callable(rename):
        return rename
    if not isinstance(rename, Mapping) or not all(isinstance(e, str) for pair in rename.items() for e in pair):
        raise TypeError(f"rename= is {rename!r}: give a dict of names in the file to names in the model, or a function")
    rules = []
    for before, after in rename.items():
        if before.count("*") != after.count("*"):
            raise ValueError(f"rename={{{before!r}: {after!r}}}: have as many * on both sides")
        rules.append((re.compile("(.*)".join(map(re.escape, before.split("*")))), after.split("*")))

    def renamed(name: str) -> str:
        for pattern, parts in rules:
            if match := pattern.fullmatch(name):
                return parts[0] + "".join(text + part for text, part in zip(match.groups(), parts[1:], strict=True))
        return name

    return renamed


def _differences(files: FileNames, tensor: StateTensor, *, cast: bool) -> list[str]:
    """Return messages about differences between a tensor in the file and in the model; not of dtypes if they `cast`."""
    index, path = files.index, files.path_in(tensor)
    if path is None:
        return []
    spec, dtype = index.resolve(path), str(tensor.dtype).removeprefix("torch.")
    dtype = spec.dtype if cast else dtype
    in_file, in_model = f"{list(spec.shape)} {spec.dtype}", f"{list(tensor.shape)} {dtype}"
    lines = []
    if in_file != in_model:
        lines.append(f"  differing: {tensor.name} is {in_file} in the file, {in_model} in the model")
    own = {alias: index.links.get(alias, alias) for alias in files.paths(tensor) if alias != path}
    return lines + [
        f"  differing: {files.in_model(alias.removeprefix(_MODEL))} is a tensor of its own in the file, tied to "
        f"{tensor.name} in the model"
        for alias, real in own.items()
        if real in index.tensors and not _same_elements(index, path, real)
    ]


def _same_elements(index: CheckpointIndex, one: str, other: str) -> bool:
    """Return whether two tensors of a file are equal bit by bit, by their checksums."""
    # Writers that do not record ties, as torch.distributed.checkpoint, write a tensor for each name.
    left, right = index.resolve(one), index.resolve(other)
    fields = ["start", "numel", "count", "stride", "checksum"]
    return left is right or (
        (left.shape, left.dtype) == (right.shape, right.dtype)
        and np.array_equal(index.rows_of(one)[fields], index.rows_of(other)[fields])
    )
