"""Muon for the hidden matrices, AdamW for everything else."""

import torch
from torch import nn

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.wrap import ModuleWrapPolicy


class Model(nn.Module):
    def __init__(self, words=64, width=32):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


world = hpcfsdp.init()
torch.manual_seed(0)
model = FSDP(
    Model(),
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    use_orig_params=True,  # each parameter by itself
)
info = hpcfsdp.param_info(model)  # parameters themselves have the shapes of shards
hidden = {name: p.param for name, p in info.items() if "blocks." in name and len(p.shape) == 2}
others = {name: p.param for name, p in info.items() if name not in hidden}
optimizer = WholeTensors(
    model,
    [
        {"params": hidden.items(), "lr": 0.02},
        {"params": others.items(), "lr": 1e-2, "weight_decay": 0.01, "algorithm": "adamw"},  # with the embedding
    ],
    Muon,
)

torch.manual_seed(1 + world.rank)
for step in range(1, 31):
    tokens = torch.randint(64, (8, 16), device=world.device)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 64).flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if world.rank == 0 and step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")

hpcfsdp.checkpoint.save("muon.h5", model=model, optimizer=optimizer, step=step)
hpcfsdp.finalize()
