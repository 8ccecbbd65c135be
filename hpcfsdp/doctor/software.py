"""Findings about Python and the packages. Pure functions of facts."""

from __future__ import annotations

import re
from typing import Any

from hpcfsdp.doctor.finding import Finding, Level
from hpcfsdp.doctor.spans import ranks as named

OLDEST = {"python": (3, 10), "torch": (2, 11), "mpi4py": (4, 0), "h5py": (3, 11)}


def judge(facts: dict[str, Any]) -> list[Finding]:
    """Python, torch with CUDA and NCCL, mpi4py, h5py with HDF5."""
    packages = facts["packages"]
    torch = facts.get("torch", {})
    h5py = facts.get("h5py", {})
    return [
        judge_version("python", facts["python"]["version"], facts["python"]["executable"]),
        judge_package("torch", torch.get("version") or packages["torch"], torch.get("error")),
        *judge_cuda(torch),
        judge_package("mpi4py", packages["mpi4py"]),
        judge_package("h5py", packages["h5py"], h5py.get("error")),
        *judge_hdf5(h5py),
    ]


def judge_version(area: str, version: str, where: str = "") -> Finding:
    """Whether something is new enough."""
    oldest = ".".join(map(str, OLDEST[area]))
    text = f"{version} ({where})" if where else version
    if numbers(version) >= OLDEST[area]:
        return Finding(area, "ok", text)
    hint = "use a newer python3 for the environment" if area == "python" else f"pip install '{area}>={oldest}'"
    return Finding(area, "problem", f"{text} is older than {oldest}", hint)


def judge_package(area: str, version: str | None, error: str | None = None) -> Finding:
    """Whether a package is there, loads, and is new enough."""
    if version is None:
        return Finding(area, "problem", "is not installed", f"pip install '{area}>={'.'.join(map(str, OLDEST[area]))}'")
    if error is not None:
        return Finding(area, "problem", f"{version} cannot be loaded: {error}", f"pip install --force-reinstall {area}")
    return judge_version(area, version)


def judge_cuda(torch: dict[str, Any]) -> list[Finding]:
    """Whether torch can use the GPUs of this machine, and which NCCL it has. Nothing where torch was not loaded."""
    if "version" not in torch:
        return []
    built_for = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else None
    if built_for is None:
        if torch["gpu_files"]:
            return [
                Finding(
                    "cuda",
                    "warning",
                    f"this machine has {torch['gpu_files']} GPU(s), but torch {torch['version']} is built for the CPU",
                    "install a torch that is built for your driver's CUDA (https://pytorch.org/get-started)",
                )
            ]
        return [Finding("cuda", "ok", "no GPU here, and torch is built for the CPU: training runs on the CPU over MPI")]
    seen = f", {torch['gpu_files']} GPU(s) in /dev" if torch["gpu_files"] else ", no GPU in /dev"
    found = [Finding("cuda", "ok", f"torch is built for {built_for}{seen}")]
    if torch["nccl"]:
        found.append(Finding("nccl", "ok", torch["nccl"]))
    elif torch["gpu_files"]:
        found.append(Finding("nccl", "problem", "torch has no NCCL", "install an official build of torch"))
    return found


def judge_hdf5(h5py: dict[str, Any]) -> list[Finding]:
    """Which HDF5 is behind h5py, and whether it has MPI: the same one as mpi4py."""
    if "hdf5" not in h5py:
        return []
    if not h5py["mpi"]:
        what = f"{h5py['hdf5']} without MPI: checkpoints are written with posix, the writer mpio is not available"
        return [Finding("hdf5", "note", what, "nothing to do; for mpio build h5py with HDF5_MPI=ON")]
    if h5py["other_mpi_files"]:
        return [
            Finding(
                "hdf5",
                "warning",
                f"{h5py['hdf5']} with an MPI other than mpi4py's ({', '.join(h5py['other_mpi_files'])})",
                "build h5py and mpi4py for the same MPI, or install h5py without MPI; do not use the writer mpio",
            )
        ]
    return [Finding("hdf5", "ok", f"{h5py['hdf5']} with the MPI of mpi4py")]


def judge_ranks(table: list[dict[str, Any]]) -> list[Finding]:
    """Whether all ranks run the same Python and packages."""
    found = []
    installations = [{"python": row["python"], **row["packages"]} for row in table]
    for name in installations[0]:
        where: dict[str | None, list[int]] = {}
        for rank, versions in enumerate(installations):
            where.setdefault(versions[name], []).append(rank)
        if len(where) > 1:
            level: Level = "problem" if name in ("torch", "mpi4py") else "warning"
            text = "; ".join(f"{version or 'none'} on {named(ranks)}" for version, ranks in where.items())
            hint = "start all ranks with the same environment, on a file system that all nodes see"
            found.append(Finding(name, level, f"ranks differ: {text}", hint))
    return found


def numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
