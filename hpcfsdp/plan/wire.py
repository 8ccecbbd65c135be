"""Collectives on a machine of nodes: the bytes that a rank receives from its node and from others, and the time.

Groups of ranks lie on nodes as ``world.mesh(replicate=..., shard=...)`` places them: the ranks of a copy are
neighbours. What comes from other nodes arrives at a node once and is passed on within it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import astuple, dataclass, replace

from hpcfsdp.plan.links import Links


@dataclass(frozen=True)
class Cost:
    """What collectives take, for one rank.

    Attributes:
        within_bytes: received from ranks of the same node.
        between_bytes: received from other nodes.
        latency_s: the part of the time that does not depend on bytes.
        transfer_s: the part that does.
        calls: collectives.
    """

    within_bytes: float = 0.0
    between_bytes: float = 0.0
    latency_s: float = 0.0
    transfer_s: float = 0.0
    calls: int = 0

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, count: float) -> Cost:
        *amounts, calls = (count * each for each in astuple(self))
        return Cost(*amounts, round(calls))


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        per_node: ranks on each of its nodes.
        nodes: over which it lies.
    """

    per_node: int
    nodes: int

    @property
    def size(self) -> int:
        return self.per_node * self.nodes

    @classmethod
    def of_shards(cls, shards: int, ranks_per_node: int) -> Group:
        """Neighbours. Where a node's ranks do not divide, as many on each node as always fit."""
        per_node = math.gcd(shards, ranks_per_node)
        return cls(per_node, shards // per_node)

    @classmethod
    def of_replicas(cls, replicas: int, shards: int, ranks_per_node: int) -> Group:
        """Ranks at the distance of a copy."""
        per_node = math.gcd(replicas, max(1, ranks_per_node // math.gcd(shards, ranks_per_node)))
        return cls(per_node, replicas // per_node)

    def gather(self, nbytes: float, links: Links) -> Cost:
        """An all-gather, or a reduce-scatter, of so many bytes over all ranks together."""
        if self.size == 1:
            return Cost()
        between = nbytes * (self.nodes - 1) / (self.nodes * self.per_node)
        within = max(0.0, nbytes * (self.size - 1) / self.size - between)
        # A ring: each part passes all ranks, and crosses nodes once for each of the others.
        hops_between = self.nodes - 1
        latency = hops_between * links.between.latency_s + (self.size - 1 - hops_between) * links.within.latency_s
        transfer = max(within / links.within.bytes_per_s, between / links.between.bytes_per_s)
        return Cost(within, between, latency, transfer, 1)

    def all_reduce(self, nbytes: float, links: Links) -> Cost:
        """An all-reduce of so many bytes on each rank: as a reduce-scatter and an all-gather."""
        half = self.gather(nbytes, links)
        return replace(half * 2, calls=half.calls)
