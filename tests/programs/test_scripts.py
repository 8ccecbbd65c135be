"""Well-known training scripts, unchanged except for the line that wraps the model.

`shares` are the ranks for which a process computes: all of them in one process, else its own.
"""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpcfsdp import checkpoint
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.programs.loops import copied


class Block(nn.Module):
    """In the manner of nanoGPT."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.heads = heads

    def forward(self, x):
        rows, length, width = x.shape
        split = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.c_proj(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=50, length=16, width=16, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, lr):
        """Matrices decay, biases and norms do not. Called before wrapping, because shards have lost the shapes."""
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-4)


def get_batch(split, step, share):
    seed = (7919 if split == "val" else 0) + 1000 * step + share
    data = torch.randint(50, (3, 13), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # for dropout
    return data[:, :-1], data[:, 1:]


def get_lr(step, warmup=2, last=6, top=1e-2, least=1e-3):
    if step < warmup:
        return top * (step + 1) / (warmup + 1)
    return least + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (last - warmup))) * (top - least)


def nano_gpt(model, optimizer, shares, mean, steps=range(6), micro_steps=2):
    losses, clip = [], getattr(model, "clip_grad_norm_", None)
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                out = [model(*get_batch("val", step, share))[1].item() for share in shares]
            losses.append(mean(sum(out) / len(out)))
            model.train()
        total = 0.0
        for micro_step in range(micro_steps):
            last = micro_step == micro_steps - 1
            with contextlib.nullcontext() if last or clip is None else model.no_sync():
                for share in shares:
                    _, loss = model(*get_batch("train", step * micro_steps + micro_step, share))
                    loss = loss / (micro_steps * len(shares))
                    loss.backward()
                    total += loss.item()
        losses.append(mean(total))
        norm = clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(norm.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, copied(model.state_dict())


def gpt():
    torch.manual_seed(1337)
    model = GPT()
    return model, model.configure_optimizers(weight_decay=0.5, lr=1e-2)


def ours(world):
    return [world.rank], lambda value: world.comm.allreduce(value) / world.size


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_nano_gpt(world):
    """Its optimizer is made before the model is wrapped, and keeps its groups."""
    expected = nano_gpt(*gpt(), range(world.size), lambda value: value)
    model, optimizer = gpt()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    close(nano_gpt(model, optimizer, *ours(world)), expected)


def test_nano_gpt_goes_on(world, shared_path):
    expected = nano_gpt(*gpt(), range(world.size), lambda value: value)
    losses, at = [], {0: range(3), 3: range(3, 6)}
    for first, steps in at.items():
        model, optimizer = gpt()
        model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
        if first:
            found = checkpoint.load(shared_path / "ckpt.h5", model=model, optimizer=optimizer)
            assert (found.step, found.extra["best"]) == (first, losses[0])
        some, state = nano_gpt(model, optimizer, *ours(world), steps=steps)
        losses += some
        if not first:
            checkpoint.save(
                shared_path / "ckpt.h5", model=model, optimizer=optimizer, step=steps.stop, extra={"best": losses[0]}
            )
    close((losses, state), expected)


class Digits(nn.Module):
    """In the manner of pytorch/examples."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def digits(step, share, rows=4):
    generator = torch.Generator().manual_seed(1000 * step + share)
    torch.manual_seed(1000 * step + share)
    return torch.randn(rows, 1, 12, 12, generator=generator), torch.randint(10, (rows,), generator=generator)


def mnist(model, shares, mean, epochs=2, steps=3):
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(epochs):
        model.train()
        for step in range(epoch * steps, (epoch + 1) * steps):
            optimizer.zero_grad()
            total = 0.0
            for share in shares:
                data, target = digits(step, share)
                loss = F.nll_loss(model(data), target) / len(shares)
                loss.backward()
                total += loss.item()
            losses.append(mean(total))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = [F.nll_loss(model(data), target).item() for data, target in (digits(99, share) for share in shares)]
        losses.append(mean(sum(found) / len(found)))
        scheduler.step()
    return losses, copied(model.state_dict())


@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_mnist(world, original):
    def build():
        torch.manual_seed(1)
        return Digits()

    expected = mnist(build(), range(world.size), lambda value: value)
    policy = ModuleWrapPolicy({nn.Conv2d, nn.Linear})
    close(mnist(FSDP(build(), auto_wrap_policy=policy, use_orig_params=original), *ours(world)), expected)
