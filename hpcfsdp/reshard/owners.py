"""Which rank owns which tensor whole, chosen by cost. Pure, and the same on all ranks without a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcfsdp.reshard.cuts import Cut

SLACK = 0.05
"""Share of the mean load by which a rank may exceed it with tensors that it has most of already."""


def choose_owners(cuts: Sequence[Cut], costs: Sequence[float], size: int, move_cost: float) -> list[int]:
    """The owner of each tensor among `size` ranks.

    First each tensor, the most expensive ones before, stays with the rank that has most of it, unless that rank would
    have more than its share of the cost. The rest go one by one to the rank that is done first.

    Args:
        costs: of each tensor to its owner.
        move_cost: of each element that the owner does not have, in the same unit.

    Returns:
        A rank for each tensor.
    """
    owners, loads = [0] * len(cuts), np.zeros(size)
    limit = (1 + SLACK) * sum(costs) / size
    left = []
    for index in sorted(range(len(cuts)), key=lambda index: -costs[index]):  # sorted() keeps the order of equal ones
        ranks, numels = cuts[index].shares()
        most = int(ranks[numels.argmax()]) if len(ranks) else 0
        if loads[most] + costs[index] <= limit:
            owners[index] = most
            loads[most] += costs[index]
        else:
            left.append((index, ranks, numels))
    for index, ranks, numels in left:
        idle = int(loads.argmin())
        candidates, has = np.append(ranks, idle), np.append(numels, numels[ranks == idle].sum())
        ends = loads[candidates] + costs[index] + move_cost * (cuts[index].numel - has)
        best = int(candidates[np.lexsort((candidates, ends))[0]])
        owners[index] = best
        loads[best] += costs[index] + move_cost * float(cuts[index].numel - has[candidates == best][0])
    return owners
