"""Checkpoints: model, optimizer, random numbers and more in one HDF5 file that any HDF5 tool opens.

Names are loaded on first use: looking into a file (``open_index``, ``latest``) needs neither MPI nor torch.
"""

import importlib

_PUBLIC = {
    "CheckpointInfo": "hpcfsdp.checkpoint.format.schema",
    "CheckpointManager": "hpcfsdp.checkpoint.manager",
    "HDF5Reader": "hpcfsdp.checkpoint.dcp.reader",
    "HDF5Writer": "hpcfsdp.checkpoint.dcp.writer",
    "checkpoint_files": "hpcfsdp.checkpoint.catalog",
    "export_peft": "hpcfsdp.checkpoint.convert.peft",
    "latest": "hpcfsdp.checkpoint.catalog",
    "load": "hpcfsdp.checkpoint.loader",
    "open": "hpcfsdp.checkpoint.lazy",
    "open_index": "hpcfsdp.checkpoint.index",
    "save": "hpcfsdp.checkpoint.writer",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hpcfsdp.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
