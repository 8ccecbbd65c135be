"""Optimizers for whole matrices."""

from hpcfsdp.optim.muon import Muon

__all__ = ["Muon"]
