"""Fully sharded data parallel training launched by MPI, with checkpoints in one HDF5 file.

Public names are loaded on first use: ``import hpcfsdp`` starts neither MPI nor HDF5 nor torch, so it is safe on a
login node where initialising MPI would abort the process.
"""

import importlib

from hpcfsdp._version import __version__

# name -> module that defines it; a module name mapped to itself is a public submodule
_PUBLIC = {
    "FullyShardedDataParallel": "hpcfsdp.fsdp",
    "Preemption": "hpcfsdp.preempt",
    "World": "hpcfsdp.world",
    "init": "hpcfsdp.world",
    "finalize": "hpcfsdp.world",
    "checkpoint": "hpcfsdp.checkpoint",
    "errors": "hpcfsdp.errors",
    "fsdp": "hpcfsdp.fsdp",
    "fsdp2": "hpcfsdp.fsdp2",
    "fully_shard": "hpcfsdp.fsdp2",
    "exit_requeue": "hpcfsdp.preempt",
    "mpi": "hpcfsdp.mpi",
    "observe": "hpcfsdp.observe",
    "optim": "hpcfsdp.optim",
    "param_groups": "hpcfsdp.api.param_info",
    "param_info": "hpcfsdp.api.param_info",
    "preemption": "hpcfsdp.preempt",
    "wrap": "hpcfsdp.wrap",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hpcfsdp' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    return module if module.__name__ == f"hpcfsdp.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
