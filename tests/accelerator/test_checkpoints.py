"""Checkpoints of models on the simulated device: saved there or on the CPU, at once or while training goes on."""

import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.checkpoint import CheckpointManager
from tests.accelerator import simulated
from tests.accelerator.programs import CPU, EXACT, SIM, leave_for_later, shard, train, whole
from tests.mpi import parity
from tests.mpi.parity import Recipe, build, close, reference

pytestmark = pytest.mark.ranks(2, 1, 4)

PATIENCE_S = 0.2
"""Ranks also wait for each other's files."""

BEFORE, AFTER, ALL = Recipe(steps=2), Recipe(steps=1), Recipe(steps=3)


def make(group, device, seed=0, **options):
    model = shard(build(parity.Nested, seed=seed).to(device), group if device == SIM else None, **options)
    return model, BEFORE.make_optimizer(model.parameters())


@pytest.mark.parametrize(
    ("source", "original", "offload", "target", "to_original", "to_offload", "policy"),
    [
        (SIM, False, False, SIM, True, True, "all"),
        (SIM, True, True, SIM, False, False, "random"),
        (SIM, True, False, CPU, False, False, "compute"),
        (SIM, False, True, CPU, True, False, "all"),
        (CPU, True, False, SIM, False, False, "all"),
        (CPU, False, False, SIM, True, True, "gather"),
    ],
)
def test_training_goes_on_from_a_file(
    world, group, streams, shared_path, source, original, offload, target, to_original, to_offload, policy
):
    model, optimizer = make(group, source, original=original, offload=offload)
    leave_for_later(streams, policy, PATIENCE_S)
    losses = train(model, BEFORE, source, optimizer).losses
    path = checkpoint.save(shared_path / "a.h5", model=model, optimizer=optimizer)
    other = make(group, target, seed=1, original=to_original, offload=to_offload)
    checkpoint.load(path, model=other[0], optimizer=other[1])
    found = train(other[0], AFTER, target, other[1], first=BEFORE.steps)
    close(found._replace(losses=losses + found.losses), reference(parity.Nested, world.size, ALL), **EXACT)


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("policy", ["compute", "all"])
def test_an_asynchronous_save_holds_the_values_of_its_step(world, group, streams, shared_path, original, policy):
    model, optimizer = make(group, SIM, original=original)
    manager = CheckpointManager(shared_path, asynchronous=True)
    train(model, BEFORE, SIM, optimizer)
    manager.save(1, model=model, optimizer=optimizer)  # allocates, and makes communicators
    manager.wait()
    expected = whole(model)
    leave_for_later(streams, policy)
    simulated.reset_counts()
    path = manager.save(2, model=model, optimizer=optimizer)
    causes = set(simulated.waits())
    losses = train(model, AFTER, SIM, optimizer, first=BEFORE.steps).losses  # while the copies are on their way
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-7)
    manager.close()
    assert causes <= {"event"}  # of the thread that writes
    other = make(group, SIM, seed=1, original=not original)
    checkpoint.load(path, model=other[0], optimizer=other[1])
    assert all(torch.equal(value, expected[name]) for name, value in whole(other[0]).items())
    assert train(other[0], AFTER, SIM, other[1], first=BEFORE.steps).losses == losses


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
def test_random_numbers_of_the_device_are_saved_and_restored(world, group, shared_path, offload):
    model, _ = make(group, SIM, offload=offload)
    path = checkpoint.save(shared_path / "a.h5", model=model)
    assert {"torch_cpu", "torch_sim"} <= set(checkpoint.open_index(path).rng)
    drawn = torch.randn(5, device=SIM).cpu(), torch.randn(5)
    checkpoint.load(path, model=model)
    assert torch.equal(torch.randn(5, device=SIM).cpu(), drawn[0])
    assert torch.equal(torch.randn(5), drawn[1])


def test_a_file_of_the_cpu_leaves_the_generator_of_the_device_as_it_is(world, group, shared_path):
    path = checkpoint.save(shared_path / "a.h5", model=make(group, CPU)[0])
    assert "torch_sim" not in checkpoint.open_index(path).rng
    model, _ = make(group, SIM)
    before = torch.get_device_module(SIM).get_rng_state()
    checkpoint.load(path, model=model)
    assert torch.equal(torch.get_device_module(SIM).get_rng_state(), before)
