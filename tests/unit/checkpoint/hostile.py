"""Checkpoint files made by hand, of which every checksum is right, and how a process reads all of a file."""

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.footer import make_footer
from hpcfsdp.checkpoint.format.image import SparseImage

READ_ALL = """
import json
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader

def everything(path):
    index = open_index(path)
    with BlockReader(index) as reader:
        tensors = {
            name: [spec.dtype, spec.shape, [block.tobytes().hex() for block in reader.blocks(name)]]
            for name, spec in index.tensors.items()
        }
    info = index.info
    return json.dumps(
        [tensors, index.links, index.param_groups, index.scalars, index.rng, info.step, info.world_size, info.date,
         info.software_version, info.format_version, info.extra, info.config],
        default=lambda array: [array.dtype.str, array.shape, array.tobytes().hex()],
    )
"""
"""Source of ``everything(path)``, for processes of their own: text with all that a file holds, every byte read."""


def put_values(file, rows=(), tensors=(), sizes=(), version="1.0", **json_by_name):
    """All that a checkpoint must have; JSON by names with ``__`` for a slash."""
    attributes = {"format": "hpcfsdp", "format_version": version, "software_version": "1", "date": "today"}
    for name, value in attributes.items():
        file.attrs[name] = np.bytes_(value)
    file.attrs["step"] = file.attrs["world_size"] = np.int64(1)
    file.attrs["committed"] = np.uint8(1)
    longest = max((len(row[0]) for row in tensors), default=1)
    file[schema.TENSORS] = np.array(list(tensors), schema.table_dtype(schema.TENSORS, longest))
    file[schema.SHAPES] = np.array(list(sizes), "<u8")
    file[schema.LINKS] = np.zeros(0, schema.table_dtype(schema.LINKS, 1))
    file[schema.EXTENTS] = np.array(list(rows), schema.EXTENT_DTYPE)
    file.require_group(schema.MODEL)
    texts = {schema.EXTRA_VALUES: "{}", schema.CONFIG: "null"}
    texts |= {name.replace("__", "/"): text for name, text in json_by_name.items()}
    for name, text in texts.items():
        file[name] = np.bytes_(text)


def make_file(path, *, more=lambda file: None, claimed=None, **values):
    """A file with a footer that is right.

    Args:
        more: puts further things into it.
        claimed: bytes that the file is to have, behind those of HDF5: a hole.
        values: see ``put_values``.
    """
    image = SparseImage()
    with h5py.File(image, "w", libver=schema.LIBVER) as file:
        put_values(file, **values)
        more(file)
    regions = list(image.written(0, image.nbytes))
    end = image.nbytes if claimed is None else claimed
    with path.open("wb") as file:
        for begin, data in regions:
            file.seek(begin)
            file.write(data)
        file.truncate(end)
        file.seek(end)
        file.write(make_footer(regions, end).pack())
    return path
