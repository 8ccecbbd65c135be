"""Held-out bits per byte, beside what a model without context could reach on the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hpcfsdp.comm import Communicator
from hpcfsdp.errors import DataError
from hpcfsdp.examples.gpt.data import Corpus, spread_windows
from hpcfsdp.examples.gpt.parallel import Share
from hpcfsdp.examples.gpt.transformer import VOCABULARY

BATCH = 16


@dataclass(frozen=True)
class HeldOut:
    """Results on the same predicted bytes."""

    bits_per_byte: float
    """Mean negative log2-likelihood under the model."""
    unigram_bits_per_byte: float
    """Entropy of the bytes' own histogram: no model that ignores context does better on them."""
    predicted_bytes: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    comm: Communicator,
    share: Share,
    corpus: Corpus,
    context: int,
    num_bytes: int,
    device: torch.device,
) -> HeldOut:
    """Collective over `comm`. Predict about `num_bytes` bytes in windows spread evenly over the corpus.

    Args:
        share: of this rank in the windows; all ranks of `comm` together have each part `share.copies` times.
        context: bytes in front of the last one that is predicted in a window.

    Raises:
        DataError: the corpus has fewer than two bytes.
    """
    length = min(context + 1, len(corpus))
    if length < 2:
        raise DataError(f"the held-out part has {len(corpus)} byte(s); two are needed to predict one: give more data")
    starts = spread_windows(len(corpus), length, max(1, num_bytes // (length - 1)))
    # Every rank makes the same number of calls, since each call gathers parameters together with the others.
    rounds = -(-len(starts) // (share.size * BATCH))
    total_nats = torch.zeros((), dtype=torch.float64, device=device)
    histogram = torch.zeros(VOCABULARY, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for index in range(rounds):
        first = (index * share.size + share.rank) * BATCH
        own = starts[first : first + BATCH]
        windows = np.stack([corpus.read(start, length) for start in own or starts[:1]])
        ids = torch.from_numpy(windows).to(device, torch.int64)
        logits = model(ids[:, :-1])
        if own:
            nats = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
            total_nats += nats.double()
            histogram += torch.from_numpy(np.bincount(windows[:, 1:].ravel(), minlength=VOCABULARY))
    model.train(was_training)
    sums = torch.cat([total_nats.view(1), histogram.to(device)])
    comm.all_reduce(sums, "sum")
    sums /= share.copies
    counts = sums[1:].cpu()
    count = counts.sum().item()
    chances = counts[counts > 0] / count
    entropy = -(chances * chances.log2()).sum().item()
    return HeldOut(sums[0].item() / math.log(2) / count, entropy, int(count))
