"""A loop written for accelerate, sharded over all ranks: mpirun -n 2 python accelerate_loop.py

Run it again and it goes on from its last checkpoint.
"""

from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import hpcfsdp
from hpcfsdp.integrations.accelerate import ShardedAccelerator

EPOCHS, FOLDER = 3, "accelerate_state"

shuffling = DataLoaderConfiguration(use_seedable_sampler=True)  # by seed and epoch: the same after a restart
accelerator = ShardedAccelerator(
    layers=["TransformerEncoderLayer"], gradient_accumulation_steps=2, dataloader_config=shuffling
)
set_seed(0)  # the same initial values on every rank
layer = torch.nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(256, 8, 32)
data = TensorDataset(x, x.mean(dim=(1, 2)))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * len(data) // 8)

loader, held_out = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
first = 0
if Path(FOLDER, "checkpoint.h5").exists():
    first = accelerator.load_state(FOLDER).step
for epoch in range(first, EPOCHS):
    loader.set_epoch(epoch)
    model.train()
    for batch, target in loader:
        with accelerator.accumulate(model):
            loss = (model(batch).mean(dim=(1, 2)) - target).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics((model(b).mean(dim=(1, 2)) - t).square()) for b, t in held_out]
    accelerator.print(f"epoch {epoch} loss {torch.cat(losses).mean():.4f}")
    accelerator.save_state(FOLDER, step=epoch + 1)
accelerator.save_model(model, "accelerate_model")
hpcfsdp.finalize()
