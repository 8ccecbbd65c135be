"""``hpcfsdp report RUN_DIR``: a page about a run. Needs neither MPI nor torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_json, print_line
from hpcfsdp.errors import UsageError
from hpcfsdp.report.page import page_of, write_page
from hpcfsdp.report.problems import problems_of
from hpcfsdp.report.run_folder import read_run
from hpcfsdp.report.summary import summarize

parser = Parser(
    "report",
    "Write a page about a run that goes on or has ended: findings with remedies, figures of loss, throughput, "
    "communication, memory and the spread over ranks, starts and ends, checkpoints, warnings, configuration and "
    "environment. It is one HTML file that needs no network, for screens, phones and paper.",
    "hpcfsdp report runs/quickstart                      # writes runs/quickstart/report.html",
    "hpcfsdp report runs/quickstart --out ~/loss.html    # elsewhere",
    "hpcfsdp report runs/quickstart --json               # the same facts and findings, for programs",
)
add = parser.add_argument
add("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run, with its metrics.jsonl")
add("--out", metavar="FILE", type=Path, help="the page; an existing file is replaced; default: RUN_DIR/report.html")


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path, or print the facts as JSON; the exit code."""
    options = parser.parse_args(arguments)
    if options.out is not None and os.path.isdir(options.out):
        raise UsageError(f"report: --out {options.out} is a folder: give the name of a file")
    run = read_run(options.run_dir)
    summary = summarize(run)
    problems = problems_of(run, summary)
    if not options.json or options.out is not None:
        page = options.out or options.run_dir / "report.html"
        write_page(page_of(run, summary, problems), page)
    if options.json:
        found = [asdict(problem) for problem in problems]
        print_json({"run_dir": str(options.run_dir), **asdict(summary), "problems": found})
    else:
        print_line(page)
    return 0
