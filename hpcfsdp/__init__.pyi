"""What type checkers see of the names that are loaded on first use."""

from hpcfsdp import (
    checkpoint as checkpoint,
    data as data,
    errors as errors,
    fsdp as fsdp,
    fsdp2 as fsdp2,
    mpi as mpi,
    observe as observe,
    optim as optim,
    wrap as wrap,
)
from hpcfsdp._version import __version__ as __version__
from hpcfsdp.api.param_info import param_groups as param_groups, param_info as param_info
from hpcfsdp.fsdp import FullyShardedDataParallel as FullyShardedDataParallel
from hpcfsdp.fsdp2 import fully_shard as fully_shard
from hpcfsdp.optim import WeightedMean as WeightedMean
from hpcfsdp.preempt import Preemption as Preemption, exit_requeue as exit_requeue, preemption as preemption
from hpcfsdp.resilience.run import resilient as resilient
from hpcfsdp.world import World as World, finalize as finalize, init as init
