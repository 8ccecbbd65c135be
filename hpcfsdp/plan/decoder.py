"""A decoder-only transformer of a given number of parameters: what ``hpcfsdp plan --params`` plans.

Pre-norm blocks with RMSNorm, rotary positions, attention of whole heads, a gated feed-forward network, and embeddings
that are not tied. Its tensors exist on the meta device alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp.errors import UsageError

_HEAD_WIDTH = 128
_WIDTH_STEP = 256
_GATE_RATIO = 8 / 3
"""Hidden units of the feed-forward network for each of the width, as most such models have."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


def shape_of(
    params: float, layers: int, *, width: int | None = None, heads: int | None = None, vocabulary: int = 32000
) -> DecoderShape:
    """The decoder with about so many parameters: its hidden units are chosen so that the number fits.

    Args:
        width: of the embedding; by default that at which feed-forward networks are 8/3 times as wide.
        heads: of attention; by default 128 elements each.

    Raises:
        UsageError: no such decoder, or counts that do not divide.
    """
    if not (layers >= 1 and vocabulary >= 1 and params >= 1):
        raise UsageError("plan: --params, --layers and --vocabulary must be positive")
    if width is None:
        a, b = (4 + 3 * _GATE_RATIO) * layers, 2.0 * vocabulary
        ideal = (-b + (b * b + 4 * a * params) ** 0.5) / (2 * a)
        step = _WIDTH_STEP if ideal >= _WIDTH_STEP else 16
        width = max(step, round(ideal / step) * step)
    if heads is None:
        heads = max(1, width // _HEAD_WIDTH)
    if width % heads or width // heads % 2:
        raise UsageError(
            f"plan: --width {width} must be a multiple of twice --heads {heads}, so that each head has an even "
            "number of elements"
        )
    rest = params - 2 * vocabulary * width - width - layers * (4 * width**2 + 2 * width)
    hidden = round(rest / (3 * width * layers))
    if hidden < 1:
        raise UsageError(
            f"plan: {params:.3g} parameters are too few for {layers} layers of width {width} and a vocabulary of "
            f"{vocabulary}: give fewer --layers, a smaller --width or --vocabulary, or more --params"
        )
    return DecoderShape(layers, width, heads, hidden, vocabulary)


class DecoderBlock(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, shape.hidden, bias=False), nn.Linear(width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) -> the same shape."""
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, cosines, sines), _rotated(key, cosines, sines)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def _rotated(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


class Decoder(nn.Module):
    """Predicts the next token."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) -> logits (batch, tokens, vocabulary)."""
        x = self.embed(ids)
        angles = torch.empty(ids.shape[1], self.head_width, dtype=x.dtype, device=x.device)
        cosines, sines = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cosines, sines)
        return self.head(self.norm(x))
