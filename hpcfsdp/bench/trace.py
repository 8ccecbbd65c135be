"""What a device did in some steps, from the trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcfsdp import accelerator

Span = tuple[float, float]
"""Begin and end of a piece of work."""
_STEPS = "hpcfsdp steps"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_APIS = ("_runtime", "_driver")
_COMMUNICATION = "ccl"
"""In the names of the kernels of NCCL, RCCL, oneCCL, HCCL."""


@dataclass(frozen=True)
class Activity:
    """What a device did, for each step.

    Attributes:
        launches: of kernels, copies and fills of memory.
        synchronisations: calls in which the host waited for the device.
        seconds: from the first work on the device to the last, under the profiler, which slows steps down.
        communication_s: in which a kernel that communicates ran.
        exposed_s: the part of it in which no other kernel ran.
        idle_s: in which nothing ran.
    """

    launches: float
    synchronisations: float
    seconds: float
    communication_s: float
    exposed_s: float
    idle_s: float


def merged(spans: Iterable[Span]) -> list[Span]:
    """The time that is in any of the spans, as spans in order that do not meet."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """How much time is in any of the spans."""
    return sum(end - begin for begin, end in merged(spans))


def exposed(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How much time is in any of the spans, and in none of the others."""
    return length([*spans, *others]) - length(others)


def activity(events: Iterable[Mapping[str, Any]], steps: int) -> Activity | None:
    """Sum up the events of a trace (Chrome's format, microseconds) of so many steps.

    None where it has no kernels: the profiler does not know this device.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    marks = [_span(event) for event in complete if event["name"] == _STEPS and event.get("cat") == "user_annotation"]
    work = [event for event in complete if event.get("cat") in _ON_DEVICE]
    if not any(event["cat"] == "kernel" for event in work):
        return None
    waits = [
        event
        for event in complete
        if str(event.get("cat")).endswith(_HOST_APIS)
        and "synchronize" in event["name"].lower()
        and any(begin <= event["ts"] < end for begin, end in marks)
    ]
    sending, computing = [], []
    for event in work:
        if event["cat"] == "kernel":
            (sending if _COMMUNICATION in event["name"].lower() else computing).append(_span(event))
    spans = [_span(event) for event in work]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Activity(
        len(work) / steps,
        len(waits) / steps,
        *(each / steps / 1e6 for each in (seconds, length(sending), exposed(sending, computing))),
        (seconds - length(spans)) / steps / 1e6,
    )


def traced(step: Callable[[], object], steps: int, device: torch.device) -> Activity | None:
    """Profile steps. None where the profiler gives no times of kernels on the device."""
    accelerator.synchronize(device)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        with torch.profiler.record_function(_STEPS):
            for _ in range(steps):
                step()
        accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return activity(json.loads(path.read_text())["traceEvents"], steps)


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]
