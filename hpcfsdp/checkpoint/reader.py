"""The place where programs find ``BlockReader``; see ``hpcfsdp.checkpoint.format.reader``."""

from hpcfsdp.checkpoint.format.reader import BlockReader

__all__ = ["BlockReader"]
