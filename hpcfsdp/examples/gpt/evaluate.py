"""Held-out bits per byte, and those of the best model without context on the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp import World
from hpcfsdp.errors import DataError
from hpcfsdp.examples.gpt.data import Corpus, spread_windows
from hpcfsdp.examples.gpt.parallel import Share, to_device
from hpcfsdp.examples.gpt.transformer import VOCABULARY

BATCH = 16


@dataclass(frozen=True)
class HeldOut:
    """Results on the same predicted bytes."""

    bits_per_byte: float
    """Mean negative log2-likelihood under the model."""
    unigram_bits_per_byte: float
    """Entropy of the bytes' histogram: no model that ignores context does better on them."""
    predicted_bytes: int


@torch.no_grad()
def evaluate(model: nn.Module, world: World, share: Share, corpus: Corpus, context: int, num_bytes: int) -> HeldOut:
    """Predict about `num_bytes` bytes in windows spread evenly over the corpus. Collective over all ranks.

    Each window has `context` bytes before the last predicted one; `share` is this rank's part of the windows.
    """
    length = min(context + 1, len(corpus))
    if length < 2:
        raise DataError(f"the held-out part has {len(corpus)} byte(s); two are needed to predict one: give more data")
    starts = spread_windows(len(corpus), length, max(1, num_bytes // (length - 1)))
    # Each call gathers parameters together with the other ranks: all ranks make the same number of calls.
    rounds = -(-len(starts) // (share.size * BATCH))
    nats = torch.zeros(1, dtype=torch.float64, device=world.device)
    histogram = torch.zeros(VOCABULARY, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for index in range(rounds):
        first = (index * share.size + share.rank) * BATCH
        own = starts[first : first + BATCH]
        windows = np.stack([corpus.read(start, length) for start in own or starts[:1]])
        ids = to_device(windows, world.device)
        logits = model(ids[:, :-1])
        if own:
            nats += F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").double()
            histogram += torch.from_numpy(np.bincount(windows[:, 1:].ravel(), minlength=VOCABULARY))
    model.train(was_training)
    sums = torch.cat([nats, histogram.to(world.device)])
    world.communicator.all_reduce(sums, "sum")
    sums = sums.cpu() / share.copies
    counts = sums[1:]
    count = counts.sum().item()
    chances = counts[counts > 0] / count
    entropy = -(chances * chances.log2()).sum().item()
    return HeldOut(sums[0].item() / math.log(2) / count, entropy, int(count))
