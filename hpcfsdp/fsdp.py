"""Fully sharded data parallelism under the names of ``torch.distributed.fsdp``: switching is one import line.

Enums and configuration classes are torch's own.
"""

from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp.api.wrapper import FullyShardedDataParallel

__all__ = ["BackwardPrefetch", "CPUOffload", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"]
