"""``hpcfsdp show FILE [NAME]``: what a checkpoint, or one tensor of it, holds. Needs neither MPI nor torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint import schema
from hpcfsdp.checkpoint.reader import BlockReader, CheckpointIndex, open_index
from hpcfsdp.cli.arguments import Parser, print_json, print_table, readable_bytes, readable_shape
from hpcfsdp.errors import UsageError, nearest

FIRST_VALUES = 8


def main(arguments: Sequence[str]) -> int:
    """Show, and return the exit code."""
    parser = Parser(
        "show", "Show what a checkpoint holds, or the values of one tensor (checked against their checksums)."
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("name", metavar="NAME", nargs="?", help="of a tensor, with or without model/ before it")
    options = parser.parse_args(arguments)
    index = open_index(options.file)
    facts = _about_file(index) if options.name is None else _about_tensor(index, options.name)
    if options.json:
        print_json(facts)
    else:
        print_table(("what", "value"), [(key, _readable(key, value)) for key, value in facts.items()])
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
        facts[f"optimizer group {number}"] = {**group, "params": len(group["params"])}
    facts["extra"] = _plain(info.extra)
    facts["config"] = info.config
    return facts


def _about_tensor(index: CheckpointIndex, name: str) -> dict[str, Any]:
    path = _find(index, name)
    spec = index.resolve(path)
    facts: dict[str, Any] = {"name": path, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
    if path != spec.path:
        facts["same tensor as"] = spec.path
    first_row, end_row = index.first_rows[spec.path]
    facts["written by ranks"] = sorted({int(rank) for rank in index.extents["rank"][first_row:end_row]})
    with BlockReader(index) as reader:
        facts |= _statistics(reader, path, spec)
    return facts


def _statistics(reader: BlockReader, path: str, spec: schema.TensorSpec) -> dict[str, Any]:
    """Minimum, maximum, mean, norm and counts, one block in memory at a time; the first values."""
    low, high, total, squares, finite, nans, first = math.inf, -math.inf, 0.0, 0.0, 0, 0, []
    for block in reader.blocks(path):
        values = readable_values(block, spec.dtype)
        if len(first) < FIRST_VALUES:
            first += [_number(value) for value in values[: FIRST_VALUES - len(first)]]
        if np.iscomplexobj(values):
            values = np.abs(values)
        good = values[np.isfinite(values)].astype(np.float64)
        nans += int(np.isnan(values).sum())
        finite += good.size
        if good.size:
            low, high = min(low, float(good.min())), max(high, float(good.max()))
            total, squares = total + float(good.sum()), squares + float(np.square(good).sum())
    facts: dict[str, Any] = {"first values": first}
    if finite:
        facts |= {"min": low, "max": high, "mean": total / finite, "norm": math.sqrt(squares)}
    return facts | {"nan": nans, "infinite": spec.numel - finite - nans}


def readable_values(block: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as numbers that numpy computes with; bfloat16 becomes float32."""
    if dtype == "bfloat16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    return block


def _find(index: CheckpointIndex, name: str) -> str:
    known = [*index.tensors, *index.links]
    for candidate in (name, f"{schema.MODEL}/{name}", f"{schema.OPTIM_STATE}/{name}"):
        if candidate in known:
            return candidate
    hint = nearest(name, known + [path.split("/", 1)[1] for path in known])
    raise UsageError(f"{index.info.path}: holds no tensor {name!r}{hint} (hpcfsdp ls lists them)")


def _number(value: Any) -> Any:
    return value.item() if not np.iscomplexobj(value) else str(value.item())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return f"array {readable_shape(np.shape(value))} {value.dtype}"
    return value


def _readable(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return f"{value} ({readable_bytes(value)})"
    if key == "shape":
        return readable_shape(value)
    return str(value)
