"""The whole examination: facts, findings and the exit code. This process never starts MPI; its child does."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp import env
from hpcfsdp.doctor import findings, installed, rank_findings
from hpcfsdp.doctor.child import Child, command_output
from hpcfsdp.doctor.findings import Finding, exit_code
from hpcfsdp.errors import LaunchError

_PROBE = "hpcfsdp.doctor.probe"
_GRACE_S = 3.0
_SECOND_LIMIT_S = 20.0
_OUTPUT_S = 0.5
"""Launchers drop output that has not reached them when the first rank ends with an error."""


@dataclass(frozen=True)
class Diagnosis:
    """The report: findings in its order, facts by name, and those of each rank, as far as MPI has come."""

    findings: list[Finding]
    facts: dict[str, Any]
    ranks: list[dict[str, Any]]


def examine(limit_s: float, print_report: Callable[[Diagnosis], None]) -> int:
    """Run all checks; return the exit code, the same on every rank. Collective over all processes of the job.

    The child may take `limit_s` seconds; one of the processes prints the report.
    """
    began = time.monotonic()
    launched = env.launcher_size()
    alone = launched is None or launched[1] == 1
    with Child(_PROBE, f"{limit_s}", limit_s=limit_s, forward=not alone) as child:
        # While the child starts: a launcher that ends the job leaves no time for it.
        own_facts = {} if env.launcher_rank() else _facts_of_this_process()
        child.wait_for("complete")
        child.deadline += _GRACE_S
        world = child.facts.get("world")
        if not (world["rank"] if world else env.launcher_rank()):  # rank 0, or a process without a launcher
            diagnosis = diagnose(child, own_facts or _facts_of_this_process(), limit_s)
            print_report(diagnosis)
            code = exit_code(diagnosis.findings)
            child.answer(code)
            return _ended_with(child, code) if world and child.failure is None else code
        if world and child.wait_for("verdict"):
            code = child.facts["verdict"]
            time.sleep(_OUTPUT_S if code else 0)
            return _ended_with(child, code)
        if child.ended_from_outside:
            code = LaunchError.exit_code
        elif child.failure is not None:
            code = _print_failure(child, child.facts.get("stage", "starting Python"))
        else:
            code = exit_code(diagnose(child, _facts_of_this_process(), limit_s).findings)
    # A launcher may end all ranks when the first ends with an error: rank 0 has to print its report before. Without MPI
    # there is no message from it, but its limits are known; if it ends earlier, the launcher ends this process, too.
    # After a failure of the child the mpirun of MPICH ends all ranks; srun does not.
    rest = began + limit_s + _SECOND_LIMIT_S + _GRACE_S - time.monotonic()
    ends_all = env.launcher_ends_all() or (child.failure is not None and not env.started_by_srun())
    time.sleep(max(_GRACE_S, rest) if ends_all else _GRACE_S)
    return code


def _ended_with(child: Child, code: int) -> int:
    """Return the common exit code of all ranks, unless the child fails to finalize MPI."""
    return code if child.wait_for("verdict") and child.ended_well() else _print_failure(child, "ending MPI")


def diagnose(child: Child, own_facts: dict[str, Any], limit_s: float) -> Diagnosis:
    """Return findings from the child's facts, and from those of this process."""
    facts = own_facts | child.facts | {"output": child.output()}
    if child.failure is not None:
        facts |= {"failure": child.failure, "ended_from_outside": child.ended_from_outside}
        if "h5py" not in facts and not child.ended_from_outside:
            facts = _facts_without_mpi(min(limit_s, _SECOND_LIMIT_S)) | facts
    for key in ("complete", "verdict"):
        facts.pop(key, None)
    table = facts.pop("ranks", [])
    found = [*findings.judge_software(facts), *findings.judge_mpi(facts)]
    if table:
        found += rank_findings.judge_ranks(facts, table)
    return Diagnosis(found, facts, [{"rank": rank} | row for rank, row in enumerate(table)])


def _facts_of_this_process() -> dict[str, Any]:
    path = shutil.which("mpirun")
    own = Path(sys.executable).parent / "mpirun"
    return {
        "host": env.host_name(),
        "python": {"version": sys.version.split()[0], "executable": sys.executable},
        "packages": installed.versions(),
        "environment": env.diagnostic_values(),
        "launched_as": env.launcher_rank(),
        "root": os.geteuid() == 0,
        "mpirun": {"path": path, "text": (command_output([path, "--version"], 10) or "").strip()} if path else None,
        "own_mpirun": str(own) if own.exists() else None,
    }


def _facts_without_mpi(limit_s: float) -> dict[str, Any]:
    """Return facts of the packages from a second child, when MPI has ended the first."""
    with Child(_PROBE, "--without-mpi", f"{limit_s}", limit_s=limit_s) as child:
        child.wait_for("complete")
        facts = {key: child.facts[key] for key in ("torch", "library", "h5py") if key in child.facts}
        package = child.facts.get("stage", "").removeprefix("loading ")
        if child.failure and package in ("torch", "h5py"):
            facts[package] = {"error": f"the process {child.failure}"}
    return facts


def _print_failure(child: Child, stage: str) -> int:
    """Print the child's failure to stderr, which all ranks may use; the exit code."""
    rank = env.launcher_rank()
    who = env.host_name() if rank is None else f"rank {rank} on {env.host_name()}"
    output = "".join(f"\n  {line}" for line in child.output(unseen=True))
    print(f"hpcfsdp: {who}: {stage} {child.failure}{output}", file=sys.stderr, flush=True)
    return LaunchError.exit_code
