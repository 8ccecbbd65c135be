"""The mean of losses over tokens, where ranks and micro-batches have different numbers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcfsdp.comm import communicator_for
from hpcfsdp.errors import UsageError
from hpcfsdp.hang.calls import public_call


class WeightedMean:
    """Weigh the losses of one step by tokens, over all of its micro-batches and ranks.

    Engines average gradients over ranks, and trainers over micro-batches: a mean of means counts a token of a short
    batch more than one of a long batch. Give a loss that is summed over tokens, and all tokens count the same::

        mean = WeightedMean([batch.num_tokens for batch in micro_batches])
        for batch in micro_batches:
            mean(loss_sum(model, batch)).backward()
        print(mean.value())

    Attributes:
        total: the number of tokens of the step, on all ranks.
    """

    @public_call("WeightedMean")
    def __init__(self, counts: Sequence[float], *, group: Any = None) -> None:
        """Add up `counts` over ranks. Collective over `group`.

        Args:
            counts: the tokens of each micro-batch of this rank; 0 for one that only keeps up with other ranks.
            group: the ranks over which gradients are averaged, a process group or a ``DeviceMesh`` of one dimension. By
                default all.

        Raises:
            UsageError: a count is negative or no number, or there are no tokens on any rank.
        """
        found = [float(count) for count in counts]
        if not all(0 <= count < float("inf") for count in found):
            raise UsageError(f"counts are numbers of tokens, from 0 on, not {found}")
        if hasattr(group, "get_group"):
            group = group.get_group()
        self._comm = communicator_for(group, required=False)
        self._sum: torch.Tensor | None = None
        self.total = self._over_ranks(sum(found))
        if not self.total:
            raise UsageError("no rank has a token in this step: leave the step out")

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Not collective. Return the part of a micro-batch in the mean, to call ``backward`` on.

        `loss` is summed over the tokens of the micro-batch, a scalar. The gradient is multiplied by the number of
        ranks, by which engines divide.
        """
        noted = loss.detach().to(torch.float64 if loss.device.type == "cpu" else torch.float32)
        self._sum = noted if self._sum is None else self._sum + noted
        return loss * (self._comm.size / self.total)

    @public_call("WeightedMean.value")
    def value(self) -> float:
        """Return the mean of the losses of all micro-batches so far, over all ranks. Collective over the group."""
        return self._over_ranks(0.0 if self._sum is None else float(self._sum)) / self.total

    def _over_ranks(self, number: float) -> float:
        if self._comm.size == 1:
            return number
        device = self._comm.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        found = torch.tensor([number], dtype=dtype, device=device)
        self._comm.all_reduce(found, "sum")
        return float(found)
