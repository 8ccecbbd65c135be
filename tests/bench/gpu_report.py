"""``make gpu-report``: the first hour on a machine with accelerators, as one JSON file and one page.

Each part runs in processes of its own and ends within its limit; one that fails is a row of the page. A second call
runs what is missing or has failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcfsdp import accelerator
from hpcfsdp.bench.harness import markdown
from hpcfsdp.cli.printing import print_json, print_note
from hpcfsdp.errors import HpcfsdpError, UsageError
from tests.bench import runs

HPCFSDP = (sys.executable, "-m", "hpcfsdp")
"""How a part starts the command; tests put one in its place that simulates the device."""
SOURCE = Path(__file__).resolve().parents[2]
_SIZES = ((64, ()), (16, ("--layers", "12", "--width", "1024")), (0, ("--layers", "4", "--width", "512")))
"""GiB of a device, and the model whose steps fit there next to those of the peers."""
_SMALL = ("--layers", "1", "--width", "16", "--context", "16", "--batch", "1", "--repeats", "1", "--dtype", "fp32")
_SMALL_TESTS = ("-k", "collectives")
_OF_THE_NODE = ("processor", "cores", "memory_bytes", "system")
"""May differ from call to call: a scheduler gives another node of a partition."""


class Part(NamedTuple):
    """One part of the report.

    Attributes:
        name: for ``--parts``, and of its files.
        command: what runs, without the launcher.
        ranks: that the launcher starts; 0 for one process without it.
        limit_s: after which it is ended, and has failed.
    """

    name: str
    command: tuple[str, ...]
    ranks: int
    limit_s: int


def parts(devices: int, device_nbytes: int, folder: Path, *, small: bool = False) -> list[Part]:
    """Return the parts for so many devices, one of which has so many bytes. The file of saves goes into `folder`.

    With one device they take 10 minutes at most.
    """
    bench = (*HPCFSDP, "bench")
    size = next(size for gib, size in _SIZES if device_nbytes >= gib << 30)
    size = _SMALL if small else ("--repeats", "5", *size)
    options = ("-q", "-rf", "--tb=short", "--color=no", "-p", "no:cacheprovider", *(_SMALL_TESTS if small else ()))
    tests = (sys.executable, "-m", "pytest", str(SOURCE / "tests" / "gpu"), "--with-mpi", *options)
    bytes_saved = ("40KB", "--tensors", "10") if small else ("2GiB", "--tensors", "300")
    saves = ("--repeats", "2", "--folder", str(folder), "--bytes", *bytes_saved, "--json")
    return [
        Part("doctor", (*HPCFSDP, "doctor"), 0, 60),
        Part("golden", (sys.executable, "-m", "tests.gpu.golden"), 0, 60),
        *(Part(f"tests-{ranks}", tests, ranks, 150) for ranks in (1, 2, 4) if ranks <= max(2, devices)),
        Part("step-imagined", (*bench, "gpu", *size, "--json"), 0, 110),
        *(Part(f"step-{ranks}", (*bench, "gpu", *size, "--json"), ranks, 150) for ranks in _worlds(devices)),
        Part("checkpoint", (*bench, "checkpoint", "--on-devices", *saves), devices, 70),
    ]


def _worlds(devices: int) -> list[int]:
    """Return 2, 4, 8 and so on, and all devices."""
    return sorted({*(1 << power for power in range(1, devices.bit_length())), *({devices} - {1})})


def run_report(options: argparse.Namespace) -> int:
    """Run the parts that are missing, have failed, or are asked for; the exit code is 1 if one has failed."""
    if accelerator.device_type() is None:
        raise UsageError("bench: gpu-report needs an accelerator, and this process sees none (hpcfsdp doctor says why)")
    folder = Path(options.folder or "runs/gpu")
    devices = options.ranks or accelerator.device_count()
    nbytes = accelerator.describe(accelerator.current_device()).nbytes
    planned = parts(devices, nbytes, folder, small=options.small)
    if unknown := set(options.parts or ()) - {part.name for part in planned}:
        names = ", ".join(part.name for part in planned)
        raise UsageError(f"bench: --parts {min(unknown)}: the parts on this machine are {names}")
    before = None if options.compare is None else runs.load(options.compare)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"bench: --folder {folder}: no folder can be made there: {error.strerror}") from None
    found = _begun(folder / "report.json", devices)
    mpirun = shlex.split(options.mpirun or "mpirun")
    for part in planned:
        kept = found["parts"].get(part.name)
        if part.name not in options.parts if options.parts else _is_done(kept, part):
            continue
        started = [*mpirun, "-n", str(part.ranks), *part.command] if part.ranks else list(part.command)
        print_note(f"bench: {part.name}: {shlex.join(started)}")
        began_s, environ = time.monotonic(), _environ()
        done = runs.result_of(started, folder / part.name, limit_s=part.limit_s, environ=environ)
        took = {"date": runs.now(), "seconds": round(time.monotonic() - began_s, 1)}
        found["parts"][part.name] = {"command": list(part.command), **took, **done}
        found["parts"] = {one.name: found["parts"][one.name] for one in planned if one.name in found["parts"]}
        _write(folder, found, before)
    _write(folder, found, before)
    if options.json:
        print_json(runs.with_changes(found, before))
    else:
        print(folder / "report.md")
    return runs.exit_code(found)


def _environ() -> dict[str, str]:
    """Return the environment of a part: it finds the tests, and has one CPU thread if nothing else was chosen."""
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _begun(path: Path, devices: int) -> dict[str, Any]:
    """Return the run that the folder has, or a new one. Raise a UsageError if devices or versions differ."""
    found = runs.new_run(devices)
    if not path.exists():
        return found
    kept = runs.load(path)
    others = [name for name in runs.differences(kept, found) if name not in _OF_THE_NODE]
    if others:
        raise UsageError(f"bench: {path} is of a run with other {', '.join(others)}: give another --folder")
    return {**found, "parts": kept["parts"]}


def _is_done(kept: Mapping[str, Any] | None, part: Part) -> bool:
    return kept is not None and "seconds" in kept and "error" not in kept and kept["command"] == list(part.command)


def _write(folder: Path, found: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Write the report as JSON, as a page, and as a figure of the ratios where matplotlib is installed."""
    runs.save(folder / "report.json", found)
    pictures = []
    if drawn := list(runs.ratios(found)):
        try:
            runs.draw_ratios(drawn, folder / "report.svg", runs.about(found))
            pictures = ["![ratios](report.svg)", ""]
        except HpcfsdpError as error:  # no matplotlib
            pictures = [str(error), ""]
    page = [*_heading(found), *pictures, *runs.lines(found, before)]
    (folder / "report.md").write_text("\n".join(page) + "\n")


def _heading(found: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, part in found["parts"].items():
        rows.append((name, "**failed**" if "error" in part else "passed", f"{part['seconds']:.0f}"))
    yield from ("# Report of a machine with accelerators", "")
    yield from (*markdown(("part", "result", "s"), rows), "")
