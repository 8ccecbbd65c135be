"""Trains a small transformer with Lightning: mpirun -n 2 python lightning_fit.py [max_steps]. Again: it goes on."""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcfsdp.integrations.lightning import HpcfsdpStrategy, ModelCheckpoint, Requeue

FOLDER = "runs/lightning"


class Shift(pl.LightningModule):
    """Learns to shift each row by one."""

    def __init__(self, width=16, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = (self.encoder(x) - x.roll(1, -1)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)]


if __name__ == "__main__":
    pl.seed_everything(0)
    requeue = Requeue(FOLDER)  # before the data: signals end no rank from here on
    loader = DataLoader(TensorDataset(torch.randn(64, 8, 16)), batch_size=4, shuffle=True)  # each rank gets its part
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=HpcfsdpStrategy(auto_wrap_policy={nn.TransformerEncoderLayer}),
        callbacks=[ModelCheckpoint(FOLDER, save_last=True), requeue],
        max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 200,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Shift(), loader, ckpt_path=requeue.resume_path())
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}", {name: float(value) for name, value in trainer.callback_metrics.items()})
