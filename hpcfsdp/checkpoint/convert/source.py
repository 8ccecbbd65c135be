"""The content of an import, whatever its format, and ties between its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import Elements
from hpcfsdp.errors import CheckpointError, nearest


@dataclass
class ImportSource:
    """The content of a checkpoint that an import writes.

    Attributes:
        specs: the tensors, by their paths in the checkpoint.
        links: (alias, path of the tensor).
        groups, scalars: of the optimizer; None without one.
        extra: values next to the tensors, as ``save`` takes them.
        step: of training, if the source records it.
    """

    specs: list[TensorSpec]
    read: Elements
    links: list[tuple[str, str]] = field(default_factory=list)
    groups: list[dict[str, Any]] | None = None
    scalars: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    step: int | None = None

    def tie(self, ties: Sequence[tuple[str, str]]) -> None:
        """Make names of the model aliases of others, given as (alias, name).

        Raise CheckpointError where the tensor is missing, or the alias is another tensor with other bytes.
        """
        for alias, kept in ties:
            by_path = {spec.path: spec for spec in self.specs}
            links = dict(self.links)
            one, other = f"{schema.MODEL}/{alias}", f"{schema.MODEL}/{kept}"
            if other not in by_path:
                known = [path.removeprefix(f"{schema.MODEL}/") for path in by_path]
                raise CheckpointError(f"there is no tensor {kept!r} to tie {alias!r} to{nearest(kept, known)}")
            if links.get(one) == other:
                continue
            if one in links or one == other:
                raise CheckpointError(f"{alias!r} is {links.get(one, one)!r} already, it cannot be {other!r} too")
            if one in by_path:
                pair = by_path[one], by_path[other]
                alike = (pair[0].shape, pair[0].dtype) == (pair[1].shape, pair[1].dtype)
                if not alike or self._digest(pair[0]) != self._digest(pair[1]):
                    raise CheckpointError(f"{one!r} and {other!r} differ, so they cannot be tied")
                self.specs.remove(pair[0])
                self.links = [(path, other if of == one else of) for path, of in self.links]
            self.links.append((one, other))

    def _digest(self, spec: TensorSpec) -> bytes:
        """Return a digest of a tensor's bytes.

        Two tensors are read one after the other: alternating could read both repeatedly.
        """
        digest = hashlib.blake2b()
        step = max(1, schema.BLOCK_BYTES // spec.itemsize)
        for start in range(0, spec.numel, step):
            elements = self.read(spec, start, min(step, spec.numel - start))
            digest.update(np.ascontiguousarray(elements).view(np.uint8))
        return digest.digest()
