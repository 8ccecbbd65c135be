"""The nodes of a job and the ranks on each: a pure value, from MPI or for an imagined machine."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Topology:
    """Nodes, in the order of their lowest rank, and for each its ranks, ascending, which need not be neighbours."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(self.nodes):
            times = Counter(ranks)
            wrong = [rank for rank in range(max(ranks, default=0) + 1) if times[rank] != 1]
            raise ValueError(
                f"nodes {self.nodes} must hold each of the ranks 0, 1, 2, ... once and no node may be empty"
                + (f"; missing or doubled: {wrong}" if wrong else "")
            )
        if any(list(node) != sorted(node) for node in self.nodes) or list(self.nodes) != sorted(self.nodes):
            raise ValueError(f"nodes {self.nodes} must be sorted, within each node and by their lowest rank")

    @classmethod
    def regular(cls, num_nodes: int, ranks_per_node: int) -> "Topology":
        """Return `num_nodes` nodes of `ranks_per_node` ranks each, filled one after the other."""
        return cls.uneven([ranks_per_node] * num_nodes)

    @classmethod
    def uneven(cls, ranks_per_node: Iterable[int]) -> "Topology":
        """Return nodes with the given numbers of ranks, filled one after the other."""
        nodes, first = [], 0
        for count in ranks_per_node:
            nodes.append(tuple(range(first, first + count)))
            first += count
        return cls(tuple(nodes))

    @classmethod
    def from_labels(cls, labels: Sequence[Hashable]) -> "Topology":
        """Put ranks with equal labels on one node. `labels` has one entry for each rank, for example its host name."""
        members: dict[Hashable, list[int]] = {}
        for rank, label in enumerate(labels):
            members.setdefault(label, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in members.values()))

    @property
    def size(self) -> int:
        return len(self._places)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the lowest rank of each node."""
        return tuple(node[0] for node in self.nodes)

    @property
    def ranks_per_node(self) -> int | None:
        """Return the number of ranks on each node, None where nodes differ."""
        counts = {len(node) for node in self.nodes}
        return counts.pop() if len(counts) == 1 else None

    def node_rank(self, rank: int) -> int:
        """Return the number of the node on which `rank` runs."""
        return self._places[rank][0]

    def local_rank(self, rank: int) -> int:
        """Return the place of `rank` among the ranks of its node."""
        return self._places[rank][1]

    def node_of(self, rank: int) -> tuple[int, ...]:
        return self.nodes[self._places[rank][0]]

    def proxy(self, rank: int, node: int) -> int:
        """Return the rank on `node` that exchanges with `rank` on its own node's behalf; `rank` itself on its own node.

        The proxy has the same local rank, modulo the ranks of its node. So each of a node's N ranks sends and receives
        1/N of the bytes between nodes.
        """
        if node == self.node_rank(rank):
            return rank
        return self.nodes[node][self.local_rank(rank) % len(self.nodes[node])]

    def clients(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of other nodes that have `rank` as their proxy on its node."""
        home = self.node_rank(rank)
        step, first = len(self.nodes[home]), self.local_rank(rank)
        return tuple(client for n, node in enumerate(self.nodes) if n != home for client in node[first::step])

    def restrict(self, ranks: Sequence[int]) -> "Topology":
        """Return the topology of a sub-group: its member ``ranks[i]`` is rank i there."""
        return Topology.from_labels([self.node_rank(rank) for rank in ranks])

    def split(self, parts: int) -> "Topology":
        """Divide each node into `parts` nodes. For tests of several nodes on one machine."""
        divided: list[tuple[int, ...]] = []
        for node in self.nodes:
            if len(node) < parts:
                raise ValueError(f"a node of {len(node)} rank(s) cannot be split into {parts} nodes")
            bounds = [len(node) * part // parts for part in range(parts + 1)]
            divided += [node[begin:end] for begin, end in pairwise(bounds)]
        return Topology(tuple(sorted(divided)))

    def __str__(self) -> str:
        counts = Counter(len(node) for node in self.nodes)
        return " + ".join(f"{many} node(s) of {ranks} rank(s)" for ranks, many in sorted(counts.items(), reverse=True))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (n, place) for n, node in enumerate(self.nodes) for place, rank in enumerate(node)}
