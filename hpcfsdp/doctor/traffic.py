"""Findings about the network between ranks, their shared memory, and its speed. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

from hpcfsdp.doctor.finding import Finding, note, ok, problem, warning

SLOW_GB_PER_S = 0.1
SMALL_SHM_BYTES = 1 << 30


def judge(facts: dict[str, Any], table: list[dict[str, Any]]) -> Iterator[Finding]:
    """The address of the store, NCCL's interface, shared memory, bandwidth."""
    several_nodes = len(facts["nodes"]) > 1
    yield from judge_address(facts.get("network"), table[0], several_nodes=several_nodes)
    if several_nodes and facts.get("device") == "cuda":
        yield judge_nccl_interface(facts["environment"].get("NCCL_SOCKET_IFNAME"), facts.get("network"), table)
    if "shared_memory" in facts:
        yield judge_memory(facts["shared_memory"], len(table))
    yield from judge_shm(table)
    if "bandwidth" in facts:
        yield from judge_bandwidth(facts["bandwidth"])
    if "links" in facts:
        yield from judge_links(facts["links"])


def judge_address(network: dict[str, Any] | None, first: dict[str, Any], *, several_nodes: bool) -> Iterator[Finding]:
    """The address and interface by which ranks reach rank 0, which has torch's store.

    Args:
        first: the facts of rank 0.
    """
    if network is None:
        return
    if network["error"] is not None:
        addresses = [address for found in first["interfaces"].values() for address in found]
        hint = "allow TCP between the nodes; see `ip addr` on the node of rank 0"
        if all(map(_is_loopback, addresses)):
            hint = "bring up a network interface on that node; `ip addr` lists them"
        yield problem("network", network["error"], hint)
        return
    address, name = network["address"], _interface(network, first)
    text = f"rank 0 is reached at {address}" + (f" (interface {name})" if name else "")
    if several_nodes and _is_loopback(address):
        hint = "give the host's name an address of its network in /etc/hosts"
        yield problem("network", f"{text}, which no other node can reach", hint)
    else:
        yield ok("network", text)


def judge_nccl_interface(wanted: str | None, network: dict[str, Any] | None, table: list[dict[str, Any]]) -> Finding:
    """NVIDIA and AMD: whether NCCL, or RCCL, will connect nodes. For several nodes."""
    if wanted is None:
        chosen = _interface(network or {}, table[0])
        hint = f"if NCCL cannot connect: export NCCL_SOCKET_IFNAME={chosen}" if chosen else ""
        return note("nccl", "NCCL_SOCKET_IFNAME is not set: NCCL chooses among the interfaces", hint)
    prefixes = tuple(part.lstrip("=") for part in wanted.split(",") if part)
    lacking = sorted({row["host"] for row in table if not any(n.startswith(prefixes) for n in row["interfaces"])})
    if lacking and not wanted.startswith("^"):
        what = f"NCCL_SOCKET_IFNAME={wanted} names no interface with an IPv4 address on {', '.join(lacking)}"
        return warning("nccl", what, "`ip addr` lists them; or unset it, and NCCL chooses")
    return ok("nccl", f"NCCL_SOCKET_IFNAME={wanted}")


def judge_memory(memory: dict[str, Any], size: int) -> Finding:
    """Whether the ranks of a node can share memory."""
    if memory["error"] is not None:
        hint = "start all ranks of a node as one user in one container, with a /dev/shm that is large enough"
        return problem("memory", f"ranks cannot share memory: {memory['error']}", hint)
    if memory["way"] == "file":
        what = "ranks share memory by a file in /dev/shm, since they do not see each other in /proc"
        return note("memory", what, "start all ranks of a node in one container; else keep /dev/shm large")
    if memory["way"] == "memfd":
        return ok("memory", "ranks share memory without a name (memfd), whatever the size of /dev/shm")
    return ok("memory", f"one rank{' on this node' if size > 1 else ''}: nothing to share")


def judge_shm(table: list[dict[str, Any]]) -> Iterator[Finding]:
    """Whether /dev/shm is as small as in most containers."""
    for row in table:
        if row["shm_bytes"] and row["shm_bytes"] < SMALL_SHM_BYTES:
            size = f"{row['shm_bytes'] >> 20} MiB on {row['host']}"
            what = f"/dev/shm has {size}: hpcfsdp does not need it, but MPI, NCCL and data loaders may"
            yield note("memory", what, "docker run --shm-size=8g (or --ipc=host) if they complain")
            return


def judge_bandwidth(measured: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """A line for each collective."""
    if not measured:
        yield note("bandwidth", "one process: nothing to send", "to measure: mpirun -n 2 python -m hpcfsdp doctor")
    for name, result in measured.items():
        speed, size, took = result["gb_per_s"], f"{result['bytes'] / (1 << 20):.0f} MiB", result["seconds"] * 1e3
        if speed is None:
            text = f"{name}: {took:.3f} ms until {size} from others can be read; no bytes move"
        else:
            text = f"{name}: {speed:.2f} GB/s per rank ({size} from others in {took:.1f} ms)"
        if not result["correct"]:
            hint = "do not train here; try another transport of MPI (Open MPI: --mca pml ob1; UCX: UCX_TLS=tcp,self,sm)"
            yield problem("bandwidth", f"{name}: the result is wrong", hint)
        elif speed is not None and speed < SLOW_GB_PER_S:
            hint = (
                "several nodes: does MPI use the fast network? One node: more ranks than cores, or bound to one core?"
            )
            yield warning("bandwidth", f"{text} is very slow", hint)
        else:
            yield ok("bandwidth", text)


def judge_links(measured: dict[str, dict[str, Any] | None]) -> Iterator[Finding]:
    """A line for each kind of link, with what ``hpcfsdp plan --links`` reads."""
    for name, where in (("within", "within a node"), ("between", "between nodes")):
        link = measured.get(name)
        if link is not None:
            speed, latency = link["bytes_per_s"] / 1e9, link["latency_s"] * 1e6
            yield ok("links", f"{where}: {speed:.2f} GB/s per rank, {latency:.1f} us a message ({link['ranks']} ranks)")


def _interface(network: dict[str, Any], first: dict[str, Any]) -> str | None:
    """The interface of rank 0 that has the address of the store."""
    return next((name for name, found in first["interfaces"].items() if network.get("address") in found), None)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
