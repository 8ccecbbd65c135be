"""A byte-level GPT: pre-norm transformer blocks, learnt positions, input and output embedding tied."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp.examples.gpt.run_config import ModelConfig

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with several heads.

    Rows of `qkv` are ordered by head, (heads, 3, width of a head): a tensor-parallel rank with consecutive rows has
    whole heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.head_width, self.dropout = width // config.heads, config.dropout
        self.tensor_rank: int | None = None
        """This rank among the ranks that divide the heads; None without tensor parallelism."""
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, bytes, width) -> the same shape."""
        heads = self.qkv(x).view(*x.shape[:2], -1, 3, self.head_width)
        query, key, value = heads.transpose(1, 2).unbind(3)
        rate = self.dropout if self.training else 0.0
        with own_random_numbers(self.tensor_rank if rate else None, x.device):
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=rate)
        return self.merge(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.dropout = config.dropout
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, bytes, width) -> the same shape."""
        x = x + self._drop(self.attention(self.norm_attention(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_feed(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Each block adds twice to the residual stream, whose variance must not depend on depth.
        for block in self.blocks:
            for layer in (block.attention.merge, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, length <= context) int64 -> logits (batch, length, 256) of the byte that follows each."""
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def count_elements(config: ModelConfig) -> int:
    """Parameter elements of a GPT of this shape. Takes no memory."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(config).parameters())


@contextlib.contextmanager
def own_random_numbers(tensor_rank: int | None, device: torch.device) -> Iterator[None]:
    """Return a context in which each rank draws its own random numbers, also on `device`; around it all draw the same.

    Without a `tensor_rank`, the number of this rank, it changes nothing.
    """
    if tensor_rank is None:
        yield
        return
    common = int(torch.randint(2**62, ()))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(common + tensor_rank)
        yield
