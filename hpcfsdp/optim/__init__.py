"""Optimizers for whole matrices, any optimizer for whole tensors of a sharded model, and averages."""

from hpcfsdp.optim.average import ExponentialAverage
from hpcfsdp.optim.muon import Muon
from hpcfsdp.optim.weighted_mean import WeightedMean
from hpcfsdp.optim.whole_tensors import WholeTensors

__all__ = ["ExponentialAverage", "Muon", "WeightedMean", "WholeTensors"]
