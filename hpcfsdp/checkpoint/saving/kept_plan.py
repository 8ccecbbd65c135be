"""The plan of a save, kept for the next save of the same model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp.checkpoint.saving.copies import Blocks, Sources
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.state.inventory import Inventory, take_inventory
from hpcfsdp.state.tensors import StateTensor


@dataclass(frozen=True, eq=False)
class Wanted:
    """What a save is to save, and the number of its ranks and that of this one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    names: Sequence[str] | None
    num_ranks: int
    rank: int

    def facts(self, found: Inventory) -> tuple[Any, ...]:
        """All that the plan depends on."""
        names = None if self.names is None else tuple(self.names)
        return names, self.num_ranks, self.rank, self.optimizer is None, found.facts


@dataclass(frozen=True, eq=False)
class Known:
    """What a save has found, and what it depends on.

    Attributes:
        facts: of the inventory, of the arguments and of this rank: equal facts lead to an equal plan.
        plan: has been checked, and compared over ranks.
        fingerprint: of the plan.
        sources: of this rank's blocks in the tensors of the inventory.
        chosen: names of the tensors to save; None: all.
        params: by group of the optimizer, the names of its parameters; None without an optimizer.
        has_states: whether modules have extra state.
    """

    facts: tuple[Any, ...]
    plan: SavePlan
    fingerprint: str
    sources: Sources
    chosen: frozenset[str] | None
    params: tuple[tuple[str, ...], ...] | None
    has_states: bool


@dataclass(frozen=True, eq=False)
class Recalled:
    """A known plan, and the tensors that its blocks are in now."""

    known: Known
    tensors: Sequence[torch.Tensor]

    def pieces(self) -> Iterator[tuple[Blocks, torch.Tensor]]:
        """See ``Sources.pieces``."""
        return self.known.sources.pieces(self.tensors)


class KeptPlan:
    """Keeps the plan of the last save of a model. Not collective.

    The plan is a function of facts that are taken anew for each save and compared by value. So a plan that no longer
    fits is not recalled, and tensors that have moved are found where they are. It keeps no memory of the model.
    """

    def __init__(self) -> None:
        self._known: Known | None = None

    def recall(self, wanted: Wanted) -> Recalled | None:
        """The kept plan, if it is that of this save."""
        if self._known is None:
            return None
        try:
            found = take_inventory(wanted.model, wanted.optimizer)
        except HpcfsdpError:  # the general way raises it, on all ranks
            return None
        if found is None or wanted.facts(found) != self._known.facts:
            return None
        return Recalled(self._known, found.tensors)

    def keep(
        self,
        wanted: Wanted,
        plan: SavePlan,
        fingerprint: str,
        named: Sequence[StateTensor],
        chosen: frozenset[str] | None,
        params: Sequence[Sequence[str]] | None,
        *,
        has_states: bool,
    ) -> Recalled | None:
        """Keeps a plan that the general way has made, compared and checked, in place of another; None if it cannot.

        Args:
            named: the plan's tensors, in its order.
            chosen, params, has_states: see ``Known``.
        """
        self._known = None
        found = take_inventory(wanted.model, wanted.optimizer)
        sources = None if found is None else Sources.find(plan, wanted.rank, named, found.tensors)
        if found is None or sources is None:
            return None
        names = None if params is None else tuple(map(tuple, params))
        self._known = Known(wanted.facts(found), plan, fingerprint, sources, chosen, names, has_states)
        return Recalled(self._known, found.tensors)
