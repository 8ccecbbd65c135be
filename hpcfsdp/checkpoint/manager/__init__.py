"""The checkpoints of a training in one folder: saved, kept, removed and loaded."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("CheckpointManager", "Saved"):
        raise AttributeError(f"module 'hpcfsdp.checkpoint.manager' has no attribute {name!r}")
    from hpcfsdp.checkpoint.manager import manager  # which imports loading, and that imports retention from here

    return getattr(manager, name)
