"""Flat parameters: layout, memory, gathered values, gradients."""
