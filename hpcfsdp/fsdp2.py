"""``fully_shard`` under the names of ``torch.distributed.fsdp``: switching is one import line.

Policies and ``DataParallelMeshDims`` are torch's own classes.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

from hpcfsdp.api.fsdp_module import FSDPModule, UnshardHandle
from hpcfsdp.api.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from hpcfsdp.comm.communicator import CommOptions

__all__ = [
    "CPUOffloadPolicy",
    "CommOptions",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
