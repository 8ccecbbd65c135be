"""``python -m hpcfsdp.run script.py ...``: a program for torchrun and torch's FSDP, under mpirun or srun, as it is.

::

    mpirun -n 8 python -m hpcfsdp.run train.py --lr 1e-3      # in place of torchrun --nproc-per-node 8 train.py ...
    srun python -m hpcfsdp.run -m package.train               # a module

The program finds the variables of torchrun (``RANK``, ``LOCAL_RANK``, ...). Its ``init_process_group`` is
``hpcfsdp.init``, with NCCL on GPUs and MPI on CPUs, and ``destroy_process_group`` is ``hpcfsdp.finalize``.
``fully_shard``, ``FullyShardedDataParallel`` and what belongs to them in ``torch.distributed.fsdp`` are hpcfsdp's.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import DEFAULT_TIMEOUT_S, current_job
from hpcfsdp.world import current_world, finalize, init

_TORCHS = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel.fsdp",
    "torch.distributed.fsdp.wrap",
)
"""Modules of torch that use its own FSDP, also for models that are not: they are loaded before the names change."""

_PLACES = {
    "torch.distributed.fsdp": {
        "hpcfsdp.fsdp": ("FullyShardedDataParallel",),
        "hpcfsdp.fsdp2": ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
    },
    "torch.distributed.fsdp.fully_sharded_data_parallel": {"hpcfsdp.fsdp": ("FullyShardedDataParallel",)},
    "torch.distributed.fsdp.sharded_grad_scaler": {"hpcfsdp.fsdp": ("ShardedGradScaler",)},
    "torch.distributed._composable.fsdp": {"hpcfsdp.fsdp2": ("fully_shard",)},
}
"""Where a program finds torch's FSDP, and what is there instead. Our classes derive from torch's ``FSDPModule``."""


_OWN_RENDEZVOUS = (None, "env://", "mpi://")


def put_in_place() -> None:
    """Not collective. Give hpcfsdp's functions and classes the names of torch's, for what is imported from now on."""
    import torch.distributed as dist

    for name in _TORCHS:
        importlib.import_module(name)
    found = {place: {each: importlib.import_module(each) for each in ours} for place, ours in _PLACES.items()}
    for place, ours in _PLACES.items():
        module = importlib.import_module(place)
        for source, names in ours.items():
            for name in names:
                setattr(module, name, getattr(found[place][source], name))
    for stock, own in (("init_process_group", _init), ("destroy_process_group", _destroy)):
        replaced = getattr(dist, stock)
        setattr(dist, stock, functools.wraps(replaced)(functools.partial(own, replaced)))


def _init(
    stock: Callable[..., None],
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    **others: Any,
) -> None:
    """Do as torch's ``init_process_group``, by ``hpcfsdp.init``. Collective over all processes of the job.

    A group that is not one of all processes with the job's own rendezvous is made by torch.
    """
    import torch.distributed as dist

    if dist.is_initialized() or store is not None or others.get("_ranks") or init_method not in _OWN_RENDEZVOUS:
        stock(backend, init_method, timeout, world_size, rank, store, **others)
        return
    comm = current_job().comm
    for name, value, real in (("rank", rank, comm.rank), ("world_size", world_size, comm.size)):
        if value not in (-1, real):
            raise LaunchError(
                f"init_process_group was given {name}={value}, but this is process {comm.rank} of {comm.size} of the "
                "MPI job: leave it out, or read it from the environment"
            )
    kind = (backend or "").lower()
    on_cpu = kind in ("gloo", "mpi", "hpcmpi")
    seconds = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
    alone = kind if kind and not on_cpu and ":" not in kind else None  # a backend of devices, which must be there
    init("cpu" if on_cpu else None, backend=alone, timeout_s=seconds)


def _destroy(stock: Callable[..., None], group: Any = None) -> None:
    """Do as torch's ``destroy_process_group``; of the default group by ``hpcfsdp.finalize``. Collective likewise."""
    import torch.distributed as dist

    if group not in (None, dist.group.WORLD) or current_world() is None:
        stock(group)
    else:
        finalize()


def _parse(arguments: Sequence[str]) -> tuple[bool, str, list[str]]:
    """Return whether a module is to be run, its name or a path, and its arguments."""
    parser = argparse.ArgumentParser(
        "python -m hpcfsdp.run",
        description="Run a program for torchrun and torch's FSDP under mpirun or srun, as it is.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module")
    parser.add_argument("target", metavar="TARGET", help="the program: a path, or with -m a module")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(arguments)
    return given.is_module, given.target, given.arguments


def main(arguments: Sequence[str]) -> None:
    """Run the program that `arguments` name. Collective over all processes of the job."""
    is_module, target, rest = _parse(arguments)
    if not is_module and not os.path.exists(target):
        raise SystemExit(f"python -m hpcfsdp.run: {target}: there is no such file; -m runs a module")
    job = current_job()  # MPI before torch
    job.export(job.topology)
    put_in_place()
    sys.argv = [target, *rest]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        if not os.path.isdir(target):
            sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")
    if current_world() is not None:
        finalize()


if __name__ == "__main__":
    main(sys.argv[1:])
