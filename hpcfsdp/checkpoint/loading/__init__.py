"""Loads: tensors of a file matched with those of a model, verified, and brought to the ranks that need them."""
