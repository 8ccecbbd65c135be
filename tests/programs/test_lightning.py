"""Lightning's Trainer over MPI: its own DDPStrategy with the backend hpcmpi, and a user's own strategy that shards.

What comes out is what Lightning gives in one process that takes the batches of all ranks.
"""

import logging
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment, MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcfsdp
import hpcfsdp.mpi  # the backend
from hpcfsdp import checkpoint
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

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

    def configure_optimizers(self):
        # Not self.parameters(): a strategy may have wrapped the module.
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2, eps=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class ShardedStrategy(DDPStrategy):
    """Parameters, gradients and optimizer state are shared out to the ranks; checkpoints are HDF5 files."""

    restore_checkpoint_after_setup = True  # into the model that is sharded by then

    def __init__(self, **options):
        super().__init__(process_group_backend="hpcmpi", precision_plugin=ClippedBySharded(self))
        self.options, self.sharded = options, None

    def setup_distributed(self):
        hpcfsdp.init("cpu")
        super().setup_distributed()

    def _setup_model(self, model):
        if self.sharded is None:
            self.sharded = FSDP(model, **self.options)
        return self.sharded

    def setup(self, trainer):
        if self.sharded is not None:  # validation after training
            self.model = self.sharded
            self.accelerator.setup(trainer)
            self.setup_precision_plugin()
        else:
            super().setup(trainer)

    def model_to_device(self):
        """FSDP takes care of it."""

    def block_backward_sync(self):
        return self.sharded.no_sync()

    def lightning_module_state_dict(self):
        return {}

    def optimizer_state(self, optimizer):
        return {}

    def save_checkpoint(self, found, filepath, storage_options=None):
        checkpoint.save(filepath, model=self.sharded, optimizer=self.optimizers[0], extra=found)

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        extra = checkpoint.load(checkpoint_path, model=self.sharded, optimizer=self.optimizers[0]).extra
        return tree_map_only(np.ndarray, torch.as_tensor, extra)  # best scores, which callbacks compare with tensors

    def load_model_state_dict(self, checkpoint, strict=True):
        """Loaded with the file."""

    def load_optimizer_state_dict(self, checkpoint):
        """Loaded with the file."""


class ClippedBySharded(Precision):
    """Clips by the norm over all ranks."""

    def __init__(self, strategy):
        self.strategy = strategy

    def clip_grad_by_norm(self, optimizer, clip_val):
        self.strategy.sharded.clip_grad_norm_(clip_val)


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
            "ignore", message="(?s).*(num_workers|tensorboard|log_every_n_steps|is not empty|ensure each sample)"
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


def fit(folder, strategy, ranks, epochs=2, resume=None, **options):
    """The curves of a training, its trainer, and the path of its last checkpoint."""
    torch.manual_seed(0)
    curves = Curves()
    saver = ModelCheckpoint(folder, monitor="val_loss", filename="best", save_last=True, save_top_k=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        max_epochs=epochs,
        callbacks=[curves, saver],
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Classifier(), data(ranks, train=True), data(ranks), ckpt_path=resume)
    return curves.values, trainer, saver.last_model_path


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Curves and state of one process."""
    values, trainer, _ = fit(tmp_path_factory.mktemp("alone"), "auto", 1, plugins=[LightningEnvironment()])
    assert not dist.is_initialized()
    return values, trainer.model.state_dict()


def test_data_parallel(shared_path, expected):
    ranks = MPIEnvironment().world_size()
    strategy = DDPStrategy(process_group_backend="hpcmpi")
    values, trainer, _ = fit(shared_path, strategy, ranks)
    assert dist.get_backend() == "hpcmpi" or ranks == 1
    close(values, expected[0])
    close(trainer.lightning_module.state_dict(), expected[1])


def test_data_parallel_goes_on(shared_path, expected):
    ranks = MPIEnvironment().world_size()
    first, _, last = fit(shared_path, DDPStrategy(process_group_backend="hpcmpi"), ranks, epochs=1)
    then, trainer, _ = fit(shared_path, DDPStrategy(process_group_backend="hpcmpi"), ranks, resume=last)
    close(first + then, expected[0])
    close(trainer.lightning_module.state_dict(), expected[1])


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_strategy_that_shards(shared_path, expected, original):
    ranks = MPIEnvironment().world_size()
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": original}
    first, _, last = fit(shared_path, ShardedStrategy(**options), ranks, epochs=1)
    then, trainer, _ = fit(shared_path, ShardedStrategy(**options), ranks, resume=last)
    close(first + then, expected[0])
    close(dict(trainer.model.state_dict()), dict(expected[1]))
    (again,) = trainer.validate(trainer.lightning_module, data(ranks), verbose=False)
    close(again["val_loss"], expected[0][-2])
