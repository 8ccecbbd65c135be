"""Boxes, runs and placements of tensors, and tensors redistributed from one sharding to another."""
