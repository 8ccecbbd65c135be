"""Checkpoints: model, optimizer, random numbers and more in one HDF5 file that any HDF5 tool opens.

Names are loaded on first use: looking into a file (``open_index``, ``latest``) needs neither MPI nor torch.
"""

import importlib

_PUBLIC = {
    "CheckpointInfo": "hpcfsdp.checkpoint.format.schema",
    "CheckpointManager": "hpcfsdp.checkpoint.manager",
    "HDF5Reader": "hpcfsdp.checkpoint.dcp.reader",
    "HDF5Writer": "hpcfsdp.checkpoint.dcp.writer",
    "checkpoint_files": "hpcfsdp.checkpoint.format.catalog",
    "export_peft": "hpcfsdp.checkpoint.convert.peft",
    "latest": "hpcfsdp.checkpoint.format.catalog",
    "load": "hpcfsdp.checkpoint.loading.loader",
    "open": "hpcfsdp.checkpoint.loading.lazy",
    "open_index": "hpcfsdp.checkpoint.format.index",
    "save": "hpcfsdp.checkpoint.saving.writer",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hpcfsdp.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
