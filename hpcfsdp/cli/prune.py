"""``hpcfsdp prune DIR``: remove old checkpoints of a folder. Needs neither MPI nor torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint import retention
from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import is_checkpoint, is_hdf5, unreadable
from hpcfsdp.checkpoint.format.catalog import checkpoint_files, step_of
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.folders import size_of
from hpcfsdp.cli.printing import print_result
from hpcfsdp.errors import UsageError
from hpcfsdp.text.terminal import readable_bytes

parser = Parser(
    "prune",
    "Remove old checkpoints of a folder (also that of a run), and files of killed saves (.*.partial), those of "
    "other machines after an hour. Only files called step-<number>.h5 are removed: others stay, whatever they "
    "hold. The newest checkpoint that is not damaged always stays.",
    "hpcfsdp prune runs/quickstart --keep-last 3 --dry-run          # what would go",
    "hpcfsdp prune runs/quickstart --keep-last 3                    # keep the newest 3",
    "hpcfsdp prune runs/quickstart --keep-last 1 --keep-every 1000  # and every 1000th step",
)
add = parser.add_argument
add("folder", metavar="DIR", type=Path)
add("--keep-last", metavar="N", type=int, help="the newest N stay (default with --keep-every: 1)")
add("--keep-every", metavar="K", type=int, help="steps that are a multiple of K stay, too")
add("--dry-run", action="store_true", help="list files, and remove none")


def main(arguments: Sequence[str]) -> int:
    """Remove and list files, and return the exit code."""
    options = parser.parse_args(arguments)
    if options.keep_last is None and options.keep_every is None:
        raise UsageError("prune: choose which files stay: --keep-last N, --keep-every K, or both")
    try:
        folder = options.folder
        if not checkpoint_files(folder) and (folder / "checkpoints").is_dir():  # the folder of a run
            folder /= "checkpoints"
        spare = [path for path in checkpoint_files(folder) if _is_foreign(path)]
        rules = {"keep_last": options.keep_last, "keep_every": options.keep_every}
        removal = retention.plan_removal(folder, **rules, spare=spare)
        left_behind = retention.abandoned(folder, time.time())
        entries = _entries(removal, left_behind)
        if not options.dry_run:
            retention.remove(removal.going)
            for path in left_behind:
                disk.remove(path)
    except OSError as error:
        raise unreadable(error.filename or options.folder, error) from error
    goes = "would go" if options.dry_run else "removed"
    rows = []
    for entry in entries:
        what, note = goes if entry["goes"] else "stays", entry.get("error", {}).get("message", "")
        step, note = ("", "left behind") if entry["step"] is None else (entry["step"], note)
        rows.append((step, entry["file"], readable_bytes(entry["bytes"]), what, note))
    value = {"dry_run": options.dry_run, "files": entries}
    columns = ("step", "file", "size", "what", "note")
    print_result(options.json, value, columns, rows, right=("step", "size"), names=("file",), text=("note",))
    return 0


def _is_foreign(path: Path) -> bool:
    """Return whether another program wrote this HDF5 file."""
    try:
        return path.is_file() and is_hdf5(path) and not is_checkpoint(path)
    except OSError:  # gone, or not readable
        return False


def _entries(removal: retention.Removal, left_behind: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the files, and whether they go, lowest step first."""
    entries: list[dict[str, Any]] = []
    for path in sorted([*removal.going, *removal.staying], key=lambda path: (step_of(path), path)):
        entry = {"file": str(path), "step": step_of(path), "bytes": size_of(path) or 0, "goes": path in removal.going}
        if path in removal.damaged:
            entry["error"] = {"message": removal.damaged[path], "kind": "damaged", "exit_code": 4, "path": str(path)}
        entries.append(entry)
    for path in left_behind:
        entries.append({"file": str(path), "step": None, "bytes": size_of(path) or 0, "goes": True})
    return entries
