"""Choose the tensors of an export and their names. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.names import matching
from hpcfsdp.errors import CheckpointError

MODEL = f"{schema.MODEL}/"
OPTIM = f"{schema.OPTIM_STATE}/"


@dataclass(frozen=True)
class Selection:
    """The content of an export.

    Attributes:
        tensors: by path, each once, in file order.
        ties: alias of a tensor -> its path in `tensors`.
        groups, scalars: of the optimizer; None without it.
    """

    tensors: dict[str, TensorSpec]
    ties: dict[str, str]
    groups: list[dict[str, Any]] | None
    scalars: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())


def select(index: CheckpointIndex, patterns: Sequence[str] = (), *, optimizer: bool = False) -> Selection:
    """Choose tensors by patterns (none: all), with the optimizer's state or without.

    Raise CheckpointError where no tensor is chosen, or the file has no optimizer.
    """
    if optimizer and index.param_groups is None:
        raise CheckpointError(f"{index.info.path}: holds no optimizer: leave --optimizer out")
    wanted = (MODEL, OPTIM) if optimizer else (MODEL,)
    paths = [path for path in matching(index, patterns) if path.startswith(wanted)]
    if not paths:
        hint = "holds no model" if not patterns else "only the optimizer's state has such names: add --optimizer"
        raise CheckpointError(f"{index.info.path}: {hint}")
    tensors: dict[str, TensorSpec] = {}
    ties: dict[str, str] = {}
    kept: dict[str, str] = {}  # a tensor that is selected by an alias alone gets that name
    for path in paths:
        spec = index.resolve(path)
        if spec.path in kept:
            ties[path] = kept[spec.path]
        else:
            kept[spec.path] = path
            tensors[path] = spec
    if not optimizer:
        return Selection(tensors, ties, None, None)
    stepped = {path.removeprefix(OPTIM).rsplit("/", 1)[0] for path in tensors if path.startswith(OPTIM)}
    scalars = {
        name: value
        for name, value in (index.scalars or {}).items()
        if not patterns or name.rsplit("/", 1)[0] in stepped
    }
    return Selection(tensors, ties, index.param_groups, scalars)
