"""Several devices in a process: nothing is done on another one than that of the rank, in no thread."""

import pytest
import torch
import torch.distributed as dist

from hpcfsdp import accelerator
from hpcfsdp.checkpoint import CheckpointManager
from hpcfsdp.engine.streams import DeviceStreams, Stream
from tests.accelerator import simulated
from tests.accelerator.programs import shard, train, whole
from tests.accelerator.test_rules import in_thread
from tests.mpi import parity
from tests.mpi.parity import Recipe, build, close, reference

OWN = torch.device("sim", 1)

RECIPE = Recipe(steps=2)


@pytest.fixture(autouse=True)
def second_of_two():
    """The device of this rank is not the first."""
    simulated.set_devices(2)
    simulated.forget_contexts()
    torch.accelerator.set_device_index(OWN.index)
    yield
    torch.accelerator.set_device_index(0)
    simulated.set_devices(1)


@pytest.mark.ranks(2, 1)
def test_training_and_saving_in_the_background(world, own_group, shared_path):
    model = shard(build(parity.Nested).to(OWN), own_group)
    optimizer = RECIPE.make_optimizer(model.parameters())
    with CheckpointManager(shared_path, asynchronous=True) as manager:
        found = train(model, RECIPE, OWN, optimizer)
        manager.save(1, model=model, optimizer=optimizer)
        manager.wait()
    close(found, reference(parity.Nested, world.size, RECIPE), rtol=1e-9, atol=1e-11)
    whole(model)
    dist.barrier(group=own_group, device_ids=[OWN.index])
    assert simulated.contexts() == {OWN.index}


@pytest.mark.ranks(1)
def test_the_watch_asks_late_and_once_and_on_the_device_itself(monkeypatch):
    streams, asked = DeviceStreams(OWN), []
    is_done = accelerator.is_done
    x = torch.zeros(2, device=OWN)
    streams.launch(Stream.GATHER, lambda async_op: x.add_(1))
    streams.launch(Stream.REDUCE, lambda async_op: x.add_(1))
    torch.accelerator.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(accelerator, "is_done", lambda event: asked.append(event) or is_done(event))
        with simulated.capturing():  # no thread may ask
            assert in_thread(lambda: streams.longest_wait(100.0)) is None
        assert not asked
        for _ in range(2):
            assert in_thread(lambda: streams.longest_wait(0.0)) is None
            assert len(asked) == 2
    assert simulated.contexts() == {OWN.index}


@pytest.mark.ranks(1)
def test_the_watch_finds_the_oldest_wait():
    streams, x = DeviceStreams(OWN), torch.zeros(2, device=OWN)
    simulated.starve(*streams._device_streams.values())
    for stream in (Stream.REDUCE, Stream.GATHER):
        streams.launch(stream, lambda async_op: x.add_(1))
    waited_s, where = in_thread(lambda: streams.longest_wait(0.0))
    assert waited_s > 0
    assert where == "the reduce stream of sim:1"
