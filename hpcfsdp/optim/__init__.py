"""Optimizers for whole matrices, and any optimizer for whole tensors of a sharded model."""

from hpcfsdp.optim.muon import Muon
from hpcfsdp.optim.whole_tensors import WholeTensors

__all__ = ["Muon", "WholeTensors"]
