"""Flat parameters: layout, memory, gathered parameters, gradients."""
