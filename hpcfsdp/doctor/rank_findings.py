"""Findings about all ranks: nodes, devices, cores, the network, memory and speed. Pure functions of facts."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hpcfsdp import env
from hpcfsdp.doctor.findings import Finding, note, ok, problem, warning
from hpcfsdp.text.terminal import members, ranks as named, spans

Rows = list[dict[str, Any]]
_SHOWN_NODES = 8
SLOW_GB_PER_S = 0.1
SMALL_SHM_BYTES = 1 << 30
_NETWORK = tuple("nfs lustre gpfs beegfs weka ceph panfs pvfs2 orangefs glusterfs cifs smb3".split())
"""The beginnings of the names of file systems that many nodes share."""


def judge_ranks(facts: dict[str, Any], table: Rows) -> Iterator[Finding]:
    """Judge the software of all ranks, their nodes and the network between them: `table` has facts of each rank."""
    nodes = facts["nodes"]  # the ranks of each
    several_nodes = len(nodes) > 1
    yield from judge_same_software(table)
    yield from judge_nodes(nodes, [row["host"] for row in table])
    yield from judge_devices(nodes, table)
    yield from judge_variables(table)
    yield from judge_binding(nodes, [members(row["cores"]) for row in table])
    yield from judge_threads(nodes, table)
    yield from judge_files(nodes, table)
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


def judge_same_software(table: list[dict[str, Any]]) -> Iterator[Finding]:
    """Judge whether all ranks run the same Python and packages."""
    installations = [{"python": row["python"], **row["packages"]} for row in table]
    for name in installations[0]:
        where: dict[str | None, list[int]] = {}
        for rank, versions in enumerate(installations):
            where.setdefault(versions[name], []).append(rank)
        if len(where) > 1:
            text = "; ".join(f"{version or 'none'} on {named(ranks)}" for version, ranks in where.items())
            hint = "start all ranks with the same environment, on a file system that all nodes see"
            differ = problem if name in ("torch", "mpi4py") else warning
            yield differ(name, f"ranks differ: {text}", hint)


def judge_nodes(nodes: list[list[int]], hosts: list[str]) -> Iterator[Finding]:
    """Judge the ranks of each node."""
    listed = [f"{hosts[node[0]]}: {named(node)}" for node in nodes[:_SHOWN_NODES]]
    more = f", and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    yield ok("nodes", f"{len(nodes)} node(s): {', '.join(listed)}{more}")
    counts = [len(node) for node in nodes]
    if len(set(counts)) > 1:
        what = f"nodes hold {min(counts)} to {max(counts)} ranks: hybrid sharding needs the same number on each"
        yield note("nodes", what, "srun --ntasks-per-node=N, mpirun --map-by ppr:N:node")
    if any(after != before + 1 for node in nodes for before, after in pairwise(node)):
        yield note("nodes", "ranks are dealt out to the nodes in turn, which is fine")


def judge_devices(nodes: list[list[int]], table: Rows) -> list[Finding]:
    """Judge whether each rank has its own accelerator, or no rank has one."""
    errors = [(rank, row["accelerator_error"]) for rank, row in enumerate(table) if row["accelerator_error"]]
    if errors:
        what = f"{named(rank for rank, _ in errors)} cannot use the accelerator: {errors[0][1]}"
        return [problem("devices", what, "compare the driver (nvidia-smi, rocm-smi, ...) with what torch is built for")]
    without = [rank for rank, row in enumerate(table) if not row["accelerator"]]
    if len(without) == len(table):
        return [ok("devices", "all ranks compute on the CPU")]
    if without:
        what = f"{named(without)} see no accelerator, the others do"
        return [problem("devices", what, "ask for accelerators on every node, or train with --device cpu")]
    found, hint = [], "at most one rank per device; or let each rank see another one: srun --gpus-per-task=1"
    for node in nodes:
        owners: dict[int, list[int]] = {}
        for rank in node:
            owners.setdefault(table[rank]["accelerator"]["lowest_rank"], []).append(rank)
        for rank, *twins in owners.values():
            if twins:
                what = f"{named([rank, *twins])} on {table[rank]['host']} share one device"
                found.append(problem("devices", f"{what}, which NCCL and its like refuse", hint))
        visible = table[node[0]]["devices_visible"]
        if visible > len(node) > 0 and len(owners) == len(node):
            what = f"{table[node[0]]['host']} has {visible} visible devices for {len(node)} rank(s): some are idle"
            found.append(note("devices", what, f"start {visible} ranks on each node"))
        cores = set().union(*(members(table[rank]["cores"]) for rank in node))
        if len(cores) < 2 * len(node):
            what = f"{named(node)} have {len(cores)} core(s) for {len(node)} rank(s): MPI waits by polling, and NCCL's"
            few = "two cores or more for each rank (srun --cpus-per-task=N, mpirun --map-by slot:PE=N)"
            found.append(warning("devices", f"{what} thread starves beside it", few))
    devices = [row["accelerator"] for row in table]
    far = [rank for rank, device in enumerate(devices) if device["far"]]
    if far:
        what = f"{named(far)} may run on no core next to the device: copies to and from host memory are slower"
        found.append(warning("devices", what, "srun --gpu-bind=closest, or bind each rank to cores next to its device"))
    sizes = [f", {device['nbytes'] / (1 << 30):.0f} GiB" if device["nbytes"] else "" for device in devices]
    kinds = sorted({f"{device['name']}{size}" for device, size in zip(devices, sizes, strict=True)})
    if len(kinds) > 1:
        found.append(note("devices", f"devices differ: {', '.join(kinds)}; the slowest sets the pace"))
    if any(finding.level == "problem" for finding in found):
        return found
    return [ok("devices", f"each rank has its own ({', '.join(kinds)})"), *found]


def judge_variables(table: Rows) -> Iterator[Finding]:
    """List the variables that decide on accelerators, and judge them. Nothing where none is set."""
    alike = []
    for name in sorted({name for row in table for name in row["variables"]}):
        where: dict[str | None, list[int]] = {}
        for rank, row in enumerate(table):
            where.setdefault(row["variables"].get(name), []).append(rank)
        if len(where) == 1 or name in env.VISIBLE:
            alike.append(f"{name}={next(iter(where))}" if len(where) == 1 else f"{name} for each rank")
        else:
            text = "; ".join(f"{'unset' if value is None else value} on {named(on)}" for value, on in where.items())
            hint = "export it in the job script, the same on all ranks (mpirun: -x NAME)"
            yield warning("variables", f"ranks differ: {name}: {text}", hint)
    if alike:
        yield ok("variables", ", ".join(alike))
    single = [rank for rank, row in enumerate(table) if row["accelerator"] and row["device_connections"] == 1]
    if single:
        what = f"CUDA_DEVICE_MAX_CONNECTIONS=1 on {named(single)}: all streams share one queue, in which copies wait"
        hint = "unset it, unless another library needs it"
        yield warning("variables", f"{what} for kernels, and collectives of two groups perhaps for ever", hint)


def judge_binding(nodes: list[list[int]], cores: list[set[int]]) -> list[Finding]:
    """Judge whether each rank has a core to itself: `cores` are for each rank those that it may run on."""
    found, counts = [], []
    for node in nodes:
        usable = set().union(*(cores[rank] for rank in node))
        if len(node) > len(usable):
            hint = "fewer ranks on each node, or more cores (srun --cpus-per-task, mpirun --map-by slot:PE=N)"
            found.append(warning("binding", f"{named(node)} share {len(usable)} core(s)", hint))
            continue
        sharers = Counter(core for rank in node for core in cores[rank])
        poor = [rank for rank in node if sum(1 / sharers[core] for core in cores[rank]) < 1 - 1e-9]
        if poor:
            what = f"{named(poor)} are pinned to the same core(s) {spans(set().union(*(cores[r] for r in poor)))}"
            hint = "mpirun --bind-to none, or --map-by slot:PE=N with N cores for each rank; srun --cpus-per-task=N"
            found.append(warning("binding", f"{what}, while others are free", hint))
        counts += [len(cores[rank]) for rank in node]
    if found:
        return found
    few, many = min(counts), max(counts)
    return [ok("binding", f"each rank may run on {few if few == many else f'{few} to {many}'} core(s)")]


def judge_threads(nodes: list[list[int]], table: Rows) -> Iterator[Finding]:
    """Judge whether the threads of all ranks fit the cores of their node."""
    if any("threads" not in row for row in table):
        return
    for node in nodes:
        usable = set().union(*(members(table[rank]["cores"]) for rank in node))
        threads = sum(table[rank]["threads"] for rank in node)
        if threads > max(len(usable), len(node)):
            chosen = table[node[0]]["omp_num_threads"]
            origin = f"OMP_NUM_THREADS={chosen}" if chosen else "torch's default"
            what = f"{named(node)} run {threads} threads ({origin}) on {len(usable)} core(s)"
            hint = f"export OMP_NUM_THREADS={max(1, len(usable) // len(node))}, or leave it unset"
            yield warning("threads", what, hint)
            return
    counts = sorted({row["threads"] for row in table})
    yield ok("threads", f"{' or '.join(map(str, counts))} on each rank")


def judge_files(nodes: list[list[int]], table: Rows) -> Iterator[Finding]:
    """Judge whether the ranks of many nodes load torch from one file system. Nothing on one node."""
    kinds = sorted({kind for row in table if (kind := row["torch_file_system"]) and is_shared(kind)})
    if len(nodes) > 1 and kinds:
        what = f"all ranks load torch from {table[0]['torch_folder']} ({', '.join(kinds)})"
        where = "docs/how-to/launching.md, Start-up on many nodes"
        hint = f"where starting is slow: unpack the environment on each node ({where})"
        yield note("files", f"{what}: over 2000 files for each rank", hint)


def judge_address(network: dict[str, Any] | None, first: dict[str, Any], *, several_nodes: bool) -> Iterator[Finding]:
    """Judge the address and interface by which ranks reach rank 0, which has torch's store; `first` are its facts."""
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
    """Judge whether NCCL, or RCCL, will connect nodes, on NVIDIA and AMD. For several nodes."""
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
    """Judge whether the ranks of a node can share memory."""
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
    """Judge whether /dev/shm is as small as in most containers."""
    for row in table:
        if row["shm_bytes"] and row["shm_bytes"] < SMALL_SHM_BYTES:
            size = f"{row['shm_bytes'] >> 20} MiB on {row['host']}"
            what = f"/dev/shm has {size}: hpcfsdp does not need it, but MPI, NCCL and data loaders may"
            yield note("memory", what, "docker run --shm-size=8g (or --ipc=host) if they complain")
            return


def judge_bandwidth(measured: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield a line for each collective."""
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
            network = "several nodes: does MPI use the fast network?"
            cores = "One node: more ranks than cores, or bound to one core?"
            yield warning("bandwidth", f"{text} is very slow", f"{network} {cores}")
        else:
            yield ok("bandwidth", text)


def judge_links(measured: dict[str, dict[str, Any] | None]) -> Iterator[Finding]:
    """Yield a line for each kind of link, with what ``hpcfsdp plan --links`` reads."""
    for name, where in (("within", "within a node"), ("between", "between nodes")):
        link = measured.get(name)
        if link is not None:
            speed, latency = link["bytes_per_s"] / 1e9, link["latency_s"] * 1e6
            yield ok("links", f"{where}: {speed:.2f} GB/s per rank, {latency:.1f} us a message ({link['ranks']} ranks)")


def _interface(network: dict[str, Any], first: dict[str, Any]) -> str | None:
    """Return the interface of rank 0 that has the address of the store."""
    return next((name for name, found in first["interfaces"].items() if network.get("address") in found), None)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def is_shared(kind: str) -> bool:
    """Return whether many nodes share a file system of this type."""
    return kind.removeprefix("fuse.").startswith(_NETWORK)
