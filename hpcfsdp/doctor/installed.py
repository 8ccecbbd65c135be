"""Versions and features of the packages. The child loads them, because that may end a process."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "mpi4py", "h5py", "numpy", "psutil")


def versions() -> dict[str, str | None]:
    """Return the installed version of each of ``PACKAGES``, without loading it."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def steps(*, initialise_mpi: bool) -> Iterator[dict[str, Any]]:
    """Yield facts, one package after the other: loading the next one may end the process.

    Unless `initialise_mpi`, as where MPI runs in this process, its library is loaded, but MPI does not start.
    """
    if not initialise_mpi:
        with contextlib.suppress(ImportError, AttributeError):
            import mpi4py

            mpi4py.rc.initialize = False
    checks = {"torch": _torch, "h5py": _h5py, "library": _mpi_library}
    if initialise_mpi:  # the library is loaded already; otherwise it comes last, because it may end the process
        checks = {"library": _mpi_library, **checks}
    for name, check in checks.items():
        yield {"stage": f"loading {name if name != 'library' else 'the MPI library'}"}
        try:
            yield {name: check()}
        except Exception as error:
            yield {name: {"error": f"{type(error).__name__}: {error}".splitlines()[0]}}


def _torch() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": importlib.metadata.version("torch")}
    facts |= {"cuda": torch.version.cuda, "rocm": torch.version.hip, "nccl": None}
    facts["gpu_files"] = len(glob.glob("/dev/nvidia[0-9]*")) or int(Path("/dev/kfd").exists())
    facts |= {"accelerator": None, "devices": 0, "backend": None, "has_backend": False}
    found = torch.accelerator.current_accelerator()  # torch is built for it, or a plug-in is installed
    if found is not None:
        facts["accelerator"], facts["devices"] = found.type, torch.accelerator.device_count()
        with contextlib.suppress(ValueError):  # torch knows no backend
            facts["backend"] = torch.distributed.get_default_backend_for_device(found)
            facts["has_backend"] = torch.distributed.is_backend_available(facts["backend"])
    if torch.version.cuda or torch.version.hip:
        with contextlib.suppress(Exception):
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _mpi_library() -> dict[str, Any]:
    from mpi4py import MPI

    facts: dict[str, Any] = {
        "text": MPI.Get_library_version().split("\n")[0].strip("\0 "),
        "standard": ".".join(map(str, MPI.Get_version())),
        "files": mpi_files(_maps()),
        "thread_level": None,
    }
    if MPI.Is_initialized():
        names = ("single", "funneled", "serialized", "multiple")
        facts["thread_level"] = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in names}[MPI.Query_thread()]
    return facts


def _h5py() -> dict[str, Any]:
    known = set(mpi_files(_maps()))
    import h5py

    return {
        "version": h5py.__version__,
        "hdf5": h5py.version.hdf5_version,
        "mpi": bool(h5py.get_config().mpi),
        "other_mpi_files": sorted(set(mpi_files(_maps())) - known) if known else [],
    }


def mpi_files(maps: str) -> list[str]:
    """Return the MPI libraries among the files that a process has mapped (the text of ``/proc/self/maps``)."""
    return sorted(set(re.findall(r"(/\S*/libmpi(?:ch)?(?:_\w+)?\.so\S*)", maps)))


def _maps() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text()
    return ""
