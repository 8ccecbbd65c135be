"""A classifier, its data, and fixtures, for the tests of Lightning's Trainer."""

import logging
import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcfsdp
from hpcfsdp.integrations.lightning import HpcfsdpStrategy
from hpcfsdp.wrap import ModuleWrapPolicy

__all__ = [
    "Block",
    "Classifier",
    "Curves",
    "close",
    "data",
    "no_group",
    "quiet",
    "sharded",
    "trainer_of",
]

ROWS, BATCH = 24, 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(5, 8), Block(8), Block(8), nn.Linear(8, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        scores = self(x)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(scores, y), sync_dist=True)

    def test_step(self, batch, index):
        self.validation_step(batch, index)

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Curves(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.values.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_epoch_end(self, trainer, module):
        self.values += [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "val_loss", "accuracy")]


@pytest.fixture(autouse=True)
def quiet():
    """Without Lightning's warnings and log messages about speed."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore",
            message="(?s).*(num_workers|tensorboard|log_every_n_steps|not empty|each sample|without a model|no last)",
        )
        yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_group():
    """The process group is what a strategy makes, and goes with it."""
    assert not dist.is_initialized()
    yield
    hpcfsdp.finalize()
    if dist.is_initialized():
        dist.destroy_process_group()


def data(ranks, train=False):
    """Batches that are the same of all ranks together, whatever their number: as Lightning shuffles and deals them."""
    x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0))
    sampler = DistributedSampler(rows, num_replicas=1, rank=0) if train and ranks == 1 else None
    return DataLoader(rows, batch_size=BATCH // ranks, sampler=sampler)


def sharded(**options):
    return HpcfsdpStrategy(auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def trainer_of(folder, strategy, **options):
    """A Trainer that prints nothing."""
    return pl.Trainer(
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **options},
    )


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
