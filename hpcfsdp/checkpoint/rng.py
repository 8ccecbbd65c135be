"""States of all random number generators that training uses, as small arrays."""

from __future__ import annotations

import random

import numpy as np
import torch

from hpcfsdp import accelerator


def capture(device: torch.device) -> dict[str, np.ndarray]:
    """This rank's states: torch on CPU and on `device`, numpy's legacy generator, Python's."""
    version, words, gauss = random.getstate()
    python = np.array([version, *words, gauss is not None, 0.0 if gauss is None else gauss], dtype=np.float64)
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    legacy = np.array([*key, position, has_gauss, gauss], dtype=np.float64)
    states = {"torch_cpu": torch.get_rng_state().numpy(), "python": python, "numpy": legacy}
    if accelerator.is_accelerator(device):
        states[f"torch_{device.type}"] = accelerator.get_rng_state(device).numpy()
    return states


def restore(states: dict[str, np.ndarray], device: torch.device) -> None:
    """Restores states of ``capture``; generators without a state stay as they are."""
    if "torch_cpu" in states:
        torch.set_rng_state(torch.from_numpy(states["torch_cpu"].copy()))
    if accelerator.is_accelerator(device) and f"torch_{device.type}" in states:
        accelerator.set_rng_state(device, torch.from_numpy(states[f"torch_{device.type}"].copy()))
    if "python" in states:
        version, *words, has_gauss, gauss = states["python"].tolist()
        random.setstate((int(version), tuple(map(int, words)), gauss if has_gauss else None))
    if "numpy" in states:
        key, (position, has_gauss, gauss) = states["numpy"][:-3], states["numpy"][-3:]
        np.random.set_state(("MT19937", key.astype(np.uint32), int(position), int(has_gauss), float(gauss)))


def reseed(seed: int) -> None:
    """Seeds all generators from one number."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
