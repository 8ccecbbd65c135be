"""All processes of the job, as MPI knows them: ranks, nodes, devices, the process group, meshes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hpcfsdp import env
from hpcfsdp.errors import CommunicationError, HangError, LaunchError, nearest
from hpcfsdp.hang import departure, events, lost, watch as hang
from hpcfsdp.hang.calls import public_call
from hpcfsdp.launch import together
from hpcfsdp.launch.job import DEFAULT_TIMEOUT_S, Job, check_torchrun, current_job
from hpcfsdp.launch.topology import Topology

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from hpcfsdp.comm.communicator import Communicator
    from hpcfsdp.comm.mesh import Extent
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator


log = logging.getLogger("hpcfsdp.hang")

_REPORT_S = 60.0  # how long a report about a hang may take


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``init``."""

    device: str | None = None
    backend: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    split_nodes: int = 1


@dataclass(frozen=True)
class World:
    """All processes of the job as this process sees them."""

    rank: int
    """The rank of this process in the job, 0 to size - 1."""
    topology: Topology
    """Which ranks share a node."""
    device: torch.device
    """The device of this rank."""
    comm: MPI.Intracomm
    """An mpi4py communicator over all processes, for your messages alone; with fewer methods in ``resilient``."""
    communicator: Communicator
    """Collectives over all ranks on tensors on `device`."""
    host: MpiCommunicator
    """Collectives over all ranks on tensors in host memory; `communicator` itself where `device` is the CPU."""
    settings: _Settings
    """The arguments of ``init``."""
    made_process_group: bool
    """Whether ``init`` created the process group, so that ``finalize`` destroys it."""
    store: Any = None
    """The store of that process group, which rank 0 serves."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return torch's default process group: NCCL where `device` is a GPU, hpcmpi otherwise."""
        import torch.distributed as dist

        # No reference here: a group of gloo that outlives its destruction aborts the process.
        return cast("dist.ProcessGroup", dist.group.WORLD)

    @property
    def size(self) -> int:
        """Return the number of processes in the job."""
        return self.topology.size

    @property
    def local_rank(self) -> int:
        """Return the rank of this process among those on its node."""
        return self.topology.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """Return the number of processes on this node."""
        return len(self.topology.node_of(self.rank))

    @property
    def node_rank(self) -> int:
        """Return the number of this node among all nodes, counted in the order of their lowest rank."""
        return self.topology.node_rank(self.rank)

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @public_call("World.mesh")
    def mesh(self, **dimensions: Extent) -> DeviceMesh:
        """Make a torch ``DeviceMesh`` that follows the nodes. Collective over all ranks.

        The last dimensions stay within nodes if their product divides the number of ranks on a node, however the
        launcher numbers the ranks::

            world.mesh()                                          # 1-D, "shard" over all ranks
            world.mesh(replicate="nodes", shard="node")           # hybrid: shard within a node, replicate across nodes
            world.mesh(replicate=2, shard=None, tensor=4)         # None: all remaining ranks

        Args:
            dimensions: name -> ranks along it, the outermost first: a number, "nodes" (their number), "node" (the ranks
                on each), or None for all remaining ranks. Default: ``shard=None``.

        Raises:
            LaunchError: on all ranks, if on one of them the product is not the number of ranks, or nodes differ in size
                and a dimension is "nodes" or "node".
        """
        from hpcfsdp.comm.agree import raise_together  # load torch
        from hpcfsdp.comm.mesh import make_mesh, plan_mesh

        with raise_together(self.host):
            plan = plan_mesh(self.topology, dimensions or {"shard": None})
        return make_mesh(plan, self.device.type)


_world: World | None = None
_lookout: lost.Lookout | None = None  # where the device is an accelerator, and the job outlives ranks
_at_end: list[tuple[Callable[[], None], Callable[[], None], Callable[[], None]]] = []


def current_world() -> World | None:
    """Return the world of ``init``, None before it and after ``finalize``."""
    return _world


@public_call("hpcfsdp.init")
def init(
    device: str | torch.device | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    split_nodes: int = 1,
    run_dir: str | Path | None = None,
) -> World:
    """Start MPI and torch.distributed and return the ``World``. Collective over all processes of the job.

    The launcher is mpirun, mpiexec or srun; a plain ``python`` process is a world of one. Ranks and nodes come from
    MPI (``MPI_Comm_split_type``), never from the environment. A second call returns the same world.
    All ranks raise if their arguments, kinds of device, or versions of hpcfsdp, torch or Python differ.

    On an accelerator the calling thread runs its backwards itself from now on
    (``torch.autograd.set_multithreading_enabled(False)``), so that Ctrl-C ends a backward that waits for other ranks.

    Args:
        device: "cpu", "cuda", or one device such as "cuda:1". Default: a GPU or another accelerator if one is visible,
            else the CPU. If several are visible, each rank takes one that is next to its cores, or the one with the
            number of its local rank.
        backend: the backend of torch's default process group: "hpcmpi", "nccl", "gloo". Default: torch's for the
            accelerator ("nccl" on a GPU), and "hpcmpi" on the CPU.
        timeout_s: seconds after which a collective gives up waiting for other ranks.
        split_nodes: divide each node into this many, to test several nodes on one machine.
        run_dir: the folder of the run. If ranks wait for each other for minutes, a report goes into its subfolder hang/
            (docs/how-to/hangs.md). Rank 0 makes it if it is missing. Default: the working directory of rank 0.

    Raises:
        LaunchError: the launcher is torchrun or does not fit the MPI library, the device does not exist, ranks share a
            GPU, there is no such backend, the device is an accelerator and MPI was started for one thread, ranks
            differ in arguments, kinds of device or versions, `run_dir` cannot be made, ``init`` was called before with
            other arguments, or torch.distributed was initialised before with another number of ranks.
    """
    global _world, _lookout
    settings = _Settings(None if device is None else str(device), backend, timeout_s, split_nodes)
    if _world is not None:
        if settings not in (_Settings(), _world.settings):
            raise LaunchError(
                f"hpcfsdp.init was called before with {_world.settings}, and now with {settings}: call "
                "hpcfsdp.finalize first"
            )
        return _world
    if not timeout_s > 0:
        raise LaunchError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
    job = current_job()
    comm = job.comm
    check_torchrun(comm.size)
    import torch.distributed as dist

    from hpcfsdp.comm import progress, torch_group  # this and the next load torch, after MPI: Cray needs this order
    from hpcfsdp.comm.backend import process_group as hpcmpi
    from hpcfsdp.comm.backend.watched_store import WatchedStore
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator
    from hpcfsdp.launch import rendezvous

    hpcmpi.register()
    departure.is_clean = False
    topology, chosen = _agree(settings)
    job_name, folder = _name_run(run_dir)
    node = cast("MPI.Intracomm", comm.Split(job.topology.node_rank(comm.rank), comm.rank))
    chosen, local_rank = _settle(settings, chosen, node)
    creates_group, store = not dist.is_initialized(), None
    if creates_group:
        backend = backend or (hpcmpi.NAME if chosen.type == "cpu" else _backend_of(chosen))
        store, address = rendezvous.open_store(comm, single_node=job.topology.num_nodes == 1, timeout_s=timeout_s)
        if lost.current is not None:
            store = WatchedStore(store)
        job.export(topology, (address, store.port), local_rank if topology == job.topology else None)
        _make_group(store, backend, chosen, timeout_s, topology if backend == hpcmpi.NAME else None)
        departure.catch_errors(comm)  # again: the hook of torch holds output back until ours returns
    elif backend is not None and backend != dist.get_backend():
        raise LaunchError(f"backend {backend!r} was asked for, but torch.distributed runs on {dist.get_backend()!r}")
    elif dist.get_world_size() != comm.size or dist.get_rank() != comm.rank:
        raise LaunchError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but MPI has this "
            f"process as rank {comm.rank} of {comm.size}: call hpcfsdp.init() first, or start with one launcher"
        )
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    if hpcmpi.is_mpi_group(group):
        host = group.communicator
    else:
        host = MpiCommunicator(comm.Dup(), topology, timeout_s=timeout_s, compare_calls=env.compare_calls())
    _world = World(
        rank=comm.rank,
        topology=topology,
        device=chosen,
        comm=comm.Dup(),
        communicator=host if chosen.type == "cpu" else torch_group.TorchGroupCommunicator(group, chosen),
        host=host,
        settings=settings,
        made_process_group=creates_group,
        store=store,  # torch does not keep one that is written in Python
    )
    torch_group.default = _world.communicator
    _watch_for_hangs(job, node, job_name, folder)
    if env.progress_thread():
        progress.start_thread()
    if chosen.type != "cpu" and lost.current is not None:
        _lookout = lost.Lookout(_abort_groups)
    node.Free()
    return _world


def _abort_groups() -> None:
    """Not collective. Have collectives of all groups of the device end: they would wait for ranks that were lost."""
    from hpcfsdp import _compat  # torch is loaded
    from hpcfsdp.comm.backend.process_group import is_mpi_group

    for group in _compat.process_groups():
        if not is_mpi_group(group):
            with contextlib.suppress(RuntimeError):  # backends of the host have no abort
                group.abort()


def _settle(settings: _Settings, chosen: torch.device, node: MPI.Intracomm) -> tuple[torch.device, int]:
    """Return this rank's device, which becomes the current one, and ``LOCAL_RANK``. Collective over all ranks.

    `chosen` is what the rank would use by itself; `node` has the ranks of its node.
    """
    from hpcfsdp import accelerator  # this and the next load torch
    from hpcfsdp.launch import device as devices

    comm = current_job().comm
    with together.raise_lowest(comm):
        here = devices.look(chosen, named=":" in (settings.device or ""))
    places = node.allgather(here)
    numbers = devices.assign(places)
    with together.raise_lowest(comm):
        device = devices.activate(chosen.type, numbers[node.rank])
        devices.share_node(places, numbers, node.rank, exclusive="ccl" in (settings.backend or "nccl"))
    if settings.device is None and device.type == "cpu":  # by chance; the same on all ranks
        unseen = None if env.hides_devices() else accelerator.unseen_driver()
        if together.minima(comm, [comm.size if unseen is None else comm.rank]) == [comm.rank]:  # one rank warns
            text = f"all ranks compute on the CPU: on {env.host_name()} {unseen}; hpcfsdp.init(device='cpu') if that "
            warnings.warn(f"{text}is meant", RuntimeWarning, stacklevel=4)
    return device, devices.local_rank(numbers, node.rank)


def _name_run(run_dir: str | Path | None) -> tuple[str, Path]:
    """Return the names of the job and of its folder, which rank 0 makes if needed. Collective over all ranks."""
    comm, folder = current_job().comm, ""
    with together.raise_lowest(comm):
        if comm.rank == 0:
            try:
                folder = os.path.abspath(run_dir or ".")
                if run_dir is not None:
                    os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"run_dir {run_dir}: cannot make this folder: {error.strerror}") from error
    job, name = env.scheduler_job(), f"{env.host_name()}-{os.getpid()}"
    if job.number:
        name = re.sub(r"[^\w.]", "_", job.number) + (f"-{job.restarts}" if job.restarts not in ("", "0") else "")
    name, folder = comm.bcast((name, folder))
    return name, Path(folder)


def _watch_for_hangs(job: Job, node: MPI.Intracomm, name: str, folder: Path) -> None:
    """Have a thread answer if the job hangs. Collective over `node`, the ranks of this node."""
    from hpcfsdp import _compat  # loads torch, after MPI
    from hpcfsdp.comm.mpi.node_memory import share

    try:
        memory = share(node, events.NBYTES * node.size)
    except CommunicationError as error:
        log.warning("there will be no report if this job hangs: %s", error)
        return
    rank, nodes = job.comm.rank, job.topology.nodes
    seat = hang.Seat(name, rank, nodes, job.topology.node_rank(rank), memoryview(memory.numpy().data), env.host_name())
    end_job = functools.partial(departure.abort, exit_code=HangError.exit_code)
    assert _world is not None
    limit_s = env.hang_s()
    if _world.device.type != "cpu":  # its backend would end the job, without a report
        limit_s = min(limit_s, _world.settings.timeout_s)
    hang.watcher = hang.Watcher(seat, folder, limit_s, end_job=end_job, traces=_compat.flight_record)


def _agree(settings: _Settings) -> tuple[Topology, torch.device]:
    """Return the topology and this rank's device, or raise if arguments or versions differ. Collective over all ranks.

    Otherwise a node with a broken driver would compute on its CPUs, and the others would wait for it in NCCL.
    """
    import torch.distributed as dist

    from hpcfsdp.launch import device as devices  # loads torch

    job = current_job()
    with together.raise_lowest(job.comm):
        known = {"hpcmpi", "gloo"} | ({"nccl"} if dist.is_nccl_available() else set())
        known |= {name for name in dist.Backend.backend_list if name not in ("undefined", "mpi", "nccl")}
        parts = settings.backend.split(",") if settings.backend is not None else []  # "nccl", or "cpu:gloo,cuda:nccl"
        for part in parts:
            name = part.rpartition(":")[2]
            if name not in known:
                listed = ", ".join(sorted(known))
                raise LaunchError(f"there is no backend {name!r}: use one of {listed}{nearest(name, known)}")
            if name == "hpcmpi" and part != settings.backend:
                what = "hpcmpi serves a whole group, not one device of it; give 'hpcmpi'"
                raise LaunchError(f"backend {settings.backend!r}: {what}")
        env.wait_log_s()
        env.hang_s()
        registered = env.registered_memory()
        topology = job.topology
        if settings.split_nodes != 1:
            topology = topology.split(settings.split_nodes)
        chosen = devices.choose(settings.device, job.topology.local_rank(job.comm.rank))
        devices.check_thread_level(chosen, progress_thread=env.progress_thread())
    mine = (settings.backend, settings.timeout_s, settings.split_nodes, chosen.type, registered)
    if not together.is_same(job.comm, mine):
        everyone = job.comm.allgather((env.host_name(), mine))
        rank, (host, theirs) = next((r, other) for r, other in enumerate(everyone) if other[1] != everyone[0][1])
        raise LaunchError(
            f"ranks differ in (backend, timeout_s, split_nodes, device, registered memory): rank 0 on "
            f"{everyone[0][0]} has {everyone[0][1]}, rank {rank} on {host} has {theirs}"
        ).on_all_ranks()
    together.compare_versions(job.comm)
    return topology, chosen


def _backend_of(device: torch.device) -> str:
    import torch.distributed as dist

    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        raise LaunchError(
            f"torch has no backend for process groups on {device.type!r}: give one with backend=, or device='cpu'"
        ) from None


def _make_group(store: Any, backend: str, device: torch.device, timeout_s: float, options: Topology | None) -> None:
    """Make torch's default process group. Collective over all ranks.

    Where one of its backends is the device's own, the group connects its ranks at once, by this device: otherwise its
    first barrier may guess a device from the global rank. Such a backend ends the job at the timeout, so that a report
    about the hang, which begins then, needs more time.
    """
    import torch.distributed as dist

    from hpcfsdp import _compat  # this and the above load torch

    comm, own = current_job().comm, None
    if device.type != "cpu":
        with contextlib.suppress(ValueError):  # torch knows no backend for it
            own = dist.get_default_backend_for_device(device)
    bound = device if own in [part.rpartition(":")[2] for part in backend.split(",")] else None
    dist.init_process_group(
        backend,
        store=store,
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=timeout_s + (_REPORT_S if bound is not None and env.hang_s() else 0)),
        pg_options=options,
        device_id=bound,
    )
    _compat.release_default_group()


def before_finalize(
    finish: Callable[[], None], give_up: Callable[[], None] = lambda: None, forget: Callable[[], None] = lambda: None
) -> None:
    """Not collective. Have ``finalize`` call `finish` first, on all ranks. `finish` may call collectives.

    If it raises, it must raise on all ranks. ``finalize`` raises the error after its own work. If ranks are lost,
    `give_up` is called instead, which must not communicate. `forget` drops what outlives a world whose ranks are lost:
    at the end of ``finalize``, or of ``resilient``.
    """
    _at_end.append((finish, give_up, forget))


def forget() -> None:
    """Not collective. Drop what was kept to go on after a loss: the training has ended on all ranks."""
    for *_, drop in _at_end:
        drop()


@public_call("hpcfsdp.finalize")
def finalize() -> None:
    """Destroy the process group of ``init``, and end the world. Collective over all processes of the job.

    Waits for a checkpoint that is still being written. MPI itself ends with the process, so ``init`` may be called
    again. Without a world this does nothing. While an exception propagates (in a ``finally``) it does not wait for
    other ranks, which may not come.

    Raises:
        CheckpointError: the checkpoint that was being written is lost. Everything else has been done.
    """
    global _world
    if _world is None:
        return
    import torch.distributed as dist

    from hpcfsdp.comm import progress, torch_group  # torch is loaded already
    from hpcfsdp.comm.backend.process_group import is_mpi_group

    leaving, problem = sys.exc_info()[0] is not None, None
    if leaving:
        hang.stop()
    for finish, *_ in () if leaving else _at_end:
        try:
            finish()
        except Exception as error:  # of any kind: the others wait in the next barrier
            problem = problem or error
    world, _world = _world, None
    torch_group.default = None
    _stop_lookout()
    own_host = world.made_process_group or not is_mpi_group(world.process_group)
    if leaving:
        progress.stop_thread()
        world.host.abandon()
        return
    try:
        world.host.barrier()
    finally:
        progress.stop_thread()
        hang.stop()
    departure.is_clean = True
    if lost.goes_on:
        progress.abandon()  # receives of what another rank had no time to send
    else:
        forget()
    try:
        if world.made_process_group and dist.is_initialized():
            dist.destroy_process_group()
        if own_host:
            world.host.close()
    finally:
        world.comm.Free()
    if problem is not None:
        raise problem


def _stop_lookout() -> None:
    global _lookout
    ended, _lookout = _lookout, None
    if ended is not None:
        ended.close()


def abandon() -> None:
    """Not collective. End the world after ranks of it were lost: no other rank is waited for, and no call completes.

    Its communicators, and whatever uses them, raise at their next call. ``init`` may be called again.
    """
    global _world
    import torch.distributed as dist

    from hpcfsdp.comm import progress, torch_group  # torch is loaded already
    from hpcfsdp.hang import waits

    lost.generation += 1
    _stop_lookout()
    _abort_groups()
    progress.stop_thread()
    hang.stop()
    for _, give_up, _ in _at_end:
        give_up()
    progress.abandon()
    _world, torch_group.default = None, None
    if dist.is_initialized():
        dist.destroy_process_group()
    waits.forget()
