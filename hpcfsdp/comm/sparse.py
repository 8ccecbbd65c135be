"""Reductions of sparse tensors: their values lie at other places on each rank."""

from __future__ import annotations

from math import prod

import torch

from hpcfsdp.comm import exchange
from hpcfsdp.comm.messages import Call
from hpcfsdp.comm.progress import Steps
from hpcfsdp.comm.reduce import Reduction, divide_
from hpcfsdp.errors import CommunicationError


def all_reduce(call: Call, tensor: torch.Tensor, how: Reduction) -> Steps:
    """`tensor`, sparse COO of the same shape on all ranks, becomes the sum or average over the ranks, coalesced."""
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(call.size)]
    yield from exchange.all_gather(call, counts, torch.tensor([values.shape[0]]))
    most, numbers = prod(tensor.shape[: indices.shape[0]]), [int(count) for count in counts]
    if not all(0 <= number <= most for number in numbers):
        raise CommunicationError(f"{call.label} on rank {call.rank}: ranks hold {numbers} of at most {most} values")
    everyones_indices = [indices.new_empty(indices.shape[0], number) for number in numbers]
    everyones_values = [values.new_empty(number, *values.shape[1:]) for number in numbers]
    yield from exchange.all_gather(call, everyones_indices, indices)
    yield from exchange.all_gather(call, everyones_values, values)
    summed = torch.cat(everyones_values).to(how.accumulate)
    total = torch.sparse_coo_tensor(torch.cat(everyones_indices, 1), summed, tensor.shape, check_invariants=True)
    total = total.coalesce()
    divide_(total.values(), how.divisor)
    tensor.copy_(total.to(tensor.dtype))
