"""torch's store on a free port of rank 0. The ranks exchange address and port over MPI."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
from typing import Any

from hpcfsdp.errors import LaunchError

PROBE_TIMEOUT_S = 3.0


def addresses_of_this_host() -> list[str]:
    """IPv4 addresses of this host that other nodes may reach: those of its name first, then those of its interfaces."""
    import psutil

    found: list[str] = []
    with contextlib.suppress(OSError):  # a node need not resolve its own name
        found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for interface in psutil.net_if_addrs().values():
        found += [entry.address for entry in interface if entry.family == socket.AF_INET]
    return [a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_loopback]


def reachable(address: str, port: int) -> bool:
    """Whether a connection to `address`:`port` opens within ``PROBE_TIMEOUT_S`` seconds."""
    try:
        socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def first_reached_by_all(candidates: list[str], port: int, comm: Any) -> str:
    """Collective over `comm`. The first of rank 0's candidate addresses to which every rank can connect."""
    reached = comm.allgather([reachable(address, port) for address in candidates])
    for index, address in enumerate(candidates):
        if all(rank_reaches[index] for rank_reaches in reached):
            return address
    blind = [rank for rank, rank_reaches in enumerate(reached) if not any(rank_reaches)]
    raise LaunchError(
        f"no address of rank 0's host ({', '.join(candidates) or 'it has none besides loopback'}; port {port}) is "
        f"reached by every rank; ranks that reach none of them: {blind or 'none, but no single address serves all'}. "
        "Allow TCP between the nodes"
    )


def open_store(comm: Any, *, single_node: bool, timeout_s: float) -> tuple[Any, str]:
    """Collective over `comm`. A TCPStore of rank 0 on a free port, and an address of it that all ranks reach."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    store = None
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, comm.size, is_master=True, timeout=timeout, wait_for_workers=False)
    port = comm.bcast(store.port if store else None)
    if single_node:
        address = "127.0.0.1"
    else:
        address = first_reached_by_all(comm.bcast(addresses_of_this_host() if store else None), port, comm)
    if store is None:
        store = dist.TCPStore(address, port, comm.size, is_master=False, timeout=timeout)
    comm.Barrier()  # if rank 0 failed next, its store would be gone, and others would try to connect in vain
    return store, address
