"""``hpcfsdp show FILE [NAME]``: facts of a checkpoint, or of one of its tensors. Needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.stats import decoded, file_statistics, json_number
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import plain_value, print_json, print_table, readable_date, readable_shape, shortened
from hpcfsdp.errors import CheckpointError, UsageError, nearest
from hpcfsdp.text.terminal import readable_bytes

FIRST_VALUES = 8

parser = Parser(
    "show",
    "Show facts of a checkpoint, or of one of its tensors (checked against its checksums).",
    "hpcfsdp show my_model.h5                  # step, date, sizes, optimizer, configuration",
    "hpcfsdp show my_model.h5 layers.0.weight  # one tensor: shape, numbers, who wrote it",
    "hpcfsdp show my_model.h5 --json           # for programs",
)
add = parser.add_argument
add("file", metavar="FILE", type=Path)
add("name", metavar="NAME", nargs="?", help="of a tensor, with or without model/ before it")


def main(arguments: Sequence[str]) -> int:
    """Show, and return the exit code."""
    options = parser.parse_args(arguments)
    index = open_index(options.file)
    facts, nested = _about_file(index) if options.name is None else (_about_tensor(index, options.name), {})
    if options.json:
        print_json(facts | plain_value(nested))
        return 0
    rows = [(key.replace("_", " "), _readable(key, value)) for key, value in facts.items()]
    filled = {key: _for_yaml(value if key == "config" else shortened(value)) for key, value in nested.items() if value}
    if filled:
        import yaml  # which only the extra `cli` installs: an error comes before any output
    print_table(("what", "value"), rows, text=("value",))
    if filled:
        print()
        print(yaml.safe_dump(filled, sort_keys=False, width=100), end="")
    return 0


def _about_file(index: CheckpointIndex) -> tuple[dict[str, Any], dict[str, Any]]:
    """Single facts, and those that have several values."""
    info = index.info
    model = [spec for path, spec in index.tensors.items() if path.startswith(f"{schema.MODEL}/")]
    optim = [spec for path, spec in index.tensors.items() if path.startswith(f"{schema.OPTIM_STATE}/")]
    facts: dict[str, Any] = {
        "file": str(info.path),
        "format": f"{schema.FORMAT} {info.format_version}",
        "software": f"hpcfsdp {info.software_version}",
        "date": info.date,
        "step": info.step,
        "ranks": info.world_size,
        "model_tensors": len(model),
        "model_elements": sum(spec.numel for spec in model),
        "model_bytes": sum(spec.nbytes for spec in model),
        "optimizer_tensors": len(optim),
        "optimizer_bytes": sum(spec.nbytes for spec in optim),
    }
    groups = [
        group | ({"params": len(group["params"])} if "params" in group else {}) for group in index.param_groups or []
    ]
    metrics = {}
    for name, (steps, values) in index.metrics.items():
        last, step = (values[-1].item(), int(steps[-1])) if len(steps) else (None, None)
        metrics[name] = {"values": len(steps), "last": last, "step": step}
    nested = {"tied_names": dict(index.links), "parts": [part.name for part in index.parts]}
    nested |= {"optimizer_groups": groups, "metrics": metrics, "extra": index.extra}
    nested |= {"data": info.data or {}, "config": info.config}
    return facts, nested


def _about_tensor(index: CheckpointIndex, name: str) -> dict[str, Any]:
    path = _find(index, name)
    spec = index.resolve(path)
    facts: dict[str, Any] = {"name": path, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
    if path != spec.path:
        facts["same_as"] = spec.path
    facts["written_by_ranks"] = sorted(set(index.rows_of(path)["rank"].tolist()))
    with BlockReader(index) as reader:
        first = decoded(reader.read(spec.path, 0, min(FIRST_VALUES, spec.numel)), spec.dtype)
        (_, found), *_ = file_statistics(index, reader, [spec.path])
    facts["first_values"] = [json_number(value) for value in first]
    if found.min is not None:
        facts |= {name: json_number(getattr(found, name)) for name in ("min", "max", "mean", "norm")}
    return facts | {"nan": found.nan, "infinite": found.inf}


def _find(index: CheckpointIndex, name: str) -> str:
    for candidate in (name, f"{schema.MODEL}/{name}", f"{schema.OPTIM_STATE}/{name}"):
        if candidate in index.tensors or candidate in index.links:
            return candidate
    if set(name) & set("*?["):
        raise UsageError(f"show: {name!r} is a pattern, and show takes one name: give the pattern to ls or stats")
    known = [*index.tensors, *index.links]
    hint = nearest(name, known + [path.split("/", 1)[1] for path in known])
    raise CheckpointError(f"{index.info.path}: holds no tensor {name!r}{hint} (hpcfsdp ls lists them)")


def _readable(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return f"{value} ({readable_bytes(value)})"
    if key == "shape":
        return readable_shape(value)
    return readable_date(value) if key == "date" else str(value)


def _for_yaml(value: Any) -> Any:
    """Return a value with types that YAML has."""
    if isinstance(value, dict):
        return {_for_yaml(key): _for_yaml(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_yaml(entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    return f"array {readable_shape(value.shape)} {value.dtype}" if isinstance(value, np.ndarray) else value
