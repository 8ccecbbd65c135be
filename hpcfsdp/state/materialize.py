"""Memory for what is on the meta device and no unit shards: such tensors stay the objects that they are."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import nn

from hpcfsdp.errors import CheckpointError
from hpcfsdp.state.model import plain_tensors


@contextlib.contextmanager
def materialized(model: nn.Module, chosen: Collection[str], device: torch.device) -> Iterator[None]:
    """Give tensors on the meta device memory that is not initialised; not collective.

    If the block raises, they are on the meta device again.

    Args:
        chosen: names of the tensors, without wrappers' names; any of the names of one that is tied.
        device: of the memory.

    Raises:
        CheckpointError: a tensor cannot be exchanged, for something else refers to it.
    """
    exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, names in plain_tensors(model).items():
            if tensor.is_meta and not set(names).isdisjoint(chosen):
                exchanged.append((tensor, _exchange(tensor, names[0], device)))
        yield
    except BaseException:
        for tensor, other in exchanged:
            torch.utils.swap_tensors(tensor, other)
        raise


def _exchange(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """What was the tensor, which has memory now."""
    other: torch.Tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    try:
        # Whoever holds the tensor, an optimizer or another module, goes on holding the right one.
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise CheckpointError(f"{name!r} is on the meta device and cannot be given memory: {error}") from error
    return other
