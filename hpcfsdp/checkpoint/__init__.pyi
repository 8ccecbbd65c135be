"""What type checkers see of the names that are loaded on first use."""

from hpcfsdp.checkpoint.convert.peft import export_peft as export_peft
from hpcfsdp.checkpoint.dcp.reader import HDF5Reader as HDF5Reader
from hpcfsdp.checkpoint.dcp.writer import HDF5Writer as HDF5Writer
from hpcfsdp.checkpoint.format.catalog import checkpoint_files as checkpoint_files, latest as latest
from hpcfsdp.checkpoint.format.index import open_index as open_index
from hpcfsdp.checkpoint.format.schema import CheckpointInfo as CheckpointInfo
from hpcfsdp.checkpoint.loading.lazy import open as open
from hpcfsdp.checkpoint.loading.loader import load as load
from hpcfsdp.checkpoint.manager import CheckpointManager as CheckpointManager
from hpcfsdp.checkpoint.saving.writer import save as save
