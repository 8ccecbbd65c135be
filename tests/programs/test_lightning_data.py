"""Lightning keeps the place in the data of a loader that has a state."""

from itertools import chain

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hpcfsdp.data import ResumableSampler, ThreadedLoader
from hpcfsdp.integrations.lightning import ModelCheckpoint
from tests.programs.lightning_programs import *  # noqa: F403
from tests.programs.lightning_programs import sharded, trainer_of
from tests.under_mpi import COMM


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(index)


class Module(pl.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.seen = nn.Linear(1, 1), kind, []

    def train_dataloader(self):
        """Made when the strategy has connected the ranks."""
        return self.kind(Numbers(), batch_sampler=ResumableSampler(Numbers(), global_batch=8))

    def training_step(self, batch, _):
        self.seen.append(batch)
        return self.linear(batch[:, None].float()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch's, of what torchdata calls
@pytest.mark.parametrize("kind", [ThreadedLoader, StatefulDataLoader])
def test_a_fit_goes_on_in_the_middle_of_an_epoch(shared_path, kind):
    def fit(step, resume=None):
        module = Module(kind)
        saver = ModelCheckpoint(shared_path, every_n_train_steps=1, save_last=True)
        options = {"enable_checkpointing": True, "max_epochs": 2, "use_distributed_sampler": False}
        trainer = trainer_of(shared_path, sharded(), callbacks=[saver, StopAt(step)], **options)
        trainer.fit(module, ckpt_path=resume)
        return module.seen

    seen = fit(3) + fit(100, "last")
    seen = [sorted(chain(*parts)) for parts in zip(*COMM.allgather([batch.tolist() for batch in seen]), strict=True)]
    whole = ResumableSampler(Numbers(), global_batch=8, rank=0, ranks=1)
    assert seen == [sorted(batch) for _ in range(2) for batch in whole]
