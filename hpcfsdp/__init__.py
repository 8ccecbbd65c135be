"""Fully sharded data parallel training launched by MPI, with checkpoints in one HDF5 file.

Public names are loaded on first use: ``import hpcfsdp`` starts neither MPI nor HDF5 nor torch, so it is safe on a
login node where initialising MPI would abort the process.
"""

import importlib

from hpcfsdp._version import __version__

# name -> module that defines it; a module name mapped to itself is a public submodule
_PUBLIC = {
    **{name: f"hpcfsdp.{name}" for name in "checkpoint data errors fsdp fsdp2 mpi observe optim wrap".split()},
    **dict.fromkeys(("World", "init", "finalize"), "hpcfsdp.world"),
    "resilient": "hpcfsdp.resilience.run",
    **dict.fromkeys(("Preemption", "exit_requeue", "preemption"), "hpcfsdp.preempt"),
    **dict.fromkeys(("param_groups", "param_info"), "hpcfsdp.api.param_info"),
    "WeightedMean": "hpcfsdp.optim",
    "FullyShardedDataParallel": "hpcfsdp.fsdp",
    "fully_shard": "hpcfsdp.fsdp2",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hpcfsdp' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    return module if module.__name__ == f"hpcfsdp.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
