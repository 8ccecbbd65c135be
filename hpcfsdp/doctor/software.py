"""Findings about Python and the packages. Pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hpcfsdp.doctor.finding import Finding, note, ok, problem, warning
from hpcfsdp.text.terminal import ranks as named

OLDEST = {"python": (3, 10), "torch": (2, 11), "mpi4py": (4, 0), "h5py": (3, 11)}


def judge(facts: dict[str, Any]) -> Iterator[Finding]:
    """Python, torch with its accelerator and NCCL, mpi4py, h5py with HDF5."""
    packages, python, torch, h5py = facts["packages"], facts["python"], facts.get("torch", {}), facts.get("h5py", {})
    yield judge_version("python", python["version"], python["executable"])
    yield judge_package("torch", torch.get("version") or packages["torch"], torch.get("error"))
    yield from judge_accelerator(torch)
    yield from judge_nccl(torch)
    yield judge_package("mpi4py", packages["mpi4py"])
    yield judge_package("h5py", packages["h5py"], h5py.get("error"))
    yield from judge_hdf5(h5py)


def judge_version(area: str, version: str, where: str = "") -> Finding:
    """Whether a version is new enough."""
    text = f"{version} ({where})" if where else version
    if numbers(version) >= OLDEST[area]:
        return ok(area, text)
    hint = "use a newer python3 for the environment" if area == "python" else _install(area)
    return problem(area, f"{text} is older than {'.'.join(map(str, OLDEST[area]))}", hint)


def judge_package(area: str, version: str | None, error: str | None = None) -> Finding:
    """Whether a package is installed, loads, and is new enough."""
    if version is None:
        return problem(area, "is not installed", _install(area))
    if error is not None:
        return problem(area, f"{version} cannot be loaded: {error}", f"pip install --force-reinstall {area}")
    return judge_version(area, version)


def _install(area: str) -> str:
    return f"pip install '{area}>={'.'.join(map(str, OLDEST[area]))}'"


def judge_accelerator(torch: dict[str, Any]) -> Iterator[Finding]:
    """Whether torch can use the accelerator of this machine, of any vendor. Nothing where torch was not loaded."""
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
    """NVIDIA and AMD: the version of NCCL, or RCCL."""
    if torch.get("nccl"):
        yield ok("nccl", f"{'RCCL' if torch['rocm'] else 'NCCL'} {torch['nccl']}")


def judge_hdf5(h5py: dict[str, Any]) -> Iterator[Finding]:
    """The HDF5 of h5py, and whether it has the MPI of mpi4py."""
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


def judge_ranks(table: list[dict[str, Any]]) -> Iterator[Finding]:
    """Whether all ranks run the same Python and packages."""
    installations = [{"python": row["python"], **row["packages"]} for row in table]
    for name in installations[0]:
        where: dict[str | None, list[int]] = {}
        for rank, versions in enumerate(installations):
            where.setdefault(versions[name], []).append(rank)
        if len(where) > 1:
            text = "; ".join(f"{version or 'none'} on {named(ranks)}" for version, ranks in where.items())
            hint = "start all ranks with the same environment, on a file system that all nodes see"
            differ = problem if name in ("torch", "mpi4py") else warning
            yield differ(name, f"ranks differ: {text}", hint)


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
