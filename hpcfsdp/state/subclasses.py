"""Parameters of tensor subclasses in a file: the plain tensors that they hold, each by its name in the parameter."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hpcfsdp import _compat
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.extension_params import InnerTensor
from hpcfsdp.state.tensors import LocalPiece, Runs, StateTensor, replicated
from hpcfsdp.units.dtensor_unit import OwnDTensor

Describe = Callable[[str, torch.Tensor, tuple[str, ...]], StateTensor]
"""Describes a tensor outside of flat parameters, by its name and further names."""


def inner_state(own: OwnDTensor, name: str, aliases: tuple[str, ...], describe: Describe) -> list[StateTensor]:
    """Return what a sharded parameter of a subclass holds. Not collective.

    What it holds is named after its attributes. A single tensor like the parameter keeps the name of the parameter.
    """
    found = own.inner
    if len(found) == 1 and found[0].is_alike and found[0].of(own.param.local).dtype == own.param.sharded.dtype:
        return [_alike(own, found[0], name, aliases, describe)]
    made = []
    for inner in found:
        names = [".".join((each, *inner.path)) for each in (name, *aliases)]
        make = _alike if inner.is_alike else _in_rows if inner.is_cut else _the_same
        made.append(make(own, inner, names[0], tuple(names[1:]), describe))
    return made


def _alike(own: OwnDTensor, inner: InnerTensor, name: str, aliases: tuple[str, ...], describe: Describe) -> StateTensor:
    return describe(name, _compat.dtensor_like(own.param.sharded, inner.of(own.param.local)), aliases)


def _in_rows(
    own: OwnDTensor, inner: InnerTensor, name: str, aliases: tuple[str, ...], describe: Describe
) -> StateTensor:
    """Describe one whose parts on the ranks lie as the rows do."""
    tensor, rows = inner.of(own.param.local), own.param.local
    outer = describe(name, own.param.sharded, aliases)
    numel, whole = math.prod(inner.shape), math.prod(own.shape)
    grows = tensor.shape[1:] == inner.shape[1:] and tensor.numel() * whole == rows.numel() * numel
    if own.dim or own.block is not None or outer.buffer is not None or not grows:
        raise CheckpointError(
            f"{name!r}: the {tuple(tensor.shape)} elements of this rank have no place in {inner.shape} of the whole "
            "parameter: convert the parameter (dequantize, for instance), or choose other tensors by names="
        )
    edges = [int(edge) * numel // whole for edge in outer.runs.edges]
    pieces = tuple(LocalPiece(piece.start * numel // whole, tensor) for piece in outer.pieces)
    runs = Runs(np.asarray(edges, np.int64), outer.runs.ranks)
    return replace(outer, shape=inner.shape, dtype=tensor.dtype, runs=runs, pieces=pieces)


def _the_same(
    own: OwnDTensor, inner: InnerTensor, name: str, aliases: tuple[str, ...], describe: Describe
) -> StateTensor:
    """Describe one that all ranks have."""
    if own.block is not None:
        raise CheckpointError(
            f"{name!r} may differ between tensor-parallel ranks, and a file has one tensor for each name: convert the "
            "parameter (dequantize, for instance), or choose other tensors by names="
        )
    return replace(replicated(name, inner.of(own.param.local), aliases), must_agree=True)
