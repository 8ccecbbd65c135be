"""Exchanges columns for rows, as ``columns`` has planned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from hpcfsdp import _compat
from hpcfsdp.checkpoint.dcp.columns import Round
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.comm import Communicator


class Exchange:
    """Rounds of one save. Their memory is used again: new pages would take as long as the exchange itself."""

    def __init__(self, comm: Communicator) -> None:
        """Not collective."""
        self._comm = comm
        self._memory: dict[str, torch.Tensor] = {}

    def rows_of(
        self,
        round_: Round,
        specs: Sequence[TensorSpec],
        values_of: Callable[[int], np.ndarray],
        agree: Callable[[], AbstractContextManager[None]],
    ) -> list[np.ndarray]:
        """Collective over `comm`. The rows of a round, each as an array of its sizes, until the next round.

        Args:
            specs: of the tensors of the round's rows.
            values_of: the values of an item, of the shape of its box, in ``schema.numpy_dtype`` of its dtype.
            agree: makes a context that is collective over `comm`: all ranks raise what one has raised in it.
        """
        size, rank = self._comm.size, self._comm.rank
        with agree():
            kinds = [schema.numpy_dtype(spec.dtype) for spec in specs]
            rows = self._arrays("rows", [(each.sizes, k) for each, k in zip(round_.rows, kinds, strict=True)])
            targets: list[list[np.ndarray]] = [[] for _ in range(size)]
            for peer, number, within in round_.received:
                targets[peer].append(rows[number][within.slices])
            sources: list[list[np.ndarray]] = [[] for _ in range(size)]
            for item, pieces in itertools.groupby(round_.sent, lambda piece: piece.place):
                values = values_of(item)
                for piece in pieces:
                    behind = values.shape[values.ndim + 1 - len(piece.within.sizes) :]
                    sources[piece.peer].append(values.reshape(-1, *behind)[piece.within.slices])
            _copy(sources[rank], targets[rank])  # what stays here is no message
            sources[rank], targets[rank] = [], []
            sent, places = self._messages("sent", sources)
            _copy(itertools.chain(*sources), places)
            sources.clear()
            received, places = self._messages("received", targets)
        self._comm.all_to_all(received, sent)
        _copy(places, itertools.chain(*targets))
        return rows

    def _messages(
        self, name: str, of_peers: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        """Memory for a message of each peer's arrays, uint8, 1-D, and the place of each array in it."""
        places = self._arrays(name, [(array.shape, array.dtype) for of_peer in of_peers for array in of_peer])
        sizes = [sum(array.nbytes for array in of_peer) for of_peer in of_peers]
        return list(self._memory[name][: sum(sizes)].split(sizes)), places

    @_compat.outside_of_modes
    def _arrays(self, name: str, kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, one after the other in the memory `name`."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        if name not in self._memory or self._memory[name].numel() < sum(sizes):
            self._memory.pop(name, None)  # not both at a time
            self._memory[name] = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = self._memory[name][: sum(sizes)].split(sizes) if sizes else ()
        return [part.numpy().view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, kinds, strict=True)]


def _copy(sources: Iterable[np.ndarray], targets: Iterable[np.ndarray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source
