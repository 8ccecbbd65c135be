"""Facts of all ranks: nodes, cores, devices, the network between ranks and its speed. Runs in the child."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hpcfsdp import accelerator, env, world as worlds
from hpcfsdp.doctor import installed, speed
from hpcfsdp.errors import HpcfsdpError, LaunchError
from hpcfsdp.launch import device as devices, rendezvous
from hpcfsdp.launch.job import current_job
from hpcfsdp.text.terminal import spans


def steps(limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield facts, equal on all ranks; "stage" names the next step. Collective over all processes of the job."""
    yield {"stage": "finding the nodes"}
    job = current_job()
    topology = job.topology
    place, error = _place()
    facts = device_facts(job.comm.rank, topology.node_of(job.comm.rank), job.comm.allgather(place))
    table = job.comm.allgather({**_of_this_rank(), **facts, "accelerator_error": error})
    yield {"nodes": [list(node) for node in topology.nodes], "ranks": table}

    yield {"stage": "connecting the ranks by TCP"}
    network: dict[str, Any] = {"address": None, "error": None}
    try:
        single = topology.num_nodes == 1
        store, network["address"] = rendezvous.open_store(job.comm, single_node=single, timeout_s=limit_s)
        del store
    except LaunchError as error:
        network["error"] = str(error)
    yield {"network": network}
    if network["error"] is not None:
        return

    # Whether ``hpcfsdp.init`` will give each rank an accelerator that no other rank uses.
    on_own = all(row["accelerator"] and row["accelerator"]["lowest_rank"] == n for n, row in enumerate(table))
    yield {"stage": f"hpcfsdp.init on {'accelerators' if on_own else 'the CPU'}"}
    try:
        world = worlds.init(None if on_own else "cpu", timeout_s=limit_s)
    except HpcfsdpError as error:
        yield {"init_error": str(error)}
        raise
    threads = world.comm.allgather(torch.get_num_threads())
    yield {"device": world.device.type, "ranks": [row | {"threads": n} for row, n in zip(table, threads, strict=True)]}

    yield {"stage": "allocating shared memory"}
    memory = speed.shared_memory(world)
    yield {"shared_memory": memory}
    yield {"stage": "an all-gather and a reduce-scatter"}
    yield {"bandwidth": speed.measure_collectives(world, shared=memory["error"] is None)}
    yield {"stage": "measuring links within and between nodes"}
    yield {"links": speed.measure_links(world)}
    worlds.finalize()


def _of_this_rank() -> dict[str, Any]:
    import psutil

    interfaces: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        if addresses := [entry.address for entry in entries if entry.family == socket.AF_INET]:
            interfaces[name] = addresses
    shm_bytes = None
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        shm_bytes = room.f_frsize * room.f_blocks
    return {
        "host": env.host_name(),
        "python": sys.version.split()[0],
        "packages": installed.versions(),
        "cores": spans(os.sched_getaffinity(0)),
        "node_cores": os.cpu_count(),
        "omp_num_threads": env.diagnostic_values().get("OMP_NUM_THREADS"),
        "interfaces": interfaces,
        "shm_bytes": shm_bytes,
        "torch_folder": str(Path(torch.__file__).parent),
        "torch_file_system": file_system_of(torch.__file__),
        "variables": env.accelerator_values(),
        "device_connections": env.device_connections(),
    }


def _place() -> tuple[devices.Place, str | None]:
    """Return the cores and devices of this rank, and what keeps it from the devices."""
    try:
        return devices.look(devices.choose(None, 0), named=False), None
    except RuntimeError as error:
        return devices.look(torch.device("cpu"), named=False), str(error).splitlines()[0]


def device_facts(rank: int, node: Sequence[int], places: Sequence[devices.Place]) -> dict[str, Any]:
    """Return facts about the device that ``hpcfsdp.init`` will give a rank; `node` has the ranks of its node.

    "lowest_rank" is the lowest one that uses the same device, "far" whether none of the rank's cores is next to it.
    """
    local, mine = node.index(rank), [places[each] for each in node]
    here, numbers = mine[local], devices.assign(mine)
    facts: dict[str, Any] = {"devices_visible": len(here.devices), "accelerator": None}
    if here.devices:
        number, near = numbers[local], here.near[numbers[local]]
        lowest = devices.owners(mine, numbers)[local] if all(each.devices for each in mine) else local
        facts["accelerator"] = {"device": f"{accelerator.device_type()}:{number}", "lowest_rank": node[lowest]}
        facts["accelerator"] |= {"far": bool(near) and near.isdisjoint(here.cores)} | asdict(here.devices[number])
    return facts


def file_system_of(path: str | os.PathLike[str], mounts: str | None = None) -> str | None:
    """Return the type of the file system that holds `path`, as "nfs4", by the text of ``/proc/mounts``; None if that
    is unknown.
    """
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError):
            mounts = Path("/proc/mounts").read_text()
    within = Path(os.path.realpath(path))
    found: tuple[int, str | None] = (0, None)
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        place = Path(point.replace("\\040", " "))
        if within.is_relative_to(place) and len(place.parts) >= found[0]:  # a later mount hides an earlier one
            found = len(place.parts), kind
    return found[1]
