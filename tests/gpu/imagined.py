"""Training as one of several imagined ranks: one process, one device, collectives that are copies on it.

``python -m tests.gpu.imagined`` runs every case once, for a tool that watches the device.
"""

import os
import sys

import torch

from hpcfsdp import accelerator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.gpu.training import batches, make_model, train, wrap

RANKS = 4
CASES = {
    "full": {},
    "no prefetching": {"backward_prefetch": None},
    "forward prefetching": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "shard grad": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "replicated": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "original": {"use_orig_params": True},
    "offload": {"cpu_offload": CPUOffload(True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}


def sharded(model, case, rank=1):
    device = next(model.parameters()).device
    return wrap(model, FakeCommunicator(rank, RANKS, device=device), **CASES[case])


def results(device, case):
    """The losses of some steps, and then this rank's shards."""
    model = sharded(make_model(device), case)
    losses = train(model, batches(device))
    return [losses.cpu(), *(param.detach().cpu() for param in model.parameters())]


def main():
    if os.environ.get("HPCFSDP_SIMULATED"):
        import tests.accelerator.simulated  # noqa: F401
    device = accelerator.current_device()
    for case in CASES:
        losses, *_ = results(device, case)
        assert losses.isfinite().all(), case
    print(f"{len(CASES)} cases on {device}")


if __name__ == "__main__":
    sys.exit(main())
