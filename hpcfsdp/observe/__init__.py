"""Figures of a training, step by step: ``Run`` writes them as JSON lines, to trackers, and as a trace.

Names are loaded on first use: reading the files of a run needs neither MPI nor torch.
"""

import importlib

_PUBLIC = dict.fromkeys(("TensorBoard", "Tracker", "WandB", "check_trackers"), "hpcfsdp.observe.trackers")
_PUBLIC["Run"] = "hpcfsdp.observe.observed"

__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hpcfsdp.observe' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
