"""Lightning's Trainer and Fabric over MPI: strategies that shard, ranks, checkpoint files, requeueing."""

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpcfsdp.integrations.lightning needs Lightning ({error}): pip install 'hpcfsdp[lightning]'", name=error.name
    ) from error

from hpcfsdp.integrations.lightning.checkpoint_file import ModelCheckpoint
from hpcfsdp.integrations.lightning.fabric import HpcfsdpFabricStrategy
from hpcfsdp.integrations.lightning.requeue import Requeue
from hpcfsdp.integrations.lightning.strategy import HpcfsdpStrategy, MPIClusterEnvironment

__all__ = ["HpcfsdpFabricStrategy", "HpcfsdpStrategy", "MPIClusterEnvironment", "ModelCheckpoint", "Requeue"]
