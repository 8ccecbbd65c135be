"""``hpcfsdp verify FILE...|FOLDER``: check every byte of checkpoints. Needs neither MPI nor torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.inspect.verify import verify_file
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.failure import as_json
from hpcfsdp.cli.folders import checkpoints_in, size_of
from hpcfsdp.cli.printing import print_json, print_line
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError
from hpcfsdp.output.progress_bar import byte_progress
from hpcfsdp.text.terminal import readable_bytes

EXIT_DAMAGED = CheckpointCorruptError.exit_code

parser = Parser(
    "verify",
    "Check every byte of checkpoints, and list all faults. Exit code 4: a file is damaged, not finished or not a "
    "checkpoint; 1: a file could not be read; 0: all files are sound.",
    "hpcfsdp verify my_model.h5              # is every byte as it was written?",
    "hpcfsdp verify runs/quickstart best.h5  # all checkpoints of a run, and a file",
)
_PATHS = "a file, or a folder of checkpoints (also that of a run)"
parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help=_PATHS)


def main(arguments: Sequence[str]) -> int:
    """Verify and print; the exit code: 4 if a file is damaged, else 1 if one cannot be read, else 0."""
    options = parser.parse_args(arguments)
    entries: list[dict[str, Any]] = []
    codes = set()
    files: list[tuple[Path, bool]] = []
    for path in options.paths:
        # Not Path.is_dir, which raises where a parent folder may not be searched.
        files += [(file, True) for file in checkpoints_in(path)] if os.path.isdir(path) else [(path, False)]
    for path, is_listed in files:
        entry = _entry(path)
        if is_listed and size_of(path) is None:  # removed since, for instance by a training that keeps a few
            continue
        codes.add(entry["error"]["exit_code"] if "error" in entry else 0 if entry["sound"] else EXIT_DAMAGED)
        entries.append(entry)
        lines = [": ".join(filter(None, (fault["where"], fault["what"]))) for fault in entry.get("faults", ())]
        if "error" in entry:
            lines = [entry["error"]["message"]]
        elif entry["sound"]:
            lines.append(f"sound: {entry['tensors']} tensors, {readable_bytes(entry['bytes'])}")
        for line in () if options.json else lines:
            print_line(f"{path}: {line}")
    if options.json:
        print_json(entries)
    return EXIT_DAMAGED if EXIT_DAMAGED in codes else max(codes, default=0)


def _entry(path: Path) -> dict[str, Any]:
    """Return the facts of a file, or the error that kept it from being read."""
    try:
        with byte_progress(f"verify {path.name}", size_of(path) or 0) as advance:
            report = verify_file(path, advance)
    except CheckpointError as error:
        what = as_json(error, [path])
        return {"file": str(path), "error": what | {"message": what["message"].removeprefix(f"{path}: ")}}
    faults = [asdict(fault) for fault in report.faults]
    facts = {"sound": report.sound, "tensors": report.tensors, "bytes": report.nbytes}
    return {"file": str(path), **facts, "faults": faults}
