"""Peak memory of a training step, of the engine and of stock torch, beside what it has to be.

hpcfsdp is measured in the processes that the launcher started, since only these are ranks of MPI. After that each of
them starts a process of its own for every other engine, so that each begins with nothing: they find each other over
gloo. ``python -m hpcfsdp.bench.memory JSON`` is such a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.bench.pss import Sampler
from hpcfsdp.bench.step import OWN, STOCK, loss_of, make_batch, make_model, training_step, units
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.agree import raise_together
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.examples.gpt.transformer import Block
from hpcfsdp.launch import rendezvous
from hpcfsdp.world import World

PLAIN = "plain"
ENGINES = (OWN, PLAIN, *STOCK)
_WHOLE = (PLAIN, "ddp")
_ADAMW = 4
"""Tensors for each parameter: itself, its gradient, and two moments."""
_WARMUP = 3
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 128 << 10
_STORE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Peak:
    """Bytes for each rank: the sum over all ranks, divided by their number.

    Attributes:
        baseline_bytes: before there is a model.
        steps_bytes: the peak of each step, above the baseline.
        analytic_bytes: what the peak above the baseline has to be, see ``analytic_bytes``.
    """

    engine: str
    baseline_bytes: int
    steps_bytes: tuple[int, ...]
    analytic_bytes: int

    @property
    def peak_bytes(self) -> int:
        return max(self.steps_bytes)


@dataclass(frozen=True)
class _Order:
    """What the processes of one engine are told."""

    engine: str
    layers: int
    width: int
    repeats: int
    rank: int
    ranks: int
    node: int
    keep_freed: bool
    store: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class _Samples:
    """What a rank has to tell. Bytes, for each rank."""

    baseline_bytes: int
    steps_bytes: tuple[int, ...]
    activation_bytes: int = 0


def measure(
    world: World,
    *,
    layers: int,
    width: int,
    repeats: int,
    keep_freed: bool = False,
    engines: Sequence[str] = ENGINES,
) -> list[Peak]:
    """Collective over all ranks. Measure the engines, one after the other.

    Call it before anything large has been in memory. `engines` starts with hpcfsdp and plain, in this order: the one
    needs a process that has not worked yet, the other tells how large activations are.

    Args:
        repeats: steps that count, after some that do not.
        keep_freed: leave it to the C library what becomes of memory that is freed within a step. By default it goes
            back to the system at once: the peak is what the engine holds, and not what was held before.
    """
    sizes = _unit_sizes(layers, width)
    found: dict[str, _Samples] = {}
    for engine in engines:
        order = _Order(engine, layers, width, repeats, world.rank, world.size, world.node_rank, keep_freed)
        if engine == OWN:
            found[engine] = _sample(order, None, world.host)
        else:
            found[engine] = _sample_elsewhere(order, world)
    activation_bytes = found[PLAIN].activation_bytes
    return [
        Peak(
            engine,
            samples.baseline_bytes,
            samples.steps_bytes,
            analytic_bytes(sizes, None if engine in _WHOLE else world.size, activation_bytes),
        )
        for engine, samples in found.items()
    ]


def analytic_bytes(unit_numels: Sequence[int], ranks: int | None, activation_bytes: int, itemsize: int = 4) -> int:
    """The peak of a step: parameters, gradients and AdamW's state, and the activations.

    Sharded over `ranks`, each holds its part of these, and besides that two gathered units and the gradient of one, the
    largest each.

    Args:
        ranks: None where nothing is sharded.
    """
    state = _ADAMW * sum(unit_numels) * itemsize
    if ranks is None:
        return state + activation_bytes
    largest = sorted(unit_numels)[-2:]
    return state // ranks + (sum(largest) + largest[-1]) * itemsize + activation_bytes


def saved_bytes(forward: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """What autograd keeps for backward when `forward` has run: every storage once, parameters of `model` left out."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result  # not earlier: what it keeps would go, and its addresses might come up again
    return sum(seen.values())


def _unit_sizes(layers: int, width: int) -> list[int]:
    """Parameter elements of each unit, the root last."""
    with torch.device("meta"):
        model = make_model(layers, width)
    inner = [sum(param.numel() for param in module.parameters()) for module in units(model, Block)]
    return [*inner, sum(param.numel() for param in model.parameters()) - sum(inner)]


class _Watch:
    """The ranks of this node, watched by the first of them. ``start`` and ``stop`` say 0 on the others."""

    def __init__(self, node: int, comm: Communicator) -> None:
        """Collective over `comm`."""
        self._comm = comm
        self._sampler = None
        everyone = comm.all_gather_object((node, os.getpid()))
        pids = [pid for where, pid in everyone if where == node]
        with raise_together(comm):
            if pids[0] == os.getpid():
                self._sampler = Sampler(pids)

    def start(self) -> int:
        """Collective over `comm`. See ``Sampler.start``; all ranks rest while it looks."""
        self._comm.barrier()
        nbytes = self._sampler.start() if self._sampler else 0
        self._comm.barrier()
        return nbytes

    def stop(self) -> int:
        """Collective over `comm`. See ``Sampler.stop``."""
        self._comm.barrier()
        return self._sampler.stop() if self._sampler else 0

    def close(self) -> None:
        if self._sampler:
            self._sampler.close()


def _sample(order: _Order, group: Any, comm: Communicator) -> _Samples:
    """Collective over `comm`. Build the engine and take steps, watched from outside."""
    if not order.keep_freed:
        give_back_at_once()
    shape = {"layers": order.layers, "width": order.width, "rank": order.rank, "ranks": order.ranks}
    # What the first use of torch's kernels leaves in memory is none of the engine's.
    training_step(PLAIN, None, **{**shape, "layers": 1})()
    watch = _Watch(order.node, comm)
    trim()
    baseline = watch.start()
    watch.stop()
    step = training_step(order.engine, group, **shape)
    peaks = []
    for _ in range(_WARMUP + order.repeats):
        trim()
        watch.start()
        step()
        peaks.append(watch.stop())
    watch.close()
    del step
    trim()  # the next engines need the room
    peaks = peaks[_WARMUP:]
    totals = [sum(values) for values in zip(*comm.all_gather_object([baseline, *peaks]), strict=True)]
    baseline, *peaks = (total // order.ranks for total in totals)
    return _Samples(baseline, tuple(peak - baseline for peak in peaks))


def _sample_elsewhere(order: _Order, world: World) -> _Samples:
    """Collective over all ranks. ``_sample`` in processes that this one and its peers start."""
    store, address = rendezvous.open_store(world.comm, single_node=world.num_nodes == 1, timeout_s=_STORE_TIMEOUT_S)
    given = {**asdict(order), "store": (address, store.port)}
    with raise_together(world.host):
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(given)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HpcfsdpError(f"measuring {order.engine} failed with exit code {done.returncode}")
        answer = json.loads(done.stdout.splitlines()[-1])
    return _Samples(answer["baseline_bytes"], tuple(answer["steps_bytes"]), answer["activation_bytes"])


def main(order: _Order) -> None:
    """Collective over the processes of one engine. Measure it and write the samples to standard output as JSON."""
    torch.set_num_threads(1)
    store = dist.TCPStore(*order.store, order.ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=order.rank, world_size=order.ranks)
    samples = asdict(_sample(order, dist.group.WORLD, TorchGroupCommunicator(dist.group.WORLD)))
    if order.engine == PLAIN:
        model = make_model(order.layers, order.width)
        samples["activation_bytes"] = saved_bytes(lambda: loss_of(model, make_batch(order.rank)), model)
    print(json.dumps(samples), flush=True)
    dist.barrier()
    os._exit(0)  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it


def give_back_at_once() -> None:
    """Have the C library hand what is freed back to the system, rather than keep it for later.

    By default glibc does so from a size on that it raises to that of the largest block which was freed; smaller ones
    stay in its heap, and how well they fit together next time differs from run to run.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)


def trim() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main(_Order(**json.loads(sys.argv[1])))
