"""Checkpoints of models on the simulated device: saved there or on the CPU, at once or while training goes on."""

import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpcfsdp import checkpoint, fully_shard
from hpcfsdp.checkpoint import CheckpointManager, HDF5Reader, HDF5Writer
from hpcfsdp.checkpoint.memory import windows
from hpcfsdp.checkpoint.saving.pending import StagedBlock, StagingRing
from hpcfsdp.checkpoint.saving.state_reads import StateReads, stream_of
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.errors import CheckpointError
from hpcfsdp.launch.topology import Topology
from tests.accelerator import simulated
from tests.accelerator.programs import CPU, EXACT, SIM, leave_for_later, mesh_of, shard, train, whole
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


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("policy", ["compute", "all"])
def test_a_version_in_memory_holds_the_values_of_its_step(
    world, group, streams, shared_path, monkeypatch, policy, num_nodes
):
    if num_nodes > world.size:
        pytest.skip("one rank is one node")
    own = MpiCommunicator(world.comm.Dup(), Topology.regular(num_nodes, world.size // num_nodes))
    monkeypatch.setattr(CheckpointManager, "_own_communicator", lambda *_: own)
    model, optimizer = make(group, SIM)
    manager = CheckpointManager(shared_path, memory_every=1)
    train(model, BEFORE, SIM, optimizer)
    manager.step(1, model=model, optimizer=optimizer)
    leave_for_later(streams, policy)
    manager.step(2, model=model, optimizer=optimizer)
    losses = train(model, AFTER, SIM, optimizer, first=BEFORE.steps).losses  # while the copies are on their way
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(-7)
    manager.step()
    manager._memory.finish()
    own.barrier()
    if num_nodes > 1 and world.rank in own.topology.nodes[0]:
        windows.drop()
    other = make(group, SIM, seed=1)
    info = CheckpointManager(shared_path, memory_every=1).load_latest(model=other[0], optimizer=other[1])
    assert (info.step, info.source) == (2, "memory")
    assert train(other[0], AFTER, SIM, other[1], first=BEFORE.steps).losses == losses
    windows.drop()


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


# The state of optimizers, which is copied in the background


class Job:
    """A training that has saved before, and whose copies of state, from here on, are made as late as may be."""

    def __init__(self, group, folder, monkeypatch, front="wrapper"):
        if front == "fully_shard":
            self.model = build(parity.Nested).to(SIM)
            fully_shard(self.model, mesh=mesh_of((group.size(),), ("shard",)))
            self.optimizer = BEFORE.make_optimizer(self.model.parameters())
        else:
            self.model, self.optimizer = make(group, SIM, original=front == "original")
        self.folder, self.may_end = folder, threading.Event()
        self.x = parity.inputs(0, 0, BEFORE.dtype).to(SIM)
        self.manager = CheckpointManager(folder, asynchronous=True)
        self.iterate()
        self.before = self.manager.save(1, model=self.model, optimizer=self.optimizer)
        self.manager.wait()
        arrived = StagedBlock.arrived
        # The thread that writes waits for the device, which would then begin the copies.
        monkeypatch.setattr(StagedBlock, "arrived", lambda block: self.may_end.wait(30) and arrived(block))

    def iterate(self):
        parity.loss_of(self.model, self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self):
        """Save in the background; return the checksums of the tensors as they are now, and the path."""
        now = checkpoint.save(self.folder / "now.h5", model=self.model, optimizer=self.optimizer)
        simulated.starve(stream_of(SIM))
        return sums(now), self.manager.save(2, model=self.model, optimizer=self.optimizer)

    def close(self):
        torch.accelerator.current_stream().synchronize()
        self.may_end.set()
        self.manager.close()


def sums(path):
    """The checksums of the tensors in a file, by their names."""
    index = checkpoint.open_index(path)
    return {name: index.rows_of(name)["checksum"].tolist() for name in index.tensors}


def without_wait(reads):
    reads._is_awaited = True  # it would be noticed, too


FRONTS = ["wrapper", "original", "fully_shard"]


@pytest.mark.ranks(1)  # with others, a collective that waits for them has the device turn to the copies
@pytest.mark.parametrize("waits", [True, False], ids=["", "without the wait"])
@pytest.mark.parametrize("front", FRONTS)
def test_a_step_waits_for_the_copies_of_the_state(world, group, shared_path, monkeypatch, front, waits):
    if not waits:
        monkeypatch.setattr(StateReads, "await_copies", without_wait)
    job = Job(group, shared_path, monkeypatch, front)
    expected, path = job.save()
    job.iterate()
    job.close()
    assert (sums(path) == expected) is waits


@pytest.mark.ranks(1)
@pytest.mark.parametrize("front", FRONTS)
def test_a_forward_and_a_backward_do_not_wait_for_the_copies_of_the_state(
    world, group, shared_path, monkeypatch, front
):
    job = Job(group, shared_path, monkeypatch, front)
    job.save()
    parity.loss_of(job.model, job.x).backward()
    torch.accelerator.current_stream().synchronize()
    assert not stream_of(SIM).query()
    job.optimizer.step()
    torch.accelerator.current_stream().synchronize()
    assert stream_of(SIM).query()
    job.close()


@pytest.mark.ranks(1)
def test_the_copies_of_the_state_wait_for_the_step_before_the_save(world, group, streams, shared_path, monkeypatch):
    job = Job(group, shared_path, monkeypatch)
    leave_for_later(streams, "compute")
    job.iterate()
    path = job.manager.save(2, model=job.model, optimizer=job.optimizer)
    job.close()
    now = checkpoint.save(shared_path / "now.h5", model=job.model, optimizer=job.optimizer)
    assert sums(path) == sums(now)


def test_state_that_a_load_replaces_is_saved(world, group, shared_path, monkeypatch):
    job = Job(group, shared_path, monkeypatch)
    job.iterate()
    with simulated.poison_when_freed():
        expected, path = job.save()
        checkpoint.load(job.before, model=job.model, optimizer=job.optimizer)
        job.close()
    assert sums(path) == expected


@pytest.mark.ranks(1)
@pytest.mark.parametrize("waits", [True, False], ids=["", "without the wait"])
def test_a_load_of_torch_into_the_state_waits_for_its_copies(world, group, shared_path, monkeypatch, waits):
    if not waits:
        monkeypatch.setattr(StateReads, "await_copies", without_wait)
    job = Job(group, shared_path, monkeypatch, "original")
    given = next(state["exp_avg"] for state in job.optimizer.state.values() if state["exp_avg"].numel())
    dcp.save({"x": given + 1}, storage_writer=HDF5Writer(shared_path / "x.h5"))
    expected, path = job.save()
    dcp.load({"x": given}, storage_reader=HDF5Reader(shared_path / "x.h5"))
    job.close()
    assert (sums(path) == expected) is waits


@pytest.mark.parametrize("front", FRONTS)
def test_state_that_is_changed_while_it_is_copied_is_refused(world, group, shared_path, monkeypatch, front):
    job = Job(group, shared_path, monkeypatch, front)
    _, path = job.save()
    if world.rank == 0:
        next(state["exp_avg"] for state in job.optimizer.state.values() if state["exp_avg"].numel()).zero_()
    with pytest.raises(CheckpointError, match=r"optimizer state 'exp_avg' of 'first.*changed in place after save\(\)"):
        job.close()
    assert not path.exists()


def test_parameters_may_be_changed_at_once_after_a_save(world, group, shared_path, monkeypatch):
    job = Job(group, shared_path, monkeypatch)
    expected, path = job.save()
    for param in job.model.parameters():
        param.data.fill_(-7)
    job.close()
    assert sums(path) == expected


@pytest.mark.ranks(1)
def test_copies_of_a_save_that_was_given_up_do_not_land_in_the_next_one(world, group, shared_path, monkeypatch):
    job = Job(group, shared_path, monkeypatch)
    job.may_end.set()
    reads = StateReads(job.model, job.optimizer)
    state = next(each["exp_avg"] for each in job.optimizer.state.values()).fill_(1).view(torch.uint8)
    other = torch.full_like(state, 7)
    ring = StagingRing(state.numel(), pinned=True)
    simulated.starve(stream_of(SIM))
    ring.start(reads)
    ring.put([("a", state)])
    ring.stop()
    ring.start()
    ring.put([("b", other)])
    [block] = ring.take(1 << 20)
    block.arrived()
    torch.accelerator.synchronize()
    assert bytes(block.arrived()) == bytes([7]) * state.numel()


@pytest.mark.ranks(1)
def test_state_that_is_not_written_by_steps_alone_is_copied_at_once(world, group, shared_path, monkeypatch):
    job = Job(group, shared_path, monkeypatch)
    states = list(job.optimizer.state.values())
    assert all(StateReads(job.model, job.optimizer).has(state["exp_avg"]) for state in states)
    assert not any(StateReads(job.model, job.optimizer).has(param) for param in job.model.parameters())
    first = next(iter(job.optimizer.state))
    first.grad = states[0]["exp_avg"]  # as optimizers that keep a gradient have it
    assert not StateReads(job.model, job.optimizer).has(states[0]["exp_avg"])
    job.optimizer.param_groups[0]["capturable"] = True  # a replay calls no hook
    assert not StateReads(job.model, job.optimizer).has(states[1]["exp_avg"])
