"""Which tensors of a checkpoint belong to which of a model. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.checkpoint.inspect.names import hits, matching
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, nearest
from hpcfsdp.state.tensors import StateTensor
from hpcfsdp.state.wrappers import CHILD, NUM_AVERAGED

_MODEL = f"{schema.MODEL}/"

_WRAPPED = re.compile(rf"(?:{CHILD}\.)*")


@dataclass(frozen=True)
class FileNames:
    """What the parameters and modules of a model are called in a file.

    As in the model, unless every name in the file begins with the name of a wrapper's child (``module.``), as those of
    a ``DistributedDataParallel`` in other programs' files do.

    Attributes:
        index: of the file.
        known: the model's names.
    """

    index: CheckpointIndex
    known: Collection[str] = field(repr=False)

    @cached_property
    def prefix(self) -> str:
        """What names in the file have before those of the model."""
        paths = (*self.index.tensors, *self.index.links)
        there = {path.removeprefix(_MODEL) for path in paths if path.startswith(_MODEL)} - {NUM_AVERAGED}
        if not there.isdisjoint(self.known):  # it may be a part of a model with a module that is called so
            return ""
        return f"{CHILD}." * max(0, _depth(there) - _depth(self.known))

    def in_file(self, name: str) -> str:
        """What is called so in the model."""
        return name if name == NUM_AVERAGED else self.prefix + name

    def in_model(self, name: str) -> str:
        """What is called so in the file."""
        return name.removeprefix(self.prefix)

    def optimizer(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Scalars by ``name/key`` and ``param_groups`` of the file's optimizer, by the names in the model."""
        scalars, groups = dict(self.index.scalars or {}), list(self.index.param_groups or ())
        if self.prefix:
            scalars = {self.in_model(name): value for name, value in scalars.items()}
            groups = [{**group, "params": list(map(self.in_model, group["params"]))} for group in groups]
        return scalars, groups

    def patterns(self, patterns: Iterable[str]) -> list[str]:
        """Patterns of names in the model, as such of names in the file; those that match there stay as they are."""
        known = [*self.index.tensors, *self.index.links]
        return [
            each if not self.prefix or hits(each, known) else self.prefix + each.removeprefix(_MODEL)
            for each in patterns
        ]

    def has_chosen(self, patterns: Iterable[str], names: Iterable[str]) -> bool:
        """Whether a pattern matches one of the names of something in the model, or what that is called in the file."""
        paths = [_MODEL + each for name in names for each in (name, self.in_file(name))]
        return any(hits(pattern, paths) for pattern in patterns)

    def paths(self, tensor: StateTensor) -> list[str]:
        """What a tensor of the model may be called in the file."""
        return [_MODEL + self.in_file(name) for name in (tensor.name, *tensor.aliases)]

    def path_in(self, tensor: StateTensor) -> str | None:
        """What a tensor of the model is called in the file, if that has it."""
        index = self.index
        return next((path for path in self.paths(tensor) if path in index.tensors or path in index.links), None)


def _depth(names: Iterable[str]) -> int:
    """How many wrappers all names go through."""
    return min((len(_WRAPPED.match(name)[0]) for name in names), default=0) // len(f"{CHILD}.")


def check_patterns(names: Sequence[str] | None) -> None:
    """Raise unless `names` are patterns of names, or None.

    Raises:
        TypeError: they are a string, or of another kind.
        ValueError: there are none.
    """
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names= is {names!r}: give a list of names or patterns")
    if not names:
        raise ValueError("names= is empty: give names or patterns of tensors, or None for all")


def chosen_of(
    tensors: Sequence[StateTensor], modules: Mapping[str, nn.Module], patterns: Sequence[str]
) -> tuple[list[StateTensor], dict[str, nn.Module], set[str]]:
    """Those of a model's tensors and modules with a state that patterns match, and all names of these tensors.

    Raises:
        CheckpointError: a pattern matches no tensor; names the nearest.
    """
    of_name = {_MODEL + name: tensor.name for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    chosen: set[str] = set()
    for pattern in patterns:
        here = hits(pattern, of_name)
        if not here and not hits(pattern, [_MODEL + name for name in modules]):
            hint = nearest(pattern.removeprefix(_MODEL), [path.removeprefix(_MODEL) for path in of_name])
            raise CheckpointError(f"no tensor of the model matches {pattern!r}{hint}")
        chosen.update(of_name[path] for path in here)
    found = [tensor for tensor in tensors if tensor.name in chosen]
    states = {n: module for n, module in modules.items() if any(hits(each, [_MODEL + n]) for each in patterns)}
    return found, states, chosen.union(*(tensor.aliases for tensor in found))


@dataclass(frozen=True)
class Match:
    """Names of tensors of the model that are in the file, that are not, and of those of the file that are not in it."""

    found: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    states: frozenset[str]
    """Of modules, beside tensors: those that the file has as well."""


def match_model(
    files: FileNames, tensors: Sequence[StateTensor], states: Collection[str], names: Sequence[str] | None, strict: bool
) -> Match:
    """What of a model the file holds.

    Args:
        tensors: of the model.
        states: names of what modules keep beside tensors.
        names, strict: as ``load`` takes them.

    Raises:
        CheckpointError: a pattern matches nothing in the file.
        CheckpointMismatchError: the file is of another model; the message lists what is missing, unexpected, different.
    """
    index = files.index
    there = {path for path in (*index.tensors, *index.links) if path.startswith(_MODEL)}
    # Files of torch.distributed.checkpoint know nothing of such states.
    known_states = set(map(files.in_model, index.module_states)) if index.keeps_module_states else set(states)
    states, targets = set(states), list(tensors)
    if names is not None:
        there = there.intersection(matching(index, files.patterns(names)))
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
    lines = [line for tensor in targets for line in _differences(files, tensor)]
    if strict:
        lines = [f"  missing in the file: {text}" for text in missing.values()] + lines
        # Its average is loaded into a model as well as into an AveragedModel.
        lines += [f"  unexpected in the file: {text}" for name, text in unexpected.items() if name != NUM_AVERAGED]
    if lines:
        shown = lines[:40] + ([f"  ... and {len(lines) - 40} more"] if len(lines) > 40 else [])
        is_part = strict and len(lines) == len(missing) < len(targets)
        what = "holds a part of the model alone: load it with names= of that part, or strict=False"
        what = what if is_part else "the checkpoint is of another model"
        raise CheckpointMismatchError(f"{index.info.path}: {what}\n" + "\n".join(shown))
    return Match(
        frozenset(tensor.name for tensor in targets if tensor.name not in missing),
        tuple(sorted(missing)),
        tuple(unexpected),
        frozenset(name for name in states if files.in_file(name) in index.module_states),
    )


def _differences(files: FileNames, tensor: StateTensor) -> list[str]:
    """What of a tensor, if the file has it, is not as in the model, in lines to be shown."""
    index, path = files.index, files.path_in(tensor)
    if path is None:
        return []
    spec = index.resolve(path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    lines = []
    if (spec.shape, spec.dtype) != (tensor.shape, dtype):
        lines.append(
            f"  differing: {tensor.name} is {list(spec.shape)} {spec.dtype} in the file, "
            f"{list(tensor.shape)} {dtype} in the model"
        )
    own = {further: index.links.get(further, further) for further in files.paths(tensor) if further != path}
    return lines + [
        f"  differing: {files.in_model(further.removeprefix(_MODEL))} is a tensor of its own in the file, tied to "
        f"{tensor.name} in the model"
        for further, real in own.items()
        if real in index.tensors and not _same_elements(index, path, real)
    ]


def _same_elements(index: CheckpointIndex, one: str, other: str) -> bool:
    """Whether two tensors of a file are equal bit by bit, as their checksums say.

    Writers that know nothing of ties, as torch.distributed.checkpoint does, have a tensor for each name.
    """
    left, right = index.resolve(one), index.resolve(other)
    fields = ["start", "numel", "count", "stride", "checksum"]
    return left is right or (
        (left.shape, left.dtype) == (right.shape, right.dtype)
        and np.array_equal(index.rows_of(one)[fields], index.rows_of(other)[fields])
    )
