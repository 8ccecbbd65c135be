"""torch's store on a free port of rank 0. The ranks exchange address and port over MPI."""

import contextlib
import datetime
import ipaddress
import socket
import time
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError
from hpcfsdp.hang import lost
from hpcfsdp.launch.job import current_job
from hpcfsdp.launch.together import minima

PROBE_TIMEOUT_S = 3.0
_ATTEMPT_S = 1.0  # to connect to the store, where rank 0 may be lost meanwhile


def addresses_of_this_host() -> list[str]:
    """Return IPv4 addresses of this host that others may reach: those of its name, then those of its interfaces."""
    import psutil

    found: list[str] = []
    with contextlib.suppress(OSError):  # a node need not resolve its own name
        found += [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    for interface in psutil.net_if_addrs().values():
        found += [entry.address for entry in interface if entry.family == socket.AF_INET]
    return [a for a in dict.fromkeys(found) if not ipaddress.ip_address(a).is_loopback]


def reachable(address: str, port: int) -> bool:
    """Return whether a connection to `address`:`port` opens within ``PROBE_TIMEOUT_S`` seconds."""
    try:
        socket.create_connection((address, port), timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def first_reached_by_all(candidates: list[str], port: int, comm: Any, *, probes: bool = True) -> str:
    """Return the first of rank 0's addresses to which every rank that probes can connect. Collective over `comm`."""
    reached = [not probes or reachable(address, port) for address in candidates]
    for address, by_all in zip(candidates, minima(comm, reached), strict=True):
        if by_all:
            return address
    reaches_some = any(reached) or not candidates
    blind = [who for who in comm.allgather(None if reaches_some else f"{comm.rank} on {env.host_name()}") if who]
    listed = ", ".join(blind) or "none, but no single address serves all"
    raise LaunchError(
        f"no address of rank 0's host ({', '.join(candidates) or 'it has none besides loopback'}; port {port}) is "
        f"reached from every node; ranks that reach none of them: {listed}. Allow TCP between the nodes"
    ).on_all_ranks()


def listening(addresses: list[str]) -> dict[str, socket.socket]:
    """Return for each address of this host a socket that listens there, all on one port. Leave out what fails."""
    found: dict[str, socket.socket] = {}
    for address in addresses:
        port = next(iter(found.values())).getsockname()[1] if found else 0
        with contextlib.suppress(OSError):  # of another machine, or its port is taken
            found[address] = socket.create_server((address, port), backlog=4096)  # all ranks come at once
    return found


def open_store(comm: Any, *, single_node: bool, timeout_s: float) -> tuple[Any, str]:
    """Return a TCPStore of rank 0 on a free port, and its address. Collective over `comm`, all ranks of the job.

    It listens on this address alone: who reaches a store can write to it. One rank of each node tries the addresses of
    rank 0: all ranks at once would be a storm of connections.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_s)
    servers: dict[str, socket.socket] = {}
    found = None
    if comm.rank == 0:
        servers = listening(["127.0.0.1"] if single_node else addresses_of_this_host())
        found = next((server.getsockname()[1] for server in servers.values()), 0), list(servers)
    try:
        port, candidates = comm.bcast(found)
        if single_node and candidates:
            (address,) = candidates
        else:
            leads = current_job().topology.local_rank(comm.rank) == 0
            address = first_reached_by_all(candidates, port, comm, probes=leads)
        fd = servers[address].detach() if servers else None
        until_s = time.monotonic() + timeout_s
        attempt = timeout if lost.current is None or fd is not None else datetime.timedelta(seconds=_ATTEMPT_S)
        while True:
            try:
                store = dist.TCPStore(address, port, comm.size, fd is not None, attempt, False, master_listen_fd=fd)
                break
            except dist.DistError:
                lost.check("the store of rank 0")
                if attempt is timeout or time.monotonic() > until_s:
                    raise
        store.set_timeout(timeout)
    finally:
        for server in servers.values():
            server.close()
    comm.Barrier()  # if rank 0 failed next, its store would be gone, and others would try to connect in vain
    return store, address
