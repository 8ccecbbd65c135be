"""``hpcfsdp bench all``: the suite of benchmarks, with a summary first, and next to an earlier run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcfsdp import accelerator
from hpcfsdp.bench import suite
from hpcfsdp.bench.harness import Ratio, markdown
from hpcfsdp.cli.printing import print_json, print_note
from hpcfsdp.errors import UsageError

_WANTED = {"lower": "< 1", "higher": "> 1"}


def run_all(options: argparse.Namespace) -> int:
    """Run the suite and print it; the exit code is 1 if a part has failed."""
    before = None if options.compare is None else suite.load(options.compare)
    for path in (options.out, options.figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"bench: {path}: there is no folder {path.absolute().parent}")
    parts = suite.SMALL if options.small else (*suite.PARTS, *(suite.ON_DEVICES if accelerator.device_count() else ()))
    extra = [] if options.repeats is None else ["--repeats", str(options.repeats)]
    extra += [] if options.folder is None else ["--folder", options.folder]
    found = suite.run(parts, options.mpirun or "mpirun", options.ranks or 2, print_note, extra)
    if options.out is not None:
        suite.save(options.out, found)
    failed = suite.failures(found)
    if options.json:
        compared = None if before is None else [_as_json(change) for change in suite.changes(before, found)]
        others = None if before is None else suite.differences(before, found)
        print_json({**found, "changes": compared, "differs_in": others})
    else:
        for line in _lines(found, before):
            print(line)
    ratios = list(suite.ratios(found))
    if options.figure is not None and ratios:
        suite.draw_ratios(ratios, Path(options.figure), suite.about(found))
    for title, message in failed.items():
        print_note(f"bench: {title} has failed: {message.splitlines()[-1] if message else 'without a message'}")
    return 1 if failed else 0


def _lines(found: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the summary, the comparison, and the table of each part."""
    yield from (suite.about(found), "")
    yield from markdown(("benchmark", "ratio", "median", "min-max", "better if"), _summary(suite.ratios(found)))
    if before is not None:
        yield from ("", f"Compared with {suite.about(before)}", "")
        if others := suite.differences(before, found):
            yield from (f"The runs differ in {', '.join(others)}: a verdict may come from that alone.", "")
        yield from markdown(("benchmark", "ratio", "before", "now", "verdict"), _changes(suite.changes(before, found)))
    for title, part in found["parts"].items():
        yield from ("", f"## {title}", "", f"`{' '.join(part['command'])}`", "")
        yield from part["text"].splitlines() if "text" in part else [f"failed: {part['error']['message']}"]


def _summary(found: Iterable[tuple[str, Ratio]]) -> Iterator[tuple[str, ...]]:
    for title, ratio in found:
        yield title, ratio.name, f"{ratio.value:.2f}", f"{ratio.low:.2f} - {ratio.high:.2f}", _WANTED[ratio.better]


def _changes(changes: Iterable[suite.Change]) -> Iterator[tuple[str, ...]]:
    def cell(ratio: Ratio | None) -> str:
        return "" if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"

    for change in changes:
        yield change.part, change.name, cell(change.before), cell(change.now), change.verdict


def _as_json(change: suite.Change) -> dict[str, Any]:
    sides = {"before": change.before, "now": change.now}
    values = {name: None if ratio is None else ratio._asdict() for name, ratio in sides.items()}
    return {"part": change.part, "name": change.name, **values, "verdict": change.verdict}
