"""Gradients of backwards under ``no_sync``: held whole on each rank, and shown as ``grad``.

Between such backwards the optimizer's parameters show views of the held gradient, so in-place changes by the program
change it. Other changes of ``grad`` are read when the next backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import set_grad
from hpcfsdp.params.sharded_params import ShardedParams


class HeldGrad:
    """The held gradient of one flat parameter.

    Attributes:
        whole: 1-D, ``padded_numel`` elements of the accumulation dtype; None if the program has discarded it.
    """

    def __init__(self, flat: ShardedParams) -> None:
        self._flat = flat
        self.whole: torch.Tensor | None = None
        self._shown: list[tuple[torch.Tensor, int] | None] | None = None  # on each parameter, with its version

    @property
    def is_shown(self) -> bool:
        """Whether ``show`` was called, and not ``end_show`` yet."""
        return self._shown is not None

    @property
    def shown_on(self) -> list[nn.Parameter]:
        """The parameters that show a held gradient."""
        if self._shown is None:
            return []
        pairs = zip(self._flat.stepped, self._shown, strict=True)
        return [param for param, shown in pairs if shown is not None and param.grad is shown[0]]

    def add(self, buffer: torch.Tensor) -> None:
        """Add a whole gradient of the reduce dtype."""
        if self.whole is None:
            self.whole = buffer.to(self._flat.dtypes.accumulate, copy=True)
        else:
            self.whole.add_(buffer)

    def drop(self, averaged: list[torch.Tensor | None] | None) -> None:
        """Take ``grad`` off the parameters, and forget the held gradient. `averaged`: see ``end_show``."""
        if self._shown is not None and averaged is not None:
            for index, (param, shown) in enumerate(zip(self._flat.stepped, self._shown, strict=True)):
                if shown is None or param.grad is not shown[0]:
                    averaged[index] = param.grad

    def show(self, used: Sequence[bool], averaged: Sequence[torch.Tensor | None]) -> None:
        """Have the parameters show their held gradients.

        Args:
            used: by leaf, whether it has had a gradient.
            averaged: shown by parameters without a held gradient.
        """
        used = used if self._flat.steps_each else [any(used)]
        noted: list[tuple[torch.Tensor, int] | None] = []
        for param, part, is_held, before in zip(self._flat.stepped, self._parts(), used, averaged, strict=True):
            # ``.data`` has a version of its own: a change of one part must not change the versions of others.
            set_grad(param, part.data if is_held else before)
            noted.append((param.grad, param.grad._version) if is_held and param.grad is not None else None)
        self._shown = noted

    def end_show(self, averaged: list[torch.Tensor | None], used: list[bool]) -> None:
        """Take ``grad`` off the parameters, and adopt the program's changes of it.

        Args:
            averaged: by parameter, the gradient of earlier synchronised backwards; changed where the program has
                discarded it with the held one, or has assigned another one.
            used: by leaf; changed where its gradient is gone.

        Raises:
            EngineError: the program has changed a held gradient in place where there is an averaged one, too.
        """
        assert self._shown is not None
        parts = self._parts()
        self._check_changes(averaged)
        for index, (param, shown) in enumerate(zip(self._flat.stepped, self._shown, strict=True)):
            grad, param.grad = param.grad, None
            if shown is None:
                averaged[index] = grad
                continue
            if grad is shown[0]:
                if grad._version != shown[1]:  # to zero, as has been checked
                    averaged[index] = None
                continue
            averaged[index] = None
            if grad is not None and grad.shape == parts[index].shape:
                parts[index].copy_(grad)
                continue
            averaged[index] = grad  # of the shape of the shard
            parts[index].zero_()
            for leaf in [index] if self._flat.steps_each else range(len(used)):
                used[leaf] = False
        self._shown = None
        if not any(used):
            self.whole = None

    def _check_changes(self, averaged: Sequence[torch.Tensor | None]) -> None:
        assert self._shown is not None
        for index, (param, shown) in enumerate(zip(self._flat.stepped, self._shown, strict=True)):
            if averaged[index] is None or shown is None or param.grad is not shown[0]:
                continue
            if param.grad._version != shown[1] and param.grad.any():
                fqn = self._flat.layout.slots[index].fqn if self._flat.steps_each else "the flat parameter"
                raise EngineError(
                    f"the gradient of {fqn!r} was changed in place between two backwards; it is the gradient that "
                    "no_sync holds on this rank, without the average of earlier backwards: change gradients after a "
                    "backward outside of no_sync, or discard all of them by zero_grad()"
                )

    def _parts(self) -> Sequence[torch.Tensor]:
        assert self.whole is not None
        return [place for (place,) in self._flat.targets(self.whole)] if self._flat.steps_each else (self.whole,)
