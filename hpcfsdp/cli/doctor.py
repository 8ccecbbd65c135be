"""``hpcfsdp doctor``: checks of the surroundings, each with a remedy. Also under mpirun and srun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import console, plain_value, print_json, print_line
from hpcfsdp.doctor.examine import Diagnosis, examine
from hpcfsdp.doctor.findings import summary
from hpcfsdp.errors import UsageError
from hpcfsdp.text.terminal import shown_lines

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_LEVEL_WIDTH, _AREA_WIDTH = 9, 11

parser = Parser(
    "doctor",
    "Check Python, torch, MPI, HDF5, devices, cores and the network, and give a remedy for each problem. "
    "As a plain process, or on many ranks: mpirun -n 4 hpcfsdp doctor.",
    "hpcfsdp doctor               # this machine",
    "mpirun -n 4 hpcfsdp doctor   # four ranks, and the network between them",
    "hpcfsdp doctor --json        # for programs",
)
parser.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help="for MPI to answer (default 60)")


def main(arguments: Sequence[str]) -> int:
    """Examine and print; the exit code is the same on every rank. Collective over all processes of the job."""
    options = parser.parse_args(arguments)
    if not 0 < options.timeout < float("inf"):
        raise UsageError(f"--timeout must be a positive number of seconds, not {options.timeout:g}")
    return examine(options.timeout, _print_as_json if options.json else _print_as_text)


def _print_as_json(diagnosis: Diagnosis) -> None:
    print_json(plain_value(asdict(diagnosis)))
    sys.stdout.flush()


def _print_as_text(diagnosis: Diagnosis) -> None:
    """Print one line for each finding; on a terminal its remedy on the next line."""
    if sys.stdout.isatty() and env.launcher_rank() is None:  # mpirun gives its ranks terminals that are not the user's
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        for width in (_LEVEL_WIDTH - 2, _AREA_WIDTH - 2):
            table.add_column(min_width=width, no_wrap=True)
        table.add_column(overflow="fold")
        for finding in diagnosis.findings:
            what = Text(shown_lines(finding.what))
            if finding.hint:
                what.append(f"\n-> {shown_lines(finding.hint)}", style="bold")
            table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.area), what)
        console().print(table)
    else:
        for finding in diagnosis.findings:
            hint = f" -> {finding.hint}" if finding.hint else ""
            line = f"{finding.level:{_LEVEL_WIDTH}}{finding.area:{_AREA_WIDTH}}{finding.what}{hint}"
            print_line(line.replace("\n", " "))
    print(summary(diagnosis.findings), flush=True)
