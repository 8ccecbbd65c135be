"""Muon for the hidden matrices, AdamW for everything else."""

import torch
from torch import nn

import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
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
    sharding_strategy=ShardingStrategy.NO_SHARD,  # Muon needs whole matrices
    use_orig_params=True,  # and each parameter by itself
)
hidden = {name: p for name, p in model.named_parameters() if "blocks." in name and p.dim() == 2}
others = {name: p for name, p in model.named_parameters() if name not in hidden}
optimizer = hpcfsdp.optim.Muon(
    [
        {"params": hidden.items(), "lr": 0.02},
        {"params": others.items(), "lr": 1e-2, "weight_decay": 0.01, "algorithm": "adamw"},  # with the embedding
    ]
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
