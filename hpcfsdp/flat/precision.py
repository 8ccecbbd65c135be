"""The dtypes that a parameter and its gradient go through in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcfsdp.comm.communicator import accumulate_dtype


@dataclass(frozen=True)
class Dtypes:
    """Of one flat parameter. Each is chosen apart from the others; nothing is converted twice.

    Attributes:
        kept: of the shard that the optimizer steps.
        compute: of the gathered values that the module computes with.
        wire: of the gradients as they travel between ranks.
        accumulate: of the sum over ranks, and of gradients that wait for the next synchronisation (``no_sync``).
        grad: of the gradient that the optimizer sees.
    """

    kept: torch.dtype
    compute: torch.dtype
    wire: torch.dtype
    accumulate: torch.dtype
    grad: torch.dtype

    @classmethod
    def plan(
        cls,
        kept: torch.dtype,
        *,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
    ) -> Dtypes:
        """The dtypes of parameters of dtype `kept`, by the rules of torch's ``MixedPrecision``.

        Args:
            param: to compute in; None for `kept`.
            reduce: to send gradients in; None for the dtype they are computed in.
            keep_low_precision_grads: the optimizer sees gradients as they travelled; otherwise in `kept`.
        """
        if not kept.is_floating_point:  # whole numbers and complex ones are never cast
            return cls(kept, kept, kept, accumulate_dtype(kept), kept)
        compute = param or kept
        wire = reduce or compute
        return cls(kept, compute, wire, accumulate_dtype(wire), wire if keep_low_precision_grads else kept)
