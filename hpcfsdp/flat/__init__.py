"""Flat parameters: where each element of each parameter lies, and the memory it lies in."""
