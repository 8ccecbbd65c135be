"""States of all random number generators that training uses, as small arrays, and their way from and to one rank.

Each rank has about 15 kB of them. Only the rank that writes or reads a file has those of all ranks.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch

from hpcfsdp import accelerator
from hpcfsdp.comm import Communicator

States = dict[str, np.ndarray]
"""By kind of generator: of one rank 1-D, of several ranks with a row for each."""


def capture(device: torch.device) -> States:
    """Return this rank's states: torch on CPU and on `device`, numpy's legacy generator, Python's."""
    version, words, gauss = random.getstate()
    python = np.array([version, *words, gauss is not None, 0.0 if gauss is None else gauss], dtype=np.float64)
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    legacy = np.array([*key, position, has_gauss, gauss], dtype=np.float64)
    states = {"torch_cpu": torch.get_rng_state().numpy(), "python": python, "numpy": legacy}
    if accelerator.is_accelerator(device):
        states[f"torch_{device.type}"] = accelerator.get_rng_state(device).numpy()
    return states


def restore(states: Mapping[str, np.ndarray], device: torch.device) -> None:
    """Restore states of ``capture``; generators without a state stay as they are."""
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
    """Seed all generators from one number."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def gather(comm: Communicator, mine: States) -> States:
    """Return the states of all ranks on rank 0, nothing on the others. Collective over `comm`."""
    sent = torch.from_numpy(packed(mine)).to(comm.device)
    received = [torch.empty_like(sent) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.gather(received, sent, 0)
    return {} if received is None else _unpacked(np.stack([row.cpu().numpy() for row in received]), mine)


def scatter(comm: Communicator, form: States, of_ranks: States) -> States:
    """Return this rank's row, or the last, of rank 0's states, of which all ranks have the `form`. Collective."""
    received = torch.empty(sum(map(_row_bytes, form.values())), dtype=torch.uint8, device=comm.device)
    inputs = None
    if comm.rank == 0:
        num_rows = len(next(iter(of_ranks.values())))
        rows = [packed({kind: value[row] for kind, value in of_ranks.items()}) for row in range(num_rows)]
        inputs = [torch.from_numpy(rows[min(rank, len(rows) - 1)]).to(comm.device) for rank in range(comm.size)]
    comm.scatter(received, inputs, 0)
    return {kind: value[0] for kind, value in _unpacked(received.cpu().numpy()[None], form).items()}


def _row_bytes(value: np.ndarray) -> int:
    return int(value.shape[-1]) * value.itemsize


def packed(states: States) -> np.ndarray:
    """Return the bytes of one rank's states, one kind after the other in the order of their names."""
    return np.concatenate([np.ascontiguousarray(states[kind]).view(np.uint8) for kind in sorted(states)])


def _unpacked(rows: np.ndarray, form: States) -> States:
    """Return the states in rows of ``packed``, of the kinds, dtypes and lengths of `form`."""
    found, begin = {}, 0
    for kind in sorted(form):
        end = begin + _row_bytes(form[kind])
        found[kind] = np.ascontiguousarray(rows[:, begin:end]).view(form[kind].dtype)
        begin = end
    return found
