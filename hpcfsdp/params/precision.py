"""The dtypes of a parameter and its gradient in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hpcfsdp.comm.reduce import accumulate_dtype


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one flat parameter.

    Attributes:
        param: of the shard.
        compute: of the gathered values.
        reduce: of gradients between ranks.
        accumulate: of sums over ranks, and of gradients held by ``no_sync``.
        grad: of the gradient that the optimizer reads.
    """

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    grad: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the narrowest of them."""
        return min(self.param.itemsize, self.compute.itemsize, self.reduce.itemsize)

    @classmethod
    def plan(
        cls,
        dtype: torch.dtype,
        *,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
    ) -> Dtypes:
        """The dtypes for parameters of `dtype`, by the rules of torch's ``MixedPrecision``.

        Args:
            param: to compute in; None for `dtype`.
            reduce: to send gradients in; None for the dtype of the computation.
            keep_low_precision_grads: the optimizer gets gradients in the reduce dtype; otherwise in `dtype`.
        """
        if not dtype.is_floating_point:  # integer and complex parameters are never cast
            return cls(dtype, dtype, dtype, accumulate_dtype(dtype), dtype)
        compute = param or dtype
        reduce = reduce or compute
        return cls(dtype, compute, reduce, accumulate_dtype(reduce), reduce if keep_low_precision_grads else dtype)
