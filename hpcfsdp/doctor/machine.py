"""Findings about nodes, devices and cores. Pure functions of the ranks' facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hpcfsdp.doctor.finding import Finding, note, ok, problem, warning
from hpcfsdp.doctor.mounts import is_shared
from hpcfsdp.text.terminal import members, ranks as named, spans

Rows = list[dict[str, Any]]
_SHOWN_NODES = 8


def judge(nodes: list[list[int]], table: Rows) -> Iterator[Finding]:
    """Topology, devices, binding, threads, and where the software lies.

    Args:
        nodes: the ranks of each node.
        table: facts of each rank.
    """
    yield from judge_nodes(nodes, [row["host"] for row in table])
    yield from judge_devices(nodes, table)
    yield from judge_binding(nodes, [members(row["cores"]) for row in table])
    yield from judge_threads(nodes, table)
    yield from judge_files(nodes, table)


def judge_nodes(nodes: list[list[int]], hosts: list[str]) -> Iterator[Finding]:
    """The ranks of each node."""
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
    """Whether each rank has its own accelerator, or no rank has one."""
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
        owners: dict[str, list[int]] = {}
        for rank in node:
            owners.setdefault(table[rank]["accelerator"]["uuid"], []).append(rank)
        for rank, *twins in owners.values():
            if twins:
                what = (
                    f"{named([rank, *twins])} on {table[rank]['host']} share one device, which NCCL and its like refuse"
                )
                found.append(problem("devices", what, hint))
        visible = table[node[0]]["devices_visible"]
        if visible > len(node) > 0 and len(owners) == len(node):
            what = f"{table[node[0]]['host']} has {visible} visible devices for {len(node)} rank(s): some are idle"
            found.append(note("devices", what, f"start {visible} ranks on each node"))
    kinds = sorted({_described(row["accelerator"]) for row in table})
    if len(kinds) > 1:
        found.append(note("devices", f"devices differ: {', '.join(kinds)}; the slowest sets the pace"))
    if any(finding.level == "problem" for finding in found):
        return found
    return [ok("devices", f"each rank has its own ({', '.join(kinds)})"), *found]


def _described(found: dict[str, Any]) -> str:
    """ "H200, 139 GiB"."""
    return f"{found['name']}, {found['bytes'] / (1 << 30):.0f} GiB" if found["bytes"] else found["name"]


def judge_binding(nodes: list[list[int]], cores: list[set[int]]) -> list[Finding]:
    """Whether each rank has a core to itself.

    Args:
        cores: for each rank the cores that it may run on.
    """
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
    """Whether the threads of all ranks fit the cores of their node."""
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
    """Whether the ranks of many nodes load torch from one file system. Nothing on one node."""
    kinds = sorted({kind for row in table if (kind := row["torch_file_system"]) and is_shared(kind)})
    if len(nodes) > 1 and kinds:
        what = (
            f"all ranks load torch from {table[0]['torch_folder']} ({', '.join(kinds)}): over 2000 files for each rank"
        )
        where = "docs/how-to/launching.md, Start-up on many nodes"
        hint = f"where starting is slow: unpack the environment on each node ({where})"
        yield note("files", what, hint)
