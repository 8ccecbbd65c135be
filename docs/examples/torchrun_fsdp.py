"""Before: a training with torch's own FSDP, started by torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 2, 8

dist.init_process_group()
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)

x = torch.randn(256, 16, 32, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.roll(1, -1))

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}), device_id=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = DistributedSampler(dataset, seed=0)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch} loss {mean.item() / dist.get_world_size():.6f}")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, "model.pt")
dist.destroy_process_group()
