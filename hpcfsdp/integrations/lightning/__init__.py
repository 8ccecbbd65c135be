"""Lightning's Trainer over MPI: a strategy that shards, its cluster environment, checkpoint files, and requeueing."""

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpcfsdp.integrations.lightning needs Lightning ({error}): pip install 'hpcfsdp[lightning]'", name=error.name
    ) from error

from hpcfsdp.integrations.lightning.checkpoint_file import ModelCheckpoint
from hpcfsdp.integrations.lightning.environment import MPIClusterEnvironment
from hpcfsdp.integrations.lightning.requeue import Requeue
from hpcfsdp.integrations.lightning.strategy import HpcfsdpStrategy

__all__ = ["HpcfsdpStrategy", "MPIClusterEnvironment", "ModelCheckpoint", "Requeue"]
