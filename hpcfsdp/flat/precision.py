"""The dtypes that a parameter and its gradient go through in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcfsdp.comm.communicator import accumulate_dtype


@dataclass(frozen=True)
class Dtypes:
    """Of one flat parameter. Each is chosen apart from the others; nothing is converted twice.

    Attributes:
        param: of the shard that the optimizer steps.
        compute: of the gathered values that the module computes with.
        reduce: of the gradients as they travel between ranks.
        accumulate: of the sum over ranks, and of gradients that wait for the next synchronisation (``no_sync``).
        grad: of the gradient that the optimizer sees.
    """

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    grad: torch.dtype

    @classmethod
    def plan(
        cls,
        dtype: torch.dtype,
        *,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
    ) -> Dtypes:
        """The dtypes of parameters of a dtype, by the rules of torch's ``MixedPrecision``.

        Args:
            param: to compute in; None for `dtype`.
            reduce: to send gradients in; None for the dtype they are computed in.
            keep_low_precision_grads: the optimizer sees gradients as they travelled; otherwise in `dtype`.
        """
        if not dtype.is_floating_point:  # whole numbers and complex ones are never cast
            return cls(dtype, dtype, dtype, accumulate_dtype(dtype), dtype)
        compute = param or dtype
        reduce = reduce or compute
        return cls(dtype, compute, reduce, accumulate_dtype(reduce), reduce if keep_low_precision_grads else dtype)
