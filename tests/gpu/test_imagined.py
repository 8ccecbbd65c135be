"""One process as one of four imagined ranks: whatever queue runs late, the same bits."""

import pytest
import torch

from hpcfsdp import accelerator
from hpcfsdp.engine.streams import DeviceStreams, Stream, Wait
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.gpu.conftest import simulated
from tests.gpu.imagined import CASES, results, sharded
from tests.gpu.processes import run_alone
from tests.gpu.training import STEPS, batches, late, make_model

pytestmark = pytest.mark.ranks(1)


@pytest.mark.parametrize("case", CASES)
def test_queues_that_run_late_change_no_bit(alone, case):
    """What a queue reads too early, for want of a wait, would be other values: COMPUTE, GATHER and REDUCE in turn."""
    expected = results(alone, case)
    assert all(value.isfinite().all() for value in expected)
    for queue in (Stream.COMPUTE, Stream.GATHER, Stream.REDUCE):
        with late(queue, simulated):
            assert same(results(alone, case), expected), queue


@pytest.mark.parametrize(
    ("why", "queue"),
    [
        (Wait.SHARDS_WRITTEN, Stream.COMPUTE),
        (Wait.VALUES_USED, Stream.COMPUTE),
        (Wait.VALUES_GATHERED, Stream.GATHER),
        (Wait.GRADS_WRITTEN, Stream.COMPUTE),
        (Wait.GRADS_TAKEN, Stream.REDUCE),
        (Wait.GRADS_REDUCED, Stream.REDUCE),
    ],
    ids=lambda value: value.name,
)
def test_without_a_wait_they_change_values(alone, monkeypatch, why, queue):
    """So the queues are late enough here for the test above to mean something."""
    expected, wait = results(alone, "full"), DeviceStreams.wait
    monkeypatch.setattr(
        DeviceStreams, "wait", lambda self, on, event, reason: None if reason is why else wait(self, on, event, reason)
    )
    with late(queue, simulated):
        assert not same(results(alone, "full"), expected)


def same(found, expected):
    return all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ["full", "shard grad", "replicated", "original", "offload"])
def test_steps_are_those_of_the_plain_module_with_the_gathered_values(alone, case):
    """Each imagined rank has the shard of this one. A plain module with such values gives the loss and gradients."""
    model, plain, places = sharded(make_model(alone), case), make_model(alone), places_of_shards(alone, case)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches(alone, steps=STEPS):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
            for param, value in zip(plain.parameters(), model.parameters(), strict=True):
                param.copy_(value.view(param.shape))
        loss, expected = model(x).square().mean(), plain(x).square().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        grads = torch.cat([torch.zeros(1), *(param.grad.flatten().cpu() for param in plain.parameters())])
        for param, place in zip(model.parameters(), places, strict=True):
            if place.numel():
                torch.testing.assert_close(param.grad.cpu().flatten(), grads[place])
        optimizer.step()
        optimizer.zero_grad()
        plain.zero_grad()


def places_of_shards(device, case):
    """For each element of this rank's shards its place among all elements of the plain module, from 1; 0 for padding.

    They are what a model has in its shards whose values are such places.
    """
    model, count = make_model(device), 1
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.arange(count, count + param.numel(), device=device).view_as(param))
            count += param.numel()
    return [param.detach().cpu().flatten().long() for param in sharded(model, case).parameters()]


def test_the_sanitizer_finds_no_race(alone):
    """torch's sanitizer sees each kernel, and the events between streams. Without it, on other devices, all runs."""
    done = run_alone("-m", "tests.gpu.imagined", **({"TORCH_CUDA_SANITIZER": "1"} if alone.type == "cuda" else {}))
    assert done.returncode == 0, done.stderr
    assert "CSAN" not in done.stderr
    assert done.stdout.startswith(f"{len(CASES)} cases on {accelerator.device_type()}")
