"""Links between ranks, devices, and what collectives take on them: bytes and time.

Groups of ranks lie on nodes as ``world.mesh(replicate=..., shard=...)`` places them: the ranks of a copy are
neighbours. What comes from other nodes arrives at a node once and is passed on within it.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from hpcfsdp.errors import UsageError, nearest

GB = 1e9
GIB = 1 << 30


@dataclass(frozen=True)
class Link:
    """A message of n bytes takes ``latency_s + n / bytes_per_s``, for each rank at the same time."""

    latency_s: float  # of a message from one rank to the next
    bytes_per_s: float  # that one rank receives while all ranks of its node receive
    source: str  # where the numbers come from


@dataclass(frozen=True)
class Links:
    """The network of a machine."""

    within: Link  # between ranks of a node
    between: Link  # between ranks of different nodes


PRESETS = {
    "nvlink3": (3e-6, 240 * GB),
    "nvlink4": (3e-6, 360 * GB),
    "nvlink5": (3e-6, 720 * GB),
    "xgmi": (4e-6, 100 * GB),
    "pcie4": (6e-6, 20 * GB),
    "pcie5": (6e-6, 40 * GB),
    "hdr": (6e-6, 22 * GB),
    "ndr": (6e-6, 44 * GB),
    "xdr": (6e-6, 88 * GB),
    "slingshot": (8e-6, 20 * GB),
    "ethernet100": (25e-6, 10 * GB),
    "ethernet25": (30e-6, 2.5 * GB),
}
"""name -> seconds, bytes per second of a rank. Assumptions: about 80 to 90 percent of what the vendors state in one
direction, with one port of the network for each rank. Latencies are those of a step of a collective."""


@dataclass(frozen=True)
class Device:
    """An accelerator."""

    flops: Mapping[int, float]  # peak by bits of a number: 16 and 32
    memory_bytes: int  # of the device
    memory_bytes_per_s: float  # of its memory
    within: str  # name of the link that a node of these devices usually has
    between: str  # the same for several nodes


DEVICES = {
    "a100": Device({16: 312e12, 32: 156e12}, 80 * GIB, 2.0e12, "nvlink3", "hdr"),
    "h100": Device({16: 989e12, 32: 494e12}, 80 * GIB, 3.3e12, "nvlink4", "ndr"),
    "h200": Device({16: 989e12, 32: 494e12}, 141 * GIB, 4.8e12, "nvlink4", "ndr"),
    "b200": Device({16: 2250e12, 32: 1100e12}, 180 * GIB, 8.0e12, "nvlink5", "ndr"),
    "mi250x": Device({16: 191e12, 32: 48e12}, 64 * GIB, 1.6e12, "xgmi", "slingshot"),
    "mi300x": Device({16: 1307e12, 32: 163e12}, 192 * GIB, 5.3e12, "xgmi", "ndr"),
    "pvc": Device({16: 420e12, 32: 26e12}, 64 * GIB, 1.6e12, "xgmi", "slingshot"),
    "cpu": Device({16: 100e9, 32: 100e9}, 4 * GIB, 8e9, "pcie4", "hdr"),
}
"""Peaks of dense matrix products as the vendors state them (NVIDIA: fp32 as TF32; mi250x, pvc: one of two dies). Those
of "cpu" are a guess at one core: ``hpcfsdp bench plan`` measures them."""


def device_named(name: str) -> Device:
    """Return one of ``DEVICES``. Raises a UsageError that names the nearest."""
    if name not in DEVICES:
        raise UsageError(f"plan: unknown device {name!r}{nearest(name, DEVICES)}; known are {', '.join(DEVICES)}")
    return DEVICES[name]


def link_of(text: str) -> Link:
    """Return a link by its name, or as "BANDWIDTH,LATENCY": GB/s for each rank, and microseconds."""
    if text in PRESETS:
        latency, bandwidth = PRESETS[text]
        return Link(latency, bandwidth, f"{text}, assumed")
    try:
        bandwidth, latency = (float(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(PRESETS)
        raise UsageError(
            f"plan: {text!r} is no link{nearest(text, PRESETS)}: give GB/s of a rank and microseconds, as 44,6, or one "
            f"of {known}"
        ) from None
    if not (0 < bandwidth < float("inf") and 0 <= latency < float("inf")):
        raise UsageError(f"plan: {text!r} is no link: the bandwidth must be positive, the latency not negative")
    return Link(latency * 1e-6, bandwidth * GB, "given")


def measured_links(path: Path, assumed: Links) -> Links:
    """Return the links in a report of ``hpcfsdp doctor --json``; those of `assumed` where it measured none."""
    found = _facts(path).get("links")
    made = {name: _measured(found.get(name), path) for name in ("within", "between")} if isinstance(found, dict) else {}
    if not any(made.values()):
        raise UsageError(
            f"plan: {path} holds no measured links: run the doctor on several ranks, as "
            "mpirun -n 8 hpcfsdp doctor --json > links.json"
        )
    return Links(made["within"] or assumed.within, made["between"] or assumed.between)


def measured_rates(path: Path) -> tuple[float, float] | None:
    """Return ``Machine.flops`` and ``memory_bytes_per_s`` in a report of ``hpcfsdp bench plan --json``; None in others.

    Raises as ``measured_links``.
    """
    found = _facts(path).get("compute")
    if found is None:
        return None
    flops, memory = _numbers(found, path, "compute", "flops", "memory_bytes_per_s")
    if not (0 < flops < float("inf") and 0 < memory < float("inf")):
        raise UsageError(f"plan: {path}: {flops:g} operations and {memory:g} bytes a second cannot be planned with")
    return flops, memory


def _facts(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"plan: {path}: {error.strerror}") from None
    except (ValueError, UnicodeDecodeError):
        raise UsageError(f"plan: {path} is not JSON: write it with hpcfsdp doctor --json > {path}") from None
    facts = report.get("facts") if isinstance(report, dict) else None
    return facts if isinstance(facts, dict) else {}


def _numbers(found: Any, path: Path, where: str, *names: str) -> list[float]:
    try:
        return [float(found[name]) for name in names]
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"plan: {path}: facts.{where} has no {' and '.join(names)}") from None


def _measured(found: Any, path: Path) -> Link | None:
    if found is None:
        return None
    latency, bandwidth = _numbers(found, path, "links", "latency_s", "bytes_per_s")
    if not (0 < bandwidth < float("inf") and 0 <= latency < float("inf")):
        raise UsageError(f"plan: {path}: a link with {bandwidth:g} bytes/s and {latency:g} s cannot be planned with")
    return Link(latency, bandwidth, f"measured, {path.name}")


@dataclass(frozen=True)
class Traffic:
    """What collectives take, for one rank."""

    within_bytes: float = 0.0  # received from ranks of the same node
    between_bytes: float = 0.0  # received from other nodes
    latency_s: float = 0.0  # the part of the time that does not depend on bytes
    transfer_s: float = 0.0  # the part that does
    calls: int = 0  # collectives

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, count: float) -> Traffic:
        *amounts, calls = (count * each for each in astuple(self))
        return Traffic(*amounts, round(calls))


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate."""

    per_node: int  # ranks on each of its nodes
    nodes: int  # over which it lies

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    @classmethod
    def of_shards(cls, shards: int, ranks_per_node: int) -> RankGroup:
        """Return neighbours: where a node's ranks do not divide, as many on each node as always fit."""
        per_node = math.gcd(shards, ranks_per_node)
        return cls(per_node, shards // per_node)

    @classmethod
    def of_replicas(cls, replicas: int, shards: int, ranks_per_node: int) -> RankGroup:
        """Return the ranks at the distance of a copy."""
        per_node = math.gcd(replicas, max(1, ranks_per_node // math.gcd(shards, ranks_per_node)))
        return cls(per_node, replicas // per_node)

    def gather(self, nbytes: float, links: Links) -> Traffic:
        """Return what an all-gather, or a reduce-scatter, of so many bytes over all ranks together takes."""
        if self.size == 1:
            return Traffic()
        between = nbytes * (self.nodes - 1) / (self.nodes * self.per_node)
        within = max(0.0, nbytes * (self.size - 1) / self.size - between)
        # A ring: each part passes all ranks, and crosses nodes once for each of the others.
        hops_between = self.nodes - 1
        latency = hops_between * links.between.latency_s + (self.size - 1 - hops_between) * links.within.latency_s
        transfer = max(within / links.within.bytes_per_s, between / links.between.bytes_per_s)
        return Traffic(within, between, latency, transfer, 1)

    def all_to_all(self, nbytes: float, links: Links) -> Traffic:
        """Return what it takes for each rank to send its part of so many bytes to each other one."""
        between = nbytes * (self.size - self.per_node) / self.size
        within = nbytes * (self.per_node - 1) / self.size
        latency = (self.size > self.per_node) * links.between.latency_s + (self.per_node > 1) * links.within.latency_s
        transfer = max(within / links.within.bytes_per_s, between / links.between.bytes_per_s)
        return Traffic(within, between, latency, transfer, int(self.size > 1))

    def all_reduce(self, nbytes: float, links: Links) -> Traffic:
        """Return what an all-reduce of so many bytes on each rank takes: a reduce-scatter and an all-gather."""
        half = self.gather(nbytes, links)
        return replace(half * 2, calls=half.calls)
