"""Writes a checkpoint from one process, with bytes that it reads elsewhere; for converters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.catalog import new_token
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.content import Content, root_attributes, small_values
from hpcfsdp.checkpoint.saving.plan import plan_alone
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile, extent_rows, naming_write_errors

Elements = Callable[[TensorSpec, int, int], np.ndarray]
"""Of a tensor, a first element and a number of elements: those elements, 1-D, of any dtype with these bytes."""


def write_alone(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    read: Elements,
    *,
    links: Sequence[tuple[str, str]] = (),
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    scalars: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint file; not collective. At most a few blocks are in memory at a time.

    Raises CheckpointError where it cannot be written, or a name or value cannot be stored.

    Args:
        path: of the file, which appears there when it is complete.
        specs: the tensors, by their paths in the file.
        read: reads elements of a tensor; called for each element once, in the order of the file.
        links: (alias, path of the tensor).
        step, extra, config: as ``save`` takes them.
        groups, scalars: of the optimizer, see ``content.small_values``; None without one.
    """
    target = Path(os.path.abspath(os.path.expanduser(path)))
    temporary = TemporaryFile(target, new_token())
    with naming_write_errors(target):
        plan = plan_alone(specs, links)
        content = Content(plan, root_attributes(step, 1), small_values(extra, config, groups, scalars))
        metadata_image = content.metadata_image()
        temporary.create(metadata_image.nbytes)
        try:
            with temporary.opened() as fd:

                def bytes_of(index: int) -> np.ndarray:
                    tensor, start, numel = plan.blocks[["tensor", "start", "numel"]][index].item()
                    return np.ascontiguousarray(read(plan.specs[tensor], start, numel)).view(np.uint8)

                blocks = BlockWriter(fd, plan, metadata_image.offsets, bytes_of)
                sums = blocks.write(np.arange(len(plan.blocks)))
                disk.sync(fd)
            temporary.commit(metadata_image, extent_rows(plan, metadata_image.offsets, [sums.tobytes()]))
        except BaseException:
            temporary.discard()
            raise
    return target
