"""Programs on the simulated accelerator: where in a step the host waits for the device."""

import dataclasses

import pytest
import torch
from torch import nn

import hpcfsdp
from hpcfsdp.checkpoint import CheckpointManager
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.examples.gpt import loop
from hpcfsdp.examples.gpt.callbacks import Callbacks
from hpcfsdp.examples.gpt.run_config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1)

SIM = torch.device("sim", 0)


class Recorder(Callbacks):
    """The losses, and the host's waits between the begins of two steps."""

    def __init__(self, monkeypatch):
        self.losses, self.waits = [], []
        self.rate = loop.learning_rate
        monkeypatch.setattr(loop, "learning_rate", self.begin_step)

    def begin_step(self, *args):
        self.waits.append(simulated.waits())
        simulated.reset_counts()
        return self.rate(*args)

    def record(self, record):
        if record["kind"] == "train":
            self.losses.append(record["loss"])


def on_device(model, config, group):
    with SIM:  # torch unties parameters that it brings to a plug-in's device
        there = GPT(config)
    there.load_state_dict(model.state_dict())
    return FullyShardedDataParallel(there, process_group=group, auto_wrap_policy=ModuleWrapPolicy({Block}))


@pytest.fixture
def train(world, group, shared_path, monkeypatch):
    if world.rank == 0:
        (shared_path / "corpus").write_bytes(b"alpha beta gamma\n" * 200)
    world.comm.Barrier()

    def run(device, accumulation):
        config = RunConfig(
            run_dir=str(shared_path / f"{device.type}-{accumulation}"),
            model=ModelConfig(layers=2, width=24, heads=3, context=16),
            data=DataConfig(paths=[str(shared_path / "corpus")], held_out=0.2),
            optim=OptimConfig(lr=1e-2, warmup_steps=2),
            train=LoopConfig(steps=7, batch=8 * world.size, accumulation=accumulation),
            eval=EvalConfig(bytes=100),
            checkpoint=CheckpointConfig(every=0),
        )
        there = world
        if device.type != "cpu":
            monkeypatch.setattr(loop, "shard", lambda model, *_, **_options: on_device(model, config.model, group))
            there = dataclasses.replace(world, device=device, communicator=TorchGroupCommunicator(group, device))
        recorder = Recorder(monkeypatch)
        held_out = loop.Trainer(config, there, hpcfsdp.preemption(), recorder).run().held_out
        return [*recorder.losses, held_out.bits_per_byte], recorder.waits

    return run


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_training_program_waits_once_in_a_step(train, accumulation):
    expected, _ = train(torch.device("cpu"), accumulation)
    losses, waits = train(SIM, accumulation)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert waits[4:] == [{"copy to host": 1}] * 3  # the first steps agree on the order of units


def test_the_progress_of_a_save_is_not_asked_of_the_device(world, group, shared_path):
    model = FullyShardedDataParallel(nn.Linear(9, 9).to(SIM), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    model(torch.ones(4, 9, device=SIM)).square().sum().backward()
    optimizer.step()
    with CheckpointManager(shared_path, asynchronous=True) as manager:
        path = manager.save(1, model=model, optimizer=optimizer)
        manager._pending.wait_for_threads()  # which wait for the device to copy what they write
        simulated.reset_counts()
        manager.step()
        assert simulated.waits() == {}
        manager.wait()
        assert path.exists()
