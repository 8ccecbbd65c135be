"""Accelerators of any vendor, by torch's generic names: this is the only module that distinguishes devices by type.

torch has one type of accelerator in a process: "cuda" (NVIDIA, and AMD by ROCm), "xpu", "npu", or that of a plug-in.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def device_type() -> str | None:
    """Return the type of the accelerator whose devices this process sees; None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def device_count() -> int:
    """Return the number of devices that this process sees."""
    return torch.accelerator.device_count() if device_type() is not None else 0


def current_device() -> torch.device:
    """Return the current device."""
    return torch.device(device_type() or "cpu", torch.accelerator.current_device_index())


def make_current(device: torch.device) -> None:
    """Make a device the current one."""
    torch.accelerator.set_device_index(device.index)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device has memory and streams of its own."""
    return device.type not in ("cpu", "meta")


@dataclass(frozen=True)
class Hardware:
    """A device as its driver describes it."""

    name: str
    uuid: str | None  # the same for all processes that share the hardware; None where the driver gives none
    nbytes: int  # of memory, 0 where it is unknown
    pci: str | None = None  # its address on the PCI bus, as "0000:c1:00.0"; None where the driver gives none


def describe(device: torch.device) -> Hardware:
    """Return what a device is."""
    found = getattr(torch.get_device_module(device), "get_device_properties", lambda device: None)(device)
    name, uuid = getattr(found, "name", device.type), getattr(found, "uuid", None)
    domain, bus, slot = (getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = f"{domain or 0:04x}:{bus:02x}:{slot:02x}.0" if isinstance(bus, int) and isinstance(slot, int) else None
    return Hardware(name, None if uuid is None else str(uuid), getattr(found, "total_memory", 0), pci)


def frees_by_stream(device: torch.device) -> bool:
    """Return whether freed memory goes to the stream first on which it was allocated, in the order of its work."""
    backend = getattr(getattr(torch.get_device_module(device), "memory", None), "get_allocator_backend", None)
    return backend is None or backend() != "cudaMallocAsync"


_DRIVERS = {"cuda": ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")}


def versions(device: torch.device) -> dict[str, str]:
    """Return versions of what a device works with, by name, as far as they can be found out."""
    found = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    module = torch.get_device_module(device)
    with contextlib.suppress(Exception):  # torch may be built without it
        found["nccl"] = ".".join(map(str, module.nccl.version()))
    with contextlib.suppress(Exception):
        found["driver"] = module.get_device_properties(device).driver_version
    for path in _DRIVERS.get(device.type, ()):
        with contextlib.suppress(OSError):
            number = re.search(r"\d+(\.\d+)+", Path(path).read_text())
            found["driver"] = number[0] if number else None
    return {name: version for name, version in found.items() if version}


_DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd")


def unseen_driver() -> str | None:
    """Say that this machine has a driver for accelerators, but torch sees no device; None if that is not so."""
    found = next((path for path in _DRIVER_FILES if Path(path).exists()), None)
    if found is None or device_type() is not None:
        return None
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": torch.version.xpu}
    built_for = next((f"{kind} {version}" for kind, version in kinds.items() if version), None)
    text = f"{found} is there, but torch {torch.__version__}, built for {built_for or 'the CPU'}, sees no device"
    if built_for is None:
        return f"{text}: install a torch that is built for the driver (https://pytorch.org/get-started)"
    return f"{text}: ask the launcher for devices (srun --gpus-per-node=N), or compare the driver with torch"


def synchronize(device: torch.device) -> None:
    """Wait for all work of a device."""
    torch.accelerator.synchronize(device)


def new_stream(device: torch.device, priority: int = 0) -> torch.Stream:
    """Return a new stream; one with a lower `priority` number comes first."""
    return torch.Stream(device, priority=priority)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which the calling thread enqueues work of a device."""
    return torch.accelerator.current_stream(device)


def on(stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a stream is the current one."""
    return stream


def record(stream: torch.Stream) -> torch.Event:
    """Return the event that everything on a stream up to here is done."""
    return stream.record_event()


def record_timed(stream: torch.Stream) -> torch.Event:
    """Return the same as ``record``, an event that knows when that was."""
    event = torch.Event(stream.device, enable_timing=True)
    stream.record_event(event)
    return event


def is_done(event: torch.Event) -> bool:
    """Return whether an event is complete, also in a thread that has set no device.

    A driver serves such a thread on the first device, where that would take hundreds of MiB for this process.
    """
    with torch.accelerator.device_index(event.device.index):
        return event.query()


def wait_for(event: torch.Event) -> None:
    """Wait until an event is complete, also in a thread that has set no device, see ``is_done``."""
    with torch.accelerator.device_index(event.device.index):
        event.synchronize()


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream captures a graph, whose replay does what the device does now, and no more."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return ask is not None and ask()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of torch's tensors on a device: now, and at their peak since ``reset_memory_peak``."""
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def reset_memory_peak(device: torch.device) -> None:
    """Make the peak of ``memory_bytes`` the present value."""
    torch.accelerator.reset_peak_memory_stats(device)


def new_pool(device: torch.device, allocator: Any) -> Any:
    """Return a pool of device memory that comes from an allocator of its own."""
    return torch.get_device_module(device).MemPool(allocator)


def allocating_from(pool: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the calling thread allocates device memory from a pool of ``new_pool``."""
    return torch.get_device_module(device).use_mem_pool(pool, device)


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator, uint8."""
    return torch.get_device_module(device).get_rng_state(device)


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore a state of ``get_rng_state``."""
    torch.get_device_module(device).set_rng_state(state, device)
