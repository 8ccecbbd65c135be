"""The state of every random number generator that training may draw from, as small arrays."""

from __future__ import annotations

import random

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, np.ndarray]:
    """The generators' states on this rank: torch on CPU and on `device`, numpy's legacy generator, Python's."""
    states = {"torch_cpu": torch.get_rng_state().numpy(), "python": _pack_python(), "numpy": _pack_numpy()}
    if device.type == "cuda":
        states["torch_cuda"] = torch.cuda.get_rng_state(device).numpy()
    return states


def restore(states: dict[str, np.ndarray], device: torch.device) -> None:
    """Put back what ``capture`` returned; a generator that is not in `states` stays as it is."""
    if "torch_cpu" in states:
        torch.set_rng_state(torch.from_numpy(states["torch_cpu"].copy()))
    if "torch_cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(states["torch_cuda"].copy()), device)
    if "python" in states:
        _unpack_python(states["python"])
    if "numpy" in states:
        _unpack_numpy(states["numpy"])


def reseed(seed: int) -> None:
    """Start all generators anew from one number."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _pack_python() -> np.ndarray:
    version, words, gauss = random.getstate()
    return np.array([version, *words, gauss is not None, 0.0 if gauss is None else gauss], dtype=np.float64)


def _unpack_python(packed: np.ndarray) -> None:
    version, *words, has_gauss, gauss = packed.tolist()
    random.setstate((int(version), tuple(map(int, words)), gauss if has_gauss else None))


def _pack_numpy() -> np.ndarray:
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return np.array([*key, position, has_gauss, gauss], dtype=np.float64)


def _unpack_numpy(packed: np.ndarray) -> None:
    key, (position, has_gauss, gauss) = packed[:-3], packed[-3:]
    np.random.set_state(("MT19937", key.astype(np.uint32), int(position), int(has_gauss), float(gauss)))
