"""``hpcfsdp show FILE [NAME]``: facts of a checkpoint, or of one of its tensors. Needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.inspect.numbers import decoded, json_number
from hpcfsdp.checkpoint.inspect.stats import file_statistics
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.cli.reporting import Parser, plain_value, print_result, readable_bytes, readable_shape
from hpcfsdp.errors import CheckpointError, nearest

FIRST_VALUES = 8


def main(arguments: Sequence[str]) -> int:
    """Show, and return the exit code."""
    parser = Parser("show", "Show facts of a checkpoint, or of one of its tensors (checked against its checksums).")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("name", metavar="NAME", nargs="?", help="of a tensor, with or without model/ before it")
    options = parser.parse_args(arguments)
    index = open_index(options.file)
    facts = _about_file(index) if options.name is None else _about_tensor(index, options.name)
    print_result(options.json, facts, ("what", "value"), [(key, _readable(key, facts[key])) for key in facts])
    return 0


def _about_file(index: CheckpointIndex) -> dict[str, Any]:
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
        "model tensors": len(model),
        "model elements": sum(spec.numel for spec in model),
        "model bytes": sum(spec.nbytes for spec in model),
        "tied names": dict(index.links),
        "optimizer tensors": len(optim),
        "optimizer bytes": sum(spec.nbytes for spec in optim),
    }
    for number, group in enumerate(index.param_groups or []):
        listed = {"params": len(group["params"])} if "params" in group else {}
        facts[f"optimizer group {number}"] = plain_value({**group, **listed})
    if index.metrics:
        facts["metrics"] = {
            name: f"{len(steps)} values" + (f", {values[-1]:.6g} at step {steps[-1]}" if len(steps) else "")
            for name, (steps, values) in index.metrics.items()
        }
    if index.parts:
        facts["files beside it"] = [part.name for part in index.parts]
    facts["extra"] = plain_value(info.extra)
    facts["config"] = plain_value(info.config)
    return facts


def _about_tensor(index: CheckpointIndex, name: str) -> dict[str, Any]:
    path = _find(index, name)
    spec = index.resolve(path)
    facts: dict[str, Any] = {"name": path, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
    if path != spec.path:
        facts["same tensor as"] = spec.path
    facts["written by ranks"] = sorted(set(index.rows_of(path)["rank"].tolist()))
    with BlockReader(index) as reader:
        first = decoded(reader.read(spec.path, 0, min(FIRST_VALUES, spec.numel)), spec.dtype)
        (_, found), *_ = file_statistics(index, reader, [spec.path])
    facts["first values"] = [json_number(value) for value in first]
    if found.min is not None:
        facts |= {name: json_number(getattr(found, name)) for name in ("min", "max", "mean", "norm")}
    return facts | {"nan": found.nan, "infinite": found.inf}


def _find(index: CheckpointIndex, name: str) -> str:
    for candidate in (name, f"{schema.MODEL}/{name}", f"{schema.OPTIM_STATE}/{name}"):
        if candidate in index.tensors or candidate in index.links:
            return candidate
    known = [*index.tensors, *index.links]
    hint = nearest(name, known + [path.split("/", 1)[1] for path in known])
    raise CheckpointError(f"{index.info.path}: holds no tensor {name!r}{hint} (hpcfsdp ls lists them)")


def _readable(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return f"{value} ({readable_bytes(value)})"
    if key == "shape":
        return readable_shape(value)
    return str(value)
