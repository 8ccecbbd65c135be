"""``hpcfsdp hang RUN_DIR``: has the ranks of a running job say where they are. Needs neither MPI nor torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_json
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.hang import report
from hpcfsdp.hang.inquiry import HangRequest, Inquiry

_OTHERS_S = 15.0
"""How long to wait for further nodes, after the first one has answered."""
_LOOK_S = 0.2

parser = Parser(
    "hang",
    "Ask the ranks of a running job where they are: what each waits in, which ranks have not come, and Python "
    "stacks. Works while the job hangs, from any node that sees the folder; the job goes on. Nodes answer within 5 "
    "seconds, or 30 where ranks are stuck in C code, and later where the file system shows new files late.",
    "hpcfsdp hang runs/quickstart            # ask the job that trains there",
    "hpcfsdp hang runs/quickstart --wait 10  # give up after 10 seconds",
)
add = parser.add_argument
add("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run, or the one that the job was started in")
add("--wait", metavar="SECONDS", type=float, default=60.0, help="for the first answer (default 60)")


def main(arguments: list[str]) -> int:
    """Ask, write a report for each job that answers, and print who waits for whom."""
    options = parser.parse_args(arguments)
    if not options.run_dir.is_dir():
        raise UsageError(f"{options.run_dir} is not a folder: give that of the run, or where the job was started")
    inquiry = Inquiry(options.run_dir)
    try:
        request, is_new = inquiry.ask("", f"asked from {env.host_name()}")
    except OSError as error:
        raise HpcfsdpError(f"{inquiry.folder}: cannot write there: {error.strerror}") from error
    if not is_new:
        raise HpcfsdpError(f"{inquiry.folder}: somebody else asks right now: {request.reason}; look there in a moment")
    try:
        answers = _answers(inquiry, request, options.wait)
        if not answers:
            raise HpcfsdpError(
                f"{options.run_dir}: no job has answered within {options.wait:g} s. A job looks for questions in the "
                "run_dir that hpcfsdp.init got, by default the folder in which it was started, and answers its user"
            )
        reports = {job: report.render(parts, request.reason, request.asked_s) for job, parts in sorted(answers.items())}
        paths = {job: inquiry.write_report(request, job, text) for job, text in reports.items()}
    finally:
        inquiry.close(request)
    if options.json:
        print_json([{"job": job, "report": str(paths[job]), "nodes": answers[job]} for job in paths])
    else:
        for job, text in reports.items():
            print(f"{report.head(text)}\n\nThe whole report: {paths[job]}")
    return 0


def _answers(inquiry: Inquiry, request: HangRequest, wait_s: float) -> dict[str, list[dict[str, Any]]]:
    """Return what each job's nodes have answered."""
    found: dict[str, list[dict[str, Any]]] = {}
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        before, found = found, {}
        for answer in filter(report.is_answer, inquiry.answers(request)):
            found.setdefault(answer["job"], []).append(answer)
        if found and not before:
            until_s = max(until_s, time.monotonic() + _OTHERS_S)
        if found and all(len(parts) == parts[0]["num_nodes"] for parts in found.values()):
            break
    return found
