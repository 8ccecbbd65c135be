"""What an import reads from, whatever its format; and tensors tied to each other in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.single import Elements
from hpcfsdp.errors import CheckpointError, nearest


@dataclass
class Source:
    """The contents of a checkpoint that is to be written.

    Attributes:
        specs: the tensors, by their paths in the checkpoint.
        read: where their elements come from.
        links: (alias, path of the tensor).
        groups, scalars: of the optimizer; None: there is none.
        extra: values beside the tensors, as ``save`` takes them.
        step: that the source tells, if it does.
    """

    specs: list[TensorSpec]
    read: Elements
    links: list[tuple[str, str]] = field(default_factory=list)
    groups: list[dict[str, Any]] | None = None
    scalars: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    step: int | None = None

    def tie(self, ties: Sequence[tuple[str, str]]) -> None:
        """Make names of the model further names of others. Where both are tensors, their bytes have to be equal.

        Args:
            ties: (further name, name that is kept).

        Raises:
            CheckpointError: there is no such tensor, or they are not equal.
        """
        for further, kept in ties:
            by_path = {spec.path: spec for spec in self.specs}
            links = dict(self.links)
            one, other = f"{schema.MODEL}/{further}", f"{schema.MODEL}/{kept}"
            if other not in by_path:
                known = [path.removeprefix(f"{schema.MODEL}/") for path in by_path]
                raise CheckpointError(f"there is no tensor {kept!r} to tie {further!r} to{nearest(kept, known)}")
            if links.get(one) == other:
                continue
            if one in links or one == other:
                raise CheckpointError(f"{further!r} is {links.get(one, one)!r} already, it cannot be {other!r} too")
            if one in by_path:
                self._check_equal(by_path[one], by_path[other])
                self.specs.remove(by_path[one])
                self.links = [(path, other if of == one else of) for path, of in self.links]
            self.links.append((one, other))

    def _check_equal(self, one: TensorSpec, other: TensorSpec) -> None:
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        if not alike or self._digest(one) != self._digest(other):
            raise CheckpointError(f"{one.path!r} and {other.path!r} differ, so they cannot be tied")

    def _digest(self, spec: TensorSpec) -> bytes:
        """Of all bytes of a tensor. One after the other: to have two at once may be to read both again and again."""
        digest = hashlib.blake2b()
        step = max(1, schema.BLOCK_BYTES // spec.itemsize)
        for start in range(0, spec.numel, step):
            elements = self.read(spec, start, min(step, spec.numel - start))
            digest.update(np.ascontiguousarray(elements).view(np.uint8))
        return digest.digest()
