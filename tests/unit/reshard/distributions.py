"""Distributions of tensors as runs."""

import math

from hpcfsdp.params.layout import Box, Run
from hpcfsdp.reshard.boxes import chunk_box, common_runs, whole_box


def whole_runs(shapes):
    """The runs of whole tensors, each in memory of its own."""
    return [Run(index, 0, math.prod(shape), 0) for index, shape in enumerate(shapes) if math.prod(shape)]


def box_runs(index, shape, box):
    """The runs of one block of a tensor; the block is contiguous in memory of its own."""
    return common_runs(index, whole_box(shape), box)


def chunk_runs(shapes, num_chunks, chunk, chosen=None):
    """The runs of one chunk of each tensor's rows, in memory of their own; all of a tensor without dimensions."""
    runs = []
    for index in range(len(shapes)) if chosen is None else chosen:
        shape = shapes[index]
        box = chunk_box(shape, num_chunks, chunk) if shape else Box((), ())
        if box is not None:
            runs += box_runs(index, shape, box)
    return runs
