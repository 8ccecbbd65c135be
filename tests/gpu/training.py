"""A model, its training, and queues that run late, for the tests of this folder."""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp.engine.streams import DeviceStreams, Stream
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy

WIDTH = 32
STEPS = 4
ROWS = 12


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def make_model(device, layers=3, width=WIDTH):
    torch.manual_seed(0)
    first, last = nn.Linear(width, width), nn.Linear(width, 8)
    return nn.Sequential(first, *(Block(width) for _ in range(layers)), last).to(device)


def wrap(model, group=None, **options):
    return FullyShardedDataParallel(model, group, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def batches(device, width=WIDTH, steps=STEPS):
    """For all ranks together."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, width, generator=generator).to(device) for _ in range(steps)]


def clip(model):
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(1.0)
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train(model, given, optimizer=torch.optim.AdamW):
    """Train a step with each input. Returns the losses, which stay on the device until the last step."""
    optimizer, losses = optimizer(model.parameters(), 1e-2), []
    for x in given:
        losses.append(model(x).square().mean())
        losses[-1].backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach() for loss in losses])


def sleep(stream):
    """Keep a stream busy for about a millisecond."""
    cycles = getattr(torch.get_device_module(stream.device), "_sleep", None)
    with stream:
        if cycles is not None:
            cycles(2_000_000)
        else:
            matrix = torch.zeros(2048, 2048, device=stream.device)
            for _ in range(4):
                matrix = matrix @ matrix


@contextlib.contextmanager
def late(queue, simulated):
    """A context in which a queue runs late whenever the engine puts something on any queue, or has one wait.

    Args:
        simulated: the module of the simulated accelerator, where it is the device: it lets a stream wait by itself.
    """

    def first_sleep(method):
        def called(self, *arguments, **keywords):
            stream = self._stream(queue)
            if simulated is None:
                sleep(stream)
            else:
                simulated.starve(stream, patience_s=0.2)
            return method(self, *arguments, **keywords)

        return called

    with contextlib.ExitStack() as changes:
        for name in ("launch", "record", "wait"):
            method = first_sleep(getattr(DeviceStreams, name))
            changes.enter_context(mock.patch.object(DeviceStreams, name, method))
        if queue is Stream.COMPUTE and simulated is None:  # so that shards, too, are written late
            hook = register_optimizer_step_pre_hook(lambda *_: sleep(torch.accelerator.current_stream()))
            changes.callback(hook.remove)
        yield
