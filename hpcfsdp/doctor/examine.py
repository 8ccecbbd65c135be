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
from hpcfsdp.doctor import installed, launcher, machine, software, traffic
from hpcfsdp.doctor.child import Child, command_output
from hpcfsdp.doctor.finding import Finding, exit_code
from hpcfsdp.errors import LaunchError

_PROBE = "hpcfsdp.doctor.probe"
_GRACE_S = 3.0
_SECOND_LIMIT_S = 20.0
_OUTPUT_S = 0.5
"""Launchers drop output that has not reached them when the first rank ends with an error."""


@dataclass(frozen=True)
class Diagnosis:
    """What the report is made of.

    Attributes:
        findings: in the order in which they are told.
        facts: what they were drawn from, by name.
        ranks: facts of each rank; empty where MPI did not come that far.
    """

    findings: list[Finding]
    facts: dict[str, Any]
    ranks: list[dict[str, Any]]


def examine(limit_s: float, tell: Callable[[Diagnosis], None]) -> int:
    """Collective over all processes of the job. Look at everything; the exit code, the same on every rank.

    Args:
        limit_s: seconds that the child may take.
        tell: prints the report; called in one of the processes.
    """
    began = time.monotonic()
    launched = env.launcher_size()
    alone = launched is None or launched[1] == 1
    with Child(_PROBE, f"{limit_s}", limit_s=limit_s, forward=not alone) as child:
        # While the child starts: a launcher that ends the job leaves no time for it.
        own_facts = {} if env.launcher_rank() else _facts_of_this_process()
        child.wait_for("complete")
        child.deadline += _GRACE_S  # for the little that is left
        if _is_rank_0(child):
            diagnosis = diagnose(child, own_facts or _facts_of_this_process(), limit_s)
            tell(diagnosis)
            code = exit_code(diagnosis.findings)
            child.answer(code)
            return code if child.failure or "world" not in child.said else _ended_with(child, code)
        if "world" in child.said and child.wait_for("verdict"):
            code = child.said["verdict"]
            time.sleep(_OUTPUT_S if code else 0)
            return _ended_with(child, code)
        code = _code_of_this_rank(child, limit_s)
    _wait_for_rank_0(began + limit_s, failed=child.failure is not None)
    return code


def _is_rank_0(child: Child) -> bool:
    """Whether this process is the one to print. Where MPI has not started, the launcher knows."""
    world = child.said.get("world")
    return world["rank"] == 0 if world else not env.launcher_rank()


def _ended_with(child: Child, code: int) -> int:
    """The exit code on which all ranks agree, when the child has ended in good order, too."""
    if child.wait_for("verdict") and child.ended_well():
        return code
    return _complain(child, "ending MPI")


def _code_of_this_rank(child: Child, limit_s: float) -> int:
    """The exit code of a rank that is not rank 0, and whose child has not heard of it."""
    if child.ended_from_outside:
        return LaunchError.exit_code
    if child.failure is not None:
        return _complain(child, child.said.get("stage", "starting Python"))
    return exit_code(diagnose(child, _facts_of_this_process(), limit_s).findings)


def diagnose(child: Child, own_facts: dict[str, Any], limit_s: float) -> Diagnosis:
    """Findings from what the child has said, and from what this process can see itself."""
    facts = own_facts | child.said | {"output": child.output()}
    if child.failure is not None:
        facts |= {"failure": child.failure, "ended_from_outside": child.ended_from_outside}
        if "h5py" not in facts and not child.ended_from_outside:
            facts = _facts_without_mpi(min(limit_s, _SECOND_LIMIT_S)) | facts
    for key in ("complete", "verdict"):
        facts.pop(key, None)
    table = facts.pop("ranks", [])
    return Diagnosis(judge(facts, table), facts, [{"rank": rank} | row for rank, row in enumerate(table)])


def judge(facts: dict[str, Any], table: list[dict[str, Any]]) -> list[Finding]:
    """All findings. A pure function."""
    found = software.judge(facts) + launcher.judge(facts)
    if table:
        found += software.judge_ranks(table) + machine.judge(facts["nodes"], table) + traffic.judge(facts, table)
    return found


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
    """What a second child can tell of the packages where the first died of MPI."""
    with Child(_PROBE, "--without-mpi", f"{limit_s}", limit_s=limit_s) as child:
        child.wait_for("complete")
        died_loading = f"the process {child.failure}" if child.failure else None
        facts = {key: child.said[key] for key in ("torch", "library", "h5py") if key in child.said}
        if died_loading:
            package = child.said.get("stage", "").removeprefix("loading ")
            if package in ("torch", "h5py"):
                facts[package] = {"error": died_loading}
    return facts


def _complain(child: Child, stage: str) -> int:
    """Say on stderr, where all ranks may speak, how the child failed."""
    rank = env.launcher_rank()
    who = env.host_name() if rank is None else f"rank {rank} on {env.host_name()}"
    said = "".join(f"\n  {line}" for line in child.output(unseen=True))
    print(f"hpcfsdp: {who}: {stage} {child.failure}{said}", file=sys.stderr, flush=True)
    return LaunchError.exit_code


def _wait_for_rank_0(deadline: float, *, failed: bool) -> None:
    """Wait until rank 0 has printed its report: a launcher may end all ranks when the first ends with an error.

    Nothing can be asked of rank 0 without MPI, but it is known how long it waits for its children. Where it is through
    before, the launcher ends this process, too.

    Args:
        failed: the child has not ended in good order. The mpirun of MPICH then ends all; srun does not.
    """
    rest = deadline + _SECOND_LIMIT_S + _GRACE_S - time.monotonic()
    ends_all = env.launcher_ends_all() or (failed and not env.started_by_srun())
    time.sleep(max(_GRACE_S, rest) if ends_all else _GRACE_S)
