"""Findings about the way between ranks: TCP, shared memory, and how fast it is. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from typing import Any

from hpcfsdp.doctor.finding import Finding

SLOW_GB_PER_S = 0.1
SMALL_SHM_BYTES = 1 << 30


def judge(facts: dict[str, Any], table: list[dict[str, Any]]) -> list[Finding]:
    """The address of the store, NCCL's interface, shared memory, bandwidth."""
    several_nodes = len(facts["nodes"]) > 1
    found = judge_address(facts.get("network"), table[0], several_nodes=several_nodes)
    if several_nodes and facts.get("device") == "cuda":
        found += judge_nccl_interface(facts["environment"].get("NCCL_SOCKET_IFNAME"), facts.get("network"), table)
    if "shared_memory" in facts:
        found.append(judge_memory(facts["shared_memory"], len(table)))
    found += judge_shm(table)
    if "bandwidth" in facts:
        found += judge_bandwidth(facts["bandwidth"])
    return found


def judge_address(network: dict[str, Any] | None, first: dict[str, Any], *, several_nodes: bool) -> list[Finding]:
    """By which address and interface the ranks reach rank 0, where torch's store is.

    Args:
        first: the facts of rank 0.
    """
    if network is None:
        return []
    outside = [address for addresses in first["interfaces"].values() for address in addresses if not _loopback(address)]
    if network["error"] is not None:
        hint = "allow TCP between the nodes; see `ip addr` on the node of rank 0"
        if not outside:
            hint = "bring up a network interface on that node; `ip addr` lists them"
        return [Finding("network", "problem", network["error"], hint)]
    address = network["address"]
    name = next((name for name, addresses in first["interfaces"].items() if address in addresses), None)
    text = f"rank 0 is reached at {address}" + (f" (interface {name})" if name else "")
    if several_nodes and _loopback(address):
        what = f"{text}, which no other node can reach"
        return [Finding("network", "problem", what, "give the host's name an address of its network in /etc/hosts")]
    return [Finding("network", "ok", text)]


def judge_nccl_interface(
    wanted: str | None, network: dict[str, Any] | None, table: list[dict[str, Any]]
) -> list[Finding]:
    """Whether NCCL will find its way between nodes. For several nodes with GPUs."""
    if wanted is None:
        address = (network or {}).get("address")
        chosen = next((name for name, found in table[0]["interfaces"].items() if address in found), None)
        hint = f"if NCCL cannot connect: export NCCL_SOCKET_IFNAME={chosen}" if chosen else ""
        return [Finding("nccl", "note", "NCCL_SOCKET_IFNAME is not set: NCCL chooses among the interfaces", hint)]
    if wanted.startswith("^"):
        return [Finding("nccl", "ok", f"NCCL_SOCKET_IFNAME={wanted}")]
    prefixes = tuple(part.lstrip("=") for part in wanted.split(",") if part)
    lacking = sorted({row["host"] for row in table if not any(n.startswith(prefixes) for n in row["interfaces"])})
    if lacking:
        what = f"NCCL_SOCKET_IFNAME={wanted} names no interface with an IPv4 address on {', '.join(lacking)}"
        return [Finding("nccl", "warning", what, "`ip addr` lists them; or unset it, and NCCL chooses")]
    return [Finding("nccl", "ok", f"NCCL_SOCKET_IFNAME={wanted}")]


def judge_memory(memory: dict[str, Any], size: int) -> Finding:
    """Whether the ranks of a node can share memory."""
    if memory["error"] is not None:
        hint = "start all ranks of a node as one user in one container, with a /dev/shm that is large enough"
        return Finding("memory", "problem", f"ranks cannot share memory: {memory['error']}", hint)
    if memory["way"] == "file":
        what = "ranks share memory by a file in /dev/shm, since they do not see each other in /proc"
        return Finding("memory", "note", what, "start all ranks of a node in one container; else keep /dev/shm large")
    if memory["way"] == "memfd":
        return Finding("memory", "ok", "ranks share memory without a name (memfd), whatever the size of /dev/shm")
    return Finding(
        "memory", "ok", "one rank on this node: nothing to share" if size > 1 else "one rank: nothing to share"
    )


def judge_shm(table: list[dict[str, Any]]) -> list[Finding]:
    """Whether /dev/shm is as small as containers have it."""
    small = {row["host"]: row["shm_bytes"] for row in table if (row["shm_bytes"] or SMALL_SHM_BYTES) < SMALL_SHM_BYTES}
    if not small:
        return []
    host, nbytes = next(iter(small.items()))
    what = f"/dev/shm has {nbytes >> 20} MiB on {host}: hpcfsdp does not need it, but MPI, NCCL and data loaders may"
    return [Finding("memory", "note", what, "docker run --shm-size=8g (or --ipc=host) if they complain")]


def judge_bandwidth(measured: dict[str, dict[str, Any]]) -> list[Finding]:
    """A line for each collective."""
    if not measured:
        hint = "to measure: mpirun -n 2 python -m hpcfsdp doctor"
        return [Finding("bandwidth", "note", "one process: nothing to send", hint)]
    found = []
    for name, result in measured.items():
        speed, size, took = result["gb_per_s"], f"{result['bytes'] / (1 << 20):.0f} MiB", result["seconds"] * 1e3
        if speed is None:
            text = f"{name}: {took:.3f} ms until {size} from others can be read; no bytes move"
        else:
            text = f"{name}: {speed:.2f} GB/s per rank ({size} from others in {took:.1f} ms)"
        if not result["correct"]:
            hint = "do not train here; try another transport of MPI (Open MPI: --mca pml ob1; UCX: UCX_TLS=tcp,self,sm)"
            found.append(Finding("bandwidth", "problem", f"{name}: the result is wrong", hint))
        elif speed is not None and speed < SLOW_GB_PER_S:
            hint = (
                "several nodes: does MPI use the fast network? One node: more ranks than cores, or bound to one core?"
            )
            found.append(Finding("bandwidth", "warning", f"{text} is very slow", hint))
        else:
            found.append(Finding("bandwidth", "ok", text))
    return found


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
