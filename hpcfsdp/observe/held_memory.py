"""Memory of a rank: what its device or process holds now and at its peak, and what parameters and others take of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat, accelerator
from hpcfsdp.checkpoint.memory.windows import held_bytes
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.sharded_params import ShardedParams
from hpcfsdp.params.storage import SharedBuffer
from hpcfsdp.units.dtensor_unit import dtensor_units_in
from hpcfsdp.units.flat_unit import units_in

_RESET_PEAK = b"5"  # what /proc/self/clear_refs takes, see proc(5)
_SIZES = re.compile(rb"^(VmHWM|VmRSS):\s*(\d+) kB$", re.MULTILINE)


class ProcessMemory:
    """The resident memory of this process, from Linux. Memory that ranks share counts in each rank that has used it."""

    capacity_bytes = 0  # the processes of a node share its memory: there is no capacity of one

    def __init__(self) -> None:
        self._status = self._clear = -1
        with contextlib.suppress(OSError):
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        with contextlib.suppress(OSError):
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak since the last call; 0 where the system does not show it.

        Where the peak cannot be reset, it is that since the start of the process.
        """
        if self._status < 0:
            return 0, 0
        found = {name: int(size) << 10 for name, size in _SIZES.findall(os.pread(self._status, 1 << 14, 0))}
        if self._clear >= 0:
            with contextlib.suppress(OSError):
                os.write(self._clear, _RESET_PEAK)
        now = found.get(b"VmRSS", 0)
        return now, max(now, found.get(b"VmHWM", 0))

    def close(self) -> None:
        for fd in (self._status, self._clear):
            if fd >= 0:
                os.close(fd)
        self._status = self._clear = -1


class DeviceMemory:
    """The memory of torch's tensors on an accelerator. Resets torch's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.capacity_bytes = accelerator.describe(device).nbytes  # 0 where the driver does not give it

    def read(self) -> tuple[int, int]:
        """Return bytes now, and at the peak since the last call."""
        found = accelerator.memory_bytes(self._device)
        accelerator.reset_memory_peak(self._device)
        return found

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def memory_of(device: torch.device) -> ProcessMemory | DeviceMemory:
    """Return the memory in which a rank computes."""
    return DeviceMemory(device) if accelerator.is_accelerator(device) else ProcessMemory()


class Holdings:
    """Counts bytes of a model and its optimizer on this rank, now and then: it goes through all tensors for that."""

    def __init__(self, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._looks, self._num_states = 0, -1
        self.parameters = self.gradients = self.optimizer = 0  # gradients as the optimizer finds them; its state
        self.shared = 0  # this rank's part of gathered values that the ranks of a node hold once, and that stay
        if model is not None:
            flats = flat_params(model)
            self.parameters = sum(map(_shard_bytes, flats)) if flats else _bytes_of(model.parameters())

    def look_at_gradients(self) -> None:
        """Count the gradients, which are complete now, in calls 1, 2, 4, 8, ... Not collective."""
        self._looks += 1
        if self._looks & (self._looks - 1) == 0:
            params: Iterable[torch.Tensor] = self._model.parameters() if self._model is not None else ()
            if self._optimizer is not None:
                params = (param for group in self._optimizer.param_groups for param in group["params"])
            self.gradients = _bytes_of(param.grad for param in params if param.grad is not None)

    def look_at_optimizer(self) -> None:
        """Count the optimizer's state, and shared values, if there are other entries than before. Not collective."""
        num_states = 0 if self._optimizer is None else len(self._optimizer.state)
        if num_states == self._num_states:
            return
        self._num_states = num_states
        if self._model is not None:
            units = (*units_in(self._model), *dtensor_units_in(self._model))
            self.shared = sum(_shared_bytes(flat) for unit in units for flat in unit.sharded_params)
        if self._optimizer is None:
            return
        values = (value for state in self._optimizer.state.values() for value in state.values())
        self.optimizer = _bytes_of(value for value in values if isinstance(value, torch.Tensor))

    def figures(self, gathered: int) -> dict[str, int]:
        """Return bytes by kind, as a record has them; `gathered` come and go. Not collective."""
        self.look_at_optimizer()
        held = held_bytes()
        return {
            "parameters_bytes": self.parameters,
            "gradients_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "gathered_bytes": gathered + self.shared,
            **({"checkpoints_bytes": held} if held else {}),
        }


def flat_params(model: nn.Module) -> list[FlatParam]:
    """Return the flat parameters of a model; empty unless it has a ``FullyShardedDataParallel``. Not collective."""
    return [flat for unit in units_in(model) for flat in unit.sharded_params]


def _shard_bytes(flat: ShardedParams) -> int:
    return int(flat.layout.shard_numel * flat.layout.dtype.itemsize)


def _shared_bytes(flat: ShardedParams) -> int:
    buffer = flat._buffer
    if not isinstance(buffer, SharedBuffer):
        return 0
    ranks = flat.comm.node_size
    own = 0 if buffer.is_cast else ranks * _shard_bytes(flat)  # the shards are in that memory
    return max(0, buffer.full.numel() * buffer.full.element_size() - own) // ranks


def _bytes_of(tensors: Iterable[Any]) -> int:
    locals_ = (_compat.local_of(tensor) for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_ if not tensor.is_meta)
