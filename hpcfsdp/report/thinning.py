"""Curves of any length with as many points as a picture can show. Pure."""

from __future__ import annotations

import numpy as np

BINS = 300
"""A picture is about as many pixels wide."""


def thinned(steps: np.ndarray, values: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """At most two points of each bin, its lowest and its highest value, in the order of steps; all of a short curve.

    Args:
        steps, values: 1-D, of one length, finite.
    """
    if len(steps) <= 2 * bins:
        return steps, values
    kept = []
    for part in np.array_split(np.arange(len(steps)), bins):
        here = values[part]
        kept += sorted({int(part[np.argmin(here)]), int(part[np.argmax(here)])})
    return steps[kept], values[kept]


def averaged(steps: np.ndarray, values: np.ndarray, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each bin, at its last step; all of a short curve. `values` may have further columns."""
    if len(steps) <= bins:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), bins)
    return np.array([steps[part[-1]] for part in parts]), np.array([values[part].mean(axis=0) for part in parts])


def spaced(steps: np.ndarray, bins: int = BINS) -> np.ndarray:
    """Marks without those that would lie on top of another one."""
    if len(steps) < 2:
        return steps
    width = max((int(steps.max()) - int(steps.min())) / bins, 1e-9)
    _, first = np.unique(((steps - steps.min()) / width).astype(np.int64), return_index=True)
    return steps[first]
