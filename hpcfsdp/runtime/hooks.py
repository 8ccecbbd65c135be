"""Tensors found in what goes into a module and what comes out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from hpcfsdp import _compat

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, Enum, np.ndarray)


class UnknownContainerError(TypeError):
    """A value that may hold tensors in a way nobody told us about."""


def tensors_in(value: Any, *, strict: bool) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, sets, mappings, dataclasses, packed sequences and pytree nodes.

    Args:
        strict: raise ``UnknownContainerError`` for an object of another type instead of passing over it.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _PLAIN):
        return
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, strict=strict)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, strict=strict)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name), strict=strict)
    else:
        found = _compat.tensors_of(value)
        if found is not None:
            yield from found
        elif strict:
            raise UnknownContainerError(type(value).__qualname__)
