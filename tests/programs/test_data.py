"""Loaders and loops of other libraries with the sampler: torchdata, accelerate, transformers."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hpcfsdp import checkpoint
from hpcfsdp.data import ResumableSampler, ThreadedLoader
from hpcfsdp.integrations.accelerate import ShardedAccelerator
from hpcfsdp.integrations.transformers import ShardedTrainer
from tests.programs.test_trainer_checkpoints import losses, make


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index)


def sampler(**options):
    return ResumableSampler(Numbers(), global_batch=8, **options)


def orders(epochs):
    """The samples of each step of an epoch, over all ranks, in their order."""
    own = sampler(rank=0, ranks=1)
    return [sorted(batch) for _ in range(epochs) for batch in own]


def of_all(world, batches):
    """What all ranks have read, by step."""
    of_ranks = world.comm.allgather([torch.as_tensor(batch).tolist() for batch in batches])
    return [sorted(itertools.chain(*parts)) for parts in zip(*of_ranks, strict=True)]


@pytest.mark.ranks(2)
@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch's, of what torchdata calls
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("steps", [2, 5])
def test_stateful_dataloader(world, workers, steps):
    def loader():
        options = {"multiprocessing_context": "spawn"} if workers else {}
        # A list: workers load no module of tests.
        return StatefulDataLoader(list(range(40)), batch_sampler=sampler(), num_workers=workers, **options)

    first, found = loader(), []
    for batch in first:
        found.append(batch)
        if len(found) == steps:
            break
    own = first.batch_sampler
    assert (own.epoch, own.samples) == divmod(8 * steps, 40)
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    while len(found) < 10:
        found += list(second)
    assert of_all(world, found[:10]) == orders(2)


def test_accelerate_registers_the_sampler(world, shared_path):
    def run(steps, load):
        accelerator, own = ShardedAccelerator(cpu=True), sampler()
        accelerator.register_for_checkpointing(own)
        model = nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        if load:
            accelerator.load_state(shared_path)
        seen = []
        for batch in itertools.islice(ThreadedLoader(Numbers(), batch_sampler=own), steps):
            seen.append(batch)
            accelerator.backward(model(batch[:, None].float()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(shared_path)
        return seen

    assert of_all(world, run(3, False) + run(2, True)) == orders(1)


def test_the_trainer_keeps_the_place(world, shared_path):
    def train(resume=None):
        base = make(shared_path, world, rows=24)
        own = ResumableSampler(base.train_dataset, global_batch=6)
        trainer = ShardedTrainer(base.model, base.args, train_dataset=base.train_dataset, data=own)
        trainer.train(resume_from_checkpoint=resume)
        assert (own.epoch, own.samples) == (2, 0)
        return losses(trainer)

    whole = train()
    assert len(whole) == 8
    assert checkpoint.open_index(shared_path / "checkpoint-3/checkpoint.h5").info.place == (0, 18)
    assert train(str(shared_path / "checkpoint-3")) == whole
