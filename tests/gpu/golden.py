"""What the engine does on a device in one step, line by line: the same on every device, as far as it is right.

One process computes as one of several imagined ranks, so that a single device shows it. The files of golden/ come from
the simulated device. ``python -m tests.gpu.golden`` compares those of this machine's device with them, and prints what
is other; with ``--write`` it writes them, which takes the simulated device.
"""

import contextlib
import difflib
import gc
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.engine.streams import DeviceStreams
from hpcfsdp.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from tests.bench.host import shard_rows
from tests.gpu.training import Block, batches, make_model, wrap

RANKS = 4
FOLDER = Path(__file__).with_name("golden")
CASES = {
    "class": {},
    "class-bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
    "class-offload": {"cpu_offload": CPUOffload(True)},
    "class-replicas": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "class-recomputed": {},
    "fully-shard": {},
}
_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class NotedStreams(DeviceStreams):
    """The streams of a device, with a line for each thing that is put there."""

    def __init__(self, device):
        super().__init__(device)
        self.lines = []
        self._of_event, self._depth = {}, 0

    def launch(self, stream, begin, finish=None, *, label=""):
        place, before = len(self.lines), self._requested()
        self.lines.append("")
        self._depth += 1
        event = super().launch(stream, begin, finish, label=label)
        self._depth -= 1
        self.lines[place] = f"{stream.value}: {label or 'the root'}, {self._requested() - before:+} bytes"
        return event

    def record(self, stream):
        event = super().record(stream)
        self._of_event[id(event)] = stream.value, event  # which keeps the number its own
        if not self._depth:
            self.lines.append(f"record {stream.value}")
        return event

    def wait(self, stream, event, why):
        if event is not None:
            of, _ = self._of_event.get(id(event), ("another", None))
            self.lines.append(f"{stream.value} waits for {of}: {why.name}")
        super().wait(stream, event, why)

    def drain(self):
        self.lines.append("drain")
        super().drain()

    def _requested(self):
        return torch.accelerator.memory_stats(self._device)["requested_bytes.all.current"]


@contextlib.contextmanager
def noted(streams):
    """A context in which units on a device use these streams, which note their collectives too."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("hpcfsdp.engine.root.streams_for", lambda device: streams))
        for name in _COLLECTIVES:
            original = getattr(Communicator, name)

            def call(comm, output, *given, _name=name, _original=original, **options):
                numel, dtype = output.numel(), str(output.dtype).removeprefix("torch.")
                streams.lines.append(f"  {_name} to {numel} x {dtype}, {comm.size} ranks")
                return _original(comm, output, *given, **options)

            stack.enter_context(mock.patch.object(Communicator, name, call))
        yield


def sharded(case, device):
    model = make_model(device)
    if case == "class-recomputed":
        _compat.checkpoint_activations(model, lambda module: isinstance(module, Block))
    if case == "fully-shard":
        shard_rows(model, Block, FakeCommunicator(1, RANKS, device=device))
        return model
    group = FakeCommunicator(1, RANKS, device=device)
    if case == "class-replicas":
        group = FakeCommunicator(1, RANKS // 2, device=device), FakeCommunicator(0, 2, device=device)
    return wrap(model, group, **CASES[case])


def trace(case, device):
    """The lines of a step, after two others."""
    _compat.init_fake_group(RANKS, device)
    streams = NotedStreams(device)
    try:
        with noted(streams):
            model = sharded(case, device)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for x in batches(device, steps=3):
                accelerator.synchronize(device)
                gc.collect()  # not within the step, where it would change what work allocates
                streams.lines.clear()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return streams.lines
    finally:
        dist.destroy_process_group()


def path_of(case):
    return FOLDER / f"{case}.txt"


def difference(case, lines):
    """What is other than in the file of a case, as a unified diff; no text if nothing is."""
    known = path_of(case).read_text().splitlines()
    return "\n".join(difflib.unified_diff(known, lines, f"golden/{case}.txt", "this device", lineterm=""))


def main(arguments):
    writes = arguments == ["--write"]
    if writes or os.environ.get("HPCFSDP_SIMULATED"):
        import tests.accelerator.simulated  # noqa: F401
    device, others = accelerator.current_device(), 0
    for case in CASES:
        lines = trace(case, device)
        if writes:
            path_of(case).write_text("\n".join(lines) + "\n")
            continue
        found = difference(case, lines)
        others += bool(found)
        print(f"{case}: {found or f'{len(lines)} lines, none other'}")
    return min(others, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
