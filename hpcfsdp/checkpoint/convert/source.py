"""The content of an import: sorted into model, optimizer and other values, and ties between its tensors."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointError, nearest

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIM_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
STEP_KEY = "step"

_ALONE = "--no-optimizer imports only the model"
_UNNAMED = (
    "which has no name: make the optimizer with model.named_parameters(), or save the result of FSDP.optim_state_dict "
    f"or torch.distributed.checkpoint.state_dict.get_optimizer_state_dict; {_ALONE}"
)
_KNOWN = f"a model is looked for under {', '.join(MODEL_KEYS)}, an optimizer under {', '.join(OPTIM_KEYS)}"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a file that is being read."""

    shape: tuple[int, ...]
    dtype: str
    fetch: Callable[[], Any] | None = None  # returns a contiguous tensor on the CPU; None: the source reads elements
    identity: Hashable = None  # equal for names that share one tensor; None where the format does not record it


@dataclass
class ImportSource:
    """The content of a checkpoint that an import writes."""

    tensors: dict[str, Stored] = field(default_factory=dict)  # by path in an hpcfsdp checkpoint
    reader: schema.Elements | None = None  # reads elements of a tensor; None: ``Stored.fetch`` gives whole ones
    links: list[tuple[str, str]] = field(default_factory=list)  # (alias, path of the tensor)
    groups: list[dict[str, Any]] | None = None  # of the optimizer; None without one
    scalars: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    _last: tuple[str, np.ndarray] | None = None

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(path, stored.shape, stored.dtype) for path, stored in self.tensors.items()]

    def read(self, spec: TensorSpec, start: int, numel: int) -> np.ndarray:
        """Read elements of a tensor; see ``schema.Elements``. At most one tensor is in memory."""
        if self.reader is not None:
            return self.reader(spec, start, numel)
        if self._last is None or self._last[0] != spec.path:
            self._last = None  # before the next comes
            from hpcfsdp.reshard.sharded_tensors import as_bytes  # loads torch, which the tensor has loaded

            self._last = spec.path, as_bytes(self.tensors[spec.path].fetch())
        # A copy: blocks that wait to be written must not keep whole tensors in memory.
        return self._last[1][start * spec.itemsize : (start + numel) * spec.itemsize].copy()

    def tie(self, ties: Sequence[tuple[str, str]]) -> None:
        """Make names of the model aliases of others, (alias, name), or raise CheckpointError where they differ."""
        for alias, kept in ties:
            by_path = {spec.path: spec for spec in self.specs}
            links = dict(self.links)
            one, other = f"{schema.MODEL}/{alias}", f"{schema.MODEL}/{kept}"
            if other not in by_path:
                known = [path.removeprefix(f"{schema.MODEL}/") for path in by_path]
                raise CheckpointError(f"there is no tensor {kept!r} to tie {alias!r} to{nearest(kept, known)}")
            if links.get(one) == other:
                continue
            if one in links or one == other:
                raise CheckpointError(f"{alias!r} is {links.get(one, one)!r} already, it cannot be {other!r} too")
            if one in by_path:
                pair = by_path[one], by_path[other]
                alike = (pair[0].shape, pair[0].dtype) == (pair[1].shape, pair[1].dtype)
                if not alike or self._digest(pair[0]) != self._digest(pair[1]):
                    raise CheckpointError(f"{one!r} and {other!r} differ, so they cannot be tied")
                del self.tensors[one]
                self.links = [(path, other if of == one else of) for path, of in self.links]
            self.links.append((one, other))

    def _digest(self, spec: TensorSpec) -> bytes:
        """Return that of a tensor's bytes. To read two tensors alternately could read both repeatedly."""
        digest = hashlib.blake2b()
        step = max(1, schema.BLOCK_BYTES // spec.itemsize)
        for start in range(0, spec.numel, step):
            elements = self.read(spec, start, min(step, spec.numel - start))
            digest.update(np.ascontiguousarray(elements).view(np.uint8))
        return digest.digest()


def sort_out(tree: Any, *, optimizer: bool = True) -> ImportSource:
    """Sort a model's or an optimizer's state dict, or a dict with either or both; further values become ``extra``.

    Raise CheckpointError, naming the part, where that is unclear or a part cannot be stored.
    """
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"holds a {type(tree).__name__}, not a dict: {_KNOWN}")
    parts = ImportSource()
    if not optimizer:
        if _is_optimizer(tree):
            raise CheckpointError("holds an optimizer's state alone, which --no-optimizer leaves out")
        tree = {key: value for key, value in tree.items() if not (key in OPTIM_KEYS and isinstance(value, Mapping))}
    if _is_optimizer(tree):
        _add_optimizer(parts, tree)
        return parts
    models = [key for key in MODEL_KEYS if isinstance(tree.get(key), Mapping) and _has_tensors(tree[key])]
    optims = [key for key in OPTIM_KEYS if _is_optimizer(tree.get(key))]
    _check_meant(tree, models, optims)
    if not models and not optims:
        _add_model(parts, tree, parts.extra)
        return parts
    for key, value in tree.items():
        if key in models:
            others: dict[Any, Any] = {}
            _add_model(parts, value, others)
            parts.extra |= {key: others} if others else {}
        elif key in optims:
            _add_optimizer(parts, value)
        elif key == STEP_KEY and type(value) is int:
            parts.step = value
        else:
            parts.extra[key] = _fetched(value)
    return parts


def _check_meant(tree: Mapping[Any, Any], models: list[str], optims: list[str]) -> None:
    """Raise unless the keys of model and optimizer are unambiguous."""
    for found in (models, optims):
        if len(found) > 1:
            raise CheckpointError(
                f"{found[0]!r} and {found[1]!r} could both be meant: save the file with only one of them"
            )
    for key in OPTIM_KEYS:
        found = tree.get(key)
        names = list(found) if isinstance(found, Mapping) else []
        if names and all(isinstance(name, str) and name.startswith(("state.", "param_groups.")) for name in names):
            raise CheckpointError(
                f"{key!r} is a flattened optimizer state dict, which lacks the groups: save it with "
                f"StateDictOptions(flatten_optimizer_state_dict=False); {_ALONE}"
            )
    if models or optims:
        return
    nested = [key for key, value in tree.items() if not isinstance(value, Stored) and _has_tensors(value)]
    if nested:
        raise CheckpointError(f"{nested[0]!r} holds tensors of unknown kind: {_KNOWN}")
    if not _has_tensors(tree):
        raise CheckpointError(f"holds no tensors: {_KNOWN}")


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Stored):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensors(entry) for entry in value.values())
    return isinstance(value, (list, tuple)) and any(_has_tensors(entry) for entry in value)


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and {"state", "param_groups"} <= set(value)
        and isinstance(value["state"], Mapping)
        and isinstance(value["param_groups"], (list, tuple))
    )


def _add_model(parts: ImportSource, model: Mapping[Any, Any], others: dict[Any, Any]) -> None:
    first: dict[Hashable, str] = {}
    for name, value in model.items():
        if not isinstance(value, Stored):
            others[name] = _fetched(value)
            continue
        path = f"{schema.MODEL}/{name}"
        kept = path if value.identity is None else first.setdefault(value.identity, path)
        if kept == path:
            parts.tensors[path] = value
        else:
            parts.links.append((path, kept))


def _add_optimizer(parts: ImportSource, optimizer: Mapping[str, Any]) -> None:
    parts.extra |= {key: _fetched(value) for key, value in optimizer.items() if key not in ("state", "param_groups")}
    names, parts.groups = _named_groups(optimizer["param_groups"])
    parts.scalars = {}
    for param, state in optimizer["state"].items():
        if not isinstance(param, str) and param not in names:
            raise CheckpointError(f"the optimizer has state of parameter {param!r}, {_UNNAMED}")
        fqn = names.get(param, param)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"the optimizer's state of {fqn!r} is a {type(state).__name__}, not a dict; {_ALONE}")
        for key, value in state.items():
            if not isinstance(key, str) or "/" in key:
                raise CheckpointError(
                    f"the optimizer's state of {fqn!r} has the key {key!r}: it must be a name without /; {_ALONE}"
                )
            if isinstance(value, Stored):
                parts.tensors[f"{schema.OPTIM_STATE}/{fqn}/{key}"] = value
            elif isinstance(value, (bool, int, float)):
                parts.scalars[f"{fqn}/{key}"] = value
            elif value is not None:
                raise CheckpointError(
                    f"optimizer state {key!r} of {fqn!r} is a {type(value).__name__}: tensors and numbers can be "
                    f"kept; {_ALONE}"
                )


def _named_groups(groups: Any) -> tuple[dict[Any, str], list[dict[str, Any]]]:
    """Return names of parameters that are given as numbers, and the groups with parameters by name."""
    names: dict[Any, str] = {}
    named = []
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
            raise CheckpointError(f"param_groups[{index}] of the optimizer does not list its parameters; {_ALONE}")
        params = list(group["params"])
        own = group.get("param_names")
        if own is not None and len(own) == len(params):
            numbered = [(param, name) for param, name in zip(params, own, strict=True) if not isinstance(param, str)]
            # DCP makes strings of the keys of the state.
            names |= {**dict(numbered), **{str(param): name for param, name in numbered}}
        unknown = [param for param in params if not isinstance(param, str) and param not in names]
        if unknown:
            raise CheckpointError(f"param_groups[{index}] of the optimizer has parameter {unknown[0]!r}, {_UNNAMED}")
        hyper = {key: _fetched(value) for key, value in group.items() if key not in ("params", "param_names")}
        named.append({"params": [names.get(param, param) for param in params], **hyper})
    return names, named


def _fetched(value: Any) -> Any:
    """Replace ``Stored`` by tensors."""
    if isinstance(value, Stored):
        return value.fetch()
    if isinstance(value, Mapping):
        return alike(value, {key: _fetched(entry) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return alike(value, [_fetched(entry) for entry in value])
    return value


def alike(value: Any, entries: Any) -> Any:
    """`entries` in a container of the type of `value`, where a checkpoint keeps that."""
    return type(value)(entries) if type(value) in (tuple, Counter, OrderedDict) else entries
